// From stored rows to tiles that a matrix product reads: TILE slots at a time, decoded in registers on the way.
//
// A row is a string of 32-bit units. A unit holds 1 value (f32), 2 (16-bit formats), 4 (fp8, q8_0) or 8 (q4_0), and the
// values of a unit come out in a fixed order; `key_order` and `value_places` say which value stands where, and only the
// queries (once) and the finished output (once) ever need to know.
//
//   keys    [values][TILE] f32            lanes are slots: units of LANES rows are transposed, then expanded, so that
//           [pairs][TILE] of 2 x bf16     a score needs no horizontal sum and group scales are a vector over slots
//   values  [TILE][columns] f32           lanes are values of one row, which is expanded span by span
//           [TILE/2][columns] of 2 x bf16 lanes are values of two rows, as the bf16 product wants them
//
// The bf16 tiles hold q8_0's and q4_0's integers, exactly; the scales stand beside them as [groups][TILE] f32. The f32
// tiles are multiplied out. Slots that nobody sees are given as rows of zeros: what lies in them is never read.
// Packers take the first `slots` rows of a tile, a multiple of LANES; the rest of the tile is left as it was.
// (Longer than 300 lines: six formats, two products.)
#pragma once

#include "ahead.h"

namespace kv {

constexpr int GROUP = 32;  // values that share one scale in q8_0 and q4_0
constexpr int MAX_DIM = 1024;

enum Format { F32 = 0, F16 = 1, BF16 = 2, FP8 = 3, Q8 = 4, Q4 = 5 };

constexpr int per_unit(int format) { return format == F32 ? 1 : format <= BF16 ? 2 : format <= Q8 ? 4 : 8; }
constexpr bool is_quantised(int format) { return format >= Q8; }
inline int row_bytes(int format, int dim) {
  return dim / per_unit(format) * 4 + (is_quantised(format) ? dim / GROUP * 2 : 0);
}
inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

// The value that comes out of `unit` at place `s` of per_unit(format).
inline int value_of_unit(int format, int unit, int s) {
  if (format != Q4) return unit * per_unit(format) + s;
  const int group = unit / 4, byte = unit % 4 * 4 + s / 2;  // low half of byte j: value j; high half: value j + 16
  return group * GROUP + byte + s % 2 * 16;
}

// Bytes of a group without its scale.
template <int F>
constexpr int CODES = GROUP / per_unit(F) * 4;

// Whether values of f32 come out in their own order instead of that of units.
constexpr bool in_own_order(int format) {
#if defined(KV_AVX2)
  return format != BF16;
#else
  return false;
#endif
}

// Values of f32 that are expanded at a time (`Span`).
constexpr int span_values(int format) {
  return !in_own_order(format) ? per_unit(format) * LANES : is_quantised(format) ? GROUP : 2 * LANES;
}

// Places of a packed row of values.
inline int value_columns(int format, bool bf16, int dim) { return round_up(dim, bf16 ? GROUP : span_values(format)); }

// --- scales -----------------------------------------------------------------------------------------------------------

#if defined(KV_AVX512)

// Eight bytes of each of eight rows, from row `first` on.
template <class R>
KV_INLINE __m512i load_words(const R& rows, int first, ptrdiff_t at) {
  const auto pair = [&](int i) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)(rows[first + i] + at)),
                              _mm_loadl_epi64((const __m128i*)(rows[first + i + 1] + at)));
  };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(pair(0)), pair(2), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(pair(4)), pair(6), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Number g of the four f16 in the words of the first and of the next eight rows.
KV_INLINE __m512 nth_halves(__m512i first, __m512i next, int g) {
  const __m512i index = _mm512_setr_epi32(0x00040000, 0x000c0008, 0x00140010, 0x001c0018, 0x00240020, 0x002c0028, 0x00340030,
                                          0x003c0038, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i of_group = _mm512_add_epi16(index, _mm512_set1_epi16(int16_t(g)));
  return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutex2var_epi16(first, of_group, next)));
}

