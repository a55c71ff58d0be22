// Attention over paged storage: the division of the work, and its reunion.
//
// Work is cut twice. A *task* is some queries of one segment with some key/value heads; its rows are heads times queries
// times the query heads of a group, so that a tile is decoded once for all that read it. With few rows a task has many
// heads, because the heads of a block lie side by side and memory is fastest where it is read in long runs (see `sweep.h`).
// The slots of a task are cut into *chunks*, each with a softmax of its own, merged at the end (flash-decoding). A task of few
// rows is bound by memory; its chunks lie on a grid of slots that its own length decides, so that the result of a decoding
// sequence depends neither on its companions nor on the number of threads. An *item* is a run of chunks of one task: threads
// take items from a common counter, and who finishes the last item of a task merges it.
//
//   1 sequence of 1200 slots, 2 heads, decode:   task (heads 0, 1)  chunks [0,512) [512,1024) [1024,1200)
//
// Bytes moved: the rows of the visible slots, keys and values, once per task; all else stays in a core's caches.
// (Longer than 300 lines: it is one class, read from top to bottom.)
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "lanes.h"
#include "rows.h"
#include "sweep.h"
#include "unit_q4.h"

namespace kv {

constexpr int CHUNK = 512;  // slots, at least; a multiple of TILE
constexpr int MOST_CHUNK = 2048;
constexpr int FEW_ROWS = 32;     // up to here chunks lie on the grid, and blocks are asked for early
constexpr int TASK_ROWS = 256;   // rows of a task at most (but one query at least): scores and output stay in L2
constexpr int LEAST_ROWS = 128;  // that tasks are made smaller to, for all threads to have some,
constexpr int MOST_SLOTS = 16;   // if they see at most so many slots for each row
constexpr int LANES_VALUES = 1 << 17;  // of a task's output in lanes, instead: the tile unit's operands come from L2 as well

struct Problem {
  Store keys, values;
  Rows queries, output;
  const Segment* segments;
  int64_t num_segments;
  const int32_t *begins, *ends;  // by row of the batch
  int64_t block_size;
  int heads, group;  // key/value heads; query heads of each
  float scale, softcap;
  const float* sinks;  // null: none
};

struct Task {
  int segment, head_begin, head_end;
  int query_begin, query_end;                  // of the segment's rows
  int64_t slot_begin, slot_end;                // what any of its queries sees
  int64_t first_chunk, num_chunks, chunk_size; // chunk c holds the slots [c, c + 1) * chunk_size
  int64_t partial_row;                         // where its partial results begin, if it has several chunks
  int64_t cost;
};

struct Item {
  int task;
  int64_t chunk_begin, chunk_end, cost;
};

struct Work : Scratch {  // what a thread works in
#if defined(KV_BF16)
  Lanes lanes;
#endif
};

class Attention {
 public:
  explicit Attention(const Problem& problem)
      : p(problem),
        shape{problem.keys,
              problem.values,
              make_reader(problem.keys, problem.queries.format, true),
              make_reader(problem.values, problem.queries.format, false),
              problem.keys.dim,
              problem.values.dim,
              problem.scale,
              problem.softcap,
              use_amx} {
    if (shape.has_unit() && problem.values.format == BF16)
      value_places(FP8, true, shape.value_dim, shape.values.places.data());
  }

  void run() {
    const int threads = at::get_num_threads();
    plan(threads);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min<int64_t>(threads, int64_t(items.size())), 1, [&](int64_t, int64_t) {
      thread_local Work work;
#if defined(KV_BF16)
      const TileUnit unit(shape.has_unit() || shape.has_q4_unit());
#endif
      for (int64_t i; (i = next.fetch_add(1)) < int64_t(items.size());) run_item(items[size_t(i)], work);
    });
  }

 private:
  const Problem& p;
  Shape shape;
  std::vector<Task> tasks;
  std::vector<Item> items;
  std::unique_ptr<std::atomic<int64_t>[]> remaining;  // chunks of each task that are not done
  std::unique_ptr<float[]> partial_output, partial_m, partial_l;

