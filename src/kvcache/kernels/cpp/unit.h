// Few rows over slots of bf16 or fp8 with the tile unit, in sweeps (`sweep.h`).
//
// A tile has up to WIDE slots, sixteen at a time. While the unit computes with sixteen slots of a tile, the other
// instructions finish those of the tile before: its exponentials beside new scores, its sums beside new products. So the
// unit, the vectors and memory all work all the time, and lines are fetched at an even pace.
//
//   keys      score 16 slots of tile i  |  turn back the 16 before them  |  exponentials of 16 slots of tile i - 1
//   values    mix 16 slots of tile i    |  add a row of tile i - 1 to the output
#pragma once

#include "sweep.h"

namespace kv {

constexpr int WIDE = 128;       // slots of a tile, at most; also what makes small blocks eight runs side by side
constexpr int UNIT_SWEEP = 16;  // tiles whose keys are read before their values: 512 KB of heads of 128

#if defined(KV_BF16)

struct Sixteens {
  int count;
  Sixteen of[WIDE / EDGE];
};

using UnitSweep = Sweep<Sixteens, UNIT_SWEEP, WIDE>;

// The rows of `slots` slots from `slot` on, both multiples of 16. `is_first`: no head of them has been found before.
template <int N>
void find_whole(const Segment& segment, const Store& store, int64_t block_size, int64_t slot, int slots, int head,
                bool is_first, Lines<N>& lines, Sixteens& rows) {
  rows.count = slots / EDGE;
  for (int g = 0; g < rows.count; g++, slot += EDGE) {
    const uint8_t* first = row_of(segment, store, block_size, slot, head);
    if (is_first && block_size < WIDE && slot % block_size == 0) __builtin_prefetch(first, 0, 3);  // as in `sweep.h`
    rows.of[g] = {first, store.row_stride};
    lines.add(first, first + EDGE * store.row_stride);
  }
}

inline void link(UnitSweep&, UnitSweep&) {}

inline int lead(const UnitSweep& sweep) { return std::min(UNIT_DISTANCE, sweep.keys.num_lines); }

struct ExpandedSweep : UnitSweep {};  // of rows that become bf16 first

inline int lead(const ExpandedSweep& sweep) { return std::min(EXPANDED_DISTANCE, sweep.keys.num_lines); }

// Values of a row that are expanded between one line that is fetched and the next. A rest is worth one from 64 on.
constexpr int STRETCH = 4 * DEPTH, LEAST_STRETCH = 2 * DEPTH;

// Lines of `dim` values of sixteen slots that are fetched when all of them have been computed with. Those of bf16 are fetched
// beside their product, and some of those of fp8 beside stretches.
template <int F>
constexpr int left_of(int dim) {
  static_assert(F == BF16 || F == FP8);
  return F == BF16 ? 0 : EDGE * dim / 64 - EDGE * ((dim + STRETCH - LEAST_STRETCH) / STRETCH);
}

// `dim` values of sixteen slots as an operand of the unit: as they lie, or expanded here.
template <int F, int WIDTH>
class Operand {
 public:
  KV_INLINE Sixteen of(const Sixteen& stored, int dim, Ahead& ahead) {
    if constexpr (F == BF16) return stored;
    for (int d = 0; d < dim; d += STRETCH) {
      const int count = std::min(dim - d, STRETCH);
      for (int i = 0; i < EDGE; i++) {
        expand_row<F>(stored[i] + d, count, 0, rows + i * dim + d);
        if (count >= LEAST_STRETCH) ahead.fetch<1>();
      }
    }
    return {reinterpret_cast<const uint8_t*>(rows), 2 * dim};
  }

 private:
  alignas(64) uint16_t rows[F == BF16 ? 32 : EDGE * WIDTH];
};

// Keys, times up to COLUMNS queries that `pack_columns` packed.
template <int F, int COLUMNS>
class UnitScores {
 public:
  static constexpr int ROWS = COLUMNS;
  const int left;  // lines of sixteen slots, see `left_of`

  UnitScores(const Shape& shape, const Scratch& s)
      : left(left_of<F>(shape.key_dim)),
        all_queries(reinterpret_cast<const uint32_t*>(s.queries.at)),
        depth(shape.key_dim) {
    Shapes shapes = full_shapes();
    set_rows(shapes, 0, 2, EDGE, 4 * COLUMNS), set_rows(shapes, 4, 8, EDGE, 4 * COLUMNS);
    set_shapes(shapes);
  }

  void turn_to(int head) {
    queries = all_queries + size_t(head) * depth / 2 * COLUMNS;
    load_queries(queries, COLUMNS, depth, 0);
  }

  // Of the sixteen slots number g of a tile.
  template <int PARITY>
  KV_INLINE void compute(int g, const Sixteen& keys, Ahead& ahead) {
    const Sixteen rows = operands[PARITY].of(keys, depth, ahead);
    score_sixteen<PARITY, F == BF16>(queries, COLUMNS, depth, rows, turned[g * EDGE], 4 * COLUMNS, [&] {
      if (F == BF16) ahead.fetch<EDGE>();
    });
  }

