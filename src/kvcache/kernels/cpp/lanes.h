// Many rows with the tile unit (`amx.h`): a lane for each row, from the scores to the output.
//
// The rows of a head go in *bands* of 16. Scores come out as [slots][16 rows], so that maximum, exponential and sum need no
// step across lanes; two slots of weights packed into bf16 pairs are the right operand of the second product:
//
//   scores^T  [slots][rows]   =  keys [slots][dim]       .  queries^T [dim/2][rows]
//   output^T  [width][rows]  +=  values^T [width][slots] .  weights^T [slots/2][rows]
//
// Values are transposed once per tile and task. While one pair of bands is softened, the unit scores the next. (A tile that
// some row of a pair sees is computed with for all its rows: 0 times a value that is not finite is NaN.)
#pragma once

#include "tile.h"

namespace kv {

#if defined(KV_BF16)

constexpr int BANDS = 2;  // at a time, so that an operand that was loaded serves twice

// What the queries of a band see: positions from the lowest and highest `begin` to the lowest and highest `end`.
struct Sight {
  int32_t lowest_begin, highest_begin, lowest_end, highest_end;

  bool sees_some(const Places& tile) const { return lowest_begin <= tile.highest && highest_end > tile.lowest; }
  bool sees_all(const Places& tile) const { return tile.full && highest_begin <= tile.lowest && lowest_end > tile.highest; }
};

// The state of the rows of one task that go in lanes, in bands; heads begin at a whole number of pairs of bands.
struct Lanes {
  Buffer<uint32_t> queries, weights;  // [bands][dim / 32][16][16]; [BANDS][TILE / 2][16]
  Buffer<uint16_t> keys, stored_values, values;  // of a tile: expanded, where they have to be; values^T [width][TILE]
  Buffer<float> output, scores;  // [bands][width][16]; [2][BANDS][TILE][16]
  Buffer<float> m, l, correction;
  Buffer<int32_t> begins, ends;  // of the rows of a head
  std::vector<Sight> sights;     // of the bands of a head
  int num_rows, bands;           // of a head