// out[group][TILE] f32 from the f16 scales that follow the quants at `offset` bytes of each row. Returns whether all are
// finite and without a sign.
inline bool pack_scales(const uint8_t* const* rows, int slots, int offset, int groups, float* out) {
  __m512i largest = _mm512_setzero_si512();
  for (int g = 0; g < groups; g += 4) {
    const int n = groups - g < 4 ? groups - g : 4;  // of four, of which the last end where the row ends
    const ptrdiff_t at = offset + 2 * (g + n) - 8;
    const __m128i skipped = _mm_cvtsi32_si128(16 * (4 - n));
    for (int j = 0; j < slots; j += 16) {
      const __m512i a = _mm512_srl_epi64(load_words(rows, j, at), skipped);
      const __m512i b = _mm512_srl_epi64(load_words(rows, j + 8, at), skipped);
      largest = _mm512_max_epu16(largest, _mm512_max_epu16(a, b));
      for (int i = 0; i < n; i++) _mm512_store_ps(out + (g + i) * TILE + j, nth_halves(a, b, i));
    }
  }
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7c00)) == 0;
}

#elif defined(KV_AVX2)

// out[group][TILE] f32 from the f16 scales that follow the quants at `offset` bytes of each row.
inline bool pack_scales(const uint8_t* const* rows, int slots, int offset, int groups, float* out) {
  for (int g = 0; g < groups; g += 4) {
    const int n = groups - g < 4 ? groups - g : 4;  // of four, of which the last end where the row ends
    const ptrdiff_t at = offset + 2 * (g + n) - 8;
    const __m128i skipped = _mm_cvtsi32_si128(16 * (4 - n));
    for (int j = 0; j < slots; j += 8) {
      __m128i pair[4], halves[4];  // of rows; of groups, for eight rows
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        pair[i] = _mm_srl_epi64(_mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)(rows[j + 2 * i] + at)),
                                                   _mm_loadl_epi64((const __m128i*)(rows[j + 2 * i + 1] + at))),
                                skipped);
      const auto four = [](__m128i a, __m128i b, __m128i* to) {  // rows 0 to 3: groups 0 and 1, groups 2 and 3
        const __m128i even = _mm_unpacklo_epi16(a, b), odd = _mm_unpackhi_epi16(a, b);
        to[0] = _mm_unpacklo_epi16(even, odd), to[1] = _mm_unpackhi_epi16(even, odd);
      };
      __m128i first[2], last[2];
      four(pair[0], pair[1], first), four(pair[2], pair[3], last);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        halves[2 * i] = _mm_unpacklo_epi64(first[i], last[i]);
        halves[2 * i + 1] = _mm_unpackhi_epi64(first[i], last[i]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        if (i < n) _mm256_storeu_ps(out + (g + i) * TILE + j, _mm256_cvtph_ps(halves[i]));
    }
  }
  return false;  // not looked at
}

#else
// out[group][TILE] f32 from the f16 scales that follow the quants at `offset` bytes of each row.
inline bool pack_scales(const uint8_t* const* rows, int slots, int offset, int groups, float* out) {
  alignas(64) uint32_t halves[TILE];
  for (int g = 0; g < groups; g += 2) {
    const bool both = g + 1 < groups;
    for (int j = 0; j < slots; j++) {
      uint32_t word = 0;
      if (both)
        std::memcpy(&word, rows[j] + offset + 2 * g, 4);
      else
        std::memcpy(&word, rows[j] + offset + 2 * g, 2);
      asm("" : "+r"(word));  // keeps compilers from making this a gather, which is several times slower
      halves[j] = word;
    }
    for (int j = 0; j < slots; j += LANES) {
      const vu word = load<vu>(halves + j);
      store(out + g * TILE + j, from_f16(word & splat_u(0xffffu)));
      if (both) store(out + (g + 1) * TILE + j, from_f16(word >> 16));
    }
  }
  return false;  // not looked at
}
#endif

// --- f32 tiles --------------------------------------------------------------------------------------------------------

