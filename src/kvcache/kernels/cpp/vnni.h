// The products of few rows with q8_0 and q4_0 as they are stored: integers times integers (VNNI), for queries of bf16.
//
// The left operand becomes fixed point of 16 bits, in two bytes, relative to the largest in a group of 32 query values, or
// among the weights of one tile with one group of columns. `dpbusd` multiplies its high bytes and its low bytes by four
// stored values at a time; those sums are exact, and the scales of the group follow once per group.
//
//            left          right             lanes                                          formats
//   scores   signed        unsigned, biased  a slot each: units of 16 rows are transposed   q8_0, q4_0
//   outputs  unsigned      signed            a column each: bytes of 4 rows interleaved     q8_0; its scales are positive
//
// The bias of keys is 128 (q8_0: turning the sign bit) or 8 (q4_0: as stored); a sum begins with minus the bias times the
// sum of the left operand. Values of q4_0 are as fast in bf16 (`mix_direct`), which takes negative scales.
//
// An error of 2^-16 of the largest is far below what bf16 loses. Scales of values that are negative or not finite, which
// only foreign rows have, go through bf16; those of keys are multiplied as they are.
// (Longer than 300 lines: two products, and what feeds them.)
#pragma once

#include <array>

#include "direct.h"

#if defined(KV_BF16) && defined(__AVX512VNNI__)
#define KV_VNNI 1
#endif

namespace kv {

#if defined(KV_VNNI)

constexpr float FIXED_SIGNED = 127 * 256, FIXED_UNSIGNED = 65535;  // what the largest becomes
template <int F>
constexpr int BIAS = F == Q8 ? 128 : 8;

// acc + the sum of four unsigned times four signed bytes, in each lane. Written out, because GCC 12 copies the accumulators
// of its own `_mm512_dpbusd_epi32` to and fro in loops, which costs half of their speed.
KV_INLINE __m512i add_products(__m512i acc, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
  return acc;
}

// Of each group of a packed query row: a sum begins with `surplus`, and is multiplied by `scale`.
struct Fixed {
  float scale;
  int32_t surplus;
};

// The maximum over the lanes of each of four vectors of floats that are not negative; NaN is larger than everything.
KV_INLINE __m128 largest_of_four(const __m512i* v) {
  const auto op = [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); };
  const __m512i ab = op(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i cd = op(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i all = op(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m512i half = op(all, _mm512_shuffle_i64x2(all, all, 0x4e));
  return _mm_castsi128_ps(_mm512_castsi512_si128(op(half, _mm512_shuffle_i64x2(half, half, 0xb1))));
}

// The two low bytes of x * factor + offset, an integer of at most 16 bits, for 4 * 16 floats.
KV_INLINE void to_fixed(const __m512* x, __m512 factor, float offset, __m512i& high, __m512i& low) {
  alignas(64) static constexpr auto bytes = [] {
    std::array<uint8_t, 64> index{};
    for (int i = 0; i < 32; i++) index[i] = uint8_t(4 * i), index[i + 32] = uint8_t(4 * i + 1);
    return index;
  }();
  const __m512i index = _mm512_load_si512(bytes.data());
  const __m512 magic = _mm512_set1_ps(12582912.0f + offset);  // adding 1.5 * 2^23 leaves the integer in the low bits
  __m512i y[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) y[v] = _mm512_castps_si512(_mm512_fmadd_ps(x[v], factor, magic));
  const __m512i a = _mm512_permutex2var_epi8(y[0], index, y[1]), b = _mm512_permutex2var_epi8(y[2], index, y[3]);
  low = _mm512_shuffle_i64x2(a, b, 0x44), high = _mm512_shuffle_i64x2(a, b, 0xee);
}

// A packed query row: high bytes [dim], low bytes [dim], Fixed [groups]; within 4 * dim bytes.
template <int F>
void pack_query_fixed(const float* values, int dim, uint8_t* to) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (int g = 0; g < dim / GROUP; g++) {
    const __m512 x[4] = {_mm512_loadu_ps(values + g * GROUP), _mm512_loadu_ps(values + g * GROUP + 16),
                         _mm512_setzero_ps(), _mm512_setzero_ps()};
    const auto size = [&](int i) { return _mm512_castps_si512(_mm512_abs_ps(x[i])); };
    const __m512i sizes = _mm512_max_epu32(size(0), size(1));  // a NaN is larger than everything
    const float largest = bits<float>(_mm512_reduce_max_epu32(sizes));
    __m512i high, low;  // with 128 added, the second byte is the high part, and the first the low part plus 128
    to_fixed(x, _mm512_set1_ps(largest > FIXED_TINY ? FIXED_SIGNED / largest : 0.0f), 128.0f, high, low);
    low = _mm512_xor_si512(low, _mm512_set1_epi8(char(0x80)));
    _mm256_storeu_si256((__m256i*)(to + g * GROUP), _mm512_castsi512_si256(high));
    _mm256_storeu_si256((__m256i*)(to + dim + g * GROUP), _mm512_castsi512_si256(low));
    const __m512i sums = _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, high), 8);
    const int32_t sum = _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(sums, ones, low));  // the other halves are zeros
    const Fixed fixed = {largest / FIXED_SIGNED + (largest - largest), -BIAS<F> * sum};  // not finite: NaN
    std::memcpy(to + 2 * dim + g * sizeof(Fixed), &fixed, sizeof(Fixed));
  }
}

