// The products of few rows in bf16, straight from stored rows: a tile that is read once is not worth packing.
//
// Scores of bf16 keys are dot products along the stored row; four keys are summed across lanes together, so a score costs
// 3 shuffles. Outputs of all formats take the pairs of two rows as they are expanded in registers.
#pragma once

#include "gemm.h"

namespace kv {

constexpr int FEW_BLOCK = 4;    // rows whose sums fit the registers
constexpr int DIRECT_MOST = 8;  // rows: above, a packed tile is cheaper

constexpr int AGAIN = 16;       // rows: so long before a row is read, its lines are asked for once more

// Calls `f` with the beginning and the number of rows of each block: nearly equal, at most FEW_BLOCK.
template <class F>
KV_INLINE void for_few_rows(int begin, int end, F&& f) {
  for (int left = (end - begin + FEW_BLOCK - 1) / FEW_BLOCK; left > 0; left--) {
    const int rows = (end - begin + left - 1) / left;
    f(begin, rows);
    begin += rows;
  }
}

// Rows are read in quads of four adjacent ones. `from(j)`: row j and those after it in its quad; `later(j)`: those that are
// read AGAIN rows after them.
//
// A load instruction should see addresses at one small distance from each other, because hardware that fetches ahead looks
// for that. So quads and pairs stay loops: unrolled, they compute 20 % faster and take 13 % longer where rows come from
// memory.

struct Table {  // each row by itself
  const uint8_t* const* rows;

  KV_INLINE const uint8_t* const* from(int j) const { return rows + j; }
  KV_INLINE const uint8_t* const* later(int j) const { return rows + std::min(j + AGAIN, TILE - 4); }
};

struct Quads {  // each quad by itself, its rows at a constant step
  struct Rows {
    const uint8_t* at;
    int64_t step;

    KV_INLINE const uint8_t* operator[](int i) const { return at + i * step; }
  };

  const uint8_t* at[(TILE + AGAIN) / 4];  // of a tile, and the first ones of what is read after it
  int64_t step;

  KV_INLINE Rows from(int j) const { return {at[j / 4] + j % 4 * step, step}; }
  KV_INLINE Rows later(int j) const { return from(j + AGAIN); }
};

#if defined(KV_BF16)

// Sums of four vectors, for each 128-bit part: (a, b, c, d).
KV_INLINE __m512 sum_parts(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

// The four parts of each of four vectors added: part i of the result is the sum of v[i]'s parts.
KV_INLINE __m512 sum_of_parts(const __m512* v) {
  const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
  const __m512 c = _mm512_shuffle_f32x4(v[2], v[3], 0x44), d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  const __m512 x = _mm512_add_ps(a, b), y = _mm512_add_ps(c, d);  // parts 0, 1 of the first, 0, 1 of the second
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

// scores[r][:slots] = q[r] . keys, for bf16 keys where they lie. `pairs` is dim / 2; WHOLE: a multiple of 16.
template <int MR, bool WHOLE, class R>
void scores_direct(const uint32_t* q, R rows, float* scores, int pairs, int slots, Ahead& next) {
  Ahead ahead = next;
#pragma GCC unroll 1
  for (int k = 0; k < slots; k += 16) {
    __m512 parts[MR][4];
#pragma GCC unroll 1
    for (int quad = 0; quad < 4; quad++) {
      const auto row = rows.from(k + 4 * quad), later = rows.later(k + 4 * quad);
      ahead.before((pairs + 15) / 16);
      __m512 acc[MR][4];
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) acc[r][i] = _mm512_setzero_ps();
#pragma GCC unroll 4  // each load then steps from quad to quad
      for (int c = 0; c < pairs; c += 16) {
        ahead.within<1>();
        const __mmask16 mask = pairs - c >= 16 ? 0xffff : __mmask16((1u << (pairs - c)) - 1u);
        const auto load = [&](const void* at) { return WHOLE ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi32(mask, at); };
        __m512i key[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) fetch_dropped(later[i] + 4 * c), key[i] = load(row[i] + 4 * c);
#pragma GCC unroll 4
        for (int r = 0; r < MR; r++) {
          const __m512i query = load(q + size_t(r) * pairs + c);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], (__m512bh)query, (__m512bh)key[i]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < MR; r++) parts[r][quad] = sum_parts(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < MR; r++) _mm512_store_ps(scores + r * TILE + k, sum_of_parts(parts[r]));
  }
  next = ahead;
}

template <int F, int MR, int NV, class R>
KV_INLINE void mix_block_direct(const uint32_t* p, size_t p_stride, R rows, int d, int dim, float* out,
                                const float* correction, int columns, int slots, Ahead& ahead) {
  __m512 acc[MR][NV];
#pragma GCC unroll 4
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = _mm512_setzero_ps();
#pragma GCC unroll 1
  for (int j = 0; j < slots; j += 2) {
    if (j % 8 == 0) ahead.before(4);
    ahead.within<1>();
    const auto row = rows.from(j), later = rows.later(j);
    if constexpr (F == BF16)
#pragma GCC unroll 4
      for (int i = 0; i < NV; i++) fetch_dropped(later[i % 2] + 2 * (d + i / 2 * GROUP));
    __m512i b[NV + 2];
#pragma GCC unroll 2
    for (int g = 0; g < NV / 2; g++) pair_rows<F>(row[0], row[1], d + g * GROUP, dim, b + 2 * g);
#pragma GCC unroll 4
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], p[v / 2 * p_stride + r * (TILE / 2) + j / 2], b[v]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < MR; r++) {
    const __m512 c = _mm512_set1_ps(correction[r]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      float* to = out + size_t(r) * columns + d + v * 16;
      _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), c, acc[r][v]));
    }
  }
}

// out[r] = out[r] * correction[r] + p[r] . values, for values where they lie; see `mix_bf16`.
template <int F, int MR, class R>
void mix_direct(const uint32_t* p, size_t p_stride, R rows, int dim, float* out, const float* correction,
                int columns, int slots, Ahead& next) {
  Ahead ahead = next;
  const size_t stride = is_quantised(F) ? p_stride : 0;
  int d = 0;
  for (; d + 64 <= columns; d += 64)
    mix_block_direct<F, MR, 4>(p + d / GROUP * stride, stride, rows, d, dim, out, correction, columns, slots, ahead);
  if (d < columns)
    mix_block_direct<F, MR, 2>(p + d / GROUP * stride, stride, rows, d, dim, out, correction, columns, slots, ahead);
  next = ahead;
}
#endif

}  // namespace kv
