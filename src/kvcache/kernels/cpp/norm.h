// Root-mean-square norm of rows: read once, written once, f32 in between. Models written in PyTorch take eight operators.
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

}  // namespace kv
