// The operators of the CPU kernel, registered with PyTorch under KVCACHE_NAMESPACE. Here tensors are checked and taken apart,
// once per call; cpu.py explains what does not fit.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>

#include "cpp/attend.h"
#include "cpp/layers.h"
#include "cpp/products.h"

namespace {

int format_of(at::ScalarType type) {
  return type == at::kFloat ? kv::F32 : type == at::kHalf ? kv::F16 : kv::BF16;
}

kv::Store store_of(const at::Tensor& array, int64_t format, int64_t dim) {
  const int64_t bytes = array.element_size();
  return {static_cast<const uint8_t*>(array.data_ptr()), array.stride(0) * bytes, array.stride(1) * bytes,
          array.stride(2) * bytes, int(format), int(dim)};
}

kv::Rows rows_of(const at::Tensor& rows) {
  return {rows.data_ptr(), rows.stride(0), rows.stride(1), format_of(rows.scalar_type())};
}

// Whether these are blocks [N,heads,block_size,W] with rows of `dim` values, as cpu.py's `refusal_of` has it.
bool are_blocks(const at::Tensor& array, int64_t format, int64_t dim, int64_t heads, int64_t block_size) {
  const int64_t multiple = format == kv::F32 ? 1 : format <= kv::BF16 ? 2 : format == kv::FP8 ? 4 : kv::GROUP;
  return dim > 0 && dim <= kv::MAX_DIM && dim % multiple == 0 && array.dim() == 4 && array.is_cpu() &&
         array.size(1) == heads && array.size(2) == block_size && array.stride(3) == 1 &&
         array.size(3) * array.element_size() == kv::row_bytes(int(format), int(dim));
}

// Whether these are rows [n,H,D] of f32, f16 or bf16.
bool are_rows(const at::Tensor& array, int64_t n) {
  const at::ScalarType type = array.scalar_type();
  return array.dim() == 3 && array.is_cpu() && array.size(0) == n &&
         (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
}

at::Tensor adjacent(const at::Tensor& rows) { return rows.stride(2) == 1 ? rows : rows.contiguous(); }

// `plan`: what cpu.py made of an AttentionBatch: segments int64 [n,6], then int32 arrays: block tables, rows, positions,
// bounds, begins, ends. It names blocks below `num_blocks`.
at::Tensor attend(const at::Tensor& any_queries, const at::Tensor& keys, const at::Tensor& values, int64_t key_format,
                  int64_t value_format, int64_t value_dim, at::TensorList plan, int64_t num_blocks, int64_t block_size,
                  double scale, std::optional<double> softcap, const std::optional<at::Tensor>& sinks) {
  const int64_t heads = are_rows(any_queries, plan[5].numel()) && keys.dim() == 4 ? keys.size(1) : 0;
  TORCH_CHECK_VALUE(heads > 0 && any_queries.size(1) > 0 && any_queries.size(1) % heads == 0 &&
                        are_blocks(keys, key_format, any_queries.size(2), heads, block_size) &&
                        are_blocks(values, value_format, value_dim, heads, block_size) &&
                        num_blocks <= std::min(keys.size(0), values.size(0)) &&
                        (!softcap.has_value() || (*softcap > 0.0 && std::isfinite(*softcap))) &&
                        (!sinks.has_value() || (sinks->dim() == 1 && sinks->numel() == any_queries.size(1))),
                    "queries, keys, values and the batch do not fit each other");
  const at::Tensor queries = adjacent(any_queries);
  const bool covers_all = plan[2].numel() == queries.size(0);  // a row of no segment sees nothing
  const std::array<int64_t, 3> shape = {queries.size(0), queries.size(1), value_dim};
  at::Tensor output = covers_all ? at::empty(shape, queries.options()) : at::zeros(shape, queries.options());
  const int64_t* table = plan[0].data_ptr<int64_t>();
  const int32_t *blocks = plan[1].data_ptr<int32_t>(), *rows = plan[2].data_ptr<int32_t>();
  const int32_t *positions = plan[3].data_ptr<int32_t>(), *bounds = plan[4].data_ptr<int32_t>();
  std::vector<kv::Segment> segments(size_t(plan[0].size(0)));
  for (size_t i = 0; i < segments.size(); i++) {
    const int64_t* s = table + 6 * i;  // first block, slots, first position, positions or -1, first row, rows
    segments[i] = {blocks + s[0], s[3] < 0 ? nullptr : positions + s[3], s[3] < 0 ? nullptr : bounds + s[3] / kv::TILE * 2,
                   rows + s[4],   s[1], s[2], s[5]};
  }
  kv::Problem problem;
  problem.keys = store_of(keys, key_format, queries.size(2));
  problem.values = store_of(values, value_format, value_dim);
  problem.queries = rows_of(queries);
  problem.output = rows_of(output);
  problem.segments = segments.data();
  problem.num_segments = int64_t(segments.size());
  problem.begins = plan[5].data_ptr<int32_t>();
  problem.ends = plan[6].data_ptr<int32_t>();
  problem.block_size = block_size;
  problem.heads = int(keys.size(1));
  problem.group = int(queries.size(1) / keys.size(1));
  problem.scale = float(scale);
  problem.softcap = float(softcap.value_or(0.0));
  problem.sinks = sinks.has_value() ? sinks->data_ptr<float>() : nullptr;
  kv::Attention(problem).run();
  return output;
}

void check_slots(const at::Tensor& slots, const at::Tensor& storage) {
  const int64_t* slot = slots.data_ptr<int64_t>();
  const int64_t end = storage.size(0) * storage.size(2);
  for (int64_t i = 0; i < slots.numel(); i++)
    TORCH_CHECK_VALUE(slot[i] >= 0 && slot[i] < end, "slot ", slot[i], " is outside the storage of ", end, " slots");
}

// Encodes new_keys [n,H,D] and new_values [n,H,Dv] into their slots of the storage.
void put(const at::Tensor& keys, const at::Tensor& values, int64_t key_format, int64_t value_format,
         const at::Tensor& slots, const at::Tensor& any_keys, const at::Tensor& any_values) {
  TORCH_CHECK_VALUE(slots.dim() == 1 && are_rows(any_keys, slots.numel()) && are_rows(any_values, slots.numel()) &&
                        keys.dim() == 4 && any_keys.size(1) == any_values.size(1) &&
                        are_blocks(keys, key_format, any_keys.size(2), any_keys.size(1), keys.size(2)) &&
                        are_blocks(values, value_format, any_values.size(2), any_values.size(1), keys.size(2)) &&
                        keys.size(0) == values.size(0),
                    "keys, values and their new rows do not fit each other");
  const at::Tensor new_keys = adjacent(any_keys), new_values = adjacent(any_values);
  check_slots(slots, keys);
  check_slots(slots, values);
  const kv::Store stores[] = {store_of(keys, key_format, new_keys.size(2)),
                              store_of(values, value_format, new_values.size(2))};
  const kv::Rows rows[] = {rows_of(new_keys), rows_of(new_values)};
  if (new_keys.numel() > 0)
    kv::put(stores, rows, 2, slots.data_ptr<int64_t>(), slots.numel(), int(keys.size(1)), keys.size(2));
}

void shift(const at::Tensor& keys, int64_t format, int64_t dim, const at::Tensor& slots, const at::Tensor& offsets,
           const at::Tensor& inv_freq, int64_t begin, bool interleaved) {
  check_slots(slots, keys);
  const kv::Rotation rotation = {inv_freq.data_ptr<double>(), int(inv_freq.numel()), int(begin), interleaved};
  if (keys.numel() > 0 && dim > 0)
    kv::shift(store_of(keys, format, dim), slots.data_ptr<int64_t>(), offsets.data_ptr<int64_t>(), slots.numel(),
              int(keys.size(1)), keys.size(2), rotation);
}

// GELU by tanh of each value; the result lies in memory as x does.
at::Tensor gelu_tanh(const at::Tensor& x) {
  const at::Tensor from = x.is_non_overlapping_and_dense() ? x : x.contiguous();
  const at::Tensor to = at::empty_like(from);
  kv::gelu_tanh(from.data_ptr(), to.data_ptr(), format_of(from.scalar_type()), from.numel());
  return to;
}

// x, or a copy where its rows are not dense: what `empty_like` makes of it lies as it does.
at::Tensor dense_rows(const at::Tensor& x) {
  return x.is_non_overlapping_and_dense() && x.stride(-1) == 1 ? x : x.contiguous();
}

// Rows of the last dimension of x, normalised; the result lies in memory as x does.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double offset, double eps, bool rounds_first) {
  const at::Tensor from = dense_rows(x), to = at::empty_like(from);
  const int64_t dim = from.size(-1);
  TORCH_CHECK_VALUE(dim == weight.numel(), "rows have ", dim, " values and the weight has ", weight.numel());
  const at::Tensor scale = weight.contiguous();
  if (from.numel() > 0)
    kv::normalise({scale.data_ptr(), format_of(scale.scalar_type()), float(offset), float(eps), rounds_first},
                  from.data_ptr(), to.data_ptr(), format_of(from.scalar_type()), from.numel() / dim, int(dim));
  return to;
}

// Queries and keys [batch, heads, tokens, dim] turned by cosines and sines [batch, tokens, turned], all of bf16. As PyTorch's
// operators leave them, rows that are turned as a whole lie in memory as before, and others are contiguous.
std::tuple<at::Tensor, at::Tensor> turn(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& cosines,
                                        const at::Tensor& sines, bool takes_part) {
  TORCH_CHECK_VALUE(queries.dim() == 4 && keys.dim() == 4 && cosines.dim() == 3, "turn takes [batch, heads, tokens, dim]");
  const int64_t batch = queries.size(0), tokens = queries.size(2), dim = queries.size(3), turned = cosines.size(2);
  const auto check = [&](const at::Tensor& t, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(t.sizes() == shape && t.scalar_type() == at::kBFloat16 && t.is_cpu(), "turn takes bfloat16 ", shape,
                      " on the CPU, not ", t.scalar_type(), " ", t.sizes(), " on ", t.device());
  };
  check(queries, {batch, queries.size(1), tokens, dim});
  check(keys, {batch, keys.size(1), tokens, dim});
  check(cosines, {batch, tokens, turned});
  check(sines, {batch, tokens, turned});
  TORCH_CHECK_VALUE(turned % 2 == 0 && (takes_part ? turned <= dim : turned == dim) && dim <= kv::MAX_DIM, turned, " of ", dim,
                    " values of a row to turn");
  const at::Tensor from[] = {dense_rows(queries), dense_rows(keys)};
  const auto result = [&](const at::Tensor& t) {
    return turned == dim ? at::empty_like(t) : at::empty(t.sizes(), t.options());
  };
  const at::Tensor to[] = {result(from[0]), result(from[1])};
  const auto heads = [](const at::Tensor& t) {
    return kv::Heads{static_cast<uint16_t*>(t.data_ptr()), t.stride(0), t.stride(1), t.stride(2), t.size(1)};
  };
  const at::Tensor cosine = cosines.contiguous(), sine = sines.contiguous();
  const kv::Heads sources[] = {heads(from[0]), heads(from[1])}, results[] = {heads(to[0]), heads(to[1])};
  kv::turn(sources, results, static_cast<uint16_t*>(cosine.data_ptr()), static_cast<uint16_t*>(sine.data_ptr()), batch,
           tokens, int(turned), int(dim));
  return {to[0], to[1]};
}

// Rows x [..., in] times weights [out, in], and a bias [out]; all of bf16.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && x.dim() > 0 && x.size(-1) == weight.size(1), "rows are ", x.sizes(),
                    " and weights are ", weight.sizes());
  TORCH_CHECK_VALUE(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "the bias is ",
                    bias->sizes(), " and weights are ", weight.sizes());
  const auto dense = [](const at::Tensor& t) {
    TORCH_CHECK_VALUE(t.scalar_type() == at::kBFloat16 && t.is_cpu(), "linear takes bfloat16 on the CPU, not ",
                      t.scalar_type(), " on ", t.device());
    return t.contiguous();
  };
  const auto values = [](const at::Tensor& t) { return static_cast<uint16_t*>(t.data_ptr()); };
  const at::Tensor rows = dense(x), weights = dense(weight), added = bias.has_value() ? dense(*bias) : at::Tensor();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  const at::Tensor to = at::empty(shape, rows.options());
  if (to.numel() > 0)
    kv::multiply({values(rows), values(weights), added.defined() ? values(added) : nullptr, values(to),
                  to.numel() / weight.size(0), weight.size(1), weight.size(0)});
  return to;
}