  int rows_of_head(const Task& task) const { return (task.query_end - task.query_begin) * p.group; }
  int rows_of(const Task& task) const { return rows_of_head(task) * (task.head_end - task.head_begin); }

  // Of row r of the key/value head `head` in a task: its query head, and where it begins in the queries or the output.
  int64_t query_head(int head, int r) const { return int64_t(head) * p.group + r % p.group; }
  int64_t place_of(const Rows& rows, const Task& task, int head, int r) const {
    return p.segments[task.segment].rows[task.query_begin + r / p.group] * rows.row_stride +
           query_head(head, r) * rows.head_stride;
  }

  // --- the plan: O(queries + items) ---

  // Rows of a task: fewer where there would be no work for all threads, which is cheaper than to cut slots into chunks as long
  // as the slots, which are then read more often, are not many times the rows.
  int most_rows(int threads) const {
    const int in_lanes = LANES_VALUES / std::max(shape.values.width, shape.key_dim / 2) / (2 * EDGE) * (2 * EDGE);
    int rows = shape.has_unit() ? std::max(TASK_ROWS, in_lanes) : TASK_ROWS;
    const auto wants_fewer = [&] {
      int64_t tasks = 0;
      for (int64_t s = 0; s < p.num_segments; s++) {
        const Segment& segment = p.segments[s];
        if (segment.num_rows * p.group <= FEW_ROWS) continue;
        const int64_t last = segment.rows[segment.num_rows - 1];
        if (std::min(segment.num_slots, int64_t(p.ends[last]) - p.begins[last]) > MOST_SLOTS * rows) return false;
        tasks += (segment.num_rows * p.group + rows - 1) / rows * p.heads;
      }
      return tasks < 4 * threads;
    };
    while (rows > LEAST_ROWS && wants_fewer()) rows = std::max(LEAST_ROWS, rows / 2 / (2 * EDGE) * (2 * EDGE));
    return rows;
  }

  // The queries of a segment and what they see, cut into tasks that have no heads yet.
  void plan_segment(int index, int task_rows, std::vector<Task>& parts) const {
    const Segment& segment = p.segments[index];
    const int64_t most = std::max(1, task_rows / p.group), pieces = (segment.num_rows + most - 1) / most;
    for (int64_t piece = 0; piece < pieces; piece++) {  // of the same size: a small rest would read all slots once more
      const int64_t q = segment.num_rows * piece / pieces, end = segment.num_rows * (piece + 1) / pieces;
      int64_t lowest = std::numeric_limits<int32_t>::max(), highest = 0;
      for (int64_t i = q; i < end; i++) {
        lowest = std::min<int64_t>(lowest, p.begins[segment.rows[i]]);
        highest = std::max<int64_t>(highest, p.ends[segment.rows[i]]);
      }
      Task task{index, 0, 1, int(q), int(end), 0, segment.num_slots, 0, 1, 0, 0, 0};
      if (segment.positions == nullptr) {
        task.slot_begin = std::clamp<int64_t>(lowest - segment.first_position, 0, segment.num_slots);
        task.slot_end = std::clamp<int64_t>(highest - segment.first_position, task.slot_begin, segment.num_slots);
      }
      parts.push_back(task);
    }
  }

  // Few rows: as many heads in a task as leave tasks and chunks for all threads. Many rows: one.
  void add_heads(Task task, int most_heads) {
    const int rows = rows_of(task), heads = rows > FEW_ROWS ? 1 : std::min(most_heads, TASK_ROWS / rows);
    for (int h = 0; h < p.heads; h += heads) {
      task.head_begin = h, task.head_end = std::min(h + heads, p.heads);
      task.cost = (task.slot_end - task.slot_begin + TILE) * (task.head_end - h) * (FEW_ROWS + rows);
      tasks.push_back(task);
    }
  }

  // Slots of a chunk of few rows: more of them where there are many, because partial results are written and read again.
  static int64_t chunk_of(int64_t slots) {
    int64_t chunk = CHUNK;
    while (chunk < MOST_CHUNK && slots >= 16 * chunk) chunk *= 2;
    return chunk;
  }