template <int F>
KV_INLINE vf expand_f32(vu x, int s) {
  if constexpr (F == F32) return bits<vf>(x);
  if constexpr (F == BF16) return bits<vf>(s == 0 ? x << 16 : x & splat_u(0xffff0000u));
  if constexpr (F == F16) return from_f16(s == 0 ? x & splat_u(0xffffu) : x >> 16);
  if constexpr (F == FP8) return from_fp8((x >> (8 * s)) & splat_u(0xffu));
  if constexpr (F == Q8) return to_float((vi)(x << (24 - 8 * s)) >> 24);
  if constexpr (F == Q4) return to_float((vi)((x >> (4 * s)) & splat_u(15u)) - 8);
}

template <int F>
void pack_keys_f32(const uint8_t* const* rows, Ahead& next, int slots, int dim, float* out, float* scales) {
  Ahead ahead = next;
  constexpr int P = per_unit(F);
  const int units = dim / P;
  if constexpr (is_quantised(F)) pack_scales(rows, slots, units * 4, dim / GROUP, scales);
  for (int k = 0; k < slots; k += LANES) {
    for (int u0 = 0; u0 < units; u0 += LANES) {
      const int n = units - u0 < LANES ? units - u0 : LANES;
      vu t[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) t[i] = load_units(rows[k + i] + 4 * u0, n);
      ahead.step<8>();
      transpose(t);
#pragma GCC unroll 16
      for (int u = 0; u < LANES; u++) {
        if (u >= n) break;
        float* to = out + size_t(u0 + u) * P * TILE + k;
#pragma GCC unroll 8
        for (int s = 0; s < P; s++) {
          vf value = expand_f32<F>(t[u], s);
          if constexpr (is_quantised(F)) value *= load<vf>(scales + (u0 + u) / (GROUP / P) * TILE + k);
          store(to + s * TILE, value);
        }
      }
    }
  }
  next = ahead;
}

// A span: VALUES of a row, which are expanded into VECTORS at once, and are FACTOR times as large.
template <int F>
struct Span {
  static constexpr int VECTORS = per_unit(F), VALUES = VECTORS * LANES;
  static constexpr float FACTOR = 1.0f;

  static KV_INLINE void expand(const uint8_t* from, vf* v) { expand_units(load<vu>(from), v); }

  static KV_INLINE void expand_units(vu units, vf* v) {
#pragma GCC unroll 8
    for (int s = 0; s < VECTORS; s++) v[s] = expand_f32<F>(units, s);
  }
};

#if defined(KV_AVX2)

template <>
struct Span<F32> {
  static constexpr int VECTORS = 2, VALUES = 2 * LANES;
  static constexpr float FACTOR = 1.0f;

  static KV_INLINE void expand(const uint8_t* from, vf* v) { v[0] = load<vf>(from), v[1] = load<vf>(from + 4 * LANES); }
};

template <>
struct Span<F16> {
  static constexpr int VECTORS = 2, VALUES = 2 * LANES;
  static constexpr float FACTOR = 1.0f;

  static KV_INLINE void expand(const uint8_t* from, vf* v) {
    v[0] = (vf)_mm256_cvtph_ps(load<__m128i>(from)), v[1] = (vf)_mm256_cvtph_ps(load<__m128i>(from + 2 * LANES));
  }
};

// By way of f16, which has subnormals of its own: shifted there, values are smaller by 2^8.
template <>
struct Span<FP8> {
  static constexpr int VECTORS = 2, VALUES = 2 * LANES;
  static constexpr float FACTOR = 256.0f;

  static KV_INLINE void expand(const uint8_t* from, vf* v) {
    const __m256i no_number = _mm256_set1_epi16(0x3f80);  // the largest magnitude
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(from)), 7);  // the sign in two bits
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(shifted, no_number), no_number);
    const __m256i halves = _mm256_or_si256(_mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbfff))), nan);
    v[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    v[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }
};

// The integers of a group, without its scale.
template <int F>
struct GroupSpan {
  static constexpr int VECTORS = GROUP / LANES, VALUES = GROUP;
  static constexpr float FACTOR = 1.0f;

