// (Longer than 300 lines: it is one pipeline, read from top to bottom.)
//
// One tile of one task: find its rows, decode them, score, soften, mix. Everything here runs inside one thread.
//
// The state of a row is its running maximum `m` (in base 2), the sum `l` of its weights, and its output, not yet divided.
// A slot that no query may see (outside the table, an empty slot) is read as a row of zeros, so that what lies in it, NaN
// included, cannot reach a result; a slot that some other query of the task sees has a weight of exactly 0.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "madd.h"
#include "vnni.h"

namespace kv {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Store {  // keys or values of one layer; strides in bytes
  const uint8_t* base;
  int64_t block_stride, head_stride, row_stride;
  int format, dim;
};

struct Segment {
  const int32_t* table;
  const int32_t* positions;  // padded to whole tiles with -1, or null: slot j holds first_position + j
  const int32_t* bounds;     // lowest and highest position of each tile, when there are `positions`
  const int32_t* rows;
  int64_t num_slots, first_position, num_rows;
};

using PackF32 = void (*)(const uint8_t* const*, Ahead&, int, int, float*, float*);
using PackPairs = void (*)(const uint8_t* const*, Ahead&, int, int, uint32_t*, float*);

template <class R>
using ScoreDirect = void (*)(const uint32_t*, R, float*, int, int, Ahead&);
template <class R>
using MixDirect = void (*)(const uint32_t*, size_t, R, int, float*, const float*, int, int, Ahead&);
using PackQuery = void (*)(const float*, int, uint8_t*);
using ScoreStored = void (*)(const uint8_t*, const uint8_t* const*, const float*, float*, int, int, Ahead&);
using Weigh = void (*)(const float*, const float*, int, int, float, uint8_t*, float*);
using FindSixteens = void (*)(const uint8_t* const*, int, int, uint16_t*, Sixteen*, Ahead&);
using MixStored = void (*)(const uint8_t*, const float*, const uint8_t* const*, int, float*, const float*, int, Ahead&);

// How one side is read: by which product, in which order, with which packer.
struct Reader {
  bool bf16 = false, scaled = false;
  bool fixed = false;  // few rows by `madd.h`
  PackF32 f32 = nullptr;
  PackPairs pairs = nullptr;
  ScoreDirect<Table> score_direct[4] = {};  // by rows - 1; null: tiles are packed
  MixDirect<Table> mix_direct[4] = {};
  ScoreDirect<const Quads&> score_whole[4] = {};  // null: whole tiles are like others
  MixDirect<const Quads&> mix_whole[4] = {};
  ScoreStored score_stored[4] = {};  // as `score_direct`, for queries of its own kind
  int query_width = 0;               // floats of such a query
  PackQuery pack_query = nullptr;    // null: values of f32 at `places`
  MixStored mix_stored[4] = {};      // as `mix_direct`, for weights of its own kind
  Weigh weigh = nullptr;             // null: weights of f32 as they are
  FindSixteens find_sixteens = nullptr;  // null: not for the tile unit
  int width = 0;  // places of a packed row
  std::vector<int> order;   // of keys: the value at each place
  std::vector<int> places;  // of values, and of keys whose queries nobody packs: the column of each

