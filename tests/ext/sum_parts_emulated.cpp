// The sum of parts of the Hopper backward, and the way through the rotation that the kernels for
// keys and queries take, on the host, on raw addresses: tests/test_sum_parts_kernel.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

namespace frx {
namespace {
// The array that the kernel declares as extern __shared__.
__align__(1024) unsigned char smem[hopper::kSmemBytes];
}  // namespace
}  // namespace frx

#pragma GCC diagnostic ignored "-Wsign-compare"  // nvcc does not mind
#pragma GCC diagnostic ignored "-Wsizeof-array-div"
#include "attention_bwd_sum_sm90.cu"

namespace py = pybind11;

namespace frx {
namespace {

template <class T>
T* at(const py::dict& addresses, const char* name) {
  return addresses.contains(name) ? reinterpret_cast<T*>(addresses[name].cast<uintptr_t>())
                                  : nullptr;
}

RotationParams rotation_of(const py::dict& d) {
  RotationParams r{};
  r.rotary_dim = d["rotary_dim"].cast<int>();
  r.axes = d["axes"].cast<int>();
  r.interleaved = d["interleaved"].cast<bool>();
  r.full_width = d["full_width"].cast<bool>();
  r.log2_base = std::log2(d["base"].cast<double>());
  r.position_type = static_cast<PositionType>(d["position_type"].cast<int>());
  r.positions = at<void>(d, "positions");
  r.position_batch_stride = d["position_batch_stride"].cast<int64_t>();
  r.cos = at<float>(d, "cos");
  r.sin = at<float>(d, "sin");
  const auto strides = d["table_strides"].cast<std::vector<int64_t>>();  // batch, head, token
  r.table_batch_stride = strides[0];
  r.table_head_stride = strides[1];
  r.table_token_stride = strides[2];
  return r;
}

// dq of one part by warps that hold 16 queries as accumulators.
template <int kHeadDim>
void turn_kernel(SumParams params) {
  const AttentionBackwardParams& p = params.attention;
  const int strips = ceil_div(p.sizes.num_queries, kWarpRows);
  const int batch_head = blockIdx.x / strips, first_row = blockIdx.x % strips * kWarpRows;
  const int lane = threadIdx.x;
  const float* fragments = dq_fragments<kHeadDim>(p, 0, batch_head, first_row, lane);
  float x[kHeadDim / 2];
  for (int i = 0; i < kHeadDim / 2; ++i) x[i] = fragments[i / 4 * kFragment + i % 4];
  store_turned_back<__nv_bfloat16>(
      p.dq, x, p.scores.scale, p.q_rotation, params.sides[kQuerySide].turns,
      *reinterpret_cast<TurningRows<kHeadDim>*>(smem), batch_head / p.sizes.num_heads,
      batch_head % p.sizes.num_heads, first_row, p.sizes.num_queries, p.sizes.head_dim, lane);
}

template <int kHeadDim>
void launch_turn(const AttentionBackwardParams& p) {
  const int64_t strips =
      p.sizes.batch * p.sizes.num_heads * ceil_div(p.sizes.num_queries, kWarpRows);
  launch(turn_kernel<kHeadDim>, "turn", strips, 32, sizeof(TurningRows<kHeadDim>), nullptr,
         plan_sum<kHeadDim>(p, cut_blocks(p.sizes, p.key_cut)));
}

// sizes: batch, queries, keys, heads, key heads, head dim. What has parts is summed; turns_only:
// dq's only part goes the way of the other kernels.
void run(const std::vector<int>& sizes, const py::dict& addresses, int splits,
         std::pair<int, int> cut, bool is_bfloat16, const py::dict& q_rotation,
         const py::dict& k_rotation, float scale, float keep_scale, bool turns_only,
         unsigned seed) {
  hopper::smem = smem;
  hopper::seed() = seed;
  AttentionBackwardParams p{};
  p.sizes = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
  p.dtype = is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  const auto view = [&](const char* name, int64_t tokens, int64_t heads) {
    const int64_t head_dim = sizes[5];
    return HeadsView{at<void>(addresses, name), tokens * heads * head_dim, heads * head_dim,
                     head_dim};
  };
  p.dq = view("dq", sizes[1], sizes[3]);
  p.dk = view("dk", sizes[2], sizes[4]);
  p.dv = view("dv", sizes[2], sizes[4]);
  p.dq_parts = at<float>(addresses, "dq_parts");
  p.dkv_parts = at<float>(addresses, "dkv_parts");
  p.num_splits = splits;
  p.key_cut = {cut.first, cut.second};
  p.scores.scale = scale;
  p.scores.keep_scale = keep_scale;
  p.scores.seed = at<int64_t>(addresses, "seed");
  p.q_rotation = rotation_of(q_rotation);
  p.k_rotation = rotation_of(k_rotation);
  if (!turns_only) return attention_backward_sm90_sum(p, cut_blocks(p.sizes, p.key_cut), nullptr);
  if (sizes[5] <= 32) return launch_turn<32>(p);
  if (sizes[5] <= 64) return launch_turn<64>(p);
  if (sizes[5] <= 128) return launch_turn<128>(p);
  launch_turn<256>(p);
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(sum_parts_emulated, m) { m.def("run", &frx::run); }
