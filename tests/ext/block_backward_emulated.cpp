// A small block's backward on the host: its binding, its plan and its kernels, whole. Called with
// torch's tensors by tests/test_block_backward_kernel.py.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

namespace frx {
// The array that the kernels declare as extern __shared__.
__align__(1024) char smem[hopper::kSmemBytes];

inline cudaStream_t current_stream(int32_t) { return nullptr; }
}  // namespace frx

#pragma GCC diagnostic ignored "-Wsign-compare"  // blockIdx is unsigned

#include "bindings_block_backward.cpp"
#include "block_backward.cpp"
#include "block_backward.cuh"

namespace py = pybind11;

namespace {

// Makes the tensors that a call puts out or works with.
py::object& allocate() {
  static py::object& function = *new py::object;  // must not outlive Python
  return function;
}

void prepare(unsigned seed, int num_sms, const py::object& function) {
  frx::emulated_sms() = num_sms;
  hopper::smem = reinterpret_cast<unsigned char*>(frx::smem);
  hopper::seed() = seed;
  hopper::written_in_chain().clear();
  hopper::says_so_last = true;
  // Before the first launch of a call anything may be unfinished.
  hopper::previous() = {};
  hopper::previous().end = reinterpret_cast<const char*>(UINTPTR_MAX);
  allocate() = function;
}

}  // namespace

// Whatever a call allocates is written by one of its kernels.
int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                 int32_t dtype, int32_t device_type, int32_t,
                                 AtenTensorHandle* made) {
  using torch::headeronly::kTypeNames;
  const std::vector<int64_t> shape(sizes, sizes + ndim);
  const torch::stable::Tensor t =
      allocate()(shape, py::module_::import("torch").attr(kTypeNames[dtype]));
  if (device_type != aoti_torch_device_type_cuda() ||
      t.attr("stride")().cast<std::vector<int64_t>>() !=
          std::vector<int64_t>(strides, strides + ndim)) {
    throw std::runtime_error("a result is not contiguous on the GPU");
  }
  const char* begin = static_cast<const char*>(t.data_ptr());
  hopper::written_in_chain().push_back({begin, begin + t.attr("nbytes").cast<int64_t>()});
  *made = py::object(t).release().ptr();
  return 0;
}

namespace frx {

namespace {

template <class Op, class ProductOp = Op>
void backward(const BlockBackwardParams& p) {
  const int head_dim = p.attention.attention.sizes.head_dim;
  if (head_dim <= 32) return launch_block_backward<Op, ProductOp, 32>(p, nullptr);
  if (head_dim <= 64) return launch_block_backward<Op, ProductOp, 64>(p, nullptr);
  launch_block_backward<Op, ProductOp, 128>(p, nullptr);
}

}  // namespace

void block_backward_bf16(const BlockBackwardParams& p, cudaStream_t) {
  backward<HalfOp<__nv_bfloat16>>(p);
}
void block_backward_fp16(const BlockBackwardParams& p, cudaStream_t) {
  backward<HalfOp<__half>>(p);
}
void block_backward_tf32(const BlockBackwardParams& p, cudaStream_t) { backward<Tf32Op<1>>(p); }
void block_backward_fp32(const BlockBackwardParams& p, cudaStream_t) {
  backward<Tf32Op<4>, StagedBf16x6Op>(p);
}

}  // namespace frx

PYBIND11_MODULE(block_backward_emulated, m) {
  m.def("prepare", &prepare);
  define_fused_rope_xattn({m});
}
