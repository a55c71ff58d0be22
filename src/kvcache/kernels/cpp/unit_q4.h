// Few rows over slots of q4_0 with the tile unit, in sweeps (`unit.h`).
//
// Integers become bf16, exactly, sixteen slots at a time; scales meet sums and weights, of which there are far fewer than
// values. Each query stands in an operand four times, once for each group of 32 values, with zeros for the others:
//
//   keys      sums [16 slots][4 groups, 4 rows]  =  integers [16 slots][128]  .  queries^T [128 / 2][4 groups, 4 rows]
//             scores [16 slots][4 rows]          =  sum over groups of sums * scales [16 slots][groups]
//   values    output [2 x rows][32 / 2]         +=  (weights * scales of a group) [2 x rows][16 slots]  .  integers
//
// A group takes two instructions: its sixteen bytes four times over, as words, shifted by 0, 4, 8 and 12 bits; and a table by
// their lowest bits. So value 2 * i + v of a group stands at v * 16 + i, as in the output (`value_places`).
//
// (q8_0 would take six: its keys and values are faster as integers, see `vnni.h`.)
#pragma once

#include "unit.h"

namespace kv {

constexpr int SPAN = 128;   // values whose four groups are computed with side by side
constexpr int MAX_SPANS = 4;
constexpr int ABREAST = 4;  // rows of a head in an operand
constexpr int SPAN_WORDS = SPAN / 2 * EDGE;  // of an operand: [pairs][16]
constexpr int SPAN_LINES = EDGE * (SPAN / 2 + SPAN / GROUP * 2) / 64;  // of sixteen slots, with their scales

#if defined(KV_BF16)

// Operands of one head's `num_rows` rows: [spans][times four rows][SPAN_WORDS].
inline int query_words(int dim, int num_rows) { return dim / SPAN * (columns_of(num_rows) / ABREAST) * SPAN_WORDS; }

// `rows`: bf16 [num_rows][dim].
inline void pack_spans(const uint16_t* rows, int num_rows, int dim, uint32_t* to) {
  std::fill_n(to, query_words(dim, num_rows), 0u);
  for (int span = 0; span < dim; span += SPAN)
    for (int first = 0; first < num_rows; first += ABREAST, to += SPAN_WORDS)
      for (int group = 0; group < SPAN / GROUP; group++) {
        __m512 pairs[4] = {}, turned[4];  // of a row each; part p of turned[i] has pair 4 * p + i of all rows
        for (int r = 0; r < std::min(num_rows - first, ABREAST); r++) {
          const __m512i row = _mm512_loadu_si512(rows + (first + r) * dim + span + group * GROUP);
          const __m256i evens = _mm512_cvtepi32_epi16(row), odds = _mm512_cvtepi32_epi16(_mm512_srli_epi32(row, 16));
          pairs[r] = _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(evens), odds, 1));  // as expanded below
        }
        turn_four(pairs, turned);
        for (int i = 0; i < 4; i++) {
          alignas(64) uint32_t parts[4][ABREAST];
          _mm512_store_ps(parts, turned[i]);
          for (int p = 0; p < 4; p++)
            std::copy_n(parts[p], ABREAST, to + (group * EDGE + 4 * p + i) * EDGE + group * ABREAST);
        }
      }
}

// to [4 groups of 32] bf16.
KV_INLINE void expand_span(const uint8_t* from, uint8_t* to) {
  const __m512i integers = _mm512_load_si512(Q4_TABLE);
  const __m512i shifts = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0x0008000800080008,
                                           0x0008000800080008, 0x000c000c000c000c, 0x000c000c000c000c);
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(from + g * (GROUP / 2))));
    _mm512_store_si512(to + g * 64, _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts), integers));
  }
}

// Sixteen slots of a span, expanded.
struct Integers {
  alignas(64) uint8_t at[EDGE * 2 * SPAN];

  KV_INLINE void expand(const Sixteen& rows, int span) {
#pragma GCC unroll 4
    for (int i = 0; i < EDGE; i++) expand_span(rows[i] + span * (SPAN / 2), at + i * 2 * SPAN);
  }
};

// Keys, times up to four or eight queries.
template <int COLUMNS>
class Q4Scores {
 public:
  static constexpr int ROWS = COLUMNS;
  const int left;

  Q4Scores(const Shape& shape, const Scratch& s)
      : left(shape.key_dim / SPAN * SPAN_LINES), dim(shape.key_dim), all_queries(s.operands.at) {
    set_shapes(full_shapes());
  }

  void turn_to(int head) {
    queries = all_queries + size_t(head) * query_words(dim, COLUMNS);
    if (stay()) load_queries(queries, EDGE, SPAN, 0);
  }

