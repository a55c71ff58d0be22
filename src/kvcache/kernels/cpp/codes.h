// Single rows of values and of codes: f32 from what is stored and back, in every format.
//
// Bit for bit what `kvcache/formats/reference.py` says. Products are `unfused` where a compiler that fuses them with the sum
// after them (FMA rounds once) would give other codes.
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

constexpr int GROUP_VECTORS = GROUP / LANES;

// --- fp8 --------------------------------------------------------------------------------------------------------------

inline void encode_group_fp8(const float* x, uint8_t* to) {
  vu codes[GROUP_VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < GROUP_VECTORS; i++) codes[i] = to_fp8(load<vf>(x + i * LANES));
  store_low_bytes<GROUP_VECTORS>(to, codes);
}

#if defined(KV_AVX512)

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

inline void decode_group_fp8(const uint8_t* from, float* to) {
#if defined(KV_AVX512)
  for (int i = 0; i < GROUP; i += 16)
    _mm512_storeu_ps(to + i, fp8_to_floats(_mm_loadu_si128((const __m128i*)(from + i))));
#else
  vu codes[GROUP_VECTORS];
  load_bytes<GROUP_VECTORS>(from, codes);
#pragma GCC unroll 4
  for (int i = 0; i < GROUP_VECTORS; i++) store(to + i * LANES, from_fp8(codes[i]));
#endif
}

// All of n values, the last of which need not fill a group.
template <class From, class To>
inline void in_groups(const From* from, int n, To* to, void (*convert)(const From*, To*)) {
  for (int i = 0; i < n; i += GROUP) {
    const int count = std::min(GROUP, n - i);
    if (count == GROUP) {
      convert(from + i, to + i);
      continue;
    }
    From rest[GROUP] = {};
    To converted[GROUP];
    std::copy_n(from + i, count, rest);
    convert(rest, converted);
    std::copy_n(converted, count, to + i);
  }
}

// --- q8_0 and q4_0 ----------------------------------------------------------------------------------------------------

inline float inverse_or_zero(float scale) {
  const float inverse = 1.0f / scale;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

inline void store_scale(float scale, uint8_t* to) {
  const uint16_t half = float_to_f16(scale);
  std::memcpy(to, &half, 2);
}

inline float largest_size(const float* x) {
  vu sizes = {};
#pragma GCC unroll 4
  for (int i = 0; i < GROUP_VECTORS; i++) sizes = larger(sizes, load<vu>(x + i * LANES) & 0x7fffffffu);
  const uint32_t size = largest_of(sizes);  // as integers a NaN is larger than everything
  return bits<float>(size > 0x7f800000u ? 0x7fc00000u : size);  // a NaN without a payload, as arithmetic makes
}

inline void encode_group_q8(const float* x, uint8_t* quants, uint8_t* scale_out) {
  const float scale = largest_size(x) / 127.0f;
  const vf inverse = splat(inverse_or_zero(scale));
  vu codes[GROUP_VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < GROUP_VECTORS; i++) {
    const vf scaled = unfused(load<vf>(x + i * LANES) * inverse);  // at most 127, as inverses are 0 or near exact
    const vu half = bits<vu>(splat(BELOW_HALF)) | (bits<vu>(scaled) & 0x80000000u);
    codes[i] = (vu)to_integer(scaled + bits<vf>(half));
  }
  store_low_bytes<GROUP_VECTORS>(quants, codes);
  store_scale(scale, scale_out);
}

// The first value of the largest size, or the first NaN.
inline float extreme_of(const float* x) {
  vu positive = {}, negative = {};  // the largest size, and below it whether a value of that sign has it
#pragma GCC unroll 4
  for (int i = 0; i < GROUP_VECTORS; i++) {
    const vu u = load<vu>(x + i * LANES), turned = u << 1 | u >> 31;
    negative = larger(negative, turned), positive = larger(positive, turned ^ 1u);
  }
  const uint32_t n = largest_of(negative), p = largest_of(positive);
  const bool is_normal = (n >> 1) - 0x00800000u <= 0x7f800000u - 0x00800000u;  // subnormals are alike where they are flushed
  if (is_normal && (n & p & 1u) == 0) return bits<float>(n >> 1 | n << 31);
  const float size = bits<float>(n >> 1);
  return *std::find_if(x, x + GROUP - 1, [&](float value) { return std::abs(value) == size || value != value; });
}

inline void encode_group_q4(const float* x, uint8_t* quants, uint8_t* scale_out) {
  const float scale = extreme_of(x) / -8.0f;
  const vf inverse = splat(inverse_or_zero(scale));
  vu codes[GROUP_VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < GROUP_VECTORS; i++) {
    const vf scaled = unfused(load<vf>(x + i * LANES) * inverse);
    codes[i] = (vu)to_integer(minimum(splat(15.0f), scaled + 8.5f));  // NaN stays
  }
#pragma GCC unroll 2
  for (int i = 0; i < GROUP_VECTORS / 2; i++) codes[i] |= codes[i + GROUP_VECTORS / 2] << 4;
  store_low_bytes<GROUP_VECTORS / 2>(quants, codes);
  store_scale(scale, scale_out);
}

#if defined(KV_AVX512)

// The first N of four groups at once: what there is one of in a group is computed for all of them in one vector. False,
// and nothing written, where comparing does not say everything (NaN, infinity, two extremes of one size).

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
    const __m512 scaled = (__m512)unfused(load<vf>(x + i * 16) * splat(inverse[i / 2]));
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
      const __m512 scaled = (__m512)unfused(load<vf>(x + g * GROUP + i) * splat(inverse[g]));
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
    const vf scale = splat(f16_to_float(half));
    constexpr int N = F == Q8 ? GROUP_VECTORS : GROUP_VECTORS / 2;
    vu codes[N];
    load_bytes<N>(quants, codes);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      store(out + i * LANES, expand_f32<F>(codes[i], 0) * scale);
      if (F == Q4) store(out + i * LANES + GROUP / 2, expand_f32<F>(codes[i], 1) * scale);
    }
#endif
  }
}

// --- rows -------------------------------------------------------------------------------------------------------------

inline void encode_row(const float* x, int format, int dim, uint8_t* to) {
  if (format <= BF16) return write_row(to, 0, format, dim, x);
  if (format == Q8) return encode_groups<Q8>(x, dim / GROUP, to, to + dim);
  if (format == Q4) return encode_groups<Q4>(x, dim / GROUP, to, to + dim / 2);
  in_groups(x, dim, to, encode_group_fp8);
}

inline void decode_row(const uint8_t* from, int format, int dim, float* out) {
  if (format <= BF16) return read_row(from, 0, format, dim, out);
  if (format == Q8) return decode_groups<Q8>(from, from + dim, dim / GROUP, out);
  if (format == Q4) return decode_groups<Q4>(from, from + dim / 2, dim / GROUP, out);
  in_groups(from, dim, out, decode_group_fp8);
}

}  // namespace kv
