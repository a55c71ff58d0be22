// Few rows times the weights of a linear layer, bf16 [out, in] as they lie in the model: no copy, nothing packed.
//
// Bytes moved: the weights, once, by panels of rows that stay in the caches while all rows of x meet them. Up to 4 rows of x at
// a time are dot products along rows of weights: four side by side for 3 and 4 (two without bf16 products), else one after the
// other. With the tile unit (`amx.h`) 4 and more are, where `in` is a multiple of 32 and for whole panels,
//
//   product^T [16 weights][16 rows]  +=  weights [16][32 values]  .  x^T [16 pairs][16 rows], which is packed once
//
// where weights are left operands as they lie, as stored keys are.
#pragma once

#include <ATen/Parallel.h>

#include "amx.h"
#include "direct_f32.h"
#include "rows.h"

namespace kv {

constexpr int PANEL = 2 * EDGE;  // rows of weights
constexpr int UNIT_LEAST = 4;    // rows of x that the unit is worth
// Processors fetch one run by themselves, but not far enough ahead. This goes into the second level: of 335 MB in rows of 640
// a core of Granite Rapids reads 17 to 19 GB/s then, 16 with the first level, 15 without (one row of x).
constexpr int WEIGHTS_AHEAD = 8192;  // bytes

struct Linear {
  const uint16_t *x, *weight, *bias;  // [rows, in], [out, in], [out] or null: bf16
  uint16_t* to;                       // [rows, out]
  int64_t rows, in, out;
};

#if defined(KV_BF16)
using Factor = uint16_t;
#else
using Factor = float;
#endif

struct Factors {  // x
  const Factor* rows;
  int64_t width;            // of a row, in places
  const uint32_t* columns;  // as `pack_columns` has them, 16 rows after the other; null: not for the tile unit
};

// The product's columns [first, first + count) of `rows` rows from `row` on, with the bias.
inline void write_sums(const Linear& p, const float (*sums)[EDGE], int64_t row, int rows, int64_t first, int count) {
  alignas(64) float bias[EDGE] = {}, values[EDGE];
  if (p.bias != nullptr) read_row(p.bias, first, BF16, count, bias);
  for (int r = 0; r < rows; r++) {
    for (int i = 0; i < EDGE; i++) values[i] = sums[r][i] + bias[i];
    write_row(p.to, (row + r) * p.out + first, BF16, count, values);
  }
}

#if defined(KV_BF16)

// parts[r][quad] = x[row + r] . each of four rows of weights, to be added by `sum_of_parts`. Meanwhile FETCHED rows from `ahead`
// on are fetched. Up to two rows of x meet one row of weights after the other, which is the order of memory (a tenth faster for
// one); more meet four side by side, which share what is loaded of x.
template <int MR, int FETCHED>
KV_INLINE void quad_products(const Factors& x, int64_t row, const uint16_t* const* weights, int64_t in, __m512 (*parts)[4],
                             int quad, const uint16_t* ahead) {
  constexpr int MC = MR <= 2 ? 1 : 4;
  const Factor* rows = x.rows + row * x.width;
  __m512 acc[MR][4];
#pragma GCC unroll 4
  for (int first = 0; first < 4; first += MC) {
#pragma GCC unroll 4
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int i = 0; i < MC; i++) acc[r][first + i] = _mm512_setzero_ps();
    const auto add = [&](int64_t at, auto&& get) {
      __m512i w[MC];
#pragma GCC unroll 4
      for (int i = 0; i < MC; i++) w[i] = get(weights[first + i] + at);
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++) {
        const __m512i value = get(rows + r * x.width + at);
#pragma GCC unroll 4
        for (int i = 0; i < MC; i++)
          acc[r][first + i] = _mm512_dpbf16_ps(acc[r][first + i], (__m512bh)value, (__m512bh)w[i]);
      }
    };
    int64_t at = 0;
    for (; at + DEPTH <= in; at += DEPTH) {
#pragma GCC unroll 4
      for (int i = first; i < std::min(first + MC, FETCHED); i++) __builtin_prefetch(ahead + i * in + at, 0, 2);
      add(at, [](const uint16_t* from) { return _mm512_loadu_si512(from); });
    }
    if (at < in) {
      const __mmask32 rest = (1u << (in - at)) - 1;
      add(at, [&](const uint16_t* from) { return _mm512_maskz_loadu_epi16(rest, from); });
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < MR; r++) parts[r][quad] = sum_parts(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

// Columns [first, first + count), at most EDGE, for all rows: four rows of weights meet them while they are in the first level.
inline void multiply_columns(const Linear& p, const Factors& x, int64_t first, int count) {
  const uint16_t* weights[EDGE];
  for (int i = 0; i < EDGE; i++) weights[i] = p.weight + (first + std::min(i, count - 1)) * p.in;
  const int64_t size = std::max<int64_t>(4 * p.in, 1), distance = (WEIGHTS_AHEAD / 2 + size - 1) / size * size;  // whole quads
  alignas(64) float sums[EDGE][EDGE];
  __m512 parts[EDGE][4];
  for (int64_t row = 0; row < p.rows; row += EDGE) {
    const int rows = int(std::min<int64_t>(p.rows - row, EDGE));
    for (int quad = 0; quad < EDGE / 4; quad++) {
      const uint16_t* ahead = p.weight + (first + 4 * quad) * p.in + distance;
      for_few_rows(0, rows, [&](int begin, int few) {
        const int fetched = 4 * begin / rows, now = row > 0 ? 0 : 4 * (begin + few) / rows - fetched;  // 4; 2, 2; 1, 1, 2; ...
        const auto run = [&](auto number) {
          constexpr int MR = decltype(number)::value;
          const auto f = now == 0   ? quad_products<MR, 0>
                         : now == 1 ? quad_products<MR, 1>
                         : now == 2 ? quad_products<MR, 2>
                                    : quad_products<MR, 4>;
          f(x, row + begin, weights + 4 * quad, p.in, parts + begin, quad, ahead + fetched * p.in);
        };
        switch (few) {
          case 1: run(std::integral_constant<int, 1>()); break;
          case 2: run(std::integral_constant<int, 2>()); break;
          case 3: run(std::integral_constant<int, 3>()); break;
          default: run(std::integral_constant<int, 4>());
        }
      });
    }
    for (int r = 0; r < rows; r++) _mm512_store_ps(sums[r], sum_of_parts(parts[r]));
    write_sums(p, sums, row, rows, first, count);
  }
}

inline Factors prepare(const Linear& p) {
  thread_local Buffer<uint32_t> columns;
  if (!use_amx || p.rows < UNIT_LEAST || p.in % DEPTH != 0 || p.out < PANEL) return {p.x, p.in, nullptr};
  columns.reserve(size_t((p.rows + EDGE - 1) / EDGE * EDGE * p.in / 2));
  for (int64_t r = 0; r < p.rows; r += EDGE)
    pack_columns(p.x + r * p.in, int(std::min<int64_t>(p.rows - r, EDGE)), int(p.in), EDGE, columns.at + r / 2 * p.in);
  return {p.x, p.in, columns.at};
}

#else

constexpr int WEIGHT_ROWS = 2;  // at a time, where more than two rows of x meet them

// The values [at, at + 2 * LANES) of a row of `in`, zeros beyond them.
KV_INLINE vu load_pairs(const uint16_t* row, int64_t at, int64_t in) {
  if (at + 2 * LANES <= in) return load<vu>(row + at);
  vu pairs = {};
  std::memcpy(&pairs, row + at, size_t(in - at) * 2);
  return pairs;
}

// sums[r][column + c] = x[r] . weight[c] for MR rows of x and MC of weights. FETCH: fetch what lies behind them.
// A row of x is f32 here: for each vector of weights its even places and then its odd ones, zeros beyond the values. Two rows
// of weights share what is loaded of x.
template <int MR, int MC, bool FETCH>
KV_INLINE void dot_products(const Factors& x, int64_t row, const uint16_t* weight, int64_t in, float (*sums)[EDGE],
                            int column) {
  const Factor* rows = x.rows + row * x.width;
  vf acc[MR][2];  // of even and of odd places, or of two rows of weights
#pragma GCC unroll 4
  for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = splat(0.0f);
  const auto add = [&](int64_t at, const vu* pairs) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      vf w[MC];
#pragma GCC unroll 2
      for (int c = 0; c < MC; c++) w[c] = expand_f32<BF16>(pairs[c], half);
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++) {
        const vf value = load<vf>(rows + r * x.width + at + half * LANES);
#pragma GCC unroll 2
        for (int c = 0; c < MC; c++) acc[r][MC == 1 ? half : c] += value * w[c];
      }
    }
  };
  int64_t at = 0;
  vu pairs[MC];