  void pack(const uint8_t* const* rows, Ahead& ahead, int slots, int dim, float* out, float* scales) const {
    if (bf16)
      pairs(rows, ahead, slots, dim, reinterpret_cast<uint32_t*>(out), scales);
    else
      f32(rows, ahead, slots, dim, out, scales);
  }
};

#if defined(KV_BF16)
template <bool WHOLE, class R>
void set_scores(ScoreDirect<R>* to) {
  const ScoreDirect<R> scores[] = {scores_direct<1, WHOLE, R>, scores_direct<2, WHOLE, R>, scores_direct<3, WHOLE, R>,
                                   scores_direct<4, WHOLE, R>};
  std::copy_n(scores, FEW_BLOCK, to);
}

template <int F, class R>
void set_mixes(MixDirect<R>* to) {
  const MixDirect<R> mixes[] = {mix_direct<F, 1, R>, mix_direct<F, 2, R>, mix_direct<F, 3, R>, mix_direct<F, 4, R>};
  std::copy_n(mixes, FEW_BLOCK, to);
}
#endif

template <int F>
void set_functions(Reader& reader, bool is_key, int dim) {
  reader.f32 = is_key ? pack_keys_f32<F> : pack_values_f32<F>;
#if KV_LANES == 8
  if constexpr (!is_quantised(F)) {
    const ScoreStored scores[] = {scores_direct_f32<F, 1>, scores_direct_f32<F, 2>, scores_direct_f32<F, 3>,
                                  scores_direct_f32<F, 4>};
    const MixStored mixes[] = {mix_direct_f32<F, 1>, mix_direct_f32<F, 2>, mix_direct_f32<F, 3>, mix_direct_f32<F, 4>};
    if (is_key) reader.query_width = value_columns(F, false, dim), std::copy_n(scores, FEW_BLOCK, reader.score_stored);
    if (!is_key) std::copy_n(mixes, FEW_BLOCK, reader.mix_stored);
  }
#endif
#if defined(KV_AVX2)
  if constexpr (is_quantised(F)) {
    if (!reader.fixed) return;
    const ScoreStored scores[] = {scores_fixed<F, 1>, scores_fixed<F, 2>, scores_fixed<F, 3>, scores_fixed<F, 4>};
    const MixStored mixes[] = {mix_fixed<F, 1>, mix_fixed<F, 2>, mix_fixed<F, 3>, mix_fixed<F, 4>};
    if (is_key) reader.query_width = dim, reader.pack_query = pack_query_fixed<F>;
    if (is_key) std::copy_n(scores, FEW_BLOCK, reader.score_stored);
    if (!is_key) reader.weigh = weigh_fixed, std::copy_n(mixes, FEW_BLOCK, reader.mix_stored);
  }
#endif
#if defined(KV_BF16)
  if constexpr (F >= BF16) {
    if (!reader.bf16) return;
    reader.pairs = is_key ? pack_keys_bf16<F> : pack_values_bf16<F>;
    if (!is_key) set_mixes<F>(reader.mix_direct);
    if constexpr (F == BF16) {
      const bool whole = dim % 32 == 0;  // vectors
      if (is_key) whole ? set_scores<true>(reader.score_direct) : set_scores<false>(reader.score_direct);
      if (is_key && whole) set_scores<true>(reader.score_whole);
      if (!is_key && whole) set_mixes<F>(reader.mix_whole);
    }
    reader.find_sixteens = find_sixteens<F>;
#if defined(KV_VNNI)
    if constexpr (is_quantised(F)) {
      const ScoreStored fixed[] = {scores_fixed<F, 1>, scores_fixed<F, 2>, scores_fixed<F, 3>, scores_fixed<F, 4>};
      if (is_key) reader.query_width = dim, reader.pack_query = pack_query_fixed<F>;
      if (is_key) std::copy_n(fixed, FEW_BLOCK, reader.score_stored);
    }
    const MixStored mixes_fixed[] = {mix_fixed<1>, mix_fixed<2>, mix_fixed<3>, mix_fixed<4>};
    if (F == Q8 && !is_key) reader.weigh = weigh_fixed, std::copy_n(mixes_fixed, FEW_BLOCK, reader.mix_stored);
#endif
  }
#endif
}

// bf16 products are for bf16 queries only, and for formats whose values or integers bf16 holds: who asks in f32 gets f32.
inline Reader make_reader(const Store& store, int query_format, bool is_key) {
  Reader reader;
#if defined(KV_BF16)
  reader.bf16 = query_format == BF16 && store.format >= BF16;
#endif
#if defined(KV_AVX2)
  reader.fixed = query_format == BF16 && is_quantised(store.format);
#endif
  reader.scaled = reader.bf16 && is_quantised(store.format);
  switch (store.format) {
    case F32: set_functions<F32>(reader, is_key, store.dim); break;
    case F16: set_functions<F16>(reader, is_key, store.dim); break;
    case BF16: set_functions<BF16>(reader, is_key, store.dim); break;
    case FP8: set_functions<FP8>(reader, is_key, store.dim); break;
    case Q8: set_functions<Q8>(reader, is_key, store.dim); break;
    default: set_functions<Q4>(reader, is_key, store.dim); break;
  }
  reader.width = is_key ? store.dim : value_columns(store.format, reader.bf16, store.dim);
  if (is_key) {
    reader.order.resize(size_t(store.dim));
    key_order(store.format, reader.bf16, store.dim, reader.order.data());
  }
  if (!is_key || (reader.score_stored[0] != nullptr && reader.pack_query == nullptr)) {
    reader.places.resize(size_t(store.dim));
    value_places(store.format, reader.bf16, store.dim, reader.places.data());
  }
  return reader;
}

struct Interval {  // positions [begin, end)
  int32_t begin, end;
};

// The union of the intervals [begins, ends), as few and ascending intervals.
inline void unite(const int32_t* begins, const int32_t* ends, int count, std::vector<Interval>& out) {
  out.clear();
  for (int i = 0; i < count; i++)
    if (begins[i] < ends[i]) out.push_back({begins[i], ends[i]});
  const auto earlier = [](const Interval& a, const Interval& b) { return a.begin < b.begin; };
  if (!std::is_sorted(out.begin(), out.end(), earlier)) std::sort(out.begin(), out.end(), earlier);
  size_t kept = 0;
  for (const Interval& next : out) {
    if (kept > 0 && next.begin <= out[kept - 1].end)
      out[kept - 1].end = std::max(out[kept - 1].end, next.end);
    else
      out[kept++] = next;
  }
  out.resize(kept);
}

// Whether some of the positions lowest..highest is seen. O(intervals), of which there is nearly always one.
inline bool intersects(const std::vector<Interval>& seen, int32_t lowest, int32_t highest) {
  for (const Interval& interval : seen)
    if (interval.begin <= highest && interval.end > lowest) return true;
  return false;
}

// Memory of one thread. It grows to what was needed and stays, so that its pages are touched once.
template <class T>
struct Buffer {
  std::unique_ptr<uint8_t[]> memory;
  size_t size = 0;
  T* at = nullptr;