  // The scores of the rows r to r + 3, with their slots in the lanes.
  KV_INLINE void take(int g, const Sixteen&, int r, __m512* out) const { turn_back(turned[g * EDGE] + r, COLUMNS, out); }

  // Sixteen of the weights of a tile, from slot `at` on: [2][num_rows][WIDE], see `store_halves`.
  static KV_INLINE void store_weights(uint32_t* weights, int r, int num_rows, size_t at, vf weight) {
    uint32_t* to = weights + size_t(r) * WIDE + at;
    store_halves(to, to + size_t(num_rows) * WIDE, weight);
  }

 private:
  const uint32_t *all_queries, *queries;
  const int depth;
  alignas(64) float turned[WIDE][COLUMNS];
  Operand<F, MAX_DIM> operands[2];
};

// From the keys of a sweep to the weights of its values, of `num_rows` rows to a head. `Scores` computes with the unit.
template <class Scores>
class KeyPhase {
 public:
  static constexpr int COLUMNS = Scores::ROWS;

  KeyPhase(const Shape& shape, int num_rows, const Scratch& s, Ahead& ahead)
      : shape(shape), num_rows(num_rows), s(s), ahead(ahead), products(shape, s) {}

  // Leaves the weights of tile i in s.weights [i][2 * num_rows * WIDE], and its factors in s.correction.
  void run(const UnitSweep& sweep, int first_head) {
    for (int i = 0; i < sweep.count; i++) {
      const Sixteens& keys = sweep.tiles[i].keys;
      const int head = sweep.tiles[i].head - first_head;
      State &now = states[i % 2], &before = states[(i + 1) % 2];
      std::fill_n(now.highest, COLUMNS, splat(NOTHING));
      products.turn_to(head);
      for (int g = 0; g < keys.count; g++) {
        if (g % 2 == 0)
          products.template compute<0>(g, keys.of[g], ahead);
        else
          products.template compute<1>(g, keys.of[g], ahead);
        if (g > 0) turn(now, g - 1, keys);
        ahead.fetch(products.left / 2);
        soften(before);
        ahead.fetch(products.left - products.left / 2);
      }
      turn(now, keys.count - 1, keys);
      finish(before);
      begin(now, keys.count, i, head);
    }
    finish(states[(sweep.count + 1) % 2]);
  }

 private:
  struct State {  // of a tile whose scores become weights
    alignas(64) float scores[COLUMNS][WIDE];  // in base 2
    vf highest[COLUMNS], totals[COLUMNS];
    alignas(64) float top[COLUMNS], shrunk[COLUMNS];
    int count = 0, done = 0;  // times sixteen slots
    uint32_t* weights;
    float* l;
  };

  const Shape& shape;
  const int num_rows;
  const Scratch& s;
  Ahead& ahead;
  Scores products;
  State states[2];

  KV_INLINE void turn(State& now, int g, const Sixteens& keys) const {
    const vf factor = splat(shape.score_factor());
#pragma GCC unroll 2
    for (int r = 0; r < COLUMNS; r += 4) {
      __m512 out[4];
      products.take(g, keys.of[g], r, out);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        vf x = (vf)out[i] * factor;
        if (shape.softcap != 0.0f) x = tanh(x) * splat(shape.softcap * LOG2E);
        store(now.scores[r + i] + g * EDGE, x);
        now.highest[r + i] = maximum(x, now.highest[r + i]);  // passes NaN over: its weight tells
      }
    }
  }

  // All scores of tile i are there: the states of its rows move on, but for the sums of weights.
  void begin(State& now, int count, int i, int head) const {
    now.count = count, now.done = 0, now.l = s.l.at + head * num_rows;
    now.weights = reinterpret_cast<uint32_t*>(s.weights.at) + size_t(i) * 2 * num_rows * WIDE;
    float m[COLUMNS] = {};
    std::copy_n(s.m.at + head * num_rows, num_rows, m);
#pragma GCC unroll 2
    for (int r = 0; r < COLUMNS; r += 4) {
      const vf before = load_first<4>(m + r), after = maximum(before, fold_first<4>(now.highest + r, Maximum()));
      store_first<4>(now.shrunk + r, shrinking(before, after));
      store_first<4>(now.top + r, after == splat(NOTHING) ? splat(0.0f) : after);  // as in `tile.h`
      store_first<4>(m + r, after);
    }
    std::copy_n(m, num_rows, s.m.at + head * num_rows);
    std::copy_n(now.shrunk, num_rows, s.correction.at + i * num_rows);
    std::fill_n(now.totals, COLUMNS, splat(0.0f));
  }

