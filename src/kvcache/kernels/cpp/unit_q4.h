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
// their lowest bits. So value 2 * i + v of a group stands at v * 16 + i, as in the output (`value_order`).
//
// (q8_0 would take six: its keys and values are faster as integers, see `vnni.h`.)
#pragma once

#include "unit.h"

namespace kv {

constexpr int SPAN = 128;   // values whose four groups are computed with side by side
constexpr int MAX_SPANS = 4;
constexpr int ABREAST = 4;  // rows of a head in an operand
constexpr int SPAN_WORDS = SPAN / 2 * EDGE;  // of an operand: [pairs][16]

#if defined(KV_BF16)

// Operands of one head's `num_rows` rows: [spans][times four rows][SPAN_WORDS].
inline int query_words(int dim, int num_rows) { return dim / SPAN * (columns_of(num_rows) / ABREAST) * SPAN_WORDS; }

// `rows`: bf16 [num_rows][dim].
inline void pack_spans(const uint16_t* rows, int num_rows, int dim, uint32_t* to) {
  alignas(64) uint16_t operand[EDGE * SPAN];
  for (int span = 0; span < dim; span += SPAN)
    for (int first = 0; first < num_rows; first += ABREAST, to += SPAN_WORDS) {
      std::fill_n(operand, EDGE * SPAN, uint16_t(0));
      for (int r = first; r < std::min(num_rows, first + ABREAST); r++)
        for (int d = 0; d < SPAN; d++) {
          const int group = d / GROUP, place = d % 2 * 16 + d % GROUP / 2;
          operand[(group * ABREAST + r - first) * SPAN + group * GROUP + place] = rows[r * dim + span + d];
        }
      pack_columns(operand, EDGE, SPAN, EDGE, to);
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
    for (int i = 0; i < EDGE; i++) expand_span(rows.at + span * (SPAN / 2) + i * rows.step, at + i * 2 * SPAN);
  }
};

// Keys, times up to four or eight queries.
template <int COLUMNS>
class Q4Scores {
 public:
  static constexpr int ROWS = COLUMNS;
  const int left;

  Q4Scores(const Shape& shape, int num_rows, const Scratch& s)
      : left(lines_of_sixteen(shape.key_store)),
        dim(shape.key_dim),
        words_of_head(query_words(dim, num_rows)),
        all_queries(s.operands.at) {
    set_shapes(full_shapes());
  }

  void turn_to(int head) {
    queries = all_queries + size_t(head) * words_of_head;
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
        const uint8_t* scales = keys.at + slot * keys.step + dim / 2;
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
  const int dim, words_of_head;
  const uint32_t *all_queries, *queries;
  alignas(64) float sums[2][MAX_SPANS * PARTS][EDGE][EDGE];
  Integers integers[2];

  bool stay() const { return PARTS == 1 && dim == SPAN; }  // the queries in their tiles
};

// From the weights and the values of a sweep to the output.
class Q4Values {
 public:
  Q4Values(const Shape& shape, int num_rows, const Scratch& s, Ahead& ahead)
      : num_rows(num_rows), dim(shape.value_dim), left(lines_of_sixteen(shape.value_store)), s(s), ahead(ahead) {}

  void run(const UnitSweep& sweep, int first_head) {
    Shapes shapes = full_shapes();
    set_rows(shapes, 0, 5, 2 * num_rows, 64);
    set_shapes(shapes);
    int at = 0;
    for (int i = 0; i < sweep.count; i++) {
      const Sixteens& values = sweep.tiles[i].values;
      const float* weights = s.weights.at + size_t(i) * 2 * num_rows * WIDE;
      float* out = s.output.at + size_t(sweep.tiles[i].head - first_head) * num_rows * dim;
      for (int span = 0; span < dim / SPAN; span++, at ^= 1) {
        State &now = states[at], &before = states[at ^ 1];
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int g = 0; g < values.count; g++) {
          Integers& rows = integers[g % 2];
          rows.expand(values.of[g], span);
          ahead.fetch(left / 2 / (dim / SPAN));
          weigh(weights + g * EDGE, values.of[g], span, operands[g % 2]);
          mix(rows.at, operands[g % 2][0]);
          add(before);
          ahead.fetch((left - left / 2) / (dim / SPAN));
        }
        finish(before);
        take_sums(now.sums);
        now.out = out + span * SPAN, now.correction = s.correction.at + i * num_rows, now.left = num_rows;
      }
    }
    finish(states[at ^ 1]);
  }

