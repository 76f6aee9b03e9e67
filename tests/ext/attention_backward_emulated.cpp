// The Hopper backward for keys and the sum of its parts on the host, on raw addresses, all keys at
// once (tests/test_key_pieces_kernel.py) or in windows (tests/test_gradient_windows_kernel.py).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

// Negative where a bit of the sign is set, then clamped: all that drop_weights does with it.
inline __nv_bfloat162 __hfma2_relu(__nv_bfloat162 a, __nv_bfloat162, __nv_bfloat162) {
  const auto clamped = [](__nv_bfloat16 x) { return x.bits & 0x8000 ? __nv_bfloat16{0} : x; };
  return {clamped(a.x), clamped(a.y)};
}
inline __half2 __hfma2_relu(__half2 a, __half2, __half2) {
  const auto clamped = [](__half x) { return x.value > 0 ? x : __half{0}; };
  return {clamped(a.x), clamped(a.y)};
}

#define __CUDACC__  // dropout's bits are drawn by device code

namespace frx {
// The arrays that the kernels declare as extern __shared__.
__align__(1024) unsigned char smem_bytes[hopper::kSmemBytes];
namespace {
__align__(1024) unsigned char smem[hopper::kSmemBytes];
}
}  // namespace frx

#pragma GCC diagnostic ignored "-Wsign-compare"  // nvcc does not mind
#pragma GCC diagnostic ignored "-Wsizeof-array-div"
#include "attention_bwd_keys_sm90.cuh"
#include "attention_bwd_sum_sm90.cu"
#include "attention_bwd_window_d256_sm90.cu"

namespace py = pybind11;