KV_INLINE Fixed fixed_of(const uint8_t* row, int dim, int g) {
  Fixed fixed;
  std::memcpy(&fixed, row + 2 * dim + g * sizeof(Fixed), sizeof(Fixed));
  return fixed;
}

// --- scores -----------------------------------------------------------------------------------------------------------

// t[u] = units u of 16 rows, which have `units` (4 or 8) of them here.
KV_INLINE void load_transposed(const uint8_t* const* rows, size_t at, int units, __m512i* t) {
  __m512i r[8], a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const uint8_t *first = rows[i / 4 * 8 + i % 4] + at, *second = rows[i / 4 * 8 + i % 4 + 4] + at;
    if (units == 8)
      r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first)),
                                _mm256_loadu_si256((const __m256i*)second), 1);
    else
      r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first))),
                                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)second)), 1);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int u = 0; u < 4; u++) {
    t[u] = _mm512_shuffle_i32x4(b[u], b[u + 4], 0x88);
    t[u + 4] = _mm512_shuffle_i32x4(b[u], b[u + 4], 0xdd);
  }
}

// scores[MR][SETS * 16] (+)= query . keys for one group, given as 8 vectors of 4 values each.
template <int MR, int SETS>
KV_INLINE void score_group(const uint8_t* q, int dim, int g, __m512i (*keys)[8], const float* scales, float* scores,
                           Ahead& ahead) {
  constexpr int STEP = MR % 2 == 0 && SETS == 2 ? 2 : SETS == 2 ? 1 : MR;
  ahead.before(MR * SETS);
#pragma GCC unroll 4
  for (int r0 = 0; r0 < MR; r0 += STEP) {
    ahead.within<STEP * SETS>();
    __m512i high[STEP][SETS], low[STEP][SETS];
#pragma GCC unroll 4
    for (int r = 0; r < STEP; r++) {
      const Fixed fixed = fixed_of(q + size_t(r0 + r) * 4 * dim, dim, g);
#pragma GCC unroll 2
      for (int s = 0; s < SETS; s++) high[r][s] = _mm512_setzero_si512(), low[r][s] = _mm512_set1_epi32(fixed.surplus);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 4
      for (int r = 0; r < STEP; r++) {
        const uint8_t* row = q + size_t(r0 + r) * 4 * dim + g * GROUP + 4 * i;
        const __m512i qh = _mm512_set1_epi32(load<int32_t>(row)), ql = _mm512_set1_epi32(load<int32_t>(row + dim));
#pragma GCC unroll 2
        for (int s = 0; s < SETS; s++) {
          high[r][s] = add_products(high[r][s], keys[s][i], qh);
          low[r][s] = add_products(low[r][s], keys[s][i], ql);
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < STEP; r++) {
      const Fixed fixed = fixed_of(q + size_t(r0 + r) * 4 * dim, dim, g);
#pragma GCC unroll 2
      for (int s = 0; s < SETS; s++) {
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][s], 8), low[r][s]);
        const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(fixed.scale));
        float* to = scores + (r0 + r) * TILE + s * 16;
        const __m512 before = g == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
        _mm512_store_ps(to, _mm512_fmadd_ps(value, _mm512_load_ps(scales + g * TILE + s * 16), before));
      }
    }
  }
}

template <int F, int MR, int SETS>
KV_INLINE void score_slots(const uint8_t* q, const uint8_t* const* rows, const float* scales, float* scores, int dim,
                           Ahead& ahead) {
  constexpr int GROUPS = F == Q8 ? 1 : 2;  // in 8 units
  const int groups = dim / GROUP;
  for (int g = 0; g < groups; g += GROUPS) {
    __m512i t[SETS][8];
#pragma GCC unroll 2
    for (int s = 0; s < SETS; s++)
      if (F == Q8)
        load_transposed(rows + 16 * s, size_t(g) * GROUP, 8, t[s]);
      else if (g + 1 < groups)
        load_transposed(rows + 16 * s, size_t(g) * GROUP / 2, 8, t[s]);
      else
        load_transposed(rows + 16 * s, size_t(g) * GROUP / 2, 4, t[s]);
#pragma GCC unroll 2
    for (int part = 0; part < GROUPS; part++) {
      if (g + part >= groups) break;
      __m512i keys[SETS][8];
#pragma GCC unroll 2
      for (int s = 0; s < SETS; s++)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
          if (F == Q8)
            keys[s][i] = _mm512_xor_si512(t[s][i], _mm512_set1_epi8(char(0x80)));
          else  // low halves of the bytes: the first 16 values of the group
            keys[s][i] = _mm512_and_si512(i < 4 ? t[s][4 * part + i] : _mm512_srli_epi16(t[s][4 * part + i - 4], 4),
                                          _mm512_set1_epi8(15));
      score_group<MR, SETS>(q, dim, g + part, keys, scales, scores, ahead);
    }
  }
}

