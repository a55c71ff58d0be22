// Single rows: encoding new keys and values into their slots, and turning stored keys to other positions.
//
// Bit for bit what `kvcache/formats/reference.py` says. A product and the sum after it stand in functions of their own
// there where a compiler that fuses them (FMA rounds once) would give other codes.
// (Longer than 300 lines: what AVX-512 does apart stands beside what it is equal to.)
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tile.h"

namespace kv {

constexpr float BELOW_HALF = 0.5f - 0x1p-25f;
constexpr int64_t GRAIN = 1 << 16;  // values that are worth waking a thread for: 10 to 30 us

struct Rows {  // queries, outputs, new keys: strides in elements, the values of a row adjacent
  void* base;
  int64_t row_stride, head_stride;
  int format;  // F32, F16 or BF16
};

inline void read_row(const void* base, int64_t at, int format, int dim, float* out) {
  const float* f32 = static_cast<const float*>(base) + at;
  const uint16_t* half = static_cast<const uint16_t*>(base) + at;
  if (format == F32)
    std::copy_n(f32, dim, out);
  else if (format == BF16)
    for (int i = 0; i < dim; i++) out[i] = bf16_to_float(half[i]);
  else
    f16_to_floats(half, dim, out);
}

inline void write_row(void* base, int64_t at, int format, int dim, const float* values) {
  float* f32 = static_cast<float*>(base) + at;
  uint16_t* half = static_cast<uint16_t*>(base) + at;
  if (format == F32)
    std::copy_n(values, dim, f32);
  else if (format == BF16)
    for (int i = 0; i < dim; i++) half[i] = float_to_bf16(values[i]);
  else
    floats_to_f16(values, dim, half);
}

// --- encoding ---------------------------------------------------------------------------------------------------------

// Saturates at 448, rounds half to even, keeps NaN. Below 2^-6 steps are 2^-9: adding 2^14 rounds there by itself.
KV_INLINE uint8_t float_to_fp8(float x) {
  const uint32_t u = bits<uint32_t>(x), sign = u >> 31 << 7;
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  const float size = std::min(bits<float>(u & 0x7fffffffu), 448.0f);
  const uint32_t s = bits<uint32_t>(size);
  const uint32_t normal = (s + 0x7ffffu + ((s >> 20) & 1u) - (120u << 23)) >> 20;
  const uint32_t subnormal = bits<uint32_t>(size + 16384.0f) - bits<uint32_t>(16384.0f);
  const uint32_t code = s < (121u << 23) ? subnormal : normal;
  return uint8_t(sign | (is_nan ? 0x7fu : code));
}

#if defined(KV_AVX512)

// The functions below with 16 values at a time: the same operations, and NaN goes the same ways (`max` and `min` give
// their second operand when one is NaN, and a NaN becomes the integer whose low byte is 0).

// A product that no sum after it is fused with.
KV_INLINE __m512 product(__m512 a, __m512 b) {
  __m512 result = _mm512_mul_ps(a, b);
  asm("" : "+v"(result));
  return result;
}

KV_INLINE __m128i floats_to_fp8(__m512 x) {
  const __m512i u = _mm512_castps_si512(x), sign = _mm512_slli_epi32(_mm512_srli_epi32(u, 31), 7);
  const __m512i magnitude = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
  const __m512 size = _mm512_min_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(448.0f));
  const __m512i s = _mm512_castps_si512(size), odd = _mm512_and_si512(_mm512_srli_epi32(s, 20), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_set1_epi32(0x7ffff - (120 << 23));
  const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(s, bias), odd), 20);
  const __m512 shifted = _mm512_add_ps(size, _mm512_set1_ps(16384.0f));
  const __m512i subnormal = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(_mm512_set1_ps(16384.0f)));
  const __mmask16 is_small = _mm512_cmplt_epu32_mask(s, _mm512_set1_epi32(121 << 23));
  const __mmask16 is_nan = _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  __m512i code = _mm512_mask_mov_epi32(normal, is_small, subnormal);
  code = _mm512_mask_mov_epi32(code, is_nan, _mm512_set1_epi32(0x7f));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(sign, code));
}

KV_INLINE void store_scale(float scale, uint8_t* to) {
  uint16_t half = uint16_t(_cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT));
  if ((half & 0x7fff) > 0x7c00) half = float_to_f16(scale);  // PyTorch's NaN, not the processor's
  std::memcpy(to, &half, 2);
}
#endif

__attribute__((noinline)) inline void multiply_group(const float* x, float factor, float* out) {
  for (int i = 0; i < GROUP; i++) out[i] = x[i] * factor;
}