  static KV_INLINE void expand(const uint8_t* from, vf* v) {
#pragma GCC unroll 4
    for (int i = 0; i < CODES<F> / LANES; i++) {
      const __m128i codes = _mm_loadl_epi64((const __m128i*)(from + i * LANES));
      if (F == Q8) {
        v[i] = to_float((vi)_mm256_cvtepi8_epi32(codes));
      } else {
        const vi x = (vi)_mm256_cvtepu8_epi32(codes);
        v[i] = to_float((x & 15) - 8), v[i + 2] = to_float((x >> 4) - 8);
      }
    }
  }
};

template <>
struct Span<Q8> : GroupSpan<Q8> {};
template <>
struct Span<Q4> : GroupSpan<Q4> {};

#endif

// The span at `from`, of which the row has `bytes` and nothing behind them is read; values beyond are zeros.
template <int F>
KV_INLINE void expand_span(const uint8_t* from, int bytes, vf* v) {
  constexpr int BYTES = Span<F>::VALUES / per_unit(F) * 4;
  if (bytes >= BYTES) return Span<F>::expand(from, v);
  if constexpr (!in_own_order(F)) {
    Span<F>::expand_units(load_units(from, bytes / 4), v);
  } else {
    uint8_t copy[BYTES] = {};
    std::memcpy(copy, from, size_t(bytes));
    Span<F>::expand(copy, v);
  }
}

template <int F>
void pack_values_f32(const uint8_t* const* rows, Ahead& next, int slots, int dim, float* out, float* scales) {
  using S = Span<F>;
  Ahead ahead = next;
  constexpr int P = per_unit(F);
  const int columns = value_columns(F, false, dim);
  if constexpr (is_quantised(F)) pack_scales(rows, slots, dim / P * 4, dim / GROUP, scales);
  vi lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  for (int j = 0; j < slots; j++) {
    float* to = out + size_t(j) * columns;
    for (int d = 0; d < dim; d += S::VALUES, to += S::VALUES) {
      ahead.step<1>();
      vf values[S::VECTORS], scale = splat(S::FACTOR);
      expand_span<F>(rows[j] + d / P * 4, (dim - d) / P * 4, values);
      if constexpr (is_quantised(F) && in_own_order(F)) scale = splat(scales[d / GROUP * TILE + j]);
      if constexpr (is_quantised(F) && !in_own_order(F))
        for (int i = 0; i < LANES && d + i * P < dim; i += GROUP / P)
          scale = lanes >= i ? splat(scales[(d + i * P) / GROUP * TILE + j]) : scale;
#pragma GCC unroll 8
      for (int v = 0; v < S::VECTORS; v++)
        store(to + v * LANES, is_quantised(F) || S::FACTOR != 1.0f ? values[v] * scale : values[v]);
    }
  }
  next = ahead;
}

// --- bf16 tiles -------------------------------------------------------------------------------------------------------

#if defined(KV_BF16)

// bf16 patterns of all magnitudes 0..127 of a byte, high and low bytes apart: vpermi2b looks up 64 bytes at once.
struct ByteTable {
  alignas(64) uint8_t high[128], low[128];
};

inline ByteTable make_byte_table(int format) {
  ByteTable table;
  for (int i = 0; i < 128; i++) {
    float value = float(i);
    if (format == FP8) {
      const int exponent = i >> 3, mantissa = i & 7;
      value = exponent == 0 ? float(mantissa) / 512.0f : bits<float>(uint32_t((exponent + 120) << 23 | mantissa << 20));
      if (i == 0x7f) value = bits<float>(0x7fc00000u);
    }
    const uint16_t pattern = float_to_bf16(value);  // exact: 8 significant bits hold all of them
    table.high[i] = uint8_t(pattern >> 8), table.low[i] = uint8_t(pattern & 255);
  }
  return table;
}
inline const ByteTable FP8_TABLE = make_byte_table(FP8), Q8_TABLE = make_byte_table(Q8);