#pragma GCC unroll 2
  for (; at + 2 * LANES <= in; at += 2 * LANES) {
    if (FETCH && at % DEPTH == 0)
      for (int c = 0; c < MC; c++) __builtin_prefetch(weight + MC * at + c * DEPTH + WEIGHTS_AHEAD / 2, 0, 2);
#pragma GCC unroll 2
    for (int c = 0; c < MC; c++) pairs[c] = load<vu>(weight + c * in + at);
    add(at, pairs);
  }
  if (at < in) {
    for (int c = 0; c < MC; c++) pairs[c] = load_pairs(weight + c * in, at, in);
    add(at, pairs);
  }
  const auto total = [&](int r, int c) { return MC == 1 ? acc[r][0] + acc[r][1] : acc[r][c]; };
#if KV_LANES == 8
  vf all[LANES] = {};
  for (int r = 0; r < MR; r++)
    for (int c = 0; c < MC; c++) all[r * MC + c] = total(r, c);
  const vf each = sum_each(all);
  for (int r = 0; r < MR; r++)
    for (int c = 0; c < MC; c++) sums[r][column + c] = each[r * MC + c];
#else
  for (int r = 0; r < MR; r++)
    for (int c = 0; c < MC; c++) sums[r][column + c] = sum(total(r, c));