  // `least`: what a chunk of many rows must cost. Their partial results are as large as what they read.
  void cut_into_chunks(Task& task, int64_t least, int64_t& partial_rows) {
    const int64_t slots = task.slot_end - task.slot_begin;
    task.chunk_size = chunk_of(slots);
    if (rows_of_head(task) > FEW_ROWS) {
      const int64_t pieces = std::clamp<int64_t>(task.cost / least, 1, (slots + CHUNK - 1) / CHUNK + 1);
      task.chunk_size = pieces == 1 ? std::max<int64_t>(task.slot_end, 1) : (slots + pieces - 1) / pieces;
      task.chunk_size = (task.chunk_size + TILE - 1) / TILE * TILE;
    }
    task.first_chunk = task.slot_begin / task.chunk_size;
    task.num_chunks = std::max<int64_t>((task.slot_end + task.chunk_size - 1) / task.chunk_size - task.first_chunk, 1);
    if (task.num_chunks == 1) return;
    task.partial_row = partial_rows;
    partial_rows += task.num_chunks * rows_of(task);
  }

  void plan(int threads) {
    std::vector<Task> parts;
    const int most = most_rows(threads);
    for (int64_t s = 0; s < p.num_segments; s++) plan_segment(int(s), most, parts);
    int64_t chunks = 0;
    for (const Task& part : parts) {
      const int64_t slots = part.slot_end - part.slot_begin;
      chunks += slots / chunk_of(slots) + 1;
    }
    const int most_heads = int(std::clamp<int64_t>(p.heads * chunks / (4 * threads), 1, p.heads));
    for (const Task& part : parts) add_heads(part, most_heads);
    int64_t total = 0, partial_rows = 0;
    for (const Task& task : tasks) total += task.cost;
    const int64_t target = std::max<int64_t>(total / (threads * 8), 1);
    const bool are_many = int64_t(tasks.size()) >= 3 * threads;  // enough for all threads as they are
    remaining.reset(new std::atomic<int64_t>[tasks.size()]);
    for (size_t t = 0; t < tasks.size(); t++) {
      Task& task = tasks[t];
      cut_into_chunks(task, are_many ? 2 * target : target, partial_rows);
      remaining[t] = task.num_chunks;
      const int64_t pieces = std::clamp<int64_t>((task.cost + target - 1) / target, 1, task.num_chunks);
      for (int64_t i = 0; i < pieces; i++)
        items.push_back({int(t), task.first_chunk + task.num_chunks * i / pieces,
                         task.first_chunk + task.num_chunks * (i + 1) / pieces, task.cost / pieces});
    }
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    if (partial_rows == 0) return;
    partial_output.reset(new float[size_t(partial_rows) * shape.values.width]);
    partial_m.reset(new float[size_t(partial_rows)]);
    partial_l.reset(new float[size_t(partial_rows)]);
  }

  // --- the work of one thread ---

  void reserve(const Task& task, Work& s) const {
    const size_t rows = size_t(rows_of(task)), scores = size_t(rows_of_head(task));
    s.output.reserve(rows * shape.values.width);
    s.m.reserve(rows), s.l.reserve(rows);
    s.begins.reserve(size_t(task.query_end - task.query_begin));
    s.ends.reserve(size_t(task.query_end - task.query_begin));
    const int depth = round_up(shape.key_dim, DEPTH), heads = task.head_end - task.head_begin;
#if defined(KV_BF16)
    if (shape.in_lanes(rows_of_head(task))) return s.lanes.reserve(heads, rows_of_head(task), depth, shape.values.width);
#endif
    const bool in_unit = shape.scores_amx(rows_of_head(task)), wide = sweeps(task) && sweeps_unit(task);
    s.queries.reserve(in_unit ? size_t(heads) * columns_of(rows_of_head(task)) * (depth / 2) + EDGE
                              : rows * std::max(shape.key_dim, shape.keys.query_width));
    s.tile.reserve(size_t(TILE) * std::max(depth, shape.values.width));
    s.key_scales.reserve(size_t(TILE) * (shape.key_dim / GROUP + 1));
    s.value_scales.reserve(size_t(TILE) * (shape.value_dim / GROUP + 1));
    s.scores.reserve(scores * TILE);
#if defined(KV_BF16)
    if (wide && !in_unit) s.operands.reserve(size_t(heads) * query_words(shape.key_dim, rows_of_head(task)));
#endif
    const size_t tiles = wide ? UNIT_SWEEP * (WIDE / TILE) : sweeps(task) ? SWEEP : 1;  // whose weights are held at a time
    const bool weighs = shape.weighs(rows_of_head(task));
    const size_t groups = shape.values.scaled || weighs ? size_t(shape.value_dim / GROUP) : 1;
    if (shape.mixes_amx(rows_of_head(task)) || wide)
      s.weights.reserve((tiles * 2 * scores + EDGE) * TILE);
    else if (shape.values.bf16 || weighs)
      s.weights.reserve(tiles * groups * scores * (TILE / 2));
    if (weighs) s.multipliers.reserve(scores * (shape.value_dim / GROUP));
    s.correction.reserve(tiles * scores);
  }