// The low and the high bytes of the bf16 of 64 values of fp8 or q8_0.
template <int F>
KV_INLINE void expand_bytes(__m512i x, __m512i& low, __m512i& high) {
  const ByteTable& table = F == Q8 ? Q8_TABLE : FP8_TABLE;
  // q8_0's -128 does not occur (the quantiser divides by 127), but a foreign one must not become +0: it reads as -127.
  const __m512i magnitude = F == Q8 ? _mm512_min_epu8(_mm512_abs_epi8(x), _mm512_set1_epi8(127))
                                    : _mm512_and_si512(x, _mm512_set1_epi8(127));
  const __m512i h = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), magnitude, _mm512_load_si512(table.high + 64));
  low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), magnitude, _mm512_load_si512(table.low + 64));
  high = _mm512_ternarylogic_epi32(h, x, _mm512_set1_epi8(char(0x80)), 0xf8);  // h | (x & sign)
}

// bf16 of 0..15 minus 8, twice: vpermw uses five bits of its index, and the fifth belongs to the neighbour.
alignas(64) inline const uint16_t Q4_TABLE[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// Lanes of two 16-bit words -> vectors of pairs (value of the low word, value of the high word), P/2 of them.
template <int F>
KV_INLINE void expand_pairs(__m512i x, __m512i* out) {
  if constexpr (F == BF16) out[0] = x;
  if constexpr (F == FP8 || F == Q8) {
    __m512i low, high;
    expand_bytes<F>(x, low, high);
    const __m512i even = _mm512_set1_epi16(0x00ff);
    // bytes 0 and 2 of each lane, then bytes 1 and 3: (mask & a) | (~mask & b)
    out[0] = _mm512_ternarylogic_epi32(even, low, _mm512_slli_epi16(high, 8), 0xca);
    out[1] = _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(low, 8), high, 0xca);
  }
  if constexpr (F == Q4) {
    const __m512i values = _mm512_load_si512(Q4_TABLE);
    out[0] = _mm512_permutexvar_epi16(x, values);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), values);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 8), values);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 12), values);
  }
}

template <int F>
void pack_keys_bf16(const uint8_t* const* rows, Ahead& next, int slots, int dim, uint32_t* out, float* scales) {
  Ahead ahead = next;
  constexpr int P = per_unit(F) / 2;
  const int units = dim / per_unit(F);
  if constexpr (is_quantised(F)) pack_scales(rows, slots, units * 4, dim / GROUP, scales);
  for (int k = 0; k < slots; k += 16) {
    for (int u0 = 0; u0 < units; u0 += 16) {
      const int n = units - u0 < 16 ? units - u0 : 16;
      vu t[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) t[i] = load_units(rows[k + i] + 4 * u0, n);
      ahead.step<8>();
      transpose(t);
#pragma GCC unroll 16
      for (int u = 0; u < 16; u++) {
        if (u >= n) break;
        __m512i pairs[P];
        expand_pairs<F>((__m512i)t[u], pairs);
#pragma GCC unroll 4
        for (int s = 0; s < P; s++) _mm512_store_si512(out + (size_t(u0 + u) * P + s) * TILE + k, pairs[s]);
      }
    }
  }
  next = ahead;
}

