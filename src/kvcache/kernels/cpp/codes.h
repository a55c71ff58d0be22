// Single rows of values and of codes: f32 from what is stored and back, in every format.
//
// Bit for bit what `kvcache/formats/reference.py` says. A product and the sum after it stand in functions of their own
// where a compiler that fuses them (FMA rounds once) would give other codes.
#pragma once

#include <algorithm>
#include <cmath>

#include "pack.h"

namespace kv {

constexpr float BELOW_HALF = 0.5f - 0x1p-25f;

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
    floats_to_bf16(values, dim, half);
  else
    floats_to_f16(values, dim, half);
}

// --- fp8 --------------------------------------------------------------------------------------------------------------

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

// The same for 16 values (`min` gives its second operand where one is NaN).
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

// 16 codes by way of f16, which has subnormals of its own: shifted there, fp8's values are smaller by 2^8.
KV_INLINE __m512 fp8_to_floats(__m128i codes) {
  const __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi8(0x7f));
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);  // the sign in two bits
  const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbfff)));
  const __m512 values = _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
  const __mmask16 is_nan = _mm_cmpeq_epi8_mask(magnitude, _mm_set1_epi8(0x7f));
  return _mm512_mask_or_ps(values, is_nan, values, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}
#endif

// --- q8_0 and q4_0 ----------------------------------------------------------------------------------------------------

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

#if defined(KV_AVX512)

// The first N of four groups at once: what there is one of in a group is computed for all of them in one vector. False,
// and nothing written, where comparing does not say everything (NaN, infinity, two extremes of one size).

// A product that no sum after it is fused with.
KV_INLINE __m512 product(__m512 a, __m512 b) {
  __m512 result = _mm512_mul_ps(a, b);
  asm("" : "+v"(result));
  return result;
}

// Lane i: what `best` makes of all lanes of v[i].
template <class F>
KV_INLINE __m128 reduce_four(const __m512* v, F&& best) {
  const auto pair = [&](__m512 a, __m512 b) { return best(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  const __m512 a = pair(v[0], v[1]), b = pair(v[2], v[3]);
  const __m512 all = best(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const __m512 half = best(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  return _mm512_castps512_ps128(best(half, _mm512_shuffle_f32x4(half, half, 0xb1)));
}

// The finite inverses of `scale`, else zero.
KV_INLINE __m128 inverses_or_zero(__m128 scale) {
  const __m128 inverse = _mm_div_ps(_mm_set1_ps(1.0f), scale);
  const __m128 size = _mm_andnot_ps(_mm_set1_ps(-0.0f), inverse);
  const __mmask8 is_finite = _mm_cmp_ps_mask(size, _mm_set1_ps(INFINITY), _CMP_LT_OQ);
  return _mm_maskz_mov_ps(is_finite, inverse);
}

KV_INLINE void store_scales(__m128 scale, int n, uint8_t* to) {
  const int64_t halves = _mm_cvtsi128_si64(_mm_cvtps_ph(scale, _MM_FROUND_TO_NEAREST_INT));
  std::memcpy(to, &halves, size_t(2 * n));
}

template <int N>
inline bool encode_first_q8(const float* x, uint8_t* quants, uint8_t* scales) {
  __m512 size[4] = {};
  const auto larger = [](__m512 a, __m512 b) {  // as integers NaN is larger than everything
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  };
#pragma GCC unroll 4
  for (int g = 0; g < N; g++)
    size[g] = larger(_mm512_abs_ps(_mm512_loadu_ps(x + g * GROUP)),
                     _mm512_abs_ps(_mm512_loadu_ps(x + g * GROUP + 16)));
  const __m128 sizes = reduce_four(size, larger);
  if (_mm_cmpge_epi32_mask(_mm_castps_si128(sizes), _mm_set1_epi32(0x7f800000))) return false;
  const __m128 scale = _mm_div_ps(sizes, _mm_set1_ps(127.0f));
  alignas(16) float inverse[4];
  _mm_store_ps(inverse, inverses_or_zero(scale));
#pragma GCC unroll 8
  for (int i = 0; i < 2 * N; i++) {
    const __m512 scaled = product(_mm512_loadu_ps(x + i * 16), _mm512_set1_ps(inverse[i / 2]));
    const __m512 half = _mm512_or_ps(_mm512_and_ps(scaled, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(BELOW_HALF));
    const __m512i code = _mm512_cvttps_epi32(_mm512_add_ps(scaled, half));  // at most 127: inverses are 0 or near exact
    _mm_storeu_si128((__m128i*)(quants + i * 16), _mm512_cvtepi32_epi8(code));
  }
  store_scales(scale, N, scales);
  return true;
}

template <int N>
inline bool encode_first_q4(const float* x, uint8_t* quants, uint8_t* scales) {
  const auto larger = [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); };
  const auto smaller = [](__m512 a, __m512 b) { return _mm512_min_ps(a, b); };
  __m512 most[4] = {}, least[4] = {};
  __mmask16 is_nan = 0;
#pragma GCC unroll 4
  for (int g = 0; g < N; g++) {
    const __m512 low = _mm512_loadu_ps(x + g * GROUP), high = _mm512_loadu_ps(x + g * GROUP + 16);
    most[g] = larger(low, high), least[g] = smaller(low, high);
    is_nan |= _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q);
  }
  const __m128 top = reduce_four(most, larger), bottom = reduce_four(least, smaller);
  const __m128 below = _mm_xor_ps(bottom, _mm_set1_ps(-0.0f)), size = _mm_max_ps(top, below);
  const __mmask8 first = __mmask8((1 << N) - 1);
  const bool is_rare = is_nan | (_mm_cmp_ps_mask(top, below, _CMP_EQ_OQ) & first) |
                       _mm_cmp_ps_mask(size, _mm_set1_ps(INFINITY), _CMP_EQ_OQ);
  if (is_rare) return false;
  const __m128 extreme = _mm_mask_mov_ps(bottom, _mm_cmp_ps_mask(top, below, _CMP_GT_OQ), top);
  const __m128 scale = _mm_div_ps(extreme, _mm_set1_ps(-8.0f));
  alignas(16) float inverse[4];
  _mm_store_ps(inverse, inverses_or_zero(scale));
#pragma GCC unroll 4
  for (int g = 0; g < N; g++) {
    const auto code = [&](int i) {
      const __m512 scaled = product(_mm512_loadu_ps(x + g * GROUP + i), _mm512_set1_ps(inverse[g]));
      return _mm512_cvttps_epi32(_mm512_min_ps(_mm512_add_ps(scaled, _mm512_set1_ps(8.5f)), _mm512_set1_ps(15.0f)));
    };
    const __m512i both = _mm512_or_si512(code(0), _mm512_slli_epi32(code(16), 4));
    _mm_storeu_si128((__m128i*)(quants + g * GROUP / 2), _mm512_cvtepi32_epi8(both));
  }
  store_scales(scale, N, scales);
  return true;
}
#endif

template <int F>
inline void encode_groups(const float* x, int n, uint8_t* quants, uint8_t* scales) {
  constexpr int BYTES = F == Q8 ? GROUP : GROUP / 2;
  for (int g = 0, count; g < n; g += count, x += count * GROUP, quants += count * BYTES, scales += count * 2) {
    count = std::min(4, n - g);
#if defined(KV_AVX512)
    const auto first = [&](auto N) {
      return F == Q8 ? encode_first_q8<N.value>(x, quants, scales) : encode_first_q4<N.value>(x, quants, scales);
    };
    if (count == 1 ? first(std::integral_constant<int, 1>())
        : count == 2 ? first(std::integral_constant<int, 2>())
        : count == 3 ? first(std::integral_constant<int, 3>())
                     : first(std::integral_constant<int, 4>()))
      continue;
#endif
    for (int i = 0; i < count; i++)
      (F == Q8 ? encode_group_q8 : encode_group_q4)(x + i * GROUP, quants + i * BYTES, scales + i * 2);
  }
}

template <int F>
inline void decode_groups(const uint8_t* quants, const uint8_t* scales, int n, float* out) {
  for (int g = 0; g < n; g++, quants += F == Q8 ? GROUP : GROUP / 2, out += GROUP) {
    uint16_t half;
    std::memcpy(&half, scales + 2 * g, 2);
#if defined(KV_AVX512)
    const __m512 scale = _mm512_set1_ps(_cvtsh_ss(half));
    __m512 values[2];
    if constexpr (F == Q8) {
      for (int i = 0; i < 2; i++)
        values[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(quants + 16 * i))));
    } else {
      const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)quants));
      const __m512 all = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
      values[0] = _mm512_permutexvar_ps(both, all);  // by the lowest four bits
      values[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), all);
    }
    for (int i = 0; i < 2; i++) _mm512_storeu_ps(out + 16 * i, _mm512_mul_ps(values[i], scale));
