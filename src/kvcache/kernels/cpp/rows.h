// Single rows: new keys and values into their slots, and stored keys turned to other positions.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "codes.h"
#include "tile.h"

namespace kv {

constexpr int64_t GRAIN = 1 << 16;  // values that are worth waking a thread for: 10 to 30 us
constexpr int64_t CONVERTED_GRAIN = LANES << 11;  // and of those that change their format on the way

struct Rows {  // queries, outputs, new keys: strides in elements, the values of a row adjacent
  void* base;
  int64_t row_stride, head_stride;
  int format;  // F32, F16 or BF16
};

// --- put --------------------------------------------------------------------------------------------------------------

inline uint8_t* row_at(const Store& store, int64_t block_size, int64_t slot, int64_t head) {
  return const_cast<uint8_t*>(store.base) + slot / block_size * store.block_stride + head * store.head_stride +
         slot % block_size * store.row_stride;
}

// storage[slot] = row for each head; slots are distinct.
inline void put_rows(const Store& store, const Rows& rows, const int64_t* slots, int64_t begin, int64_t end, int heads,
                     int64_t block_size) {
  const bool as_is = rows.format == store.format;
  const int64_t element = rows.format == F32 ? 4 : 2, bytes = row_bytes(store.format, store.dim);
  alignas(64) float values[MAX_DIM];
  for (int64_t i = begin; i < end; i++)
    for (int h = 0; h < heads; h++) {
      const int64_t at = i * rows.row_stride + h * rows.head_stride;
      uint8_t* to = row_at(store, block_size, slots[i], h);
      if (as_is) {
        std::memcpy(to, static_cast<const uint8_t*>(rows.base) + at * element, size_t(bytes));
        continue;
      }
      read_row(rows.base, at, rows.format, store.dim, values);
      encode_row(values, store.format, store.dim, to);
    }
}

inline void put(const Store* stores, const Rows* rows, int num_stores, const int64_t* slots, int64_t n, int heads,
                int64_t block_size) {
  int64_t worth = GRAIN;
  for (int s = 0; s < num_stores; s++)
    if (rows[s].format != stores[s].format) worth = CONVERTED_GRAIN;
  const int64_t grain = std::max<int64_t>(1, worth / (int64_t(heads) * stores[0].dim * num_stores));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int s = 0; s < num_stores; s++) put_rows(stores[s], rows[s], slots, begin, end, heads, block_size);
  });
}

// --- shift ------------------------------------------------------------------------------------------------------------

struct Rotation {
  const double* inv_freq;  // radians per position of each pair
  int num_pairs, begin;    // the rotary part: values [begin, begin + 2 * num_pairs)
  bool interleaved;        // pairs (2i, 2i + 1) instead of (i, i + num_pairs)
};

struct Angles {
  alignas(64) float cosine[MAX_DIM / 2], sine[MAX_DIM / 2];
  int64_t offset = 0;  // of which nothing is asked

  void set(const Rotation& rotation, int64_t to) {
    if (to == offset) return;
    for (int i = 0; i < rotation.num_pairs; i++) {
      const double angle = double(to) * rotation.inv_freq[i];  // f32 is off by 1e-3 after ten thousand tokens
      cosine[i] = float(std::cos(angle)), sine[i] = float(std::sin(angle));
    }
    offset = to;
  }
};

KV_INLINE float as_float(float x) { return x; }
KV_INLINE float as_float(uint16_t x) { return bf16_to_float(x); }
KV_INLINE void set_float(float& to, float x) { to = x; }
KV_INLINE void set_float(uint16_t& to, float x) { to = float_to_bf16(x); }

KV_INLINE vf lanes_of(const float* from) { return load<vf>(from); }
KV_INLINE vf lanes_of(const uint16_t* from) { return bf16_lanes(from); }
KV_INLINE void set_lanes(float* to, vf x) { store(to, x); }
KV_INLINE void set_lanes(uint16_t* to, vf x) { store_bf16(to, x); }

template <int STEP, class T>  // T: float, or bf16
inline void rotate_pairs(T* first, T* second, const float* cosine, const float* sine, int pairs) {
  int i = 0;
  for (; STEP == 1 && i + LANES <= pairs; i += LANES) {
    const vf a = lanes_of(first + i), b = lanes_of(second + i), c = load<vf>(cosine + i), s = load<vf>(sine + i);
    set_lanes(first + i, a * c - b * s);
    set_lanes(second + i, a * s + b * c);
  }
#pragma GCC ivdep
  for (; i < pairs; i++) {
    const float a = as_float(first[i * STEP]), b = as_float(second[i * STEP]);
    set_float(first[i * STEP], a * cosine[i] - b * sine[i]);
    set_float(second[i * STEP], a * sine[i] + b * cosine[i]);
  }
}

template <class T>
inline void rotate(T* row, const Rotation& rotation, const Angles& angles) {
  T* first = row + rotation.begin;
  const float *cosine = angles.cosine, *sine = angles.sine;
  if (rotation.interleaved)
    rotate_pairs<2>(first, first + 1, cosine, sine, rotation.num_pairs);
  else
    rotate_pairs<1>(first, first + rotation.num_pairs, cosine, sine, rotation.num_pairs);
}

// Turns the keys in `slots` (distinct) by `offsets` positions, in place; an offset of 0 leaves the bytes alone. Adjacent
// slots are done head by head, in the order of memory.
inline void shift(const Store& store, const int64_t* slots, const int64_t* offsets, int64_t n, int heads,
                  int64_t block_size, const Rotation& rotation) {
  const int64_t worth = store.format == F32 || store.format == BF16 ? GRAIN : CONVERTED_GRAIN;
  const int64_t grain = std::max<int64_t>(1, worth / (int64_t(heads) * store.dim));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    Angles angles;
    alignas(64) float values[MAX_DIM];
    for (int64_t i = begin, run; i < end; i += run) {
      run = 1;
      while (i + run < end && slots[i + run] == slots[i] + run && slots[i + run] % block_size != 0) run++;
      for (int h = 0; h < heads; h++) {
        uint8_t* row = row_at(store, block_size, slots[i], h);
        for (int64_t j = i; j < i + run; j++, row += store.row_stride) {
          if (offsets[j] == 0) continue;
          angles.set(rotation, offsets[j]);
          if (store.format == F32) {
            rotate(reinterpret_cast<float*>(row), rotation, angles);
          } else if (store.format == BF16) {
            rotate(reinterpret_cast<uint16_t*>(row), rotation, angles);
          } else {
            decode_row(row, store.format, store.dim, values);
            rotate(values, rotation, angles);
            encode_row(values, store.format, store.dim, row);
          }
        }
      }
    }
  });
}

}  // namespace kv