namespace frx {
namespace {

HeadsView view_of(uintptr_t address, int64_t tokens, int64_t heads, int64_t head_dim) {
  return {reinterpret_cast<void*>(address), tokens * heads * head_dim, heads * head_dim, head_dim};
}

template <class T>
T* at(const py::dict& addresses, const char* name) {
  return addresses.contains(name) ? reinterpret_cast<T*>(addresses[name].cast<uintptr_t>())
                                  : nullptr;
}

// delta is the kernel's before that for keys.
void show_delta_late(const AttentionBackwardParams& p) {
  const int64_t rows = p.sizes.batch * p.sizes.num_heads * p.sizes.num_queries;
  hopper::previous().begin = reinterpret_cast<const char*>(p.delta);
  hopper::previous().end = reinterpret_cast<const char*>(p.delta + rows);
}

AttentionSizes sizes_of(const std::vector<int>& sizes) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
}

// sizes: batch, queries, keys, heads, key heads, head dim.
AttentionBackwardParams params_of(const std::vector<int>& sizes, const py::dict& addresses,
                                  std::pair<int, int> cut, int rotary_dim, double dropout_p) {
  AttentionBackwardParams p{};
  p.sizes = sizes_of(sizes);
  p.dtype = DType::kBFloat16;
  const auto view = [&](const char* name, int tokens, int heads) {
    return view_of(addresses[name].cast<uintptr_t>(), sizes[tokens], sizes[heads], sizes[5]);
  };
  p.q = view("q", 1, 3);
  p.dout = view("dout", 1, 3);
  p.dq = view("dq", 1, 3);
  p.k = view("k", 2, 4);
  p.v = view("v", 2, 4);
  p.dk = view("dk", 2, 4);
  p.dv = view("dv", 2, 4);
  p.lse = at<const float>(addresses, "lse");
  p.delta = at<float>(addresses, "delta");
  p.dq_parts = at<float>(addresses, "dq_parts");
  p.dkv_parts = at<float>(addresses, "dkv_parts");
  p.dq_with_dkv = p.dq_parts != nullptr;
  p.num_splits = 1;
  p.key_cut = {cut.first, cut.second};
  p.scores.kv_lengths = at<int32_t>(addresses, "kv_lengths");
  p.scores.key_keep = at<bool>(addresses, "key_keep");
  p.scores.scale = 0.2f;
  if (dropout_p > 0) {
    p.scores.seed = at<int64_t>(addresses, "seed");
    p.scores.keep_threshold = static_cast<uint32_t>((1 - dropout_p) * 65536.0);
    p.scores.keep_scale = static_cast<float>(1 / (1 - dropout_p));
  }
  p.k_rotation.rotary_dim = p.q_rotation.rotary_dim = rotary_dim;
  p.k_rotation.axes = p.q_rotation.axes = 1;
  p.k_rotation.log2_base = p.q_rotation.log2_base = 10;
  return p;
}

void start(const AttentionBackwardParams& p, unsigned seed) {
  hopper::smem = smem_bytes;
  hopper::seed() = seed;
  show_delta_late(p);
}

// dq, too, if it has parts.
void run(const std::vector<int>& sizes, const py::dict& addresses, std::pair<int, int> cut,
         int rotary_dim, bool is_causal, double dropout_p, unsigned seed) {
  AttentionBackwardParams p = params_of(sizes, addresses, cut, rotary_dim, dropout_p);
  p.scores.is_causal = is_causal;
  start(p, seed);
  if (p.sizes.head_dim <= 64) {
    p.dq_with_dkv
        ? run_backward_keys<KeySideConfig<64, 64, 2, 2, true, true, true>>(p, true, nullptr)
        : run_backward_keys<KeySideConfig<64, 96, 2, 2, true, true, false>>(p, true, nullptr);
  } else if (p.sizes.head_dim > 128) {
    run_backward_keys<KeySideConfig<256, 64, 2, 2, false, true, false>>(p, true, nullptr);
    run_backward_keys<KeySideConfig<256, 64, 2, 1, true, false, false>>(p, false, nullptr);
  } else {
    p.dq_with_dkv
        ? run_backward_keys<KeySideConfig<128, 64, 2, 2, true, true, true>>(p, true, nullptr)
        : run_backward_keys<KeySideConfig<128, 64, 2, 2, true, true, false>>(p, true, nullptr);
  }
  if (p.dq_parts != nullptr || p.dkv_parts != nullptr)
    attention_backward_sm90_sum(p, cut_blocks(p.sizes, p.key_cut), nullptr);
}

constexpr int kWindowsDim = 256;  // padded

int64_t window_bytes(const std::vector<int>& sizes, int blocks) {
  return blocks * window_block_bytes(sizes_of(sizes));
}

// Blocks of a window; those that are whole, of each window and of the last; stride and share; tiles
// of the first split.
using Windows = std::tuple<int, int, int, int, int, int>;

WindowPlan plan_of(const std::vector<int>& sizes, const Windows& windows) {
  const auto [blocks, whole, last_whole, stride, share, first_split] = windows;
  const KeyShares shares = {ceil_div(sizes[1], kWindowTile), stride, share};
  return {blocks, {whole, shares, first_split}, {last_whole, shares, first_split}};
}

int64_t part_floats(const std::vector<int>& sizes, const Windows& windows) {
  return window_part_floats(sizes_of(sizes), plan_of(sizes, windows), kWindowsDim);
}

// Whole, by windows of blocks of keys.
void run_windows(const std::vector<int>& sizes, const py::dict& addresses, const Windows& windows,
                 int num_splits, int rotary_dim, double dropout_p, bool is_fp16, unsigned seed) {
  const WindowPlan plan = plan_of(sizes, windows);
  AttentionBackwardParams p = params_of(sizes, addresses, {0, 1}, rotary_dim, dropout_p);
  if (is_fp16) p.dtype = DType::kFloat16;
  p.dq_with_dkv = false;
  p.num_splits = num_splits;
  p.windows = {plan, at<void>(addresses, "gradients")};
  start(p, seed);
  const auto written = [](const void* data, int64_t bytes) {
    const char* const begin = static_cast<const char*>(data);
    return hopper::Range{begin, begin + bytes};
  };
  const float* const parts_end = dq_fragments<kWindowsDim>(p, num_splits, 0, 0, 0);
  hopper::written_in_chain() = {written(p.windows.gradients, window_bytes(sizes, plan.blocks)),
                                written(p.dq_parts, (parts_end - p.dq_parts) * sizeof(float))};
  attention_backward_sm90_windows_d256(p, nullptr);
  hopper::written_in_chain().clear();
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(attention_backward_emulated, m) {
  m.def("run", &frx::run);
  m.def("run_windows", &frx::run_windows);
  m.def("window_bytes", &frx::window_bytes);
  m.def("part_floats", &frx::part_floats);
}
