// Many rows with the tile unit (`amx.h`): a lane for each row, from the scores to the output.
//
// The rows of a head go in *bands* of 16. Scores come out as [slots][16 rows], so that maximum, exponential and sum need no
// step across lanes; two slots of weights packed into bf16 pairs are the right operand of the second product:
//
//   scores^T  [slots][rows]   =  keys [slots][dim]       .  queries^T [dim/2][rows]
//   output^T  [width][rows]  +=  values^T [width][slots] .  weights^T [slots/2][rows]
//
// A group of tiles stays in the second-level cache, with its values transposed once; two bands at a time, whose queries and
// output stay in the first level, meet one tile of it after the other. While two bands are softened, the unit scores them with
// their next tile, and mixes what it has scored before. (A tile that some row of a pair sees is computed with for all its rows:
// 0 times a value that is not finite is NaN.)
#pragma once

#include <memory>

#include "bands.h"

namespace kv {

#if defined(KV_BF16)

// What the queries of a band see: positions from the lowest and highest `begin` to the lowest and highest `end`.
struct Sight {
  int32_t lowest_begin, highest_begin, lowest_end, highest_end;

  bool sees_some(const Places& tile) const { return lowest_begin <= tile.highest && highest_end > tile.lowest; }
  bool sees_all(const Places& tile) const { return tile.full && highest_begin <= tile.lowest && lowest_end > tile.highest; }
};

// Tiles that a task turns to together.
struct TileGroup {
  static constexpr int SIZE = 4;
  static constexpr int VALUES = 1 << 17;  // of keys and values: with a task's queries and output they stay in the second level

  int count;
  Tile tiles[SIZE];
  Lines<SIZE * TILE> keys, values;
};

struct Visit {  // of two bands of a head, the first of which is number `band`, to a tile
  int band, tile;
};

// The state of the rows of one task that go in lanes, in bands; heads begin at a whole number of pairs of bands.
struct Lanes {
  Buffer<uint32_t> queries, weights;  // [bands][dim / 32][16][16]; [2][BANDS][TILE / 2][16]
  Buffer<uint16_t> keys, values;      // of a group: expanded, where they have to be; values^T [width][TILE] of each tile
  Buffer<uint16_t> stored_values;     // of a tile: expanded, where they have to be
  Buffer<float> output, scores;       // [bands][width][16]; [2][BANDS][TILE][16]
  Buffer<float> m, l, correction;     // of all rows; of two bands
  Buffer<int32_t> begins, ends;       // of the rows of a head
  std::vector<Sight> sights;          // of the bands of a head
  Buffer<Visit> visits;               // in a group
  std::unique_ptr<TileGroup[]> groups;  // two
  int num_rows, bands;                  // of a head
  int group_size;                       // tiles

  void reserve(int heads, int rows, int key_width, int width) {
    if (groups == nullptr) groups.reset(new TileGroup[2]);
    num_rows = rows, bands = round_up(rows, EDGE * BANDS) / EDGE;
    const size_t all = size_t(heads) * bands;
    queries.reserve(all * EDGE * key_width / 2);
    weights.reserve(2 * BANDS * TILE / 2 * EDGE);
    group_size = std::clamp(TileGroup::VALUES / (TILE * (key_width + width)), 1, TileGroup::SIZE);
    keys.reserve(size_t(group_size) * TILE * key_width), values.reserve(size_t(group_size) * TILE * width);
    stored_values.reserve(size_t(TILE) * width);
    output.reserve(all * EDGE * width);
    scores.reserve(2 * BANDS * TILE * EDGE);
    m.reserve(all * EDGE), l.reserve(all * EDGE), correction.reserve(BANDS * EDGE);
    begins.reserve(size_t(bands) * EDGE), ends.reserve(size_t(bands) * EDGE);
    sights.resize(size_t(bands)), visits.reserve(size_t(group_size) * bands / BANDS);
  }

