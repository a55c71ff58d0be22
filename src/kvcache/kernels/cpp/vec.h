// Vectors of LANES floats, and what every other header needs of them.
//
// One source serves three instruction sets, chosen when it is compiled:
//
//   | macro of the compiler           | LANES | isa       | what is special                                       |
//   |---------------------------------|-------|-----------|-------------------------------------------------------|
//   | AVX512F BW DQ VL                | 16    | avx512    | transposes, f16; with BF16 and VBMI also bf16 products |
//   | AVX2 FMA F16C                   | 8     | avx2      | transposes, f16                                       |
//   | otherwise, or KVCACHE_PORTABLE  | 8     | scalar    | nothing: GCC's and Clang's vector types, any machine  |
//
// Arithmetic is written with the compilers' vector types, so that it exists once; intrinsics stand only where the
// vector types have no word for an instruction, or GCC 12 does not find it.
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if !defined(KVCACHE_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__)
#define KV_AVX512 1
#define KV_LANES 16
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define KV_BF16 1
#endif
#elif !defined(KVCACHE_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KV_AVX2 1
#define KV_LANES 8
#else
#define KV_LANES 8
#endif

#if defined(KV_AVX512) || defined(KV_AVX2)
#include <immintrin.h>
#endif

#define KV_INLINE inline __attribute__((always_inline))

namespace kv {

constexpr int LANES = KV_LANES;

typedef float vf __attribute__((vector_size(4 * KV_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * KV_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * KV_LANES)));

template <class V, class T>
KV_INLINE V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <class T, class V>
KV_INLINE void store(T* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

template <class To, class From>
KV_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

KV_INLINE vf splat(float x) {
#if defined(KV_AVX512)
  return (vf)_mm512_set1_ps(x);
#elif defined(KV_AVX2)
  return (vf)_mm256_set1_ps(x);
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = x;
  return v;
#endif
}

KV_INLINE vu splat_u(uint32_t x) { return bits<vu>(splat(bits<float>(x))); }

KV_INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }  // where one is NaN: b
KV_INLINE vf minimum(vf a, vf b) { return a < b ? a : b; }

KV_INLINE vu larger(vu a, vu b) { return a > b ? a : b; }

KV_INLINE float sum(vf v) {
#if defined(KV_AVX512)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float half[LANES / 2];
  for (int i = 0; i < LANES / 2; i++) half[i] = v[i] + v[i + LANES / 2];
  return (half[0] + half[2]) + (half[1] + half[3]);
#endif
}

KV_INLINE float maximum_of(vf v) {
#if defined(KV_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

KV_INLINE uint32_t largest_of(vu v) {
#if defined(KV_AVX512)
  return _mm512_reduce_max_epu32((__m512i)v);
#else
  uint32_t half[LANES / 2];
  for (int i = 0; i < LANES / 2; i++) half[i] = std::max(v[i], v[i + LANES / 2]);
  return std::max(std::max(half[0], half[2]), std::max(half[1], half[3]));
#endif
}

KV_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
// Towards zero; the low byte is 0 of NaN (x86 and Arm).
KV_INLINE vi to_integer(vf v) { return __builtin_convertvector(v, vi); }

// Bytes into the lanes of N vectors, and the low bytes of lanes out of them. With vector types alone GCC 12 takes them
// apart lane by lane, unless memory is between.
template <int N>
KV_INLINE void load_bytes(const uint8_t* from, vu* v) {
#if defined(KV_AVX2)
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) v[i] = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + i * LANES)));
#else
  uint32_t lanes[N * LANES];
  for (int i = 0; i < N * LANES; i++) lanes[i] = from[i];
  asm("" : "+m"(lanes));
  std::memcpy(v, lanes, sizeof(lanes));
#endif
}

