// The two matrix products of attention over one tile: scores = queries . keys, output = output * correction + p . values.
//
// Register blocks of MR rows times NV vectors; the left operand is broadcast, the right one is a packed tile (pack.h)
// that stays in the first-level cache. Every row is computed with the same operations in the same order whatever MR is,
// so a row's result does not depend on the rows beside it.
#pragma once

#include "pack.h"

namespace kv {

#if defined(KV_AVX512)
constexpr int MAX_ROWS = 6, VECTORS = 4;
#elif defined(KV_AVX2)
constexpr int MAX_ROWS = 6, VECTORS = 2;
#else
constexpr int MAX_ROWS = 4, VECTORS = 2;
#endif

constexpr float FIXED_TINY = 1e-30f;  // the largest of what becomes fixed point counts as zero below

// Whether lines are fetched in the loops of products, or all of a loop's before it: with sixteen registers steps cost a
// sixth of them.
constexpr bool STEPS_WITHIN = LANES == 16;

// Calls `f` with the number of rows of each block, as a constant: blocks of nearly equal size, at most MAX_ROWS rows.
template <class F>
KV_INLINE void for_row_blocks(int begin, int end, F&& f) {
  const int rows = end - begin, blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int b = 0, at = begin; b < blocks; b++) {
    const int n = (end - at + blocks - b - 1) / (blocks - b);
    switch (n) {
      case 1: f(at, std::integral_constant<int, 1>()); break;
      case 2: f(at, std::integral_constant<int, 2>()); break;
      case 3: f(at, std::integral_constant<int, 3>()); break;
      case 4: f(at, std::integral_constant<int, 4>()); break;
#if KV_LANES == 16 || defined(KV_AVX2)
      case 5: f(at, std::integral_constant<int, 5>()); break;
      case 6: f(at, std::integral_constant<int, 6>()); break;
#endif
    }
    at += n;
  }
}

// --- f32 --------------------------------------------------------------------------------------------------------------