  // What the rows of a head see: those of query q [query_begins[q], query_ends[q]).
  void set_sights(const int32_t* query_begins, const int32_t* query_ends, int group) {
    for (int b = 0; b < bands; b++) {
      Sight& sight = sights[size_t(b)];
      sight = {std::numeric_limits<int32_t>::max(), 0, std::numeric_limits<int32_t>::max(), 0};
      for (int r = b * EDGE; r < (b + 1) * EDGE; r++) {
        begins.at[r] = r < num_rows ? query_begins[r / group] : 0;
        ends.at[r] = r < num_rows ? query_ends[r / group] : 0;
        if (r >= num_rows) continue;
        sight.lowest_begin = std::min(sight.lowest_begin, begins.at[r]);
        sight.highest_begin = std::max(sight.highest_begin, begins.at[r]);
        sight.lowest_end = std::min(sight.lowest_end, ends.at[r]);
        sight.highest_end = std::max(sight.highest_end, ends.at[r]);
      }
    }
  }

  void start(int heads, int width) const {
    const size_t all = size_t(heads) * bands * EDGE;
    std::fill_n(output.at, all * width, 0.0f);
    std::fill_n(m.at, all, NOTHING);
    std::fill_n(l.at, all, 0.0f);
  }

  // Hands over the output of band b times `factor`, a row's columns [c, c + 16) at a time: to(row of the band, c, columns).
  template <class F>
  KV_INLINE void transpose_band(size_t b, int width, vf factor, F&& to) const {
    const float* from = output.at + b * width * EDGE;
    for (int c = 0; c < width; c += EDGE) {
      vu t[EDGE];
#pragma GCC unroll 16
      for (int i = 0; i < EDGE; i++) t[i] = bits<vu>(load<vf>(from + (c + i) * EDGE) * factor);
      transpose(t);
      for (int i = 0; i < EDGE; i++) to(i, c, bits<vf>(t[i]));
    }
  }

  // The state into rows, whose columns hold the values in their order.
  void store_rows(int heads, int width, const Scratch& s) const {
    for (int h = 0; h < heads; h++) {
      std::copy_n(m.at + size_t(h) * bands * EDGE, num_rows, s.m.at + size_t(h) * num_rows);
      std::copy_n(l.at + size_t(h) * bands * EDGE, num_rows, s.l.at + size_t(h) * num_rows);
      for (int r = 0; r < num_rows; r += EDGE)
        transpose_band(size_t(h) * bands + r / EDGE, width, splat(1.0f), [&](int i, int c, vf columns) {
          if (r + i < num_rows) store(s.output.at + (size_t(h) * num_rows + r + i) * width + c, columns);
        });
    }
  }
};

// A group of tiles for all rows of a task, while the lines of the next group are fetched.
class GroupRun {
 public:
  GroupRun(const Shape& shape, const TileGroup& group, const TileGroup& next, int first_head, const Lanes& lanes)
      : shape(shape), group(group), next(next), first_head(first_head), lanes(lanes) {}

  // `is_first`: nobody has fetched the lines of this group yet.
  void run(bool is_first) {
    const int visits = find_visits(), lines = next.keys.num_lines + next.values.num_lines;
    Ahead ahead(next.keys, next.values, {}, {}, 0, lines, group.count * 2 * TILE + visits * BANDS * PARTS * PART_WORK);
    find_operands(is_first, ahead);
    if (visits > 0) score(0).finish();
    Beside<Mixing> mixing;
    for (int i = 0; i < visits; i++) {
      Beside<Scoring> scoring = i + 1 < visits ? score(i + 1) : Beside<Scoring>();
      soften(i, 0, scoring, ahead);
      soften(i, 1, mixing, ahead);
      const uint16_t* values = lanes.values.at + size_t(lanes.visits.at[i].tile) * TILE * width;
      float* output = lanes.output.at + first_band(i) * EDGE * width;
      for (int b = 0; b < BANDS; b++) correct(lanes.correction.at + b * EDGE, width, output + size_t(b) * EDGE * width);
      mixing = {{values, weights(i), width, output}, width / EDGE};
    }
    mixing.finish();
  }