#endif
}

inline Factors prepare(const Linear& p) {
  thread_local Buffer<Factor> rows;
  const int64_t step = 2 * LANES, width = (p.in + step - 1) / step * step;
  rows.reserve(size_t(p.rows * width));
  for (int64_t r = 0; r < p.rows; r++)
    for (int64_t i = 0; i < width; i += step) {
      const vu pairs = load_pairs(p.x + r * p.in, i, p.in);
      for (int half = 0; half < 2; half++) store(rows.at + r * width + i + half * LANES, expand_f32<BF16>(pairs, half));
    }
  return {rows.at, width, nullptr};
}

// Columns [first, first + count), at most EDGE, for up to FEW_BLOCK rows.
template <bool FETCH>
inline void multiply_few(const Linear& p, const Factors& x, int64_t row, int rows, int64_t first, int count) {
  alignas(64) float sums[FEW_BLOCK][EDGE] = {};
  const auto run = [&](auto columns, int i) {
    constexpr int MC = decltype(columns)::value;
    const uint16_t* weight = p.weight + (first + i) * p.in;
    switch (rows) {
      case 1: dot_products<1, 1, FETCH>(x, row, weight, p.in, sums, i); break;
      case 2: dot_products<2, 1, FETCH>(x, row, weight, p.in, sums, i); break;
      case 3: dot_products<3, MC, FETCH>(x, row, weight, p.in, sums, i); break;
      default: dot_products<4, MC, FETCH>(x, row, weight, p.in, sums, i);
    }
  };
  int i = 0;
  if (rows > 2)
    for (; i + WEIGHT_ROWS <= count; i += WEIGHT_ROWS) run(std::integral_constant<int, WEIGHT_ROWS>(), i);
  for (; i < count; i++) run(std::integral_constant<int, 1>(), i);
  write_sums(p, sums, row, rows, first, count);
}

