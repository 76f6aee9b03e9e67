// norm_rope's kernels on the host, on raw addresses: tests/test_norm_rope_kernel.py.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <vector>

namespace frx::norm_rope {
namespace {
// The array that the kernels declare as extern __shared__.
__align__(16) unsigned char smem[emulation::kSmemCapacity];
}  // namespace
}  // namespace frx::norm_rope

#include "norm_rope_backward.cu"
#include "norm_rope_forward.cu"

namespace py = pybind11;

namespace frx {

Gpu current_gpu() { return {90, emulation::gpu().num_sms}; }

namespace {

template <class T>
T field(const py::dict& fields, const char* name) {
  return fields.contains(name) ? fields[name].cast<T>() : T{};
}

void* address(const py::dict& fields, const char* name) {
  return reinterpret_cast<void*>(field<uintptr_t>(fields, name));
}

DType dtype(const py::dict& fields, const char* name) {
  return static_cast<DType>(field<int>(fields, name));
}

NormRopeParams params_of(const py::dict& fields) {
  NormRopeParams p = {};
  p.batch = field<int64_t>(fields, "batch");
  p.num_tokens = field<int64_t>(fields, "num_tokens");
  p.num_heads = field<int>(fields, "num_heads");
  p.head_dim = field<int>(fields, "head_dim");
  p.input_dtype = dtype(fields, "input_dtype");
  p.output_dtype = dtype(fields, "output_dtype");
  p.x = address(fields, "x");
  p.grad = address(fields, "grad");
  p.out = address(fields, "out");
  p.bias = address(fields, "bias");
  p.bias_dtype = dtype(fields, "bias_dtype");
  p.norm_kind = static_cast<NormKind>(field<int>(fields, "norm_kind"));
  p.norm_inner = field<bool>(fields, "norm_inner");
  p.norm_eps = field<float>(fields, "norm_eps");
  p.norm_weight = address(fields, "norm_weight");
  p.norm_bias = address(fields, "norm_bias");
  p.norm_dtype = dtype(fields, "norm_dtype");
  p.dnorm_weight = static_cast<float*>(address(fields, "dnorm_weight"));
  p.dnorm_bias = static_cast<float*>(address(fields, "dnorm_bias"));
  p.num_partials = field<int>(fields, "num_partials");
  p.rotary_dim = field<int>(fields, "rotary_dim");
  p.axes = field<int>(fields, "axes");
  p.interleaved = field<bool>(fields, "interleaved");
  p.full_width = field<bool>(fields, "full_width");
  p.log2_base = field<double>(fields, "log2_base");
  p.position_type = static_cast<PositionType>(field<int>(fields, "position_type"));
  p.positions = address(fields, "positions");
  p.position_batch_stride = field<int64_t>(fields, "position_batch_stride");
  p.cos = static_cast<const float*>(address(fields, "cos"));
  p.sin = static_cast<const float*>(address(fields, "sin"));
  p.table_batch_stride = field<int64_t>(fields, "table_batch_stride");
  p.table_head_stride = field<int64_t>(fields, "table_head_stride");
  p.table_token_stride = field<int64_t>(fields, "table_token_stride");
  return p;
}

// Behind a kernel that copies the gradients from "written" to "grad".
void rope_backward(const std::vector<py::dict>& sides) {
  std::vector<NormRopeParams> params;
  for (const py::dict& fields : sides) params.push_back(params_of(fields));
  emulation::previous_kernel() = [&] {
    for (size_t i = 0; i < sides.size(); ++i) {
      const NormRopeParams& p = params[i];
      std::memcpy(p.out, address(sides[i], "written"),
                  p.batch * p.num_tokens * p.num_heads * p.head_dim *
                      norm_rope::element_bytes(p.output_dtype));
    }
  };
  run_rope_backward(params.data(), static_cast<int>(params.size()), nullptr);
}

void set_gpu(int num_sms, int max_smem_bytes, unsigned seed) {
  emulation::gpu() = {num_sms, max_smem_bytes, seed, norm_rope::smem};
}

}  // namespace

PYBIND11_MODULE(norm_rope_emulated, m) {
  m.def("set_gpu", &set_gpu);
  m.def("norm_rope", [](const py::dict& fields) { run_norm_rope(params_of(fields), nullptr); });
  m.def("norm_rope_backward",
        [](const py::dict& fields) { run_norm_rope_backward(params_of(fields), nullptr); });
  m.def("rope_backward", &rope_backward);
  m.def("is_wide",
        [](const py::dict& fields) { return norm_rope::can_be_wide(params_of(fields)); });
}

}  // namespace frx