  void reserve(int heads, int rows, int key_width, int width) {
    num_rows = rows, bands = round_up(rows, EDGE * BANDS) / EDGE;
    const size_t all = size_t(heads) * bands;
    queries.reserve(all * EDGE * key_width / 2);
    weights.reserve(BANDS * TILE / 2 * EDGE);
    keys.reserve(size_t(TILE) * key_width), stored_values.reserve(size_t(TILE) * width), values.reserve(size_t(TILE) * width);
    output.reserve(all * EDGE * width);
    scores.reserve(2 * BANDS * TILE * EDGE);
    m.reserve(all * EDGE), l.reserve(all * EDGE), correction.reserve(BANDS * EDGE);
    begins.reserve(size_t(bands) * EDGE), ends.reserve(size_t(bands) * EDGE);
    sights.resize(size_t(bands));
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

  // The state into rows, whose columns hold the values in their order.
  void finish(int heads, int width, const Scratch& s) const {
    for (int h = 0; h < heads; h++) {
      std::copy_n(m.at + size_t(h) * bands * EDGE, num_rows, s.m.at + size_t(h) * num_rows);
      std::copy_n(l.at + size_t(h) * bands * EDGE, num_rows, s.l.at + size_t(h) * num_rows);
      for (int r = 0; r < num_rows; r += EDGE) {
        const float* from = output.at + (size_t(h) * bands + r / EDGE) * width * EDGE;
        for (int c = 0; c < width; c += EDGE) {
          vu t[EDGE];
          for (int i = 0; i < EDGE; i++) t[i] = load<vu>(from + (c + i) * EDGE);
          transpose(t);
          for (int i = 0; i < EDGE && r + i < num_rows; i++)
            store(s.output.at + (size_t(h) * num_rows + r + i) * width + c, t[i]);
        }
      }
    }
  }
};

// scores[2][TILE][16] = keys . queries of two bands, which lie `stride` apart.
inline void score_bands(const Sixteen* keys, const uint32_t* queries, size_t stride, int depth, float* scores) {
  float* second = scores + TILE * EDGE;
  for (int half = 0; half < 2; half++, keys += 2) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    const uint32_t* q = queries;
    for (int d = 0; d < depth; d += DEPTH, q += EDGE * EDGE) {
      tile_load<4>(keys[0].at + 2 * d, keys[0].step);
      tile_load<6>(q, 64), tile_dot<0, 4, 6>();
      tile_load<7>(q + stride, 64), tile_dot<1, 4, 7>();
      tile_load<5>(keys[1].at + 2 * d, keys[1].step), tile_dot<2, 5, 6>();
      tile_dot<3, 5, 7>();
    }
    tile_store<0>(scores + half * 2 * EDGE * EDGE, 64), tile_store<2>(scores + (half * 2 + 1) * EDGE * EDGE, 64);
    tile_store<1>(second + half * 2 * EDGE * EDGE, 64), tile_store<3>(second + (half * 2 + 1) * EDGE * EDGE, 64);
  }
}

// Scores of a band [TILE][16] become weights, two slots a bf16 pair; the state of its rows moves on.
template <bool PLAIN>
inline void soften_band(const Shape& shape, const Places& tile, const int32_t* begins, const int32_t* ends, float* scores,
                        uint32_t* weights, float* m, float* l, float* correction, const float* output, int width) {
  const float factor = shape.softcap == 0.0f ? shape.scale * LOG2E : shape.scale / shape.softcap;
  vf highest[4] = {splat(NOTHING), splat(NOTHING), splat(NOTHING), splat(NOTHING)};
  if (PLAIN) {
    for (int j = 0; j < TILE; j += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) highest[i] = maximum(load<vf>(scores + (j + i) * EDGE), highest[i]);
  } else {
    const vi begin = load<vi>(begins), end = load<vi>(ends);
    for (int j = 0; j < TILE; j++) {
      vf x = load<vf>(scores + j * EDGE) * splat(factor);
      if (shape.softcap != 0.0f) x = tanh(x) * splat(shape.softcap * LOG2E);
      const vi position = (vi)splat_u(uint32_t(tile.positions[j]));
      x = (position >= begin) & (position < end) ? x : splat(NOTHING);
      store(scores + j * EDGE, x);
      highest[j % 4] = maximum(x, highest[j % 4]);
    }
  }
  const vf most = maximum(maximum(highest[0], highest[1]), maximum(highest[2], highest[3])) * splat(PLAIN ? factor : 1.0f);
  const vf before = load<vf>(m), after = maximum(before, most), shrunk = shrinking(before, after);
  const vf top = after == splat(NOTHING) ? splat(0.0f) : after;  // nothing seen yet: weights of zero
  alignas(64) static const uint16_t pairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(pairs);
  vf total[2] = {splat(0.0f), splat(0.0f)};
#pragma GCC unroll 2
  for (int j = 0; j < TILE; j += 2) {
    vf w[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const vf x = load<vf>(scores + (j + i) * EDGE);
      w[i] = exp2(PLAIN ? x * splat(factor) - top : x - top);
      total[i] += w[i];
    }
    for (int i = 0; i < width / (TILE / 2); i++, output += EDGE) __builtin_prefetch(output, 0, 3);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]);
    _mm512_store_si512(weights + j / 2 * EDGE, _mm512_permutexvar_epi16(order, both));
  }
  store(l, load<vf>(l) * shrunk + (total[0] + total[1]));
  store(m, after);
  store(correction, shrunk);
}

// values^T [width][TILE] of bf16 rows.
inline void turn_values(const Sixteen* rows, int width, uint16_t* to) {
  for (int k = 0; k < TILE; k += DEPTH, rows += 2)
    for (int d = 0; d < width; d += DEPTH) {
      vu t[2][EDGE];
#pragma GCC unroll 16
      for (int i = 0; i < EDGE; i++) {
        const Sixteen& from = rows[i / 8];
        const uint8_t* at = from.at + i % 8 * 2 * from.step + 2 * d;
        const __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + from.step);
        t[0][i] = (vu)_mm512_unpacklo_epi16(a, b), t[1][i] = (vu)_mm512_unpackhi_epi16(a, b);
      }
      transpose(t[0]), transpose(t[1]);
#pragma GCC unroll 16
      for (int i = 0; i < EDGE; i++)  // lane i of unpacked values
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) store(to + size_t(d + i / 4 * 8 + v * 4 + i % 4) * TILE + k, t[v][i]);
    }
}