// The same for all rows.
inline void multiply_columns(const Linear& p, const Factors& x, int64_t first, int count) {
  for (int64_t row = 0; row < p.rows; row += FEW_BLOCK) {
    const auto f = row == 0 ? multiply_few<true> : multiply_few<false>;
    f(p, x, row, int(std::min<int64_t>(p.rows - row, FEW_BLOCK)), first, count);
  }
}

#endif

#if defined(KV_BF16)

// Columns [first, first + PANEL) for up to EDGE * BLOCKS rows. FETCH: fetch the next panel, in the order of memory. (What lies
// WEIGHTS_AHEAD comes too late where all rows of a panel are read at once; not spaced it gains nothing.)
template <int BLOCKS, bool FETCH>
void multiply_in_unit(const Linear& p, const Factors& x, int64_t row, int rows, int64_t first) {
  const uint16_t *weight = p.weight + first * p.in, *second = weight + EDGE * p.in, *next = weight + PANEL * p.in;
  const uint32_t* columns = x.columns + row / 2 * p.in;
  Spaced spaced;
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t d = 0; d < p.in; d += DEPTH) {
    tile_load<4>(weight + d, p.in * 2), tile_load<5>(second + d, p.in * 2);
    tile_load<6>(columns + d * (EDGE / 2), 64), tile_dot<0, 4, 6>(), tile_dot<1, 5, 6>();
    if (BLOCKS > 1) tile_load<7>(columns + (p.in + d) * (EDGE / 2), 64), tile_dot<2, 4, 7>(), tile_dot<3, 5, 7>();
    if (FETCH)
#pragma GCC unroll 32
      for (int i = 0; i < PANEL; i++, next += DEPTH) spaced.fetch<2, 2>(next);
  }
  const auto write = [&](auto tile) {
    constexpr int T = decltype(tile)::value;
    alignas(64) float sums[EDGE][EDGE];
    vu turned[EDGE];
    tile_store<T>(sums, 64);
    for (int i = 0; i < EDGE; i++) turned[i] = load<vu>(sums[i]);
    transpose(turned);
    for (int i = 0; i < EDGE; i++) store(sums[i], turned[i]);
    write_sums(p, sums, row + T / 2 * EDGE, std::min(rows - T / 2 * EDGE, EDGE), first + T % 2 * EDGE, EDGE);
  };
  write(std::integral_constant<int, 0>()), write(std::integral_constant<int, 1>());
  if (BLOCKS > 1) write(std::integral_constant<int, 2>()), write(std::integral_constant<int, 3>());
}

#endif

// Columns [first, first + PANEL) as far as there are, for all rows.
inline void multiply_panel(const Linear& p, const Factors& x, int64_t first) {
#if defined(KV_BF16)
  if (x.columns != nullptr && first + PANEL <= p.out) {
    for (int64_t row = 0; row < p.rows; row += 2 * EDGE) {
      const int rows = int(std::min<int64_t>(p.rows - row, 2 * EDGE));
      const auto f = rows <= EDGE ? (row == 0 ? multiply_in_unit<1, true> : multiply_in_unit<1, false>)
                                  : (row == 0 ? multiply_in_unit<2, true> : multiply_in_unit<2, false>);
      f(p, x, row, rows, first);
    }
    return;
  }
#endif
  const int64_t end = std::min(first + PANEL, p.out);
  for (int64_t at = first; at < end; at += EDGE) multiply_columns(p, x, at, int(std::min<int64_t>(end - at, EDGE)));
}

// to = x . weight^T + bias.
inline void multiply(const Linear& p) {
  const Factors x = prepare(p);
  const int64_t panels = (p.out + PANEL - 1) / PANEL, grain = GRAIN / std::max<int64_t>(PANEL * p.in, 1);
  at::parallel_for(0, panels, std::max<int64_t>(grain, 1), [&](int64_t begin, int64_t end) {
#if defined(KV_BF16)
    const TileUnit unit(x.columns != nullptr);
#endif
    for (int64_t panel = begin; panel < end; panel++) multiply_panel(p, x, panel * PANEL);
  });
}

}  // namespace kv