  void reserve(size_t count) {
    if (count <= size) return;
    memory.reset(new uint8_t[count * sizeof(T) + 64]());
    at = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
    size = count;
  }
};

// The decoded keys of a tile are dead when its values are decoded: both use `tile`, half as much of the first-level cache.
struct Scratch {
  Buffer<float> queries, tile, key_scales, value_scales, scores, weights, multipliers, output, m, l, correction;
  Buffer<uint32_t> operands;     // queries for `unit_q4.h`
  Buffer<int32_t> begins, ends;  // of each query of the task
  std::vector<Interval> seen;    // positions that some query of the task sees: disjoint, ascending
  Interval seen_by_all;
};

struct Places {  // the positions of a tile's slots
  alignas(64) int32_t positions[TILE];  // -1: must not be seen
  int32_t lowest, highest;
  int slots;  // rows to decode, a multiple of LANES
  bool full;  // every one of TILE slots holds a position
};

struct Tile : Places {
  int64_t begin;  // its slots are [begin, begin + count) of the segment
  int count, head;
  const uint8_t *keys[TILE], *values[TILE];
  Lines<TILE> key_lines, value_lines;
};

// The positions of the slots [begin, begin + count) of a segment, without the rows. False when nobody sees any of them.
inline bool place_tile(const Segment& segment, const std::vector<Interval>& seen, int64_t begin, int count, Tile& tile) {
  const int32_t first = int32_t(segment.first_position + begin);
  const int32_t* bounds = segment.positions == nullptr ? nullptr : segment.bounds + begin / TILE * 2;
  tile.begin = begin, tile.count = count;
  tile.lowest = bounds == nullptr ? first : bounds[0];
  tile.highest = bounds == nullptr ? first + count - 1 : bounds[1];
  if (!intersects(seen, tile.lowest, tile.highest)) return false;
  if (bounds == nullptr)
    for (int j = 0; j < count; j++) tile.positions[j] = first + j;
  else
    std::copy_n(segment.positions + begin, count, tile.positions);
  std::fill(tile.positions + count, tile.positions + TILE, -1);
  tile.full = bounds == nullptr && count == TILE;
  tile.slots = round_up(count, LANES);
  if (bounds == nullptr && seen[0].begin <= tile.lowest && seen[0].end > tile.highest) return true;
  for (int j = 0; j < count; j++) {
    const int32_t position = tile.positions[j];
    if (position >= 0 && intersects(seen, position, position)) continue;
    tile.positions[j] = -1;
    tile.full = false;
  }
  return true;
}

// Where the rows of one side of a placed tile lie. Slots without a position get rows of zeros. `is_early`: the first lines of its
// blocks are asked for now, long before their turn, because what translates their addresses comes from memory, too.
inline void find_rows(const Segment& segment, const Store& store, int64_t block_size, bool is_early, Tile& tile,
                      const uint8_t** rows, Lines<TILE>& lines) {
  const int count = tile.count;
  lines.clear();
  const uint8_t* base = store.base + tile.head * store.head_stride;
  const int64_t bytes = row_bytes(store.format, store.dim);
  int64_t block = tile.begin / block_size, offset = tile.begin % block_size;
  for (int j = 0; j < count; block++, offset = 0) {
    const int run = int(std::min<int64_t>(block_size - offset, count - j));
    const uint8_t* row = base + segment.table[block] * store.block_stride + offset * store.row_stride;
    if (is_early && offset == 0) __builtin_prefetch(row, 0, 3);
    for (int i = 0; i < run; i++) rows[j + i] = row + i * store.row_stride;
    lines.add(row - reinterpret_cast<uintptr_t>(row) % 64, row + (run - 1) * store.row_stride + bytes);
    j += run;
  }
  if (tile.full) return;
  for (int j = count; j < TILE; j++) rows[j] = ZERO_ROW;
  for (int j = 0; j < count; j++)
    if (tile.positions[j] < 0) rows[j] = ZERO_ROW;
}

enum class Weights { FLOATS, PAIRS, HALVES };  // what scores become: f32 in their place, `store_pairs` or `store_halves`

// What all tiles of a call share.
struct Shape {
  Store key_store, value_store;
  Reader keys, values;
  int key_dim, value_dim;
  float scale, softcap;  // softcap 0: none
  bool amx;              // whether to use the tile unit

