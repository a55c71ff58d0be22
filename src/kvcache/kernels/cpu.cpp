// The operators of the CPU kernel, registered with PyTorch under KVCACHE_NAMESPACE. Checks that cost nothing stand in
// cpu.py; here the tensors are taken apart, once per call.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpp/attend.h"

namespace {

int format_of(at::ScalarType type) {
  return type == at::kFloat ? kv::F32 : type == at::kHalf ? kv::F16 : kv::BF16;
}

kv::Store store_of(const at::Tensor& array, int64_t format, int64_t dim) {
  const int64_t bytes = array.element_size();
  return {static_cast<const uint8_t*>(array.data_ptr()), array.stride(0) * bytes, array.stride(1) * bytes,
          array.stride(2) * bytes, int(format), int(dim)};
}

// `plan`: what cpu.py made of an AttentionBatch: segments int64 [n,6], then int32 arrays: block tables, rows, positions,
// bounds, begins, ends.
at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, int64_t key_format,
                  int64_t value_format, int64_t value_dim, at::TensorList plan, int64_t block_size, double scale,
                  double softcap, const std::optional<at::Tensor>& sinks) {
  at::Tensor output = at::empty({queries.size(0), queries.size(1), value_dim}, queries.options());
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
  problem.queries = {queries.data_ptr(), queries.stride(0), queries.stride(1), format_of(queries.scalar_type())};
  problem.output = {output.data_ptr(), output.stride(0), output.stride(1), format_of(output.scalar_type())};
  problem.segments = segments.data();
  problem.num_segments = int64_t(segments.size());
  problem.begins = plan[5].data_ptr<int32_t>();
  problem.ends = plan[6].data_ptr<int32_t>();
  problem.block_size = block_size;
  problem.heads = int(keys.size(1));
  problem.group = int(queries.size(1) / keys.size(1));
  problem.scale = float(scale);
  problem.softcap = float(softcap);
  problem.sinks = sinks.has_value() ? sinks->data_ptr<float>() : nullptr;
  kv::Attention(problem).run();
  return output;
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
  library.def(
      "attend(Tensor queries, Tensor keys, Tensor values, int key_format, int value_format, int value_dim, "
      "Tensor[] plan, int block_size, float scale, float softcap, Tensor? sinks) -> Tensor",
      attend);
}