template <int N>
KV_INLINE void store_low_bytes(uint8_t* to, const vu* v) {
#if defined(KV_AVX512)
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) _mm_storeu_si128((__m128i*)(to + i * LANES), _mm512_cvtepi32_epi8((__m512i)v[i]));
#elif defined(KV_AVX2)
  const __m256i low = _mm256_set1_epi64x(0x0c080400);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    const __m256i four = _mm256_shuffle_epi8((__m256i)v[i], low);
    const __m128i eight = _mm_unpacklo_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    _mm_storel_epi64((__m128i*)(to + i * LANES), eight);
  }
#else
  uint32_t lanes[N * LANES];
  std::memcpy(lanes, v, sizeof(lanes));
  asm("" : "+m"(lanes));
  for (int i = 0; i < N * LANES; i++) to[i] = uint8_t(lanes[i]);
#endif
}

// A product that no sum after it is fused with.
KV_INLINE vf unfused(vf product) {
#if defined(KV_AVX512)
  asm("" : "+v"(product));
#elif defined(KV_AVX2)
  asm("" : "+x"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

// Lanes [0, N), of vectors whose other lanes do not matter; N is at most 4.
template <int N>
KV_INLINE vf load_first(const float* from) {
#if defined(KV_AVX512)
  if constexpr (N == 4) return (vf)_mm512_zextps128_ps512(_mm_loadu_ps(from));
#endif
  vf v = splat(0.0f);
  for (int i = 0; i < N; i++) v[i] = from[i];
  return v;
}

template <int N>
KV_INLINE void store_first(float* to, vf v) {
#if defined(KV_AVX512)
  if constexpr (N == 4) return _mm_storeu_ps(to, _mm512_castps512_ps128((__m512)v));
#endif
  for (int i = 0; i < N; i++) to[i] = v[i];
}

// What `fold_first` folds lanes with: whole vectors, or halves and quarters of several at once.
struct Maximum {
  KV_INLINE float operator()(vf v) const { return maximum_of(v); }
#if defined(KV_AVX512)
  KV_INLINE __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
  KV_INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
#endif
};

struct Sum {
  KV_INLINE float operator()(vf v) const { return sum(v); }
#if defined(KV_AVX512)
  KV_INLINE __m256 operator()(__m256 a, __m256 b) const { return _mm256_add_ps(a, b); }
  KV_INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_add_ps(a, b); }
#endif
};

// Each of N vectors folded to a number, in lanes [0, N). Four together take half the steps, in the order of `sum`.
template <int N, class Op>
KV_INLINE vf fold_first(const vf* v, Op op) {
#if defined(KV_AVX512)
  if constexpr (N == 4) {
    __m128 part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m256 half = op(_mm512_castps512_ps256((__m512)v[i]), _mm512_extractf32x8_ps((__m512)v[i], 1));
      part[i] = op(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
    return (vf)_mm512_zextps128_ps512(op(op(part[0], part[2]), op(part[1], part[3])));
  }
#endif
  vf folded = splat(0.0f);
  for (int i = 0; i < N; i++) folded[i] = op(v[i]);
  return folded;
}

// 2^x, relative error 1e-7 or so; exactly 0 below 2^-126, so that a masked score (-inf) adds nothing; NaN of NaN. x <= 127.
// Cephes' exp2f scheme: split into integer and fraction in [-0.5, 0.5], minimax polynomial of the fraction.
KV_INLINE vf exp2(vf x) {
  const vf low = splat(-126.0f);
  const vf clamped = maximum(low, x);  // NaN stays
#if defined(KV_AVX512)
  const vf whole = (vf)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const vf biased = clamped + magic;
  const vf whole = biased - magic;
#endif
  const vf f = clamped - whole;
  vf p = splat(1.535336188319500e-4f);
  p = p * f + splat(1.339887440266574e-3f);
  p = p * f + splat(9.618437357674640e-3f);
  p = p * f + splat(5.550332471162809e-2f);
  p = p * f + splat(2.402264791363012e-1f);
  p = p * f + splat(6.931472028550421e-1f);
  p = p * f + splat(1.0f);
#if defined(KV_AVX512)
  const vf scaled = (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
  return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ), (__m512)scaled);
#else
  const vi exponent = (bits<vi>(biased) - bits<vi>(magic)) << 23;
  const vf scaled = bits<vf>(bits<vi>(p) + exponent);
  const vf found = bits<vf>(bits<vi>(scaled) & (vi)(x >= low));
  return x == x ? found : x;
#endif
}

#if defined(KV_AVX512)
// 2^x for what becomes bf16: relative error 1e-4, but 1 of 0; exactly 0 below 2^-126; NaN of NaN.
KV_INLINE vf exp2_coarse(vf x) {
  const __m512 f = _mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.0782679702f);  // minimax among those of 1 at 0 and 2 at 1
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.226307682f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.695424348f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(is_normal, p, (__m512)x);
}
#endif