// Whether this build has the tile unit's instructions.
bool has_amx() {
#if defined(KV_AMX)
  return true;
#else
  return false;
#endif
}

bool uses_amx() { return kv::use_amx; }

// Builds without bf16 products have no use for it, and stay without.
void set_amx(bool on) {
#if defined(KV_BF16)
  kv::use_amx = on;
#else
  (void)on;
#endif
}

std::string isa() {
#if defined(KV_BF16)
  return "avx512+bf16";
#elif defined(KV_AVX512)
  return "avx512";
#elif defined(KV_AVX2)
  return "avx2";
#else
  return "scalar";
#endif
}

}  // namespace

TORCH_LIBRARY(KVCACHE_NAMESPACE, library) {
  library.def("isa", isa);
  library.def("has_amx", has_amx);
  library.def("uses_amx", uses_amx);
  library.def("set_amx", set_amx);
  library.def(
      "attend(Tensor queries, Tensor keys, Tensor values, int key_format, int value_format, int value_dim, "
      "Tensor[] plan, int num_blocks, int block_size, float scale, float? softcap, Tensor? sinks) -> Tensor");
  library.def(
      "put(Tensor(a!) keys, Tensor(b!) values, int key_format, int value_format, Tensor slots, Tensor new_keys, "
      "Tensor new_values) -> ()");
  library.def(
      "shift(Tensor(a!) keys, int format, int dim, Tensor slots, Tensor offsets, Tensor inv_freq, int begin, "
      "bool interleaved) -> ()");
  library.def("gelu_tanh(Tensor x) -> Tensor");
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float offset, float eps, bool rounds_first) -> Tensor");
  library.def("turn(Tensor queries, Tensor keys, Tensor cosines, Tensor sines, bool takes_part) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(KVCACHE_NAMESPACE, CPU, library) {
  library.impl("attend", attend);
  library.impl("put", put);
  library.impl("shift", shift);
  library.impl("gelu_tanh", gelu_tanh);
  library.impl("linear", linear);
  library.impl("rms_norm", rms_norm);
  library.impl("turn", turn);
}