  void pack_queries(const Task& task, Work& s) const {
    const Segment& segment = p.segments[task.segment];
    const int dim = shape.key_dim;
    const int* order = shape.keys.order.data();
    float* to = s.queries.at;
    float values[MAX_DIM];
    uint16_t* to_bf16 = reinterpret_cast<uint16_t*>(s.queries.at);
    s.seen_by_all = {0, std::numeric_limits<int32_t>::max()};
    for (int q = task.query_begin; q < task.query_end; q++) {
      s.begins.at[q - task.query_begin] = std::max(p.begins[segment.rows[q]], 0);  // an empty slot has position -1
      s.ends.at[q - task.query_begin] = p.ends[segment.rows[q]];
      s.seen_by_all.begin = std::max(s.seen_by_all.begin, p.begins[segment.rows[q]]);
      s.seen_by_all.end = std::min(s.seen_by_all.end, p.ends[segment.rows[q]]);
    }
    unite(s.begins.at, s.ends.at, task.query_end - task.query_begin, s.seen);
#if defined(KV_BF16)
    const int num_rows = rows_of_head(task);
    if (shape.in_lanes(num_rows)) {
      s.lanes.set_sights(s.begins.at, s.ends.at, p.group);
      return pack_columns_of(task, EDGE, BANDS * EDGE, s.lanes.queries.at);
    }
    const int columns = columns_of(num_rows);
    if (shape.scores_amx(num_rows))
      return pack_columns_of(task, columns, columns, reinterpret_cast<uint32_t*>(s.queries.at));
#endif
    const bool is_stored = shape.scores_stored(rows_of_head(task));
    const int width = is_stored ? shape.keys.query_width : dim;
    for (int h = task.head_begin; h < task.head_end; h++)
      for (int r = 0; r < rows_of_head(task); r++, to += width, to_bf16 += dim) {
        read_row(p.queries.base, place_of(p.queries, task, h, r), p.queries.format, dim, values);
        if (is_stored && shape.keys.pack_query != nullptr) {
          shape.keys.pack_query(values, dim, reinterpret_cast<uint8_t*>(to));
        } else if (is_stored) {
          std::fill_n(to, width, 0.0f);
          for (int i = 0; i < dim; i++) to[shape.keys.places[i]] = values[i];
        } else if (shape.keys.bf16) {  // exact: these queries are bf16
          for (int i = 0; i < dim; i++) to_bf16[i] = uint16_t(bits<uint32_t>(values[order[i]]) >> 16);
        } else {
          for (int i = 0; i < dim; i++) to[i] = values[order[i]];
        }
      }
#if defined(KV_BF16)
    if (!shape.has_q4_unit() || !sweeps(task) || !sweeps_unit(task)) return;
    alignas(64) uint16_t rows[UNIT_FEW * MAX_SPANS * SPAN];
    for (int h = task.head_begin; h < task.head_end; h++) {
      copy_queries(task, h, 0, num_rows, dim, rows);
      pack_spans(rows, num_rows, dim, s.operands.at + size_t(h - task.head_begin) * query_words(dim, num_rows));
    }
#endif
  }

#if defined(KV_BF16)
  // The rows [begin, end) of a head, which are bf16, `step` values apart.
  void copy_queries(const Task& task, int head, int begin, int end, int step, uint16_t* to) const {
    const uint16_t* queries = static_cast<const uint16_t*>(p.queries.base);
    for (int r = begin; r < end; r++, to += step)
      std::copy_n(queries + place_of(p.queries, task, head, r), shape.key_dim, to);
  }