// tanh: Cephes' tanhf (odd polynomial below 0.625, through the exponential above).
KV_INLINE vf tanh(vf x) {
  const vf size = maximum(x, -x), square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * square + splat(2.06390887954e-2f);
  p = p * square + splat(-5.37397155531e-2f);
  p = p * square + splat(1.33314422036e-1f);
  p = p * square + splat(-3.33332819422e-1f);
  const vf small = p * square * x + x;
  const vf e = exp2(minimum(size, splat(10.0f)) * splat(2.885390081777927f));  // e^(2|x|); tanh(10) is 1 in f32
  const vf large = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
  const vf signed_large = bits<vf>(bits<vu>(large) | (bits<vu>(x) & splat_u(0x80000000u)));
  return size >= splat(0.625f) ? signed_large : small;  // NaN is small
}

// f32 of f16 bit patterns that stand in the low halves of the lanes (the high halves are zero).
KV_INLINE vf from_f16(vu x) {
#if defined(KV_AVX512)
  return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x));
#elif defined(KV_AVX2)
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0x08);
  return (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
#else
  const vu magnitude = (x & 0x7fffu) << 13, exponent = magnitude & 0x0f800000u;
  const vu normal = magnitude + (112u << 23);
  const vf subnormal = bits<vf>(normal + (1u << 23)) - bits<vf>(splat_u(113u << 23));
  vu result = exponent == 0u ? bits<vu>(subnormal) : normal;
  result = exponent == 0x0f800000u ? normal + (112u << 23) : result;
  return bits<vf>(result | ((x & 0x8000u) << 16));
#endif
}

// f32 of fp8 e4m3 (fn: no infinities, 0x7f is NaN) bit patterns in the low bytes of the lanes. Exact, and free of
// subnormal f32 on the way, so that flushing them to zero changes nothing.
KV_INLINE vf from_fp8(vu x) {
  const vu magnitude = x & 0x7fu, shifted = magnitude << 20;
  const vu normal = shifted + (120u << 23);
  const vf subnormal = bits<vf>(normal + (1u << 23)) - bits<vf>(splat_u(121u << 23));
  vu result = magnitude < 8u ? bits<vu>(subnormal) : normal;
  result = magnitude == 0x7fu ? splat_u(0x7fc00000u) : result;
  return bits<vf>(result | ((x & 0x80u) << 24));
}

// Saturates at 448, rounds half to even, keeps NaN. Below 2^-6 steps are 2^-9: adding 2^14 rounds there by itself.
KV_INLINE vu to_fp8(vf x) {
  const vu u = bits<vu>(x), magnitude = u & 0x7fffffffu;
  const vf size = minimum(bits<vf>(magnitude), splat(448.0f));
  const vu s = bits<vu>(size);
  const vu normal = (s + (0x7ffffu - (120u << 23)) + ((s >> 20) & 1u)) >> 20;
  const vu subnormal = bits<vu>(size + 16384.0f) - bits<uint32_t>(16384.0f);
  const vu code = (vi)s < (vi)splat_u(121u << 23) ? subnormal : normal;
  return u >> 31 << 7 | ((vi)magnitude > 0x7f800000 ? splat_u(0x7fu) : code);
}