// scores[r][TILE] = q[r][dim] . keys[dim][TILE] for MR rows.
template <int MR>
void scores_f32(const float* q, const float* keys, float* scores, int dim, Ahead& next) {
  Ahead ahead = next;
  for (int k = 0; k < TILE; k += VECTORS * LANES) {
    if (!STEPS_WITHIN) ahead.advance(dim);
    vf acc[MR][VECTORS] = {};
    for (int d = 0; d < dim; d++) {
      if (STEPS_WITHIN) ahead.step<1>();
      vf b[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) b[v] = load<vf>(keys + size_t(d) * TILE + k + v * LANES);
#pragma GCC unroll 6
      for (int r = 0; r < MR; r++) {
        const vf a = splat(q[size_t(r) * dim + d]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) acc[r][v] += a * b[v];
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) store(scores + r * TILE + k + v * LANES, acc[r][v]);
  }
  next = ahead;
}

template <int MR, int NV>
KV_INLINE void mix_block_f32(const float* p, const float* values, float* out, const float* correction, int columns,
                             int slots, Ahead& ahead) {
  if (!STEPS_WITHIN) ahead.advance(slots);
  vf acc[MR][NV] = {};
  for (int j = 0; j < slots; j++) {
    if (STEPS_WITHIN) ahead.step<1>();
    vf b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) b[v] = load<vf>(values + size_t(j) * columns + v * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) {
      const vf a = splat(p[r * TILE + j]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] += a * b[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < MR; r++) {
    const vf c = splat(correction[r]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      float* to = out + size_t(r) * columns + v * LANES;
      store(to, load<vf>(to) * c + acc[r][v]);
    }
  }
}

// out[r][columns] = out * correction[r] + p[r][:slots] . values[:slots][columns] for MR rows.
template <int MR>
void mix_f32(const float* p, const float* values, float* out, const float* correction, int columns, int slots,
             Ahead& next) {
  Ahead ahead = next;
  int c = 0;
  for (; c + VECTORS * LANES <= columns; c += VECTORS * LANES)
    mix_block_f32<MR, VECTORS>(p, values + c, out + c, correction, columns, slots, ahead);
  for (; c < columns; c += LANES) mix_block_f32<MR, 1>(p, values + c, out + c, correction, columns, slots, ahead);
  next = ahead;
}

// --- bf16 products, f32 sums ------------------------------------------------------------------------------------------

#if defined(KV_BF16)

KV_INLINE __m512 dot(__m512 acc, uint32_t pair, __m512i b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(int(pair)), (__m512bh)b);
}

// scores[r][TILE] = q[r] . keys over `pairs` pairs. SCALED: each group of 16 pairs is multiplied by scales[group][TILE];
// sums over groups stand in `scores` meanwhile, because registers hold the products of one group.
template <int MR, bool SCALED>
void scores_bf16(const uint32_t* q, const uint32_t* keys, const float* scales, float* scores, int pairs,
                 Ahead& next) {
  Ahead ahead = next;
  const int step = SCALED ? GROUP / 2 : pairs;
  for (int begin = 0; begin < pairs; begin += step) {
    __m512 acc[MR][4];
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) acc[r][v] = _mm512_setzero_ps();
    for (int i = begin; i < begin + step; i++) {
      ahead.step<1>();
      __m512i b[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) b[v] = _mm512_load_si512(keys + size_t(i) * TILE + v * 16);
#pragma GCC unroll 6
      for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) acc[r][v] = dot(acc[r][v], q[size_t(r) * pairs + i], b[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
#pragma GCC unroll 6
      for (int r = 0; r < MR; r++) {
        float* to = scores + r * TILE + v * 16;
        if (!SCALED) {
          _mm512_store_ps(to, acc[r][v]);
          continue;
        }
        const __m512 scale = _mm512_load_ps(scales + begin / (GROUP / 2) * TILE + v * 16);
        const __m512 before = begin == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
        _mm512_store_ps(to, _mm512_fmadd_ps(acc[r][v], scale, before));
      }
  }
  next = ahead;
}

template <int MR, int NV>
KV_INLINE void mix_block_bf16(const uint32_t* p, size_t p_stride, const uint32_t* values, float* out, const float* correction,
                              int columns, int pairs, Ahead& ahead) {
  __m512 acc[MR][NV];
#pragma GCC unroll 6
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = _mm512_setzero_ps();
  for (int j = 0; j < pairs; j++) {
    ahead.step<1>();
    __m512i b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) b[v] = _mm512_load_si512(values + size_t(j) * columns + v * 16);
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], p[v / 2 * p_stride + r * (TILE / 2) + j], b[v]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < MR; r++) {
    const __m512 c = _mm512_set1_ps(correction[r]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      float* to = out + size_t(r) * columns + v * 16;
      _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), c, acc[r][v]));
    }
  }
}

// out[r][columns] = out * correction[r] + p[r] . values. `p_stride` pairs lie between the p of one group of 32 columns
// and the next: 0 when there are no scales, and p then serves all columns.
template <int MR>
void mix_bf16(const uint32_t* p, size_t p_stride, const uint32_t* values, float* out, const float* correction,
              int columns, int pairs, Ahead& next) {
  Ahead ahead = next;
  int c = 0;
  for (; c + 64 <= columns; c += 64)
    if (p_stride == 0)  // a constant: one broadcast serves four vectors
      mix_block_bf16<MR, 4>(p, 0, values + c, out + c, correction, columns, pairs, ahead);
    else
      mix_block_bf16<MR, 4>(p + c / GROUP * p_stride, p_stride, values + c, out + c, correction, columns, pairs, ahead);
  if (c < columns)
    mix_block_bf16<MR, 2>(p + c / GROUP * p_stride, 0, values + c, out + c, correction, columns, pairs, ahead);
  next = ahead;
}
#endif

}  // namespace kv