  // The next sixteen weights of each row, if some are left.
  KV_INLINE void soften(State& before) const {
    if (before.done == before.count) return;
    const size_t at = before.done++ * EDGE;
#pragma GCC unroll 8
    for (int r = 0; r < COLUMNS; r++) {
      if (r == num_rows) break;
      const vf weight = exp2_coarse(load<vf>(before.scores[r] + at) - splat(before.top[r]));
      before.totals[r] += weight;
      Scores::store_weights(before.weights, r, num_rows, at, weight);
    }
  }

  void finish(State& before) const {
    if (before.count == 0) return;
    while (before.done < before.count) soften(before);
    float sums[COLUMNS];
#pragma GCC unroll 2
    for (int r = 0; r < COLUMNS; r += 4) store_first<4>(sums + r, fold_first<4>(before.totals + r, Sum()));
    for (int r = 0; r < num_rows; r++) before.l[r] = before.l[r] * before.shrunk[r] + sums[r];
    before.count = before.done = 0;
  }
};

// Products of weights, as `store_halves` leaves them, and values.
template <int F>
class UnitMixes {
 public:
  explicit UnitMixes(const Shape&) {}

  // Adds those of the sixteen slots number g of a tile and of `blocks` times DEPTH columns from `column` on; the lines of those
  // that are still to be fetched are returned.
  KV_INLINE int compute(int g, const Sixteen& values, int column, int blocks, const float* weights, int, Ahead& ahead) {
    const Sixteen rows = operands[g % 2].of({values.at + column * (F == BF16 ? 2 : 1), values.step}, blocks * DEPTH, ahead);
    mix_sixteen<F == BF16>(reinterpret_cast<const uint32_t*>(weights), 4 * WIDE, rows.at, rows.step, blocks, [&] {
      if (F == BF16) ahead.fetch<EDGE>();
    });
    return left_of<F>(blocks * DEPTH);
  }

  static void arrange(Sums, int, int) {}

 private:
  Operand<F, 4 * DEPTH> operands[2];
};

// From the weights and the values of a sweep to the output. `Mixes` computes with the unit, and `arrange` gives the sums of a row
// the order of the output.
template <class Mixes>
class ValuePhase {
 public:
  ValuePhase(const Shape& shape, int num_rows, const Scratch& s, Ahead& ahead)
      : num_rows(num_rows), columns(shape.values.width), s(s), ahead(ahead), products(shape) {}

  void run(const UnitSweep& sweep, int first_head) {
    Shapes shapes = full_shapes();
    set_rows(shapes, 0, 5, 2 * num_rows, 64);
    set_shapes(shapes);
    int at = 0;
    for (int i = 0; i < sweep.count; i++) {
      const Sixteens& values = sweep.tiles[i].values;
      const float* weights = s.weights.at + size_t(i) * 2 * num_rows * WIDE;
      float* out = s.output.at + size_t(sweep.tiles[i].head - first_head) * num_rows * columns;
      for (int c = 0; c < columns; c += 4 * DEPTH, at ^= 1) {
        State &now = states[at], &before = states[at ^ 1];
        const int blocks = std::min(4, (columns - c) / DEPTH);
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int g = 0; g < values.count; g++) {
          const int left = products.compute(g, values.of[g], c, blocks, weights + g * EDGE, num_rows, ahead);
          add(before);
          ahead.fetch(left);
        }
        finish(before);
        take_sums(now.sums);
        now.out = out + c, now.correction = s.correction.at + i * num_rows, now.blocks = blocks, now.left = num_rows;
      }
    }
    finish(states[at ^ 1]);
  }

 private:
  struct State {  // of products that are to be added to the output
    alignas(64) Sums sums;
    float* out;
    const float* correction;
    int blocks, left = 0;  // of DEPTH columns, and rows
  };

  const int num_rows, columns;
  const Scratch& s;
  Ahead& ahead;
  Mixes products;
  State states[2];

  // out[r] = out[r] * correction[r] + sums of the next row, if one is left.
  KV_INLINE void add(State& before) const {
    if (before.left == 0) return;
    const int r = --before.left;
    Mixes::arrange(before.sums, r, num_rows);
    add_sums(before.sums, r, num_rows, before.blocks, before.correction[r], before.out + size_t(r) * columns);
  }

  void finish(State& before) const {
    while (before.left > 0) add(before);
  }
};

// All of a sweep, as `run_sweep` of `sweep.h` is.
template <class Scores, class Mixes, class S>
void run_phases(const Shape& shape, const S& sweep, const S& next, int first_head, int num_rows, const Scratch& s) {
  Ahead ahead(sweep.keys, sweep.values, next.keys, next.values, lead(sweep), 0, 1);
  KeyPhase<Scores>(shape, num_rows, s, ahead).run(sweep, first_head);
  ValuePhase<Mixes>(shape, num_rows, s, ahead).run(sweep, first_head);
  set_shapes(full_shapes());
}

#endif

}  // namespace kv