  // The queries as the tile unit wants them, `columns` rows at a time; heads begin at multiples of `align` rows.
  void pack_columns_of(const Task& task, int columns, int align, uint32_t* to) const {
    const int depth = round_up(shape.key_dim, DEPTH), num_rows = rows_of_head(task);
    alignas(64) uint16_t rows[EDGE * MAX_DIM];  // [16][depth], zeros beyond the values
    if (depth > shape.key_dim) std::fill_n(rows, EDGE * depth, 0);
    for (int h = task.head_begin; h < task.head_end; h++)
      for (int begin = 0; begin < round_up(num_rows, align); begin += columns, to += depth / 2 * columns) {
        const int count = std::clamp(num_rows - begin, 0, columns);
        copy_queries(task, h, begin, begin + count, depth, rows);
        pack_columns(rows, count, depth, columns, to);
      }
  }
#endif

  struct Span {  // slots [begin, end)
    int64_t begin, end;
  };

  // The way through slots without some of them, in the order of memory: a *unit* of slots (a block, or a tile where blocks do
  // not hold whole tiles) with all heads, then the next; within a unit head by head; within a head tile by tile.
  struct Cursor {
    int64_t unit_begin, unit_end, slot, end;
    int head, size;  // slots of a tile
    Span without;
  };

  Cursor start(const Task& task, Span slots, int size, Span without) const {
    const int64_t begin = slots.begin == without.begin ? without.end : slots.begin;
    const int64_t end = begin < without.begin ? without.begin : slots.end;
    const int64_t unit = p.block_size % size == 0 ? p.block_size : size;
    return {begin, std::min(end, (begin / unit + 1) * unit), begin, slots.end, task.head_begin, size, without};
  }

  void move_on(const Task& task, Cursor& at) const {
    at.slot += at.size;
    if (at.slot < at.unit_end) return;
    at.slot = at.unit_begin;
    if (++at.head == task.head_end) at = start(task, {at.unit_end, at.end}, at.size, at.without);
  }

  // Whether a task goes into sweeps: few rows, of bf16 or what becomes it, in a context that is worth it.
  bool sweeps(const Task& task) const {
    const bool is_long = task.slot_end - task.slot_begin >= 4 * TILE;
    const bool is_dense = p.keys.row_stride == row_bytes(p.keys.format, p.keys.dim) &&
                          p.values.row_stride == row_bytes(p.values.format, p.values.dim);
    return is_long && is_dense && p.segments[task.segment].positions == nullptr && p.block_size % EDGE == 0 &&
           (sweeps_unit(task) || sweeps_direct(task));
  }

  // Whether the tile unit computes with them: it wants keys and values of one format, bf16, fp8_e4m3 or q4_0, in whole steps.
  bool sweeps_unit(const Task& task) const {
    const auto are_even = [&](int step) { return p.keys.dim % step == 0 && p.values.dim % step == 0; };
    if (shape.has_q4_unit())
      return are_even(SPAN) && std::max(p.keys.dim, p.values.dim) <= MAX_SPANS * SPAN && rows_of_head(task) <= UNIT_FEW;
    const bool is_known = p.keys.format == p.values.format && (p.keys.format == BF16 || p.keys.format == FP8);
    return is_known && are_even(DEPTH) && shape.scores_amx(rows_of_head(task));
  }

  bool sweeps_direct(const Task& task) const {
    return rows_of_head(task) <= DIRECT_MOST && shape.keys.score_whole[0] != nullptr &&
           shape.values.mix_whole[0] != nullptr;
  }