inline float inverse_or_zero(float scale) {
  const float inverse = 1.0f / scale;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

inline float largest_size(const float* x) {
  vi largest = {};
  for (int i = 0; i < GROUP; i += LANES) {
    const vi size = load<vi>(x + i) & 0x7fffffff;
    largest = size > largest ? size : largest;  // as integers a NaN is larger than everything
  }
  int32_t best = largest[0];
  for (int i = 1; i < LANES; i++) best = std::max(best, largest[i]);
  return bits<float>(best > 0x7f800000 ? 0x7fc00000 : best);  // a NaN without a payload, as arithmetic makes
}

inline void encode_group_q8(const float* x, uint8_t* quants, uint8_t* scale_out) {
#if defined(KV_AVX512)
  const float size = largest_size(x) / 127.0f;
  const __m512 inverse = _mm512_set1_ps(inverse_or_zero(size)), sign = _mm512_set1_ps(-0.0f);
  for (int i = 0; i < GROUP; i += 16) {
    const __m512 scaled = product(_mm512_loadu_ps(x + i), inverse);
    const __m512 half = _mm512_or_ps(_mm512_and_ps(scaled, sign), _mm512_set1_ps(BELOW_HALF));
    const __m512 low = _mm512_max_ps(_mm512_set1_ps(-127.5f), _mm512_add_ps(scaled, half));
    const __m512i code = _mm512_cvttps_epi32(_mm512_min_ps(_mm512_set1_ps(127.5f), low));
    _mm_storeu_si128((__m128i*)(quants + i), _mm512_cvtepi32_epi8(code));
  }
  return store_scale(size, scale_out);
#endif
  float scaled[GROUP];
  const float scale = largest_size(x) / 127.0f;
  multiply_group(x, inverse_or_zero(scale), scaled);
  for (int i = 0; i < GROUP; i++) {
    const float rounded = scaled[i] + std::copysign(BELOW_HALF, scaled[i]);
    quants[i] = uint8_t(int8_t(int32_t(std::min(std::max(rounded, -127.5f), 127.5f))));
  }
  const uint16_t half = float_to_f16(scale);
  std::memcpy(scale_out, &half, 2);
}

inline void encode_group_q4(const float* x, uint8_t* quants, uint8_t* scale_out) {
  const float size = largest_size(x);
#if defined(KV_AVX512)
  const __m512 v[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
  uint32_t largest = 0;  // or NaN, of which one is enough
  for (int i = 0; i < 2; i++) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v[i], v[i], _CMP_UNORD_Q);
    largest |= uint32_t(is_nan | _mm512_cmp_ps_mask(_mm512_abs_ps(v[i]), _mm512_set1_ps(size), _CMP_EQ_OQ)) << (16 * i);
  }
  const float step = x[__builtin_ctz(largest)] / -8.0f;
  const __m512 inverse = _mm512_set1_ps(inverse_or_zero(step));
  __m512i code[2];
  for (int i = 0; i < 2; i++) {
    const __m512 moved = _mm512_add_ps(product(v[i], inverse), _mm512_set1_ps(8.5f));
    const __m512 low = _mm512_max_ps(_mm512_setzero_ps(), moved);
    code[i] = _mm512_cvttps_epi32(_mm512_min_ps(_mm512_set1_ps(15.0f), low));
  }
  const __m512i both = _mm512_or_si512(code[0], _mm512_slli_epi32(code[1], 4));
  _mm_storeu_si128((__m128i*)quants, _mm512_cvtepi32_epi8(both));
  return store_scale(step, scale_out);
#endif
  float scaled[GROUP];
  int extreme = 0;
  while (extreme < GROUP - 1 && std::abs(x[extreme]) != size && x[extreme] == x[extreme]) extreme++;
  const float scale = x[extreme] / -8.0f;
  multiply_group(x, inverse_or_zero(scale), scaled);
  uint8_t codes[GROUP];
  for (int i = 0; i < GROUP; i++) codes[i] = uint8_t(int32_t(std::min(std::max(scaled[i] + 8.5f, 0.0f), 15.0f)));
  for (int i = 0; i < GROUP / 2; i++) quants[i] = uint8_t(codes[i] | codes[i + GROUP / 2] << 4);
  const uint16_t half = float_to_f16(scale);
  std::memcpy(scale_out, &half, 2);
}

inline void encode_row(const float* x, int format, int dim, uint8_t* to) {
  if (format <= BF16) return write_row(to, 0, format, dim, x);
  int i = 0;
#if defined(KV_AVX512)
  for (; format == FP8 && i + 16 <= dim; i += 16) _mm_storeu_si128((__m128i*)(to + i), floats_to_fp8(_mm512_loadu_ps(x + i)));
#endif
  if (format == FP8)
    for (; i < dim; i++) to[i] = float_to_fp8(x[i]);
  if (format == Q8)
    for (int g = 0; g < dim / GROUP; g++) encode_group_q8(x + g * GROUP, to + g * GROUP, to + dim + 2 * g);
  if (format == Q4)
    for (int g = 0; g < dim / GROUP; g++) encode_group_q4(x + g * GROUP, to + g * GROUP / 2, to + dim / 2 + 2 * g);
}