  // What sums of products are multiplied with: scores in base 2, or what a softcap takes.
  float score_factor() const { return softcap == 0.0f ? scale * LOG2E : scale / softcap; }

  // Keys of q8_0 and q4_0 stay integers times a scale: rounded to bf16 they gave weights that were off by 2 % for large ones.
  bool has_unit() const {
    return amx && keys.find_sixteens != nullptr && !keys.scaled && values.find_sixteens != nullptr;
  }
  // So are those of q4_0 for few rows (`unit_q4.h`).
  bool has_q4_unit() const { return amx && keys.scaled && key_store.format == Q4 && value_store.format == Q4; }
  bool in_lanes(int rows) const { return has_unit() && rows > UNIT_FEW; }
  bool scores_amx(int rows) const { return has_unit() && !in_lanes(rows); }
  bool mixes_amx(int rows) const { return has_unit() && !in_lanes(rows) && !values.scaled; }

  bool scores_direct(int rows) const { return rows <= DIRECT_MOST && keys.score_direct[0] != nullptr; }
  bool scores_stored(int rows) const { return rows <= DIRECT_MOST && keys.score_stored[0] != nullptr; }
  bool mixes_stored(int rows) const { return rows <= DIRECT_MOST && values.mix_stored[0] != nullptr; }
  bool weighs(int rows) const { return mixes_stored(rows) && values.weigh != nullptr; }
  bool mixes_direct(int rows) const { return rows <= DIRECT_MOST && values.mix_direct[0] != nullptr; }
  Weights weights(int rows) const {
    return mixes_amx(rows) ? Weights::HALVES : values.bf16 && !values.scaled ? Weights::PAIRS : Weights::FLOATS;
  }
};

// scores[r] = q[base + r] . keys for the rows [begin, end) of one head, whose rows begin at `base`.
inline void score_packed(const Shape& shape, const Scratch& s, int base, int begin, int end, Ahead& ahead) {
  const int dim = shape.key_dim;
  for_row_blocks(begin, end, [&](int row, auto rows) {
    constexpr int MR = decltype(rows)::value;
    float* out = s.scores.at + size_t(row) * TILE;
#if defined(KV_BF16)
    if (shape.keys.bf16) {
      const uint32_t* q = reinterpret_cast<const uint32_t*>(s.queries.at) + size_t(base + row) * (dim / 2);
      const uint32_t* keys = reinterpret_cast<const uint32_t*>(s.tile.at);
      if (shape.keys.scaled)
        scores_bf16<MR, true>(q, keys, s.key_scales.at, out, dim / 2, ahead);
      else
        scores_bf16<MR, false>(q, keys, nullptr, out, dim / 2, ahead);
      return;
    }
#endif
    scores_f32<MR>(s.queries.at + size_t(base + row) * dim, s.tile.at, out, dim, ahead);
  });
}

// output[base + r] = output[base + r] * correction[r] + weights[r] . values for the rows [begin, end) of `num_rows`.
inline void mix_packed(const Shape& shape, const Scratch& s, int base, int begin, int end, int num_rows, int slots,
                       Ahead& ahead) {
  const int columns = shape.values.width;
  for_row_blocks(begin, end, [&](int row, auto rows) {
    constexpr int MR = decltype(rows)::value;
    float* out = s.output.at + size_t(base + row) * columns;
#if defined(KV_BF16)
    if (shape.values.bf16) {
      const uint32_t* weights = reinterpret_cast<const uint32_t*>(s.weights.at) + size_t(row) * (TILE / 2);
      const size_t stride = shape.values.scaled ? size_t(num_rows) * (TILE / 2) : 0;
      mix_bf16<MR>(weights, stride, reinterpret_cast<const uint32_t*>(s.tile.at), out, s.correction.at + row, columns,
                   slots / 2, ahead);
      return;
    }
#endif
    mix_f32<MR>(s.scores.at + size_t(row) * TILE, s.tile.at, out, s.correction.at + row, columns, slots, ahead);
  });
}

// What a weight of maximum `m` is worth where the maximum is `top`, in base 2: exactly 1 where they are the same, infinite or
// not. Without a branch: a processor would guess it long before the keys are there, and one wrong guess stops all fetching.
KV_INLINE vf shrinking(vf m, vf top) { return m == top ? splat(1.0f) : exp2(m - top); }
KV_INLINE float shrinking(float m, float top) { return shrinking(splat(m), splat(top))[0]; }

// The weights of 2 * LANES slots as bf16 pairs.
KV_INLINE void store_pairs(uint32_t* to, vf a, vf b) {
#if defined(KV_BF16)
  _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#endif
}

// The weight of a slot twice, as the first and as the second of a bf16 pair whose other half is 0.
KV_INLINE void store_halves(uint32_t* first, uint32_t* second, vf weights) {
#if defined(KV_BF16)
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weights));
  _mm512_store_si512(first, low);
  _mm512_store_si512(second, _mm512_slli_epi32(low, 16));