  // What sweeps read of some slots: those that all queries see, in whole steps.
  Span swept(const Task& task, const Work& s, Span slots) const {
    const int64_t step = sweeps_unit(task) ? EDGE : TILE, first = p.segments[task.segment].first_position;
    const int64_t begin = std::max(slots.begin, s.seen_by_all.begin - first);
    const int64_t end = std::min(slots.end, s.seen_by_all.end - first);
    const Span whole = {(begin + step - 1) / step * step, end / step * step};
    return sweeps(task) && whole.begin < whole.end ? whole : Span{slots.end, slots.end};
  }

  template <class S>
  void next_sweep(const Task& task, Cursor& at, S& sweep) const {
    const Segment& segment = p.segments[task.segment];
    sweep.count = 0, sweep.keys.clear(), sweep.values.clear();
    for (; at.unit_begin < at.end && sweep.count < S::SIZE; move_on(task, at)) {
      const int slots = int(std::min<int64_t>(at.size, at.unit_end - at.slot));
      auto& tile = sweep.tiles[sweep.count++];
      tile.head = at.head;
      const bool is_first = at.head == task.head_begin;
      find_whole(segment, p.keys, p.block_size, at.slot, slots, at.head, is_first, sweep.keys, tile.keys);
      find_whole(segment, p.values, p.block_size, at.slot, slots, at.head, is_first, sweep.values, tile.values);
    }
  }

  void run_sweep(const Task& task, const DirectSweep& sweep, const DirectSweep& next, const Scratch& s) const {
    kv::run_sweep(shape, sweep, next, task.head_begin, task.query_end - task.query_begin, p.group, s);
  }

#if defined(KV_BF16)
  template <class S>
  void run_sweep(const Task& task, const S& sweep, const S& next, const Scratch& s) const {
    const int rows = rows_of_head(task);
    const auto run = [&](auto columns) {
      constexpr int N = decltype(columns)::value;
      if constexpr (std::is_same_v<S, UnitSweep>)
        run_phases<UnitScores<BF16, N>, UnitMixes<BF16>>(shape, sweep, next, task.head_begin, rows, s);
      else if (p.keys.format == FP8)
        run_phases<UnitScores<FP8, N>, UnitMixes<FP8>>(shape, sweep, next, task.head_begin, rows, s);
      else
        run_phases<Q4Scores<N>, Q4Mixes>(shape, sweep, next, task.head_begin, rows, s);
    };
    columns_of(rows) == 4 ? run(std::integral_constant<int, 4>()) : run(std::integral_constant<int, 8>());
  }
#endif

  template <class S>
  void run_sweeps(const Task& task, Span slots, const Work& s) const {
    Cursor cursor = start(task, slots, S::SLOTS, {slots.end, slots.end});
    S sweeps[2];
    next_sweep(task, cursor, sweeps[0]);
    fetch_first(sweeps[0].keys, sweeps[0].values, lead(sweeps[0]));
    for (int at = 0; sweeps[at].count > 0; at ^= 1) {
      next_sweep(task, cursor, sweeps[at ^ 1]);
      link(sweeps[at], sweeps[at ^ 1]);
      run_sweep(task, sweeps[at], sweeps[at ^ 1], s);
    }
  }

  // Fills `tile` with the cursor's slots, or the next ones that some query sees, and moves on; false at the end.
  bool next_tile(const Task& task, const Work& s, Cursor& at, Tile& tile) const {
    const Segment& segment = p.segments[task.segment];
    // Many rows read a tile for so long that its blocks are found meanwhile; blocks of a few slots are too many.
    const bool asks_early = rows_of_head(task) <= FEW_ROWS && p.block_size >= EDGE && p.block_size < WIDE;
    for (; at.unit_begin < at.end; move_on(task, at)) {
      const int count = int(std::min<int64_t>(at.size, at.unit_end - at.slot));
      if (!place_tile(segment, s.seen, at.slot, count, tile)) continue;
      tile.head = at.head;
      const bool is_early = asks_early && at.head == task.head_begin;
      find_rows(segment, p.keys, p.block_size, is_early, tile, tile.keys, tile.key_lines);
      find_rows(segment, p.values, p.block_size, is_early, tile, tile.values, tile.value_lines);
      move_on(task, at);
      return true;
    }
    tile.key_lines.clear(), tile.value_lines.clear();
    return false;
  }

