// The tile unit of Intel's newer server CPUs (AMX): an instruction adds to 16 x 16 sums the products of 16 rows with 16
// columns, 32 bf16 values each, in 16 cycles. A core of Granite Rapids does 3.3 TFLOP/s with it, and 0.1 with `dpbf16`.
//
//   C [16][16] f32  +=  A [16][32] bf16, rows as they lie  .  B [16 pairs][16 columns] of 2 x bf16
//
// Stored keys are a left operand as they lie: scores come out transposed, a slot each row, and no key is ever packed.
//
//   scores^T [slots][rows]  =  keys [slots][dim]  .  queries^T [dim/2][rows], which a task packs once
//
// Few rows turn their scores back and go on as without AMX (`tile.h`). Values, too, are read as they lie: as a right operand
// whose pairs are two columns of one slot. What belongs to the first column is multiplied by pairs (weight, 0), what belongs
// to the second by (0, weight), in other rows of the left operand: eight rows of queries are sixteen of these.
//
//   output [2 x 8 rows][width/2]  =  weights [2 x 8 rows][slots]  .  values [slots][width/2]
//
// (0 times a value that is not finite is NaN: of a pair of columns both get it, in the rows that see the slot.)
//
// More rows stay in the first form to the end, see `lanes.h`.
#pragma once

#include <algorithm>
#include <type_traits>

#include "direct.h"

#if defined(KV_BF16) && defined(__AMX_BF16__) && !defined(KVCACHE_EMULATE_AMX)
#define KV_AMX 1  // without it plain loops stand for the unit, which only tests want
#endif

namespace kv {

constexpr int EDGE = 16;   // rows and columns of a tile of the unit
constexpr int DEPTH = 32;  // values of a product's row
constexpr int UNIT_FEW = 8;  // rows of a head: above, they go in lanes

// Rows that a head of few rows takes up in the operands of the unit: their scores are turned back four at a time.
constexpr int columns_of(int num_rows) { return num_rows <= 4 ? 4 : 8; }

// On by `set_amx`, which cpu_build.py calls where the system lets this process use it.
inline bool use_amx = false;

alignas(64) inline const uint8_t ZERO_ROW[MAX_DIM * 4 + 64] = {};

struct Sixteen {  // rows of 16 slots, `step` bytes apart; bf16 where they are an operand
  const uint8_t* at;
  int64_t step;

  const uint8_t* operator[](int i) const { return at + i * step; }
};

#if defined(KV_BF16)

constexpr bool ONCE = true;  // is an operand read: it then leaves the first-level cache to the rest

#if defined(KV_AMX)

// Written out, because those of GCC 12 do not say which memory they read.
template <int T, bool IS_ONCE = false>
KV_INLINE void tile_load(const void* at, int64_t step) {
  if constexpr (IS_ONCE)
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(step), "i"(T) : "memory");
  else
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(step), "i"(T) : "memory");
}
template <int T>
KV_INLINE void tile_store(void* at, int64_t step) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(step), "i"(T) : "memory");
}
template <int T>
KV_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int C, int A, int B>
KV_INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