#endif
}

// Scores of N rows that see [begin, end) become weights in place; the rows' states move on, and their correction factors are
// set. Rows go side by side, because the steps of one row wait for each other.
template <int N, Weights KIND>
void soften(const Shape& shape, const Places& tile, int32_t begin, int32_t end, float* scores, uint32_t* pairs,
            size_t half, float* m, float* l, float* correction, Ahead& next) {
  Ahead ahead = next;
  const int vectors = tile.slots / LANES;
  vf s[N][TILE / LANES], highest[N], total[N];
  float top[N];
  const bool all = tile.full && begin <= tile.lowest && end > tile.highest;
  const float factor = shape.score_factor();
#pragma GCC unroll 4
  for (int r = 0; r < N; r++) highest[r] = splat(NOTHING), total[r] = splat(0.0f);
#pragma GCC unroll 8
  for (int v = 0; v < TILE / LANES; v++) {
    if (v == vectors) break;
#pragma GCC unroll 4
    for (int r = 0; r < N; r++) {
      vf& x = s[r][v];
      x = load<vf>(scores + r * TILE + v * LANES) * splat(factor);
      if (shape.softcap != 0.0f) x = tanh(x) * splat(shape.softcap * LOG2E);
      if (!all) {
        const vi position = load<vi>(tile.positions + v * LANES);
        x = (position >= begin) & (position < end) ? x : splat(NOTHING);
      }
      highest[r] = maximum(x, highest[r]);  // passes NaN over: its weight tells
    }
  }
  const vf before = load_first<N>(m), after = maximum(before, fold_first<N>(highest, Maximum()));
  const vf shrunk = shrinking(before, after);
  store_first<N>(correction, shrunk);
  store_first<N>(m, after);
  store_first<N>(top, after == splat(NOTHING) ? splat(0.0f) : after);  // nothing seen yet: weights of zero
#pragma GCC unroll 8
  for (int v = 0; v < TILE / LANES; v++) {
    if (v == vectors) break;
#pragma GCC unroll 4
    for (int r = 0; r < N; r++) {
      if (v % 2 == 0) ahead.step<1>();
      const vf weight = s[r][v] = exp2(s[r][v] - splat(top[r]));
      total[r] += weight;
      if constexpr (KIND == Weights::FLOATS)
        store(scores + r * TILE + v * LANES, weight);
      else if constexpr (KIND == Weights::HALVES)
        store_halves(pairs + r * TILE + v * LANES, pairs + half + r * TILE + v * LANES, weight);
      else if (v % 2 == 1)
        store_pairs(pairs + r * (TILE / 2) + v / 2 * 16, s[r][v - 1], weight);
      else if (v + 1 == vectors)
        store_pairs(pairs + r * (TILE / 2) + v / 2 * 16, weight, splat(0.0f));
    }
  }
  store_first<N>(l, load_first<N>(l) * shrunk + fold_first<N>(total, Sum()));
  next = ahead;
}