 private:
  struct State {  // of products that are to be added to the output
    alignas(64) Sums sums;
    float* out;
    const float* correction;
    int left = 0;  // rows
  };

  const int num_rows, dim, left;
  const Scratch& s;
  Ahead& ahead;
  State states[2];
  Integers integers[2];
  alignas(64) uint32_t operands[2][4][2 * UNIT_FEW * EDGE];  // [groups][2 * num_rows][16 slots]

  // Weights of sixteen slots times the scales of each group.
  KV_INLINE void weigh(const float* weights, const Sixteen& values, int span, uint32_t (*to)[2 * UNIT_FEW * EDGE]) const {
    __m512 scales[4];
    load_scales(values.at + dim / 2 + 8 * span, values.step, scales);
#pragma GCC unroll 8
    for (int r = 0; r < UNIT_FEW; r++, weights += WIDE) {
      if (r == num_rows) break;
      const __m512 w = _mm512_load_ps(weights);
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++)
        store_halves(to[g] + r * EDGE, to[g] + (num_rows + r) * EDGE, (vf)_mm512_mul_ps(w, scales[g]));
    }
  }

  // to[g] [16 slots]: those of four groups, which stand side by side.
  static KV_INLINE void load_scales(const uint8_t* from, int64_t step, __m512* to) {
    const auto four = [&](int i) {
      const auto word = [&](int k) { return _mm_loadl_epi64((const __m128i*)(from + (i + k) * step)); };
      return _mm256_set_m128i(_mm_unpacklo_epi64(word(2), word(3)), _mm_unpacklo_epi64(word(0), word(1)));
    };
    const __m512i a = _mm512_inserti64x4(_mm512_castsi256_si512(four(0)), four(4), 1);
    const __m512i b = _mm512_inserti64x4(_mm512_castsi256_si512(four(8)), four(12), 1);
    __m512i index = _mm512_setr_epi32(0x00040000, 0x000c0008, 0x00140010, 0x001c0018, 0x00240020, 0x002c0028, 0x00340030,
                                      0x003c0038, 0x00050001, 0x000d0009, 0x00150011, 0x001d0019, 0x00250021, 0x002d0029,
                                      0x00350031, 0x003d0039);  // the first group of all slots, then the second
#pragma GCC unroll 2
    for (int g = 0; g < 4; g += 2, index = _mm512_add_epi16(index, _mm512_set1_epi16(2))) {
      const __m512i both = _mm512_permutex2var_epi16(a, index, b);
      to[g] = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
      to[g + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
    }
  }

  static KV_INLINE void mix(const uint8_t* rows, const uint32_t* weights) {
    constexpr int NEXT = 2 * UNIT_FEW * EDGE;
    tile_load<4>(weights, 64), tile_load<5>(rows, 2 * SPAN), tile_dot<0, 4, 5>();
    tile_load<4>(weights + NEXT, 64), tile_load<6>(rows + 64, 2 * SPAN), tile_dot<1, 4, 6>();
    tile_load<4>(weights + 2 * NEXT, 64), tile_load<5>(rows + 128, 2 * SPAN), tile_dot<2, 4, 5>();
    tile_load<4>(weights + 3 * NEXT, 64), tile_load<6>(rows + 192, 2 * SPAN), tile_dot<3, 4, 6>();
  }

  // out[r] = out[r] * correction[r] + sums of the next row, if one is left.
  KV_INLINE void add(State& before) {
    if (before.left == 0) return;
    const int r = --before.left;
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {  // columns side by side, which is the order of the output
      float *first = before.sums[g][r], *second = before.sums[g][num_rows + r];
      const __m512 a = _mm512_load_ps(first), b = _mm512_load_ps(second);
      _mm512_store_ps(first, _mm512_permutex2var_ps(a, low, b));
      _mm512_store_ps(second, _mm512_permutex2var_ps(a, high, b));
    }
    add_sums(before.sums, r, num_rows, 4, before.correction[r], before.out + size_t(r) * dim);
  }

  void finish(State& before) {
    while (before.left > 0) add(before);
  }
};

#endif

}  // namespace kv