 private:
  const Shape& shape;
  const TileGroup &group, &next;
  const int first_head;
  const Lanes& lanes;
  const int depth = round_up(shape.key_dim, DEPTH), width = shape.values.width;
  const size_t stride = size_t(depth) / 2 * EDGE;  // of a band's queries
  Sixteen keys[TileGroup::SIZE][TILE / EDGE];

  void find_operands(bool is_first, Ahead& ahead) {
    const auto fetch = [&](int t) {
      if (!is_first || t >= group.count) return;
      const Tile& tile = group.tiles[t];
      fetch_first(tile.value_lines, tile.key_lines, tile.value_lines.num_lines + tile.key_lines.num_lines);
    };
    fetch(0);
    for (int t = 0; t < group.count; t++) {
      const Tile& tile = group.tiles[t];
      Sixteen values[TILE / EDGE];
      fetch(t + 1);
      shape.values.find_sixteens(tile.values, tile.slots, shape.value_dim, lanes.stored_values.at, values, ahead);
      turn_values(values, width, lanes.values.at + size_t(t) * TILE * width);
      shape.keys.find_sixteens(tile.keys, tile.slots, shape.key_dim, lanes.keys.at + size_t(t) * TILE * depth, keys[t], ahead);
    }
  }

  // Two bands after the other, each pair to the tiles of its head that some of its rows see; how many.
  int find_visits() const {
    int count = 0;
    for (int begin = 0, end = 0; begin < group.count; begin = end) {
      while (end < group.count && group.tiles[end].head == group.tiles[begin].head) end++;
      for (int band = 0; band < lanes.bands; band += BANDS)
        for (int tile = begin; tile < end; tile++)
          if (sees(band, tile) || sees(band + 1, tile)) lanes.visits.at[count++] = {band, tile};
    }
    return count;
  }

  bool sees(int band, int tile) const { return lanes.sights[size_t(band)].sees_some(group.tiles[tile]); }

  // Of the two bands of visit i, among those of all heads.
  size_t first_band(int i) const {
    const Visit& visit = lanes.visits.at[i];
    return size_t(group.tiles[visit.tile].head - first_head) * lanes.bands + visit.band;
  }

  // Those of a visit are wanted until the one after it has its own.
  float* scores(int i) const { return lanes.scores.at + size_t(i % 2) * BANDS * TILE * EDGE; }
  uint32_t* weights(int i) const { return lanes.weights.at + size_t(i % 2) * BANDS * TILE / 2 * EDGE; }

  Beside<Scoring> score(int i) const {
    const uint32_t* queries = lanes.queries.at + first_band(i) * stride;
    return {{keys[lanes.visits.at[i].tile], queries, stride, depth, scores(i)}, 2 * depth / DEPTH};
  }

  // Band b of the two of visit i.
  template <class Products>
  void soften(int i, int b, Beside<Products>& beside, Ahead& ahead) const {
    const Visit& visit = lanes.visits.at[i];
    const Tile& tile = group.tiles[visit.tile];
    const int row = (visit.band + b) * EDGE;  // of the head
    const size_t state = (first_band(i) + b) * EDGE;
    const Band band = {lanes.begins.at + row,
                       lanes.ends.at + row,
                       scores(i) + b * TILE * EDGE,
                       weights(i) + b * TILE / 2 * EDGE,
                       lanes.m.at + state,
                       lanes.l.at + state,
                       lanes.correction.at + b * EDGE};
    const bool is_plain = shape.softcap == 0.0f && shape.scale > 0.0f;
    if (row >= lanes.num_rows) {  // no rows: the state stays
      std::fill_n(band.weights, TILE / 2 * EDGE, 0);
      std::fill_n(band.correction, EDGE, 1.0f);
    } else if (is_plain && lanes.sights[size_t(visit.band + b)].sees_all(tile)) {
      soften_band<true>(shape, tile, band, beside, ahead);
    } else {
      soften_band<false>(shape, tile, band, beside, ahead);
    }
    beside.finish();
  }
};

#endif

}  // namespace kv