struct alignas(64) Shapes {  // of the eight tiles
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void set_shapes(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }

#else  // the same on any CPU but for rounding, slowly, for tests

struct alignas(64) TileRegister {
  uint32_t rows[EDGE][EDGE];
};
inline thread_local TileRegister tile_registers[8];

struct Shapes {
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
inline thread_local Shapes tile_shapes;

inline void set_shapes(const Shapes& shapes) { tile_shapes = shapes; }
inline void release_tiles() {}

template <int T, bool = false>
void tile_load(const void* at, int64_t step) {
  for (int i = 0; i < tile_shapes.rows[T]; i++)
    std::memcpy(tile_registers[T].rows[i], static_cast<const uint8_t*>(at) + i * step, tile_shapes.row_bytes[T]);
}
template <int T>
void tile_store(void* at, int64_t step) {
  for (int i = 0; i < tile_shapes.rows[T]; i++)
    std::memcpy(static_cast<uint8_t*>(at) + i * step, tile_registers[T].rows[i], tile_shapes.row_bytes[T]);
}
template <int T>
void tile_zero() {
  tile_registers[T] = {};
}
template <int C, int A, int B>
void tile_dot() {
  for (int i = 0; i < EDGE; i++) {
    vf sum = load<vf>(tile_registers[C].rows[i]);
    for (int k = 0; k < EDGE; k++) {
      const uint32_t a = tile_registers[A].rows[i][k];
      const vu b = load<vu>(tile_registers[B].rows[k]);
      sum += splat(bits<float>(a << 16)) * bits<vf>(b << 16);
      sum += splat(bits<float>(a & 0xffff0000u)) * bits<vf>(b & 0xffff0000u);
    }
    store(tile_registers[C].rows[i], sum);
  }
}

#endif

// For the tiles [begin, end).
inline void set_rows(Shapes& shapes, int begin, int end, int num_rows, int row_bytes) {
  for (int t = begin; t < end; t++) shapes.rows[t] = uint8_t(num_rows), shapes.row_bytes[t] = uint16_t(row_bytes);
}

inline Shapes full_shapes() {
  Shapes shapes;
  set_rows(shapes, 0, 8, EDGE, 64);
  return shapes;
}

// While one is alive, all tiles of its thread have 16 rows of 64 bytes, unless `set_shapes` changes them meanwhile.
class TileUnit {
 public:
  explicit TileUnit(bool on) : on(on) {
    if (on) set_shapes(full_shapes());
  }
  ~TileUnit() {
    if (on) release_tiles();
  }
  TileUnit(const TileUnit&) = delete;

 private:
  bool on;
};

// --- operands ---------------------------------------------------------------------------------------------------------

// A stored row as bf16, in the order of its values; [round_up(dim, 32)], zeros beyond `dim`. `scales_at`: where the scales
// of q8_0 and q4_0 stand, which are multiplied in and rounded.
template <int F>
KV_INLINE void expand_row(const uint8_t* row, int dim, int scales_at, uint16_t* to) {
  const auto scale = [&](int d) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(load<int16_t>(row + scales_at + d / GROUP * 2)));
  };
  const auto store_products = [&](int d, __m512i low, __m512i high) {
    const __m512 factor = scale(d);
    const __m512 a = _mm512_mul_ps(_mm512_cvtepi32_ps(low), factor), b = _mm512_mul_ps(_mm512_cvtepi32_ps(high), factor);
    _mm512_store_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  };
  if constexpr (F == BF16)
    for (int d = 0; d < dim; d += DEPTH) {
      const __mmask32 mask = dim - d >= DEPTH ? ~0u : (1u << (dim - d)) - 1u;
      _mm512_store_si512(to + d, _mm512_maskz_loadu_epi16(mask, row + 2 * d));
    }
  if constexpr (F == FP8)
    for (int d = 0; d < dim; d += 2 * DEPTH) {
      const __mmask64 mask = dim - d >= 2 * DEPTH ? ~0ull : (1ull << (dim - d)) - 1ull;
      const __m512i lanes = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking gives the values in order
      __m512i low, high;
      expand_bytes<F>(_mm512_permutexvar_epi64(lanes, _mm512_maskz_loadu_epi8(mask, row + d)), low, high);
      _mm512_store_si512(to + d, _mm512_unpacklo_epi8(low, high));
      if (d + DEPTH < dim) _mm512_store_si512(to + d + DEPTH, _mm512_unpackhi_epi8(low, high));
    }
  if constexpr (F == Q8)
    for (int d = 0; d < dim; d += GROUP) {
      const __m128i *from = (const __m128i*)(row + d);
      store_products(d, _mm512_cvtepi8_epi32(_mm_loadu_si128(from)), _mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
    }
  if constexpr (F == Q4)
    for (int d = 0; d < dim; d += GROUP) {
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(row + d / 2))), eight = _mm512_set1_epi32(8);
      store_products(d, _mm512_sub_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(15)), eight),
                     _mm512_sub_epi32(_mm512_srli_epi32(bytes, 4), eight));
    }
}