// Words of two rows side by side: lane i = (word i of a, word i of b).
KV_INLINE __m512i interleave_words(__m512i a, __m512i b) {
  alignas(64) static const uint16_t index[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  return _mm512_permutex2var_epi16(a, _mm512_load_si512(index), b);
}

// q4_0: a group has only eight words; they stand twice, the second time shifted to the high halves of their bytes.
KV_INLINE __m512i interleave_nibbles(__m512i a, __m512i b) {
  alignas(64) static const uint16_t index[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39};
  const __m512i words = _mm512_permutex2var_epi16(a, _mm512_load_si512(index), b);
  return _mm512_mask_srli_epi16(words, 0xffff0000u, words, 4);
}

// Pairs (value of row a, value of row b) of the 32 values from `d` on: two vectors of 16 columns. Nothing beyond `dim` is
// read.
template <int F>
KV_INLINE void pair_rows(const uint8_t* a, const uint8_t* b, int d, int dim, __m512i* pairs) {
  const int left = dim - d;
  if constexpr (F == BF16) {
    const __mmask16 mask = left >= 32 ? 0xffff : __mmask16((1u << (left / 2)) - 1u);
    const __m512i x = _mm512_maskz_loadu_epi32(mask, a + 2 * d), y = _mm512_maskz_loadu_epi32(mask, b + 2 * d);
    pairs[0] = _mm512_unpacklo_epi16(x, y), pairs[1] = _mm512_unpackhi_epi16(x, y);
  } else if constexpr (F == Q4) {
    const __m128i x = _mm_loadu_si128((const __m128i*)(a + d / 2)), y = _mm_loadu_si128((const __m128i*)(b + d / 2));
    const __m512i words = interleave_nibbles(_mm512_castsi128_si512(x), _mm512_castsi128_si512(y));
    __m512i all[4];
    expand_pairs<F>(words, all);
    pairs[0] = all[0], pairs[1] = all[2];
  } else {
    const __mmask8 mask = left >= 32 ? 0xff : __mmask8((1u << (left / 4)) - 1u);
    const __m256i x = _mm256_maskz_loadu_epi32(mask, a + d), y = _mm256_maskz_loadu_epi32(mask, b + d);
    expand_pairs<F>(interleave_words(_mm512_castsi256_si512(x), _mm512_castsi256_si512(y)), pairs);
  }
}

// Columns come in groups of 32, so that a group has one scale.
template <int F>
void pack_values_bf16(const uint8_t* const* rows, Ahead& next, int slots, int dim, uint32_t* out, float* scales) {
  Ahead ahead = next;
  const int columns = round_up(dim, GROUP);
  if constexpr (is_quantised(F)) pack_scales(rows, slots, dim / per_unit(F) * 4, dim / GROUP, scales);
  for (int j = 0; j < slots; j += 2) {
    uint32_t* to = out + size_t(j / 2) * columns;
    for (int d = 0; d < dim; d += GROUP, to += GROUP) {
      __m512i pairs[2 + 2 * (F == Q4)];
      pair_rows<F>(rows[j], rows[j + 1], d, dim, pairs);
      ahead.step<1>();
      _mm512_store_si512(to, pairs[0]);
      _mm512_store_si512(to + 16, pairs[1]);
    }
  }
  next = ahead;
}
#endif

// --- where a value stands in a packed tile ----------------------------------------------------------------------------

// order[i]: the value (0..dim-1) at place i of the packed keys, dim places.
inline void key_order(int format, bool bf16, int dim, int* order) {
  const int P = per_unit(format);
  for (int u = 0; u < dim / P; u++)
    for (int s = 0; s < P; s++) {
      int place = s;
      if (bf16 && P > 2) {  // pairs: vector v holds the v-th value of the low word, then of the high word
        const int half = P / 2;
        place = s % half * 2 + s / half;
      }
      order[u * P + place] = value_of_unit(format, u, s);
    }
}

// places[v]: the column of value v in packed values, and in queries of `direct_f32.h`.
inline void value_places(int format, bool bf16, int dim, int* places) {
  const int P = per_unit(format), columns = value_columns(format, bf16, dim);
  for (int c = 0; c < columns; c++) {
    int value;
    if (!bf16 && in_own_order(format)) {
      value = c < dim ? c : -1;
    } else if (!bf16) {
      const int unit = c / (LANES * P) * LANES + c % LANES, s = c / LANES % P;
      value = unit < dim / P ? value_of_unit(format, unit, s) : -1;  // -1: padding
    } else {
      const int base = c / GROUP * GROUP, v = c % GROUP / 16, i = c % 16;
      if (format == BF16)
        value = base + i / 4 * 8 + v * 4 + i % 4;
      else if (format == Q4)
        value = base + i % 8 * 2 + v + i / 8 * 16;
      else
        value = base + 2 * i + v;
      if (value >= dim) value = -1;
    }
    if (value >= 0) places[value] = c;
  }
}

}  // namespace kv