// The same for the rows [begin, end) of a head's `num_rows`, whose states begin at `base`.
inline void soften_rows(const Shape& shape, const Places& tile, const Scratch& s, int base, int begin, int end,
                        int num_rows, int group, uint32_t* pairs, float* correction, Ahead& ahead) {
  const Weights kind = shape.weights(num_rows);
  for (int r = begin; r < end;) {
    const int q = r / group, rows = std::min((q + 1) * group, end) - r;
    const auto run = [&](auto count) {
      constexpr int N = decltype(count)::value;
      const auto f = kind == Weights::HALVES  ? soften<N, Weights::HALVES>
                     : kind == Weights::PAIRS ? soften<N, Weights::PAIRS>
                                              : soften<N, Weights::FLOATS>;
      f(shape, tile, s.begins.at[q], s.ends.at[q], s.scores.at + size_t(r) * TILE,
        pairs + size_t(r) * (kind == Weights::HALVES ? TILE : TILE / 2), size_t(num_rows) * TILE, s.m.at + base + r,
        s.l.at + base + r, correction + r, ahead);
      r += N;
    };
    if (rows >= 4)
      run(std::integral_constant<int, 4>());
    else if (rows >= 2)
      run(std::integral_constant<int, 2>());
    else
      run(std::integral_constant<int, 1>());
  }
}

// bf16 pairs of a row's weights times the scales of each group of columns.
inline void weigh(const Shape& shape, const Scratch& s, int row, int num_rows, int slots) {
  const float* from = s.scores.at + size_t(row) * TILE;
  for (int g = 0; g < shape.value_dim / GROUP; g++) {
    uint32_t* to = reinterpret_cast<uint32_t*>(s.weights.at) + (size_t(g) * num_rows + row) * (TILE / 2);
    const float* scales = s.value_scales.at + g * TILE;
    for (int j = 0; j < slots; j += 2 * LANES)
      store_pairs(to + j / 2, load<vf>(from + j) * load<vf>(scales + j),
                  load<vf>(from + j + LANES) * load<vf>(scales + j + LANES));
  }
}

#if KV_LANES == 8
// Spans of a row, or groups: the units of work of `direct_f32.h` and `madd.h` for one slot.
inline int spans_of(const Reader& reader, const Store& store) {
  const int values = reader.fixed ? GROUP : span_values(store.format);
  return round_up(store.dim, values) / values;
}
#endif

// Units of work of a tile, as `Ahead` counts them: inner iterations, a block of keys counting for 8. `rows` of `of_head`
// rows of the head see it.
inline int work_of_keys(const Shape& shape, int slots, int rows, int of_head) {
  const int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS, dim = shape.key_dim;
  const int few_blocks = (rows + FEW_BLOCK - 1) / FEW_BLOCK;
  const int units = dim / per_unit(shape.key_store.format);
  if (shape.scores_amx(of_head)) return slots + round_up(dim, DEPTH) / DEPTH * 12;
#if KV_LANES == 8
  if (shape.scores_stored(of_head)) return few_blocks * slots * spans_of(shape.keys, shape.key_store);
#else
  if (shape.scores_stored(of_head)) return rows * (slots / LANES) * (dim / GROUP);
#endif
  if (shape.scores_direct(rows)) return few_blocks * (slots / 4) * ((dim + 31) / 32);
  return 8 * (slots / LANES) * ((units + LANES - 1) / LANES) +
         blocks * (shape.keys.bf16 ? dim / 2 : dim * (TILE / (VECTORS * LANES)));
}

inline int work_of_weights(int slots, int rows) { return rows * ((slots / LANES + 1) / 2); }

