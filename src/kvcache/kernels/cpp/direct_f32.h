// The products of few rows in f32, straight from stored rows, on CPUs without AVX-512: a tile that is read once is not worth
// packing, and packed as f32 it would take all of a first-level cache.
//
// Rows are expanded span by span where they are wanted (`Span`). Scores are dot products along the stored row; eight keys are
// summed across lanes together.
#pragma once

#include "gemm.h"

namespace kv {

#if KV_LANES == 8

// Lane i: the sum of v[i].
KV_INLINE vf sum_each(const vf* v) {
#if defined(KV_AVX2)
  __m256 four[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const auto pair = [&](int at) {
      const __m256 a = (__m256)v[at], b = (__m256)v[at + 1];
      return _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    };
    const __m256d a = pair(4 * i), b = pair(4 * i + 2);
    four[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return (vf)_mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
#else
  vf sums;
  for (int i = 0; i < LANES; i++) sums[i] = sum(v[i]);
  return sums;
#endif
}

// In a register: GCC would rather load it again for each product, and two loads a cycle are all that there are.
KV_INLINE vf held(vf x) {
#if defined(KV_AVX2)
  asm("" : "+x"(x));
#endif
  return x;
}

constexpr int keys_at_once(int rows) { return rows > 2 ? 2 : 4; }  // whose sums fit the registers

// scores[r][:slots] = q[r] . keys for MR rows, whose values stand where `value_places` says.
template <int F, int MR>
void scores_direct_f32(const uint8_t* q, const uint8_t* const* rows, const float*, float* scores, int dim, int slots,
                       Ahead& ahead) {
  using S = Span<F>;
  constexpr int P = per_unit(F), KEYS = keys_at_once(MR);
  const int width = value_columns(F, false, dim);
  const float* queries = reinterpret_cast<const float*>(q);
  for (int k = 0; k < slots; k += LANES) {
    vf sums[MR][LANES];
#pragma GCC unroll 1
    for (int i = 0; i < LANES; i += KEYS) {
      ahead.advance(KEYS * width / S::VALUES);
      vf acc[MR][KEYS];
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) acc[r][j] = splat(0.0f);
      const auto add = [&](int d, auto&& expand) {
        vf keys[KEYS][S::VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) expand(rows[k + i + j] + d / P * 4, keys[j]);
#pragma GCC unroll 4
        for (int v = 0; v < S::VECTORS; v++)
#pragma GCC unroll 4
          for (int r = 0; r < MR; r++) {
            const vf query = held(load<vf>(queries + size_t(r) * width + d + v * LANES));
#pragma GCC unroll 4
            for (int j = 0; j < KEYS; j++) acc[r][j] += query * keys[j][v];
          }
      };
      int d = 0;
      for (; d + S::VALUES <= dim; d += S::VALUES) add(d, [](const uint8_t* from, vf* v) { S::expand(from, v); });
      if (d < dim) add(d, [&](const uint8_t* from, vf* v) { expand_span<F>(from, (dim - d) / P * 4, v); });
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) sums[r][i + j] = acc[r][j];
    }
#pragma GCC unroll 4
    for (int r = 0; r < MR; r++) store(scores + r * TILE + k, sum_each(sums[r]) * splat(S::FACTOR));
  }
}

constexpr int PART = 16;  // slots that are mixed into all columns before the next

// out[r] = out[r] * correction[r] + weights[r][:slots] . values for MR rows.
template <int F, int MR>
void mix_direct_f32(const uint8_t* weights, const float*, const uint8_t* const* rows, int dim, float* out,
                    const float* correction, int slots, Ahead& ahead) {
  using S = Span<F>;
  constexpr int P = per_unit(F);
  const int width = value_columns(F, false, dim);
  const float* p = reinterpret_cast<const float*>(weights);
  for (int begin = 0; begin < slots; begin += PART) {
    const int end = std::min(begin + PART, slots);
    const auto mix = [&](int d, auto&& expand) {
      ahead.advance(end - begin);
      vf acc[MR][S::VECTORS];
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++) {
        const vf factor = splat((begin == 0 ? correction[r] : 1.0f) / S::FACTOR);
#pragma GCC unroll 8
        for (int v = 0; v < S::VECTORS; v++) acc[r][v] = load<vf>(out + size_t(r) * width + d + v * LANES) * factor;
      }
      for (int j = begin; j < end; j++) {
        vf values[S::VECTORS];
        expand(rows[j] + d / P * 4, values);
#pragma GCC unroll 4
        for (int r = 0; r < MR; r++) {
          const vf weight = splat(p[r * TILE + j]);
#pragma GCC unroll 8
          for (int v = 0; v < S::VECTORS; v++) acc[r][v] += weight * values[v];
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int v = 0; v < S::VECTORS; v++) store(out + size_t(r) * width + d + v * LANES, acc[r][v] * splat(S::FACTOR));
    };
    int d = 0;
    for (; d + S::VALUES <= dim; d += S::VALUES) mix(d, [](const uint8_t* from, vf* v) { S::expand(from, v); });
    if (d < dim) mix(d, [&](const uint8_t* from, vf* v) { expand_span<F>(from, (dim - d) / P * 4, v); });
  }
}

#endif

}  // namespace kv