// Groups of 32 values from their quants and the scales behind them.
inline void decode_groups(const uint8_t* from, int format, int dim, float* out) {
  const uint8_t* scales = from + (format == Q8 ? dim : dim / 2);
  for (int g = 0; g < dim / GROUP; g++) {
    uint16_t half;
    std::memcpy(&half, scales + 2 * g, 2);
    const float scale = f16_to_float(half);
    float* to = out + g * GROUP;
#if defined(KV_AVX512)
    __m128i bytes[2];
    if (format == Q8) {
      for (int i = 0; i < 2; i++) bytes[i] = _mm_loadu_si128((const __m128i*)(from + g * GROUP + 16 * i));
    } else {
      const __m128i both = _mm_loadu_si128((const __m128i*)(from + g * GROUP / 2)), low = _mm_set1_epi8(15);
      bytes[0] = _mm_sub_epi8(_mm_and_si128(both, low), _mm_set1_epi8(8));
      bytes[1] = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(both, 4), low), _mm_set1_epi8(8));
    }
    for (int i = 0; i < 2; i++)
      _mm512_storeu_ps(to + 16 * i, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes[i])), _mm512_set1_ps(scale)));
#else
    if (format == Q8)
      for (int i = 0; i < GROUP; i++) to[i] = float(int8_t(from[g * GROUP + i])) * scale;
    else
      for (int i = 0; i < GROUP / 2; i++) {
        to[i] = float((from[g * GROUP / 2 + i] & 15) - 8) * scale;
        to[i + GROUP / 2] = float((from[g * GROUP / 2 + i] >> 4) - 8) * scale;
      }
#endif
  }
}

inline void decode_row(const uint8_t* from, int format, int dim, float* out) {
  if (format <= BF16) return read_row(from, 0, format, dim, out);
  if (is_quantised(format)) return decode_groups(from, format, dim, out);
  int i = 0;
#if defined(KV_AVX512)
  for (; i + 16 <= dim; i += 16)
    store(out + i, from_fp8((vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + i)))));
#endif
  for (; i < dim; i += 4) {  // a unit
    vu codes = {};
    for (int j = 0; j < 4; j++) codes[j] = from[i + j];
    const vf values = from_fp8(codes);
    std::memcpy(out + i, &values, 16);
  }
}

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
  float values[MAX_DIM];
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
  const int64_t grain = std::max<int64_t>(1, GRAIN / (int64_t(heads) * stores[0].dim * num_stores));
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
  std::vector<float> cosine, sine;
  int64_t offset = 0;

  void set(const Rotation& rotation, int64_t to) {
    if (to == offset && !cosine.empty()) return;
    cosine.resize(size_t(rotation.num_pairs)), sine.resize(size_t(rotation.num_pairs));
    for (int i = 0; i < rotation.num_pairs; i++) {
      const double angle = double(to) * rotation.inv_freq[i];  // f32 is off by 1e-3 after ten thousand tokens
      cosine[size_t(i)] = float(std::cos(angle)), sine[size_t(i)] = float(std::sin(angle));
    }
    offset = to;
  }
};

KV_INLINE float as_float(float x) { return x; }
KV_INLINE float as_float(uint16_t x) { return bf16_to_float(x); }
KV_INLINE void set_float(float& to, float x) { to = x; }
KV_INLINE void set_float(uint16_t& to, float x) { to = float_to_bf16(x); }

template <int STEP, class T>  // T: float, or bf16
inline void rotate_pairs(T* first, T* second, const float* cosine, const float* sine, int pairs) {
#pragma GCC ivdep
  for (int i = 0; i < pairs; i++) {
    const float a = as_float(first[i * STEP]), b = as_float(second[i * STEP]);
    set_float(first[i * STEP], a * cosine[i] - b * sine[i]);
    set_float(second[i * STEP], a * sine[i] + b * cosine[i]);
  }
}

template <class T>
inline void rotate(T* row, const Rotation& rotation, const Angles& angles) {
  T* first = row + rotation.begin;
  const float *cosine = angles.cosine.data(), *sine = angles.sine.data();
  if (rotation.interleaved)
    rotate_pairs<2>(first, first + 1, cosine, sine, rotation.num_pairs);
  else
    rotate_pairs<1>(first, first + rotation.num_pairs, cosine, sine, rotation.num_pairs);
}

// Turns the keys in `slots` (distinct) by `offsets` positions, in place; an offset of 0 leaves the bytes alone. Adjacent
// slots are done head by head, in the order of memory.
inline void shift(const Store& store, const int64_t* slots, const int64_t* offsets, int64_t n, int heads,
                  int64_t block_size, const Rotation& rotation) {
  const int64_t grain = std::max<int64_t>(1, GRAIN / (int64_t(heads) * store.dim));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    Angles angles;
    float values[MAX_DIM];
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