// scores[r][:slots] = q[r] . keys for MR rows that `pack_query_fixed` packed; scales[groups][TILE].
template <int F, int MR>
void scores_fixed(const uint8_t* q, const uint8_t* const* rows, const float* scales, float* scores, int dim, int slots,
                  Ahead& next) {
  Ahead ahead = next;
  int k = 0;
  for (; k + 32 <= slots; k += 32) score_slots<F, MR, 2>(q, rows + k, scales + k, scores + k, dim, ahead);
  if (k < slots) score_slots<F, MR, 1>(q, rows + k, scales + k, scores + k, dim, ahead);
  next = ahead;
}

// --- outputs ----------------------------------------------------------------------------------------------------------

// weights[:slots] times the scales of each group of values: to[groups][high, low][TILE] bytes, and what they are to be
// multiplied by. `l` is the sum of the row's weights so far: where it is not finite, no result is.
inline void weigh_fixed(const float* weights, const float* scales, int groups, int slots, float l, uint8_t* to,
                        float* multipliers) {
  __m512 p[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) p[v] = v * 16 < slots ? _mm512_load_ps(weights + v * 16) : _mm512_setzero_ps();
  for (int g0 = 0; g0 < groups; g0 += 4) {
    __m512 x[4][4];
    __m512i sizes[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
      sizes[g] = _mm512_setzero_si512();
      if (g0 + g >= groups) continue;
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) {
        x[g][v] = v * 16 < slots ? _mm512_mul_ps(p[v], _mm512_load_ps(scales + (g0 + g) * TILE + v * 16)) : p[v];
        sizes[g] = _mm512_max_epu32(sizes[g], _mm512_castps_si512(x[g][v]));
      }
    }
    const __m128 largest = largest_of_four(sizes), one = _mm_set1_ps(FIXED_UNSIGNED);
    const __mmask8 not_tiny = _mm_cmp_ps_mask(largest, _mm_set1_ps(FIXED_TINY), _CMP_GT_OQ);
    alignas(16) float factors[4], inverses[4];
    _mm_store_ps(factors, _mm_maskz_div_ps(not_tiny, one, largest));
    _mm_store_ps(inverses, _mm_add_ps(_mm_div_ps(largest, one), _mm_set1_ps(l - l)));
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
      if (g0 + g >= groups) continue;
      __m512i high, low;
      to_fixed(x[g], _mm512_set1_ps(factors[g]), 0.0f, high, low);
      _mm512_store_si512(to + (g0 + g) * 2 * TILE, high);
      _mm512_store_si512(to + (g0 + g) * 2 * TILE + TILE, low);
      multipliers[g0 + g] = inverses[g];
    }
  }
}

// The 32 values of a group of q8_0 in four rows: lane i of values[v] holds those of column 2 * i + v, as the bf16 tiles do.
KV_INLINE void interleave_rows(const uint8_t* const* rows, int g, __m512i* values) {
  alignas(64) static constexpr auto bytes = [] {
    std::array<uint8_t, 128> index{};
    for (int v = 0; v < 2; v++)
      for (int i = 0; i < 16; i++)
        for (int r = 0; r < 4; r++) index[v * 64 + 4 * i + r] = uint8_t(r * 32 + 2 * i + v);
    return index;
  }();
  __m512i pair[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    pair[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(rows[2 * i] + g * GROUP))),
                                 _mm256_loadu_si256((const __m256i*)(rows[2 * i + 1] + g * GROUP)), 1);
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++)
    values[v] = _mm512_permutex2var_epi8(pair[0], _mm512_load_si512(bytes.data() + 64 * v), pair[1]);
}

// out[r] = out[r] * correction[r] + weights[r] . values for MR rows, whose weights lie `groups` * 2 * TILE bytes apart.
template <int MR>
void mix_fixed(const uint8_t* weights, const float* multipliers, const uint8_t* const* rows, int dim, float* out,
               const float* correction, int slots, Ahead& next) {
  Ahead ahead = next;
  const int groups = dim / GROUP;
  for (int g = 0; g < groups; g++) {
    __m512i high[MR][2], low[MR][2];
#pragma GCC unroll 4
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int j = 0; j < slots; j += 4) {
      if (j % 16 == 0) ahead.before(4);
      ahead.within<1>();
      __m512i values[2];
      interleave_rows(rows + j, g, values);
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++) {
        const uint8_t* w = weights + size_t(r * groups + g) * 2 * TILE + j;
        const __m512i wh = _mm512_set1_epi32(load<int32_t>(w)), wl = _mm512_set1_epi32(load<int32_t>(w + TILE));
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
          high[r][v] = add_products(high[r][v], wh, values[v]);
          low[r][v] = add_products(low[r][v], wl, values[v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < MR; r++) {
      const __m512 scale = _mm512_set1_ps(multipliers[r * groups + g]), c = _mm512_set1_ps(correction[r]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][v], 8), low[r][v]);
        float* to = out + size_t(r) * dim + g * GROUP + v * 16;
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_mul_ps(_mm512_load_ps(to), c)));
      }
    }
  }
  next = ahead;
}
#endif

}  // namespace kv