  // Calls `f` with each tile of some slots and the one after it, but for those that sweeps read; `meanwhile` is called when
  // the first is known and on its way.
  template <class G, class F>
  void for_tiles(const Task& task, Span slots, Span without, const Work& s, G&& meanwhile, F&& f) const {
    Cursor cursor = start(task, slots, TILE, without);
    Tile tiles[2];
    bool more = next_tile(task, s, cursor, tiles[0]);
    if (more) fetch_first(tiles[0].key_lines, tiles[0].value_lines, lead(tiles[0]));
    meanwhile();
    for (int at = 0; more; at ^= 1) {
      more = next_tile(task, s, cursor, tiles[at ^ 1]);
      f(tiles[at], tiles[at ^ 1]);
    }
  }

#if defined(KV_BF16)
  void next_group(const Task& task, const Work& s, Cursor& at, TileGroup& group) const {
    group.count = 0, group.keys.clear(), group.values.clear();
    while (group.count < s.lanes.group_size && next_tile(task, s, at, group.tiles[group.count])) {
      const Tile& tile = group.tiles[group.count++];
      group.keys.add(tile.key_lines), group.values.add(tile.value_lines);
    }
  }

  void run_groups(const Task& task, Span slots, const Work& s) const {
    Cursor cursor = start(task, slots, TILE, {slots.end, slots.end});
    TileGroup* groups = s.lanes.groups.get();
    next_group(task, s, cursor, groups[0]);
    bool is_first = true;
    for (int at = 0; groups[at].count > 0; at ^= 1, is_first = false) {
      next_group(task, s, cursor, groups[at ^ 1]);
      GroupRun(shape, groups[at], groups[at ^ 1], task.head_begin, s.lanes).run(is_first);
    }
  }
#endif

  void run_chunk(const Task& task, int64_t chunk, const Work& s) const {
    const Span slots = {std::max(task.slot_begin, chunk * task.chunk_size),
                        std::min(task.slot_end, (chunk + 1) * task.chunk_size)};
    const int rows = rows_of(task), queries = task.query_end - task.query_begin, width = shape.values.width;
#if defined(KV_BF16)
    if (shape.in_lanes(rows_of_head(task))) {
      s.lanes.start(task.head_end - task.head_begin, width);
      return run_groups(task, slots, s);
    }
#endif
    std::fill_n(s.output.at, size_t(rows) * width, 0.0f);
    std::fill_n(s.m.at, rows, NOTHING);
    std::fill_n(s.l.at, rows, 0.0f);
    const Span whole = swept(task, s, slots);
    const auto sweep = [&] {
      if (whole.begin == whole.end) return;
#if defined(KV_BF16)
      if (sweeps_unit(task) && p.keys.format == BF16) return run_sweeps<UnitSweep>(task, whole, s);
      if (sweeps_unit(task)) return run_sweeps<ExpandedSweep>(task, whole, s);
#endif
      run_sweeps<DirectSweep>(task, whole, s);
    };
    for_tiles(task, slots, whole, s, sweep, [&](const Tile& tile, const Tile& next) {
      run_tile(shape, tile, next, (tile.head - task.head_begin) * rows_of_head(task), queries, p.group, s);
    });
  }

  void run_item(const Item& item, Work& s) {
    const Task& task = tasks[size_t(item.task)];
    reserve(task, s);
    pack_queries(task, s);
    for (int64_t c = item.chunk_begin; c < item.chunk_end; c++) {
      run_chunk(task, c, s);
      if (task.num_chunks == 1) return finish_only(task, s);
#if defined(KV_BF16)
      if (shape.in_lanes(rows_of_head(task))) s.lanes.store_rows(task.head_end - task.head_begin, shape.values.width, s);
#endif
      const int64_t rows = rows_of(task), row = task.partial_row + (c - task.first_chunk) * rows;
      std::copy_n(s.output.at, rows * shape.values.width, partial_output.get() + row * shape.values.width);
      std::copy_n(s.m.at, rows, partial_m.get() + row);
      std::copy_n(s.l.at, rows, partial_l.get() + row);
    }
    const int64_t done = item.chunk_end - item.chunk_begin;
    if (remaining[size_t(item.task)].fetch_sub(done, std::memory_order_acq_rel) != done) return;
    merge(task, s);
    finish(task, s);
  }