// output[2][width][16] = output * correction + values^T . weights for two bands.
inline void mix_bands(const uint16_t* values, const uint32_t* weights, int width, const float* correction, float* output) {
  for (int b = 0; b < BANDS; b++) {
    const __m512 c = _mm512_load_ps(correction + b * EDGE), one = _mm512_set1_ps(1.0f);
    if (_mm512_cmpneq_ps_mask(c, one) == 0) continue;
    float* to = output + size_t(b) * width * EDGE;
    for (int d = 0; d < width; d++, to += EDGE) _mm512_store_ps(to, _mm512_mul_ps(_mm512_load_ps(to), c));
  }
  float* second = output + size_t(width) * EDGE;
  tile_load<4>(weights, 64), tile_load<5>(weights + EDGE * EDGE, 64);
  tile_load<6>(weights + 2 * EDGE * EDGE, 64), tile_load<7>(weights + 3 * EDGE * EDGE, 64);
  for (int d = 0; d < width; d += EDGE) {
    const uint16_t* v = values + size_t(d) * TILE;
    tile_load<0>(output + d * EDGE, 64), tile_load<1>(second + d * EDGE, 64);
    tile_load<2>(v, 2 * TILE), tile_load<3>(v + DEPTH, 2 * TILE);
    tile_dot<0, 2, 4>(), tile_dot<1, 2, 6>();
    tile_dot<0, 3, 5>(), tile_dot<1, 3, 7>();
    tile_store<0>(output + d * EDGE, 64), tile_store<1>(second + d * EDGE, 64);
  }
}

// `run_tile` for rows in lanes: the whole of one tile, for the rows of the task's head number `head`.
inline void run_tile_lanes(const Shape& shape, const Tile& tile, const Tile& next, int head, const Lanes& lanes) {
  const int depth = round_up(shape.key_dim, DEPTH), width = shape.values.width;
  const auto sees = [&](int b) {
    return lanes.sights[size_t(b)].sees_some(tile) || lanes.sights[size_t(b) + 1].sees_some(tile);
  };
  int first = 0, last = lanes.bands;
  while (first < last && !sees(first)) first += BANDS;
  while (last > first && !sees(last - BANDS)) last -= BANDS;
  if (first == last) return;
  Ahead ahead(tile.key_lines, tile.value_lines, next.key_lines, next.value_lines, lead(tile),
              tile.key_lines.num_lines + tile.value_lines.num_lines - lead(tile) + lead(next),
              2 * tile.slots + (last - first) / BANDS * 16);
  Sixteen keys[TILE / EDGE], values[TILE / EDGE];
  shape.keys.find_sixteens(tile.keys, tile.slots, shape.key_dim, lanes.keys.at, keys, ahead);
  shape.values.find_sixteens(tile.values, tile.slots, shape.value_dim, lanes.stored_values.at, values, ahead);
  turn_values(values, width, lanes.values.at);
  const bool is_plain = shape.softcap == 0.0f && shape.scale > 0.0f;
  const size_t base = size_t(head) * lanes.bands, stride = size_t(depth) / 2 * EDGE;
  const auto scores = [&](int b) { return lanes.scores.at + size_t(b / BANDS % 2) * BANDS * TILE * EDGE; };
  score_bands(keys, lanes.queries.at + (base + first) * stride, stride, depth, scores(first));
  for (int b = first; b < last; b += BANDS) {
    ahead.step<16>();
    if (b + BANDS < last)
      score_bands(keys, lanes.queries.at + (base + b + BANDS) * stride, stride, depth, scores(b + BANDS));
    for (int i = 0; i < BANDS; i++) {
      const size_t row = (base + b + i) * EDGE;
      if ((b + i) * EDGE >= lanes.num_rows) {  // no rows: the state stays
        std::fill_n(lanes.weights.at + i * TILE / 2 * EDGE, TILE / 2 * EDGE, 0);
        std::fill_n(lanes.correction.at + i * EDGE, EDGE, 1.0f);
        continue;
      }
      const auto f = is_plain && lanes.sights[size_t(b + i)].sees_all(tile) ? soften_band<true> : soften_band<false>;
      f(shape, tile, lanes.begins.at + (b + i) * EDGE, lanes.ends.at + (b + i) * EDGE, scores(b) + i * TILE * EDGE,
        lanes.weights.at + i * TILE / 2 * EDGE, lanes.m.at + row, lanes.l.at + row, lanes.correction.at + i * EDGE,
        lanes.output.at + (base + b + i) * width * EDGE, width);
    }
    mix_bands(lanes.values.at, lanes.weights.at, width, lanes.correction.at, lanes.output.at + (base + b) * width * EDGE);
  }
}

#endif

}  // namespace kv
