// Few rows over whole tiles of bf16: the keys of several tiles, and only then their values.
//
// Memory is fastest in long runs: processors fetch ahead by themselves, and where a run ends they begin anew, and its pages
// have to be looked up. A core of Zen 5 that only reads gets 37 GB/s out of one run, 35 out of runs of 256 KB here and there,
// 28 out of runs of 32 KB, and 31 out of four of those side by side, 1 KB of each in turn. So a tile of small blocks is read
// from four of them side by side, a quad of rows of each in turn; the sums do not mind the order.
#pragma once

#include "tile.h"

namespace kv {

// Tiles whose keys are read before their values: eight are 128 KB of heads of 128. A Zen 4 reads eight heads as fast with two,
// and a single one of 256 an eighth faster.
constexpr int SWEEP = FETCHED_INTO == 2 ? 2 : 8;

template <class R>
struct Whole {  // slots of one head; all queries see them
  int head;
  R keys, values;
};

template <class R, int N, int S>
struct Sweep {
  static constexpr int SIZE = N, SLOTS = S;  // tiles, and slots of a tile

  int count;
  Whole<R> tiles[N];
  Lines<16 * N> keys, values;
};

using DirectSweep = Sweep<Quads, SWEEP, TILE>;

// The row of a slot.
inline const uint8_t* row_of(const Segment& segment, const Store& store, int64_t block_size, int64_t slot, int head) {
  return store.base + segment.table[slot / block_size] * store.block_stride + head * store.head_stride +
         slot % block_size * store.row_stride;
}

// The rows of the slots [slot, slot + TILE), which lie in one block or in several whole times 16. `is_first`: no head of
// them has been found before.
template <int N>
void find_whole(const Segment& segment, const Store& store, int64_t block_size, int64_t slot, int, int head, bool is_first,
                Lines<N>& lines, Quads& quads) {
  const int64_t step = store.row_stride;
  quads.step = step;
  if (block_size % TILE == 0) {
    const uint8_t* first = row_of(segment, store, block_size, slot, head);
    for (int n = 0; n < TILE / 4; n++) quads.at[n] = first + n * 4 * step;
    return lines.add(first, first + TILE * step);
  }
  for (int i = 0; i < 4; i++) {
    const uint8_t* first = row_of(segment, store, block_size, slot + 16 * i, head);
    if (is_first) __builtin_prefetch(first, 0, 3);  // what translates its address comes from memory, too: a sweep before
    for (int group = 0; group < 4; group++) quads.at[4 * group + i] = first + group * 4 * step;
  }
  for (int n = 0; n < TILE / 4; n++) lines.add(quads.at[n], quads.at[n] + 4 * step);
}

// Tells the rows of each tile what is read after them.
inline void link(DirectSweep& sweep, DirectSweep& next) {
  for (int i = 0; i < sweep.count; i++) {
    const bool is_last = i + 1 == sweep.count;
    Whole<Quads>& tile = sweep.tiles[i];
    const Quads& after_keys = is_last ? sweep.tiles[0].values : sweep.tiles[i + 1].keys;
    const Quads& after_values = !is_last ? sweep.tiles[i + 1].values : next.count > 0 ? next.tiles[0].keys : tile.values;
    std::copy_n(after_keys.at, AGAIN / 4, tile.keys.at + TILE / 4);
    std::copy_n(after_values.at, AGAIN / 4, tile.values.at + TILE / 4);
  }
}

inline int lead(const DirectSweep& sweep) {
  return std::min(DISTANCE, sweep.keys.num_lines + sweep.values.num_lines);
}

inline const Places ALL_SEEN = {{}, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(), TILE, true};

// All of a sweep, for `queries` queries of `group` rows each, of which those of `first_head` begin at row 0 of the task. Its
// lead has been fetched; meanwhile the rest of it is, and then the lead of `next`.
inline void run_sweep(const Shape& shape, const DirectSweep& sweep, const DirectSweep& next, int first_head, int queries,
                      int group, const Scratch& s) {
  const int rows = queries * group, pairs = shape.key_dim / 2, width = shape.values.width;
  uint32_t* weights = reinterpret_cast<uint32_t*>(s.weights.at);
  Ahead ahead(sweep.keys, sweep.values, next.keys, next.values, lead(sweep),
              sweep.keys.num_lines + sweep.values.num_lines - lead(sweep) + lead(next),
              sweep.count * (work_of_keys(shape, TILE, rows, rows) + work_of_weights(TILE, rows) +
                             work_of_values(shape, TILE, rows, rows)));
  for (int i = 0; i < sweep.count; i++) {
    const Whole<Quads>& tile = sweep.tiles[i];
    const int base = (tile.head - first_head) * rows;
    const uint32_t* queries_of_head = reinterpret_cast<const uint32_t*>(s.queries.at) + size_t(base) * pairs;
    for_few_rows(0, rows, [&](int row, int count) {
      shape.keys.score_whole[count - 1](queries_of_head + size_t(row) * pairs, tile.keys, s.scores.at + size_t(row) * TILE,
                                        pairs, TILE, ahead);
    });
    soften_rows(shape, ALL_SEEN, s, base, 0, rows, rows, group, weights + size_t(i) * rows * (TILE / 2),
                s.correction.at + i * rows, ahead);
  }
  for (int i = 0; i < sweep.count; i++) {
    const Whole<Quads>& tile = sweep.tiles[i];
    const int base = (tile.head - first_head) * rows;
    for_few_rows(0, rows, [&](int row, int count) {
      shape.values.mix_whole[count - 1](weights + (size_t(i) * rows + row) * (TILE / 2), 0, tile.values, shape.value_dim,
                                        s.output.at + size_t(base + row) * width, s.correction.at + i * rows + row, width,
                                        TILE, ahead);
    });
  }
}

}  // namespace kv
