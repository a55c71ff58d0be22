// The two products of many rows, and the softmax between them, for two bands of 16 rows and one tile; see `lanes.h`.
//
// The unit's products go on while vectors are computed: they stand in steps of four between parts of the softmax of other scores.
#pragma once

#include "tile.h"

namespace kv {

#if defined(KV_BF16)

constexpr int BANDS = 2;  // at a time, so that an operand that was loaded serves twice
constexpr int PARTS = 8;  // of a band's softmax, with products between them: 16, 4 and none at all cost 7 % and more
constexpr int PART_WORK = 16;  // of a part, in the units of `Ahead`
// A row's highest score moves on when it is exceeded by so much (powers of two), not before: its output is then multiplied
// again, which took a tenth of the time. Weights are 256 at most: as exact in bf16 and f32 as those up to 1, and only values of
// 1e32 and more overflow by them.
// The same: Zadouri and others, FlashAttention-4.
constexpr float SLACK = 8.0f;

struct Band {
  const int32_t *begins, *ends;  // what its rows see
  float* scores;                 // [TILE][16]
  uint32_t* weights;             // [TILE / 2][16]
  float *m, *l, *correction;
};

// Products whose `steps` are taken while something else is computed, in PARTS parts.
template <class Products>
class Beside {
 public:
  Beside() = default;
  Beside(const Products& products, int steps) : products(products), left(steps), share((steps + PARTS - 1) / PARTS) {}

  KV_INLINE void run_part() { run(share); }
  void finish() { run(left); }

 private:
  Products products;
  int left = 0, share = 0;

  KV_INLINE void run(int steps) {
    for (; steps > 0 && left > 0; steps--, left--) products.step();
  }
};

// scores[2][TILE][16] = keys . queries of two bands, which lie `stride` apart; 2 * depth / DEPTH steps.
struct Scoring {
  const Sixteen* keys;  // of a tile
  const uint32_t* queries;
  size_t stride;
  int depth;
  float* scores;
  int d = 0;

  KV_INLINE void step() {
    if (d == 0) tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    const uint32_t* q = queries + d * (EDGE / 2);
    tile_load<4, ONCE>(keys[0].at + 2 * d, keys[0].step);
    tile_load<6>(q, 64), tile_dot<0, 4, 6>();
    tile_load<7>(q + stride, 64), tile_dot<1, 4, 7>();
    tile_load<5, ONCE>(keys[1].at + 2 * d, keys[1].step), tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
    if ((d += DEPTH) < depth) return;
    float* second = scores + TILE * EDGE;
    tile_store<0>(scores, 64), tile_store<2>(scores + EDGE * EDGE, 64);
    tile_store<1>(second, 64), tile_store<3>(second + EDGE * EDGE, 64);
    keys += 2, scores += 2 * EDGE * EDGE, d = 0;
  }
};

// output[2][width][16] += values^T . weights of two bands; width / EDGE steps.
struct Mixing {
  const uint16_t* values;  // values^T [width][TILE]
  const uint32_t* weights;
  int width;
  float* output;
  int d = 0;

  KV_INLINE void step() {
    if (d == 0) {
      tile_load<4>(weights, 64), tile_load<5>(weights + EDGE * EDGE, 64);
      tile_load<6>(weights + 2 * EDGE * EDGE, 64), tile_load<7>(weights + 3 * EDGE * EDGE, 64);
    }
    const uint16_t* v = values + size_t(d) * TILE;
    float *first = output + d * EDGE, *second = first + size_t(width) * EDGE;
    tile_load<0>(first, 64), tile_load<1>(second, 64);
    tile_load<2, ONCE>(v, 2 * TILE), tile_load<3, ONCE>(v + DEPTH, 2 * TILE);
    tile_dot<0, 2, 4>(), tile_dot<1, 2, 6>();
    tile_dot<0, 3, 5>(), tile_dot<1, 3, 7>();
    tile_store<0>(first, 64), tile_store<1>(second, 64);
    d += EDGE;
  }
};

// Scores of a band become weights, two slots a bf16 pair; the state of its rows moves on, and their correction factors are set.
template <bool PLAIN, class Products>
void soften_band(const Shape& shape, const Places& tile, const Band& band, Beside<Products>& beside, Ahead& ahead) {
  float* scores = band.scores;
  const float factor = shape.score_factor();
  vf highest[4] = {splat(NOTHING), splat(NOTHING), splat(NOTHING), splat(NOTHING)};
  if (PLAIN) {
    for (int j = 0; j < TILE; j += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) highest[i] = maximum(load<vf>(scores + (j + i) * EDGE), highest[i]);
  } else {
    const vi begin = load<vi>(band.begins), end = load<vi>(band.ends);
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
  const vf before = load<vf>(band.m), after = most > before + splat(SLACK) ? most : before, shrunk = shrinking(before, after);
  const vf top = after == splat(NOTHING) ? splat(0.0f) : after;  // nothing seen yet: weights of zero
  alignas(64) static const uint16_t pairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(pairs);
  vf total[2] = {splat(0.0f), splat(0.0f)};
  for (int part = 0; part < TILE; part += TILE / PARTS) {
    beside.run_part();
    if (part % (2 * TILE / PARTS) == 0) ahead.step<2 * PART_WORK, 2>();
#pragma GCC unroll 4
    for (int j = part; j < part + TILE / PARTS; j += 2) {
      vf w[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        const vf x = load<vf>(scores + (j + i) * EDGE);
        w[i] = exp2_coarse(PLAIN ? x * splat(factor) - top : x - top);
        total[i] += w[i];
      }
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]);
      _mm512_store_si512(band.weights + j / 2 * EDGE, _mm512_permutexvar_epi16(order, both));
    }
  }
  store(band.l, load<vf>(band.l) * shrunk + (total[0] + total[1]));
  store(band.m, after);
  store(band.correction, shrunk);
}

// output[width][16] *= correction[16], where that changes something.
inline void correct(const float* correction, int width, float* output) {
  const vf factor = load<vf>(correction);
  if (_mm512_cmpneq_ps_mask((__m512)factor, _mm512_set1_ps(1.0f)) == 0) return;
  for (int d = 0; d < width; d++, output += EDGE) store(output, load<vf>(output) * factor);
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

#endif

}  // namespace kv
