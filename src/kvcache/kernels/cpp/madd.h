// The products of few rows with q8_0 and q4_0 as they are stored, in integers of 16 bits (AVX2), for queries of bf16.
//
// (What `vnni.h` is where there is VNNI, by the same names.) The left operand becomes fixed point, relative to the largest in a
// group of 32 query values, or of a tile's weights times the scales of one group of columns. `madd` multiplies sixteen of its
// values by stored ones and adds pairs: twice as many as a product of f32 takes. Sums within a group of keys, and over a tile of
// values, are exact; their scales follow once. An error of 2^-16 of the largest is far below what the codes lose; scales may
// have any sign, and one that is no number gives NaN.
//
//   scores    lanes are pairs of values of one key
//   outputs   lanes are columns: pairs of values of two rows, interleaved
#pragma once

#include "codes.h"
#include "direct_f32.h"

namespace kv {

#if defined(KV_AVX2)

constexpr float FIXED_LARGEST = 32767;

KV_INLINE __m256i sizes_of(vf x) { return _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0x7fffffff)); }

// x * factor as integers of 16 bits, for two vectors.
KV_INLINE __m256i to_fixed(vf a, vf b, vf factor) {
  const __m256i low = _mm256_cvtps_epi32((__m256)(a * factor)), high = _mm256_cvtps_epi32((__m256)(b * factor));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
}

// Half h of the 32 values of a group, of which `at` points to the codes.
template <int F>
KV_INLINE __m256i widen(const uint8_t* at, int h) {
  if (F == Q8) return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(at + 16 * h)));
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at));
  return _mm256_sub_epi16(h == 0 ? _mm256_and_si256(codes, _mm256_set1_epi16(15)) : _mm256_srli_epi16(codes, 4),
                          _mm256_set1_epi16(8));
}

// A packed query row: int16 [dim], and what the sums of each group are multiplied with, f32 [groups]; within 4 * dim bytes.
template <int F>
void pack_query_fixed(const float* values, int dim, uint8_t* to) {
  for (int g = 0; g < dim / GROUP; g++) {
    const float* x = values + g * GROUP;
    const float largest = largest_size(x), scale = largest / FIXED_LARGEST + (largest - largest);  // not finite: NaN
    const vf factor = splat(largest > FIXED_TINY ? FIXED_LARGEST / largest : 0.0f);
    for (int i = 0; i < GROUP; i += 2 * LANES)
      store(to + 2 * (g * GROUP + i), to_fixed(load<vf>(x + i), load<vf>(x + i + LANES), factor));
    std::memcpy(to + 2 * dim + g * sizeof(float), &scale, sizeof(float));
  }
}

// scores[r][:slots] = q[r] . keys for MR rows that `pack_query_fixed` packed, `dim` floats apart; scales[groups][TILE].
template <int F, int MR>
void scores_fixed(const uint8_t* q, const uint8_t* const* rows, const float* scales, float* scores, int dim, int slots,
                  Ahead& ahead) {
  constexpr int KEYS = keys_at_once(MR);
  const int groups = dim / GROUP;
  for (int k = 0; k < slots; k += LANES) {
    vf sums[MR][LANES];
#pragma GCC unroll 1
    for (int i = 0; i < LANES; i += KEYS) {
      vf acc[MR][KEYS];
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) acc[r][j] = splat(0.0f);
      ahead.advance(KEYS * groups);
      for (int g = 0; g < groups; g++) {
        __m256i key[KEYS][2];
        vf scale[KEYS];
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) {
          key[j][0] = widen<F>(rows[k + i + j] + g * CODES<F>, 0), key[j][1] = widen<F>(rows[k + i + j] + g * CODES<F>, 1);
          scale[j] = splat(scales[g * TILE + k + i + j]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < MR; r++) {
          const uint8_t* at = q + size_t(r) * 4 * dim + 2 * g * GROUP;
          const __m256i a = load<__m256i>(at), b = load<__m256i>(at + 32);
          const vf of_query = splat(load<float>(q + (size_t(r) * 4 + 2) * dim + g * sizeof(float)));
#pragma GCC unroll 4
          for (int j = 0; j < KEYS; j++) {
            const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(key[j][0], a), _mm256_madd_epi16(key[j][1], b));
            acc[r][j] += to_float((vi)sum) * (scale[j] * of_query);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) sums[r][i + j] = acc[r][j];
    }
#pragma GCC unroll 4
    for (int r = 0; r < MR; r++) store(scores + r * TILE + k, sum_each(sums[r]));
  }
}