  template <int PARITY>
  KV_INLINE void compute(int, const Sixteen& keys, Ahead&) {
    const uint32_t* operand = queries;
    for (int span = 0; span < dim / SPAN; span++) {
      Integers& rows = integers[PARITY];
      rows.expand(keys, span);
      for (int p = 0; p < PARTS; p++, operand += SPAN_WORDS) {
        if (!stay()) load_queries(operand, EDGE, SPAN, 0);
        score_sixteen<PARITY>(operand, EDGE, SPAN, {rows.at, 2 * SPAN}, sums[PARITY][span * PARTS + p][0], 64, [] {});
      }
    }
  }

  KV_INLINE void take(int g, const Sixteen& keys, int r, __m512* out) const {
    const __m256i spread = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3,  //
                                            4, 5, 4, 5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7);
    __m512 v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      __m512 scores[4];  // [group, row] of the slots i, i + 4, i + 8, i + 12
#pragma GCC unroll 4
      for (int p = 0; p < 4; p++) {
        const int slot = i + 4 * p;
        const uint8_t* scales = keys[slot] + dim / 2;
        scores[p] = _mm512_setzero_ps();
        for (int span = 0; span < dim / SPAN; span++) {
          const __m256i halves = _mm256_shuffle_epi8(_mm256_set1_epi64x(load<int64_t>(scales + 8 * span)), spread);
          const __m512 sum = _mm512_load_ps(sums[g % 2][span * PARTS + r / ABREAST][slot]);
          scores[p] = _mm512_fmadd_ps(_mm512_cvtph_ps(halves), sum, scores[p]);
        }
      }
      const auto pair = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
      };
      const __m512 a = pair(scores[0], scores[1]), b = pair(scores[2], scores[3]);
      v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    turn_four(v, out);
  }

  // [num_rows][WIDE] floats, which the values' scales are still to be multiplied with.
  static KV_INLINE void store_weights(uint32_t* weights, int r, int, size_t at, vf weight) {
    store(weights + size_t(r) * WIDE + at, weight);
  }

 private:
  static constexpr int PARTS = COLUMNS / ABREAST;
  const int dim;
  const uint32_t *all_queries, *queries;
  alignas(64) float sums[2][MAX_SPANS * PARTS][EDGE][EDGE];
  Integers integers[2];

  bool stay() const { return PARTS == 1 && dim == SPAN; }  // the queries in their tiles
};

// Products of weights and values, a span at a time.
class Q4Mixes {
 public:
  explicit Q4Mixes(const Shape& shape) : dim(shape.value_dim) {}

  KV_INLINE int compute(int g, const Sixteen& values, int column, int, const float* weights, int num_rows, Ahead& ahead) {
    Integers& rows = integers[g % 2];
    rows.expand(values, column / SPAN);
    ahead.fetch(SPAN_LINES / 2);
    weigh(weights, num_rows, values, column / SPAN, operands[g % 2]);
    mix(rows.at, operands[g % 2][0]);
    return SPAN_LINES - SPAN_LINES / 2;
  }

  // Columns side by side are the order of the output.
  static KV_INLINE void arrange(Sums sums, int r, int num_rows) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
      float *first = sums[g][r], *second = sums[g][num_rows + r];
      const __m512 a = _mm512_load_ps(first), b = _mm512_load_ps(second);
      _mm512_store_ps(first, _mm512_permutex2var_ps(a, low, b));
      _mm512_store_ps(second, _mm512_permutex2var_ps(a, high, b));
    }
  }

 private:
  static constexpr int NEXT = 2 * UNIT_FEW * EDGE;  // words of a group's operand: [2 * num_rows][16 slots]

  const int dim;
  Integers integers[2];
  alignas(64) uint32_t operands[2][4][NEXT];

  // Weights of sixteen slots times the scales of each group.
  KV_INLINE void weigh(const float* weights, int num_rows, const Sixteen& values, int span, uint32_t (*to)[NEXT]) const {
    const ptrdiff_t at = dim / 2 + 8 * span;
    const __m512i a = load_words(values, 0, at), b = load_words(values, 8, at);
    __m512 scales[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) scales[g] = nth_halves(a, b, g);
#pragma GCC unroll 8
    for (int r = 0; r < UNIT_FEW; r++, weights += WIDE) {
      if (r == num_rows) break;
      const __m512 w = _mm512_load_ps(weights);
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++)
        store_halves(to[g] + r * EDGE, to[g] + (num_rows + r) * EDGE, (vf)_mm512_mul_ps(w, scales[g]));
    }
  }

  static KV_INLINE void mix(const uint8_t* rows, const uint32_t* weights) {
    tile_load<4>(weights, 64), tile_load<5>(rows, 2 * SPAN), tile_dot<0, 4, 5>();
    tile_load<4>(weights + NEXT, 64), tile_load<6>(rows + 64, 2 * SPAN), tile_dot<1, 4, 6>();
    tile_load<4>(weights + 2 * NEXT, 64), tile_load<5>(rows + 128, 2 * SPAN), tile_dot<2, 4, 5>();
    tile_load<4>(weights + 3 * NEXT, 64), tile_load<6>(rows + 192, 2 * SPAN), tile_dot<3, 4, 6>();
  }
};

#endif

}  // namespace kv