  // The chunks of a task, in their order, into the state in scratch.
  void merge(const Task& task, const Work& s) const {
    const int64_t rows = rows_of(task), width = shape.values.width;
    for (int64_t r = 0; r < rows; r++) {
      float m = NOTHING, l = 0.0f;
      for (int64_t c = 0; c < task.num_chunks; c++) m = std::max(m, partial_m[size_t(task.partial_row + c * rows + r)]);
      float* out = s.output.at + r * width;
      std::fill_n(out, width, 0.0f);
      for (int64_t c = 0; c < task.num_chunks; c++) {
        const int64_t row = task.partial_row + c * rows + r;
        const float weight = shrinking(partial_m[size_t(row)], m);
        const float* from = partial_output.get() + row * width;
        for (int64_t i = 0; i < width; i++) out[i] += weight * from[i];
        l += weight * partial_l[size_t(row)];
      }
      s.m.at[r] = m, s.l.at[r] = l;
    }
  }

  // What the output of a row is multiplied with in the end.
  float factor_of(int64_t head, float m, float l) const {
    float factor = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = p.sinks[head] * LOG2E, top = std::max(m, sink);
      factor = shrinking(m, top);
      l = l * factor + (sink == NOTHING ? 0.0f : exp2(splat(sink - top))[0]);
    }
    return l == 0.0f ? 0.0f : factor / l;  // NaN stays
  }

  // Divides, restores the order of the values, and writes.
  void finish(const Task& task, const Work& s) const {
    const int dim = shape.value_dim, width = shape.values.width, rows = rows_of_head(task);
    const int* places = shape.values.places.data();
    const bool in_order = shape.in_lanes(rows);
    float values[MAX_DIM];
    const float* from = s.output.at;
    int at = 0;
    for (int h = task.head_begin; h < task.head_end; h++)
      for (int r = 0; r < rows; r++, at++, from += width) {
        const float factor = factor_of(query_head(h, r), s.m.at[at], s.l.at[at]);
        for (int i = 0; i < dim; i++) values[i] = from[in_order ? i : places[i]] * factor;
        write_row(p.output.base, place_of(p.output, task, h, r), p.output.format, dim, values);
      }
  }

  // The same for a task of one chunk, whose rows in lanes are there still.
  void finish_only(const Task& task, const Work& s) const {
#if defined(KV_BF16)
    if (shape.in_lanes(rows_of_head(task))) return finish_lanes(task, s);
#endif
    finish(task, s);
  }

#if defined(KV_BF16)
  // Rows in lanes: their output is bf16 as their queries are.
  void finish_lanes(const Task& task, const Work& s) const {
    const Lanes& lanes = s.lanes;
    const int dim = shape.value_dim, width = shape.values.width;
    size_t b = 0;
    for (int h = task.head_begin; h < task.head_end; h++)
      for (int begin = 0; begin < lanes.bands * EDGE; begin += EDGE, b++) {
        alignas(64) float factors[EDGE] = {};
        uint16_t* to[EDGE] = {};
        const int count = std::min(EDGE, lanes.num_rows - begin);
        for (int i = 0; i < count; i++) {
          factors[i] = factor_of(query_head(h, begin + i), lanes.m.at[b * EDGE + i], lanes.l.at[b * EDGE + i]);
          to[i] = static_cast<uint16_t*>(p.output.base) + place_of(p.output, task, h, begin + i);
        }
        if (count > 0)
          lanes.transpose_band(b, width, load<vf>(factors), [&](int i, int c, vf columns) {
            const __mmask16 wanted = _cvtu32_mask16((1u << std::clamp(dim - c, 0, EDGE)) - 1);
            if (i < count) _mm256_mask_storeu_epi16(to[i] + c, wanted, (__m256i)_mm512_cvtneps_pbh((__m512)columns));
          });
      }
  }
#endif
};

}  // namespace kv