inline int work_of_values(const Shape& shape, int slots, int rows, int of_head) {
  const int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS, columns = shape.values.width;
  const int few_blocks = (rows + FEW_BLOCK - 1) / FEW_BLOCK;
  if (shape.mixes_amx(of_head)) return slots + columns / DEPTH * (slots / EDGE * 3 + 2);
#if KV_LANES == 8
  if (shape.mixes_stored(of_head)) return few_blocks * slots * spans_of(shape.values, shape.value_store);
#else
  if (shape.mixes_stored(of_head)) return few_blocks * (slots / 4) * (columns / GROUP);
#endif
  if (shape.mixes_direct(rows)) return few_blocks * (slots / 2) * ((columns + 63) / 64);
  if (shape.values.bf16) return slots / 2 * (columns / GROUP) + blocks * (slots / 2) * ((columns + 63) / 64);
  return slots * (columns / span_values(shape.value_store.format)) +
         blocks * slots * (columns / (VECTORS * LANES) + columns % (VECTORS * LANES) / LANES);
}

inline int scales_at(const Store& store) { return store.dim / per_unit(store.format) * 4; }

// scores[r] = q[base + r] . keys of the tile, for the rows [begin, end) of a head's `num_rows`.
inline void score(const Shape& shape, const Tile& tile, const Scratch& s, int base, int begin, int end, int num_rows,
                  Ahead& ahead) {
  const int dim = shape.key_dim, rows = end - begin;
#if defined(KV_BF16)
  if (shape.scores_amx(num_rows)) {
    const int depth = round_up(dim, DEPTH);
    Sixteen keys[TILE / EDGE];
    shape.keys.find_sixteens(tile.keys, tile.slots, dim, reinterpret_cast<uint16_t*>(s.tile.at), keys, ahead);
    const size_t head = size_t(base / num_rows);
    const uint32_t* queries = reinterpret_cast<const uint32_t*>(s.queries.at) + head * columns_of(num_rows) * (depth / 2);
    return scores_amx(queries, keys, depth, num_rows, s.scores.at, ahead);
  }
#endif
  if (shape.scores_stored(num_rows)) {
    if (is_quantised(shape.key_store.format))
      pack_scales(tile.keys, tile.slots, scales_at(shape.key_store), dim / GROUP, s.key_scales.at);
    const int width = shape.keys.query_width;
    const uint8_t* queries = reinterpret_cast<const uint8_t*>(s.queries.at + size_t(base) * width);
    for_few_rows(begin, end, [&](int row, int count) {
      shape.keys.score_stored[count - 1](queries + size_t(row) * width * 4, tile.keys, s.key_scales.at,
                                         s.scores.at + size_t(row) * TILE, dim, tile.slots, ahead);
    });
  } else if (shape.scores_direct(rows)) {
    const uint32_t* queries = reinterpret_cast<const uint32_t*>(s.queries.at) + size_t(base) * (dim / 2);
    for_few_rows(begin, end, [&](int row, int count) {
      shape.keys.score_direct[count - 1](queries + size_t(row) * (dim / 2), Table{tile.keys},
                                         s.scores.at + size_t(row) * TILE, dim / 2, tile.slots, ahead);
    });
  } else {
    shape.keys.pack(tile.keys, ahead, tile.slots, dim, s.tile.at, s.key_scales.at);
    score_packed(shape, s, base, begin, end, ahead);
  }
}

// The weights of the rows [begin, end) as `mix_stored` takes them; false when the tile's scales are not for it: those of `vnni.h`
// have no sign and are finite.
inline bool weigh_stored(const Shape& shape, const Tile& tile, const Scratch& s, int base, int begin, int end) {
  const int groups = shape.value_dim / GROUP;
  [[maybe_unused]] const bool are_plain =
      pack_scales(tile.values, TILE, scales_at(shape.value_store), groups, s.value_scales.at);  // zeros where no slot is
#if defined(KV_VNNI)
  if (!are_plain) return false;
#endif
  for (int r = begin; r < end; r++)
    shape.values.weigh(s.scores.at + size_t(r) * TILE, s.value_scales.at, groups, tile.slots, s.l.at[base + r],
                       reinterpret_cast<uint8_t*>(s.weights.at) + size_t(r) * groups * 2 * TILE,
                       s.multipliers.at + size_t(r) * groups);
  return true;
}

inline void mix_stored(const Shape& shape, const Tile& tile, const Scratch& s, int base, int begin, int end, int num_rows,
                       Ahead& ahead) {
  const bool weighs = shape.weighs(num_rows);
  const int groups = weighs ? shape.value_dim / GROUP : 0;  // weights of f32 have no multipliers
  const uint8_t* weights = reinterpret_cast<const uint8_t*>(weighs ? s.weights.at : s.scores.at);
  const size_t stride = weighs ? size_t(groups) * 2 * TILE : TILE * sizeof(float);
  for_few_rows(begin, end, [&](int row, int count) {
    shape.values.mix_stored[count - 1](weights + row * stride, s.multipliers.at + row * groups, tile.values, shape.value_dim,
                                       s.output.at + size_t(base + row) * shape.values.width, s.correction.at + row,
                                       tile.slots, ahead);
  });
}

