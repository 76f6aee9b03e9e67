// The kernels of attention over tokens on the host, on raw addresses:
// tests/test_token_attention_kernel.py.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

namespace frx {
// The array that the kernels declare as extern __shared__.
__align__(1024) char smem[hopper::kSmemBytes];
}  // namespace frx

#include "token_attention_backward.cuh"
#include "token_attention_forward.cuh"

namespace frx {
namespace {

template <class T>
T* at(const pybind11::dict& addresses, const char* name) {
  if (!addresses.contains(name)) return nullptr;
  return reinterpret_cast<T*>(addresses[name].cast<uintptr_t>());
}

// sizes: B, Tq, Tk, H, Hkv, D, Dv, splits; rotation: rotary_dim, axes, interleaved. q and k are
// contiguous.
TokenAttentionParams params_of(const std::vector<int>& sizes, const pybind11::dict& addresses,
                               const std::vector<int>& rotation, float scale, bool is_causal,
                               unsigned seed) {
  hopper::smem = reinterpret_cast<unsigned char*>(smem);
  hopper::seed() = seed;
  TokenAttentionParams p{};
  p.sizes = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
  const int64_t head_dim = sizes[5];
  p.width = sizes[6];
  p.num_splits = sizes[7];
  p.q = {at<void>(addresses, "q"), sizes[1] * sizes[3] * head_dim, sizes[3] * head_dim, head_dim};
  p.k = {at<void>(addresses, "k"), sizes[2] * sizes[4] * head_dim, sizes[4] * head_dim, head_dim};
  p.x = at<void>(addresses, "x");
  p.scores.key_keep = at<bool>(addresses, "key_keep");
  p.scores.kv_lengths = at<int32_t>(addresses, "kv_lengths");
  p.scores.scale = scale;
  p.scores.is_causal = is_causal;
  p.w_v = at<void>(addresses, "w_v");
  p.b_v = at<void>(addresses, "b_v");
  p.o = at<void>(addresses, "o");
  p.lse = at<float>(addresses, "lse");
  p.u = at<void>(addresses, "u");
  p.u_rest = at<void>(addresses, "u_rest");
  p.part_u = at<float>(addresses, "part_u");
  p.part_rows = at<float2>(addresses, "part_rows");
  p.du = at<void>(addresses, "du");
  p.dlse = at<float>(addresses, "dlse");
  p.part_dq = at<float>(addresses, "part_dq");
  p.dq = at<void>(addresses, "dq");
  p.dk = at<void>(addresses, "dk");
  p.dx = at<void>(addresses, "dx");
  p.k_rotation.rotary_dim = rotation[0];
  p.k_rotation.axes = rotation[1];
  p.k_rotation.interleaved = rotation[2] != 0;
  if (rotation[0] == 0) return p;
  p.k_rotation.positions = at<void>(addresses, "k_positions");
  if (p.k_rotation.positions != nullptr) p.k_rotation.position_type = PositionType::kInt64;
  p.k_rotation.position_batch_stride = sizes[2] * rotation[1];
  p.k_rotation.cos = at<float>(addresses, "k_cos");
  p.k_rotation.sin = at<float>(addresses, "k_sin");
  p.k_rotation.table_token_stride = rotation[0] / 2;
  p.k_rotation.table_batch_stride = sizes[2] * p.k_rotation.table_token_stride;
  const int pairs = rotation[0] / rotation[1] / 2;
  constexpr double kLog2Base = 10.0;
  for (int i = 0; i < pairs; ++i) {
    p.k_turns[i] = turns_a_position(inverse_frequency(i, 2 * pairs, kLog2Base));
  }
  return p;
}

void run(bool forward, bool is_bf16, const TokenAttentionParams& p) {
  if (forward) {
    is_bf16 ? dispatch_token_attention<HalfOp<__nv_bfloat16>>(p, nullptr)
            : dispatch_token_attention<HalfOp<__half>>(p, nullptr);
  } else {
    is_bf16 ? dispatch_token_gradients<HalfOp<__nv_bfloat16>>(p, nullptr)
            : dispatch_token_gradients<HalfOp<__half>>(p, nullptr);
  }
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(token_attention_emulated, m) {
  m.def("run", [](bool forward, bool is_bf16, const std::vector<int>& sizes,
                  const pybind11::dict& addresses, const std::vector<int>& rotation, float scale,
                  bool is_causal, unsigned seed) {
    frx::run(forward, is_bf16, frx::params_of(sizes, addresses, rotation, scale, is_causal, seed));
  });
  m.def("splits", &frx::token_splits);
}