#else
    const float scale = f16_to_float(half);
    for (int i = 0; i < GROUP; i++) {
      const int quant = F == Q8 ? int8_t(quants[i]) : (i < GROUP / 2 ? quants[i] & 15 : quants[i - GROUP / 2] >> 4) - 8;
      out[i] = float(quant) * scale;
    }
#endif
  }
}

// --- rows -------------------------------------------------------------------------------------------------------------

inline void encode_row(const float* x, int format, int dim, uint8_t* to) {
  if (format <= BF16) return write_row(to, 0, format, dim, x);
  if (format == Q8) return encode_groups<Q8>(x, dim / GROUP, to, to + dim);
  if (format == Q4) return encode_groups<Q4>(x, dim / GROUP, to, to + dim / 2);
  int i = 0;
#if defined(KV_AVX512)
  for (; i + 16 <= dim; i += 16) _mm_storeu_si128((__m128i*)(to + i), floats_to_fp8(_mm512_loadu_ps(x + i)));
#endif
  for (; i < dim; i++) to[i] = float_to_fp8(x[i]);
}

inline void decode_row(const uint8_t* from, int format, int dim, float* out) {
  if (format <= BF16) return read_row(from, 0, format, dim, out);
  if (format == Q8) return decode_groups<Q8>(from, from + dim, dim / GROUP, out);
  if (format == Q4) return decode_groups<Q4>(from, from + dim / 2, dim / GROUP, out);
  int i = 0;
#if defined(KV_AVX512)
  for (; i + 16 <= dim; i += 16) _mm512_storeu_ps(out + i, fp8_to_floats(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
  for (; i < dim; i += 4) {  // a unit
    vu codes = {};
    for (int j = 0; j < 4; j++) codes[j] = from[i + j];
    const vf values = from_fp8(codes);
    std::memcpy(out + i, &values, 16);
  }
}

}  // namespace kv