// Loads the first `n` of LANES 32-bit units, the rest zero; nothing beyond unit n is touched.
KV_INLINE vu load_units(const uint8_t* from, int n) {
#if defined(KV_AVX512)
  return (vu)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1u), from);
#else
  if (n == LANES) return load<vu>(from);  // else a call of memcpy, and a wait for what it wrote
  vu v = {};
  std::memcpy(&v, from, size_t(4 * n));
  return v;
#endif
}

// out[i][j] = in[j][i] for LANES x LANES 32-bit units, in registers.
KV_INLINE void transpose(vu* t) {
#if defined(KV_AVX512)
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)t[i], (__m512i)t[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)t[i], (__m512i)t[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512i p = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x88), q = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x88);
    const __m512i s = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xdd);
    t[c] = (vu)_mm512_shuffle_i32x4(p, r, 0x88);
    t[c + 8] = (vu)_mm512_shuffle_i32x4(p, r, 0xdd);
    t[c + 4] = (vu)_mm512_shuffle_i32x4(q, s, 0x88);
    t[c + 12] = (vu)_mm512_shuffle_i32x4(q, s, 0xdd);
  }
#elif defined(KV_AVX2)
  __m256i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32((__m256i)t[i], (__m256i)t[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32((__m256i)t[i], (__m256i)t[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    t[c] = (vu)_mm256_permute2x128_si256(b[c], b[c + 4], 0x20);
    t[c + 4] = (vu)_mm256_permute2x128_si256(b[c], b[c + 4], 0x31);
  }
#else
  vu a[LANES];
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) a[i][j] = t[j][i];
  for (int i = 0; i < LANES; i++) t[i] = a[i];
#endif
}

// --- scalars ----------------------------------------------------------------------------------------------------------

KV_INLINE float bf16_to_float(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

// Round to nearest even; NaN stays NaN.
KV_INLINE uint16_t float_to_bf16(float x) {
  const uint32_t u = bits<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

typedef uint16_t halves __attribute__((vector_size(2 * KV_LANES)));

KV_INLINE vf bf16_lanes(const uint16_t* from) {
#if defined(KV_AVX2)  // GCC 12 expands halves apart
  return bits<vf>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16));
#else
  return bits<vf>(__builtin_convertvector(load<halves>(from), vu) << 16);
#endif
}

// As `float_to_bf16`, in the upper half of each lane, beside what it leaves in the lower.
KV_INLINE vu nearest_bf16(vf x) {
  const vu u = bits<vu>(x);
  return x == x ? u + 0x7fffu + ((u >> 16) & 1u) : u | 0x400000u;
}

KV_INLINE void store_bf16(uint16_t* to, vf x) {
#if defined(KV_AVX2)
  const __m256i words = (__m256i)(nearest_bf16(x) >> 16);
  store(to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
  store(to, __builtin_convertvector(nearest_bf16(x) >> 16, halves));
#endif
}

inline void floats_to_bf16(const float* from, int n, uint16_t* to) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) store_bf16(to + i, load<vf>(from + i));
  for (; i < n; i++) to[i] = float_to_bf16(from[i]);
}

KV_INLINE float f16_to_float(uint16_t x) { return c10::detail::fp16_ieee_to_fp32_value(x); }
KV_INLINE uint16_t float_to_f16(float x) { return c10::detail::fp16_ieee_from_fp32_value(x); }

inline void f16_to_floats(const uint16_t* from, int n, float* to) {
  int i = 0;
#if defined(KV_AVX512) || defined(KV_AVX2)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
  for (; i < n; i++) to[i] = f16_to_float(from[i]);
}

inline void floats_to_f16(const float* from, int n, uint16_t* to) {
  int i = 0;
#if defined(KV_AVX512) || defined(KV_AVX2)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) to[i] = float_to_f16(from[i]);
}

}  // namespace kv