// The largest lanes of four vectors of what are no signed integers; a NaN is larger than everything.
KV_INLINE __m128 largest_of_four(const __m256i* v) {
  const auto op = [](__m256i a, __m256i b) { return _mm256_max_epu32(a, b); };
  const __m256i ab = op(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
  const __m256i cd = op(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
  const __m256i all = op(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return _mm_castsi128_ps(_mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

// weights[:slots] times the scales [groups][TILE] of values: to[groups][TILE], and what they are to be multiplied by. `l` is
// the sum of the row's weights so far: where it is not finite, no result is.
inline void weigh_fixed(const float* weights, const float* scales, int groups, int slots, float l, uint8_t* to,
                        float* multipliers) {
  vf p[TILE / LANES];
#pragma GCC unroll 8
  for (int v = 0; v < TILE / LANES; v++) p[v] = v * LANES < slots ? load<vf>(weights + v * LANES) : splat(0.0f);
  for (int g0 = 0; g0 < groups; g0 += 4) {
    __m256i sizes[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
      sizes[g] = _mm256_setzero_si256();
      if (g0 + g >= groups) continue;
#pragma GCC unroll 8
      for (int v = 0; v < TILE / LANES; v++)
        sizes[g] = _mm256_max_epu32(sizes[g], sizes_of(p[v] * load<vf>(scales + (g0 + g) * TILE + v * LANES)));
    }
    const __m128 largest = largest_of_four(sizes), one = _mm_set1_ps(FIXED_LARGEST);
    alignas(16) float factors[4], inverses[4];
    _mm_store_ps(factors, _mm_and_ps(_mm_div_ps(one, largest), _mm_cmpgt_ps(largest, _mm_set1_ps(FIXED_TINY))));
    _mm_store_ps(inverses, _mm_add_ps(_mm_mul_ps(largest, _mm_set1_ps(1.0f / FIXED_LARGEST)),
                                      _mm_add_ps(_mm_sub_ps(largest, largest), _mm_set1_ps(l - l))));
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
      if (g0 + g >= groups) continue;
      const float* of_group = scales + (g0 + g) * TILE;
      const vf factor = splat(factors[g]);
      multipliers[g0 + g] = inverses[g];
#pragma GCC unroll 8
      for (int v = 0; v < TILE / LANES; v += 2)
        store(to + 2 * ((g0 + g) * TILE + v * LANES), to_fixed(p[v] * load<vf>(of_group + v * LANES),
                                                              p[v + 1] * load<vf>(of_group + (v + 1) * LANES), factor));
    }
  }
}

// out[r] = out[r] * correction[r] + weights[r] . values for MR rows, whose weights lie `groups` * TILE apart.
template <int F, int MR>
void mix_fixed(const uint8_t* weights, const float* multipliers, const uint8_t* const* rows, int dim, float* out,
               const float* correction, int slots, Ahead& ahead) {
  const int groups = dim / GROUP;
  for (int g = 0; g < groups; g++)
#pragma GCC unroll 1
    for (int h = 0; h < 2; h++) {
      ahead.advance(slots / 2);
      __m256i acc[MR][2];
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
      for (int j = 0; j < slots; j += 2) {
        const uint8_t *first = rows[j] + g * CODES<F>, *second = rows[j + 1] + g * CODES<F>;
        const __m256i a = h == 0 ? widen<F>(first, 0) : widen<F>(first, 1);
        const __m256i b = h == 0 ? widen<F>(second, 0) : widen<F>(second, 1);
        const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int r = 0; r < MR; r++) {
          const __m256i w = _mm256_set1_epi32(load<int32_t>(weights + 2 * (size_t(r * groups + g) * TILE + j)));
          acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(low, w));
          acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(high, w));
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++) {
        const vf factor = splat(multipliers[r * groups + g]), c = splat(correction[r]);
        float* to = out + size_t(r) * dim + g * GROUP + h * 16;
        const vi first = (vi)_mm256_permute2x128_si256(acc[r][0], acc[r][1], 0x20);
        const vi second = (vi)_mm256_permute2x128_si256(acc[r][0], acc[r][1], 0x31);
        store(to, load<vf>(to) * c + to_float(first) * factor);
        store(to + LANES, load<vf>(to + LANES) * c + to_float(second) * factor);
      }
    }
}

#endif

}  // namespace kv
