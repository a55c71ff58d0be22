// Layers of models between attention and products: read once, written once, f32 in between. Norms written in PyTorch take
// eight operators, rotary embeddings sixteen, and its GELU takes four times as long as this one.
#pragma once

#include "rows.h"

namespace kv {

struct Norm {
  const void* weight;  // [dim]
  int weight_format;
  float offset;  // added to the weight
  float eps;
  bool rounds_first;  // the row is rounded to its format before the weight multiplies it, as Llama does and Gemma does not
};

// to = x / sqrt(mean(x^2) + eps) * (weight + offset) for rows of `dim` adjacent values.
inline void normalise(const Norm& norm, const void* from, void* to, int format, int64_t num_rows, int dim) {
  at::parallel_for(0, num_rows, std::max<int64_t>(1, GRAIN / dim), [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> values;
    values.resize(2 * size_t(dim));
    float *x = values.data(), *weight = x + dim;
    read_row(norm.weight, 0, norm.weight_format, dim, weight);
    for (int i = 0; i < dim; i++) weight[i] += norm.offset;
    for (int64_t row = begin; row < end; row++) {
      read_row(from, row * dim, format, dim, x);
      vf squares = splat(0.0f);
      int i = 0;
      for (; i + LANES <= dim; i += LANES) squares += load<vf>(x + i) * load<vf>(x + i);
      float total = sum(squares);
      for (; i < dim; i++) total += x[i] * x[i];
      const float factor = 1.0f / std::sqrt(total / float(dim) + norm.eps);
      for (i = 0; i < dim; i++) x[i] *= factor;
      if (norm.rounds_first) {
        write_row(to, row * dim, format, dim, x);
        read_row(to, row * dim, format, dim, x);
      }
      for (i = 0; i < dim; i++) x[i] *= weight[i];
      write_row(to, row * dim, format, dim, x);
    }
  });
}

// GELU by tanh of `n` adjacent values: x / (1 + exp(-sqrt(8 / pi) (x + 0.044715 x^3))), because 1 + tanh(y) is twice the
// sigmoid of 2 y.
inline void gelu_tanh(const void* from, void* to, int format, int64_t n) {
  constexpr int PIECE = 256;  // a multiple of LANES
  constexpr float LINEAR = -1.5957691216f * LOG2E, CUBIC = LINEAR * 0.044715f;
  const vf one = splat(1.0f), most = splat(126.0f);
  at::parallel_for(0, (n + PIECE - 1) / PIECE, GRAIN / PIECE, [&](int64_t begin, int64_t end) {
    alignas(64) float values[PIECE] = {};
    for (int64_t at = begin * PIECE; at < std::min(end * PIECE, n); at += PIECE) {
      const int count = int(std::min<int64_t>(PIECE, n - at));
      read_row(from, at, format, count, values);
      for (int i = 0; i < PIECE; i += LANES) {
        const vf x = load<vf>(values + i);
        const vf power = x * (splat(LINEAR) + splat(CUBIC) * x * x);
        const vf result = x / (one + exp2(minimum(power, most)));  // NaN: of x, where `minimum` lost it
        store(values + i, x < splat(-30.0f) ? x * splat(0.0f) : result);  // nothing is left; NaN of -inf, as PyTorch's
      }
      write_row(to, at, format, count, values);
    }
  });
}

// --- rotary embeddings ----------------------------------------------------------------------------------------------------

struct Heads {  // bf16 [batch, heads, tokens, dim], strides in elements, the values of a row adjacent
  uint16_t* base;
  int64_t batch_stride, head_stride, token_stride;
  int64_t heads;

  uint16_t* row(int64_t batch, int64_t head, int64_t token) const {
    return base + batch * batch_stride + head * head_stride + token * token_stride;
  }
};

KV_INLINE float rounded(float x) { return bf16_to_float(float_to_bf16(x)); }
KV_INLINE vf rounded(vf x) { return bits<vf>(nearest_bf16(x) & 0xffff0000u); }

// to = from * cosine + (halves exchanged, the first of them negated) * sine, of the first `turned` values of `dim`; the others
// stay. As PyTorch computes it: products are rounded before they are added.
inline void turn_row(const uint16_t* from, uint16_t* to, const float* cosine, const float* sine, int turned, int dim) {
  const int half = turned / 2;
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vf a = bf16_lanes(from + i), b = bf16_lanes(from + half + i);
    store_bf16(to + i, rounded(a * load<vf>(cosine + i)) + rounded(-b * load<vf>(sine + i)));
    store_bf16(to + half + i, rounded(b * load<vf>(cosine + half + i)) + rounded(a * load<vf>(sine + half + i)));
  }
  for (; i < half; i++) {
    const float a = bf16_to_float(from[i]), b = bf16_to_float(from[half + i]);
    to[i] = float_to_bf16(rounded(a * cosine[i]) + rounded(-b * sine[i]));
    to[half + i] = float_to_bf16(rounded(b * cosine[half + i]) + rounded(a * sine[half + i]));
  }
  std::copy(from + turned, from + dim, to + turned);
}

// Rows of `from` turned into `to`, of queries and of keys, by cosines and sines [batch, tokens, turned].
inline void turn(const Heads (&from)[2], const Heads (&to)[2], const uint16_t* cosines, const uint16_t* sines,
                 int64_t batch, int64_t tokens, int turned, int dim) {
  const int64_t values = (from[0].heads + from[1].heads) * dim, grain = std::max<int64_t>(1, GRAIN / (values + 1));
  at::parallel_for(0, batch * tokens, grain, [&](int64_t begin, int64_t end) {
    alignas(64) float cosine[MAX_DIM], sine[MAX_DIM];
    for (int64_t i = begin; i < end; i++) {
      const int64_t b = i / tokens, t = i % tokens;
      read_row(cosines, i * turned, BF16, turned, cosine);
      read_row(sines, i * turned, BF16, turned, sine);
      for (int side = 0; side < 2; side++)
        for (int64_t h = 0; h < from[side].heads; h++)
          turn_row(from[side].row(b, h, t), to[side].row(b, h, t), cosine, sine, turned, dim);
    }
  });
}

}  // namespace kv