// output[base + r] = output[base + r] * correction[r] + weights[r] . values of the tile; `s.scores` holds the weights.
inline void mix(const Shape& shape, const Tile& tile, const Scratch& s, int base, int begin, int end, int num_rows,
                Ahead& ahead) {
  const int dim = shape.value_dim, rows = end - begin;
  if (shape.mixes_stored(num_rows) && (!shape.weighs(num_rows) || weigh_stored(shape, tile, s, base, begin, end)))
    return mix_stored(shape, tile, s, base, begin, end, num_rows, ahead);
#if defined(KV_BF16)
  if (shape.mixes_amx(num_rows)) {
    Sixteen values[TILE / EDGE];
    shape.values.find_sixteens(tile.values, tile.slots, dim, reinterpret_cast<uint16_t*>(s.tile.at), values, ahead);
    return mix_amx(reinterpret_cast<const uint32_t*>(s.weights.at), begin, end, num_rows, values, tile.slots,
                   s.output.at + size_t(base) * shape.values.width, s.correction.at, shape.values.width, ahead);
  }
#endif
  const bool direct = shape.mixes_direct(rows);
  if (!direct)
    shape.values.pack(tile.values, ahead, tile.slots, dim, s.tile.at, s.value_scales.at);
  else if (shape.values.scaled)
    pack_scales(tile.values, tile.slots, scales_at(shape.value_store), dim / GROUP, s.value_scales.at);
  if (shape.values.scaled)
    for (int r = begin; r < end; r++) weigh(shape, s, r, num_rows, tile.slots);
  if (!direct) return mix_packed(shape, s, base, begin, end, num_rows, tile.slots, ahead);
  for_few_rows(begin, end, [&](int row, int count) {
    shape.values.mix_direct[count - 1](reinterpret_cast<const uint32_t*>(s.weights.at) + size_t(row) * (TILE / 2),
                                       size_t(num_rows) * (TILE / 2), Table{tile.values}, dim,
                                       s.output.at + size_t(base + row) * shape.values.width, s.correction.at + row,
                                       shape.values.width, tile.slots, ahead);
  });
}

// Lines of a tile that are fetched before its keys are read: the keys at least, because many rows read all of them first.
inline int lead(const Tile& tile) {
  return std::clamp(DISTANCE, tile.key_lines.num_lines, tile.key_lines.num_lines + tile.value_lines.num_lines);
}

inline void fetch_first(Side keys, Side values, int lines) { Ahead(keys, values, {}, {}, 0, lines, 1).step<1>(); }

// The whole of one tile of one head, for the rows that see some of it: `queries` queries of `group` rows each, of which the
// first is the task's row `base`. The tile's lead has been fetched; meanwhile the rest of it is, and then the lead of `next`.
inline void run_tile(const Shape& shape, const Tile& tile, const Tile& next, int base, int queries, int group,
                     const Scratch& s) {
  int first = 0, last = queries;
  while (first < last && (s.ends.at[first] <= tile.lowest || s.begins.at[first] > tile.highest)) first++;
  while (last > first && (s.ends.at[last - 1] <= tile.lowest || s.begins.at[last - 1] > tile.highest)) last--;
  if (first == last) return;
  const int begin = first * group, end = last * group, rows = queries * group;
  const int lines = tile.key_lines.num_lines + tile.value_lines.num_lines - lead(tile) + lead(next);
  Ahead ahead(tile.key_lines, tile.value_lines, next.key_lines, next.value_lines, lead(tile), lines,
              work_of_keys(shape, tile.slots, end - begin, rows) + work_of_weights(tile.slots, end - begin) +
                  work_of_values(shape, tile.slots, end - begin, rows));
  score(shape, tile, s, base, begin, end, rows, ahead);
  soften_rows(shape, tile, s, base, begin, end, rows, group, reinterpret_cast<uint32_t*>(s.weights.at), s.correction.at,
              ahead);
  mix(shape, tile, s, base, begin, end, rows, ahead);
}

}  // namespace kv