// TILE rows as operands: where they lie, if that will do, else expanded into `buffer` [TILE][round_up(dim, 32)].
template <int F>
void find_sixteens(const uint8_t* const* rows, int slots, int dim, uint16_t* buffer, Sixteen* to, Ahead& next) {
  Ahead ahead = next;
  const int width = round_up(dim, DEPTH), scales_at = dim / per_unit(F) * 4;
  for (int k = 0; k < TILE; k += EDGE, rows += EDGE, to++) {
    if (k >= slots) {
      *to = {ZERO_ROW, 0};
      continue;
    }
    const int64_t step = rows[1] - rows[0];
    bool is_even = F == BF16 && dim == width;
    for (int i = 2; is_even && i < EDGE; i++) is_even = rows[i] - rows[0] == i * step;
    uint16_t* packed = buffer + size_t(k) * width;
    if (!is_even)
      for (int i = 0; i < EDGE; i++) {
        ahead.step<1>();
        expand_row<F>(rows[i], dim, scales_at, packed + size_t(i) * width);
      }
    else
      ahead.step<EDGE>();
    *to = is_even ? Sixteen{rows[0], step} : Sixteen{reinterpret_cast<const uint8_t*>(packed), width * 2};
  }
  next = ahead;
}

// Right operands from `count` <= `columns` rows of bf16 [width], the others zero: to[width / 2 pairs][columns rows]. For fewer
// than 16 columns 64 bytes behind them are written, too.
inline void pack_columns(const uint16_t* rows, int count, int width, int columns, uint32_t* to) {
  for (int d = 0; d < width; d += DEPTH) {
    vu t[EDGE];
    for (int i = 0; i < EDGE; i++) t[i] = i < count ? load<vu>(rows + size_t(i) * width + d) : vu{};
    transpose(t);
    for (int i = 0; i < EDGE; i++, to += columns) store(to, t[i]);
  }
}

// --- few rows ---------------------------------------------------------------------------------------------------------

// Queries that `pack_columns` packed, from value `d` on, into the tiles 4 to 7, as far as there are tiles.
KV_INLINE void load_queries(const uint32_t* queries, int columns, int depth, int d) {
  const uint32_t* at = queries + d / 2 * columns;
  const int next = DEPTH / 2 * columns;
  tile_load<4>(at, 4 * columns);
  if (d + DEPTH < depth) tile_load<5>(at + next, 4 * columns);
  if (d + 2 * DEPTH < depth) tile_load<6>(at + 2 * next, 4 * columns);
  if (d + 3 * DEPTH < depth) tile_load<7>(at + 3 * next, 4 * columns);
}

// to [16], `step` bytes apart = keys . queries, whose first 128 values are in their tiles. C: 0 and 1 in turn, so that while
// one sum is waited for the next begins. `pace` is called after each product.
template <int C, bool IS_ONCE = false, class F>
KV_INLINE void score_sixteen(const uint32_t* queries, int columns, int depth, const Sixteen& keys, float* to, int step,
                             F&& pace) {
  const auto add = [&](int d, auto tile) {
    if (d >= depth) return;
    tile_load<2 + C, IS_ONCE>(keys.at + 2 * d, keys.step), tile_dot<C, 2 + C, decltype(tile)::value>();
    pace();
  };
  tile_zero<C>();
  for (int d = 0; d < depth; d += 4 * DEPTH) {
    if (depth > 4 * DEPTH) load_queries(queries, columns, depth, d);
    add(d, std::integral_constant<int, 4>()), add(d + DEPTH, std::integral_constant<int, 5>());
    add(d + 2 * DEPTH, std::integral_constant<int, 6>()), add(d + 3 * DEPTH, std::integral_constant<int, 7>());
  }
  tile_store<C>(to, step);
}

// out[r][16 slots] of four rows; part p of v[i] has those of slot i + 4 * p.
KV_INLINE void turn_four(const __m512* v, __m512* out) {
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1])), b = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3]));
  const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1])), d = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}

// The same from [16 slots][rows], `columns` values apart.
KV_INLINE void turn_back(const float* from, int columns, __m512* out) {
  __m512 v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++, from += columns) {
    v[i] = _mm512_castps128_ps512(_mm_load_ps(from));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, _mm_load_ps(from + 4 * columns));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, _mm_load_ps(from + 8 * columns));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, _mm_load_ps(from + 12 * columns));
  }
  turn_four(v, out);
}

// scores[r][TILE] = keys . queries for `num_rows` rows that `pack_columns` packed.
inline void scores_amx(const uint32_t* queries, const Sixteen* keys, int depth, int num_rows, float* scores, Ahead& next) {
  Ahead ahead = next;
  alignas(64) float turned[TILE][EDGE];
  const int columns = columns_of(num_rows);
  const auto pace = [&] { ahead.step<3>(); };
  // Sixteen slots after the other, as they lie in memory.
  load_queries(queries, columns, depth, 0);
  for (int k = 0; k < TILE; k += 2 * EDGE, keys += 2) {
    score_sixteen<0>(queries, columns, depth, keys[0], turned[k], 64, pace);
    score_sixteen<1>(queries, columns, depth, keys[1], turned[k + EDGE], 64, pace);
  }
  for (int r = 0; r < num_rows; r += 4)
    for (int k = 0; k < TILE; k += EDGE) {
      __m512 out[4];
      turn_back(turned[k] + r, EDGE, out);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        if (r + i < num_rows) _mm512_store_ps(scores + (r + i) * TILE + k, out[i]);
    }
  next = ahead;
}

// The tiles 0 to 3 += weights, `step` bytes apart, times values [16][blocks * DEPTH] from `at` on. `pace` as above.
template <bool IS_ONCE = false, class F>
KV_INLINE void mix_sixteen(const uint32_t* weights, int step, const uint8_t* at, int64_t values_step, int blocks, F&& pace) {
  tile_load<4>(weights, step);
  tile_load<5, IS_ONCE>(at, values_step), tile_dot<0, 4, 5>();
  pace();
  if (blocks == 1) return;
  tile_load<6, IS_ONCE>(at + 64, values_step), tile_dot<1, 4, 6>();
  pace();
  if (blocks == 2) return;
  tile_load<5, IS_ONCE>(at + 128, values_step), tile_dot<2, 4, 5>();
  pace();
  if (blocks == 3) return;
  tile_load<6, IS_ONCE>(at + 192, values_step), tile_dot<3, 4, 6>();
  pace();
}

using Sums = float[4][EDGE][EDGE];  // of four blocks of DEPTH columns: the first ones of all rows, then the second ones

KV_INLINE void take_sums(Sums sums) {
  tile_store<0>(sums[0], 64), tile_store<1>(sums[1], 64), tile_store<2>(sums[2], 64), tile_store<3>(sums[3], 64);
}

// out = out * factor + sums, of row r of `num_rows`.
KV_INLINE void add_sums(const Sums sums, int r, int num_rows, int blocks, float correction, float* out) {
  const __m512 factor = _mm512_set1_ps(correction);
  for (int b = 0; b < blocks; b++, out += DEPTH) {
    _mm512_store_ps(out, _mm512_fmadd_ps(_mm512_load_ps(out), factor, _mm512_load_ps(sums[b][r])));
    _mm512_store_ps(out + EDGE, _mm512_fmadd_ps(_mm512_load_ps(out + EDGE), factor, _mm512_load_ps(sums[b][num_rows + r])));
  }
}

// out[r] = out[r] * correction[r] + weights . values for the rows [begin, end) of `num_rows` <= 8. Weights are those of
// `store_halves`, [2 * num_rows][TILE], all first ones and then all second ones; 16 rows are read. Columns come as
// `value_order` has those of fp8.
inline void mix_amx(const uint32_t* weights, int begin, int end, int num_rows, const Sixteen* values, int slots, float* out,
                    const float* correction, int columns, Ahead& next) {
  Ahead ahead = next;
  alignas(64) Sums sums;
  for (int c = 0; c < columns; c += 4 * DEPTH) {
    const int blocks = std::min(4, (columns - c) / DEPTH);
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int g = 0; g < slots / EDGE; g++)
      mix_sixteen(weights + g * EDGE, 4 * TILE, values[g].at + 2 * c, values[g].step, blocks, [&] { ahead.step<3>(); });
    take_sums(sums);
    for (int r = begin; r < end; r++) {
      if (r == begin) ahead.step<8>();
      add_sums(sums, r, num_rows, blocks, correction[r], out + size_t(r) * columns + c);
    }
  }
  next = ahead;
}

#endif

}  // namespace kv
