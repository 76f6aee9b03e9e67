// The order of launches of attention forward and backward, and the two small kernels around the
// tiled ones: combining split keys, and delta.
#include "attention_sm90.h"
#include "attention_tf32_sm90.h"
#include "chained_launch.cuh"
#include "cuda_check.h"
#include "entry.h"
#include "mask.cuh"
#include "mma.cuh"
#include "portable.h"
#include "scores.cuh"
#include "storage.cuh"

namespace frx {

namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements a lane handles at a time; divides every head dim

// One (batch, query, head), shared by `lanes` neighbouring lanes. Heads are numbered fastest,
// as they lie in memory, and no block spans two batch elements.
struct Row {
  int64_t b, index;  // index = (b * H + h) * Tq + query
  int h, query;
  int lane;  // within the row
  bool exists;
};

// Lanes of a row: a power of two, one for each vector of up to 256 dims.
FRX_HOST_DEVICE int row_lanes(int head_dim) {
  int lanes = 1;
  while (lanes * kVector < head_dim) lanes *= 2;
  return lanes;
}

FRX_HOST_DEVICE uint32_t blocks_a_batch_element(const AttentionSizes& sizes) {
  const int64_t rows = static_cast<int64_t>(sizes.num_queries) * sizes.num_heads;
  return static_cast<uint32_t>(
      ceil_div(rows, static_cast<int64_t>(kThreads / row_lanes(sizes.head_dim))));
}

__device__ __forceinline__ Row row_of_thread(const AttentionSizes& sizes, int lanes) {
  const uint32_t blocks = blocks_a_batch_element(sizes), heads = sizes.num_heads;
  const uint32_t b = blockIdx.x / blocks;
  const uint32_t i = (blockIdx.x - b * blocks) * (kThreads / lanes) + threadIdx.x / lanes;
  const uint32_t query = i / heads, h = i - query * heads;
  Row row;
  row.b = b;
  row.h = static_cast<int>(h);
  row.query = static_cast<int>(query);
  row.index = (row.b * heads + h) * sizes.num_queries + query;
  row.lane = threadIdx.x % lanes;
  row.exists = query < static_cast<uint32_t>(sizes.num_queries);
  return row;
}

int64_t row_blocks(const AttentionSizes& sizes) {
  return sizes.batch * blocks_a_batch_element(sizes);
}

// o = sum_s exp(lse_s - lse) o_s with lse = log sum_s exp(lse_s), over the parts of the keys.
__global__ __launch_bounds__(kThreads) void combine_splits_kernel(
    const __grid_constant__ AttentionForwardParams p) {
  const Row row = row_of_thread(p.sizes, row_lanes(p.sizes.head_dim));
  wait_for_previous_kernel();
  if (!row.exists) return;
  const int d = row.lane * kVector, head_dim = p.sizes.head_dim;
  const int64_t rows = p.sizes.batch * p.sizes.num_heads * p.sizes.num_queries;

  float lse_max = negative_infinity();
  for (int s = 0; s < p.num_splits; ++s) {
    lse_max = fmaxf(lse_max, p.partial_lse[s * rows + row.index]);
  }
  const bool has_keys = lse_max > negative_infinity();
  float sum = 0.f, o[kVector] = {};
  if (has_keys) {
    for (int s = 0; s < p.num_splits; ++s) {
      const int64_t part = s * rows + row.index;
      const float weight = expf(p.partial_lse[part] - lse_max);
      sum += weight;
      if (weight == 0.f || d >= head_dim) continue;  // what a part without keys holds is not read
      const auto values = Storage<float>::load<kVector>(p.partial_o, DType(), part * head_dim + d);
#pragma unroll
      for (int i = 0; i < kVector; ++i) o[i] = fmaf(weight, values.elements[i], o[i]);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) o[i] /= sum;
  }
  if (row.lane == 0) p.lse[row.index] = has_keys ? lse_max + logf(sum) : negative_infinity();
  if (d >= head_dim) return;
  const int64_t at = offset_in(p.o, row.b, row.query, row.h) + d;
  Storage<AnyType>::store(p.o.data, p.dtype, at, o);
  if (p.o_rest.data == nullptr) return;
  const auto rounded = Storage<AnyType>::load<kVector>(p.o.data, p.dtype, at);
#pragma unroll
  for (int i = 0; i < kVector; ++i) o[i] -= rounded.elements[i];
  Storage<AnyType>::store(p.o_rest.data, p.dtype, offset_in(p.o_rest, row.b, row.query, row.h) + d,
                          o);
}

// delta = rowsum(dout * (o + o_rest)) - dlse. All of a thread's loads are under way at once: there
// is little else to do but to clear dq_parts, where the kernel after this one adds to them.
template <class Element>
__global__ __launch_bounds__(kThreads) void delta_kernel(
    const __grid_constant__ AttentionBackwardParams p) {
  using Vector = Packed<Element, kVector>;
  const int lanes = row_lanes(p.sizes.head_dim);
  const Row row = row_of_thread(p.sizes, lanes);
  const int d = row.lane * kVector;
  auto load = [&](const HeadsView& view) {
    return Storage<Element>::template load<kVector>(view.data, DType(),
                                                    offset_in(view, row.b, row.query, row.h) + d);
  };
  wait_for_previous_kernel();
  // Only now: what precedes this kernel is complete for the next one as well.
  let_next_kernel_start();
  if (p.dq_with_dkv) {
    auto* const parts = reinterpret_cast<float4*>(p.dq_parts);
    const int64_t all = p.dq_parts_floats / 4, step = int64_t{gridDim.x} * kThreads;
#pragma unroll 1  // two turns as a rule
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += step) {
      parts[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  Vector o = {}, rest = {}, dout = {};
  if (row.exists && d < p.sizes.head_dim) {
    o = load(p.o);
    dout = load(p.dout);
    if (p.o_rest.data != nullptr) rest = load(p.o_rest);
  }
  float lse = 0.f, dlse = 0.f;
  const bool is_first = row.exists && row.lane == 0;
  if (is_first) lse = p.lse[row.index];
  if (is_first && p.dlse != nullptr) dlse = p.dlse[row.index];

  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float x = to_float(dout.elements[i]);
    // As the gradient of a weight takes it: what rounding adds would be common to a whole row.
    const float taken = p.dtype == DType::kTF32 ? __uint_as_float(round_to_tf32(x)) : x;
    sum = fmaf(taken, to_float(o.elements[i]), sum);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sum = fmaf(to_float(dout.elements[i]), to_float(rest.elements[i]), sum);
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  // A row without keys is constant: nothing flows through it, not even a gradient of its lse.
  if (is_first) p.delta[row.index] = lse > negative_infinity() ? sum - dlse : 0.f;
}

void run_delta(const AttentionBackwardParams& p, cudaStream_t stream) {
  auto* kernel = delta_kernel<float>;
  if (p.dtype == DType::kBFloat16) kernel = delta_kernel<__nv_bfloat16>;
  if (p.dtype == DType::kFloat16) kernel = delta_kernel<__half>;
  launch_chained(kernel, "attention_delta", row_blocks(p.sizes), kThreads, 0, stream, p);
}

// The portable kernels are compiled apart for each dtype; this picks one.
template <class Params>
void run_for_dtype(const Params& p, cudaStream_t stream, void (*bf16)(const Params&, cudaStream_t),
                   void (*fp16)(const Params&, cudaStream_t),
                   void (*tf32)(const Params&, cudaStream_t),
                   void (*fp32)(const Params&, cudaStream_t)) {
  switch (p.dtype) {
    case DType::kBFloat16:
      return bf16(p, stream);
    case DType::kFloat16:
      return fp16(p, stream);
    case DType::kTF32:
      return tf32(p, stream);
    case DType::kFloat32:
      return fp32(p, stream);
  }
}

}  // namespace

void run_attention_forward(const AttentionForwardParams& p, cudaStream_t stream) {
  if (p.use_sm90) {
    run_attention_forward_sm90(p, stream);
  } else {
    run_for_dtype(p, stream, attention_forward_bf16, attention_forward_fp16, attention_forward_tf32,
                  attention_forward_fp32);
  }
  if (p.num_splits > 1) {
    launch_chained(combine_splits_kernel, "combine_splits", row_blocks(p.sizes), kThreads, 0,
                   stream, p);
  }
}

void run_attention_backward(const AttentionBackwardParams& p, cudaStream_t stream) {
  if (p.weight_scale != nullptr) {
    if (p.dq_with_dkv) {
      check_cuda(cudaMemsetAsync(p.dq_parts, 0, sizeof(float) * p.dq_parts_floats, stream),
                 "attention_backward");
    }
    run_for_dtype(p, stream, attention_row_sums_bf16, attention_row_sums_fp16,
                  attention_row_sums_tf32, attention_row_sums_fp32);
  } else {
    run_delta(p, stream);
  }
  AttentionBackwardParams portable = p;
  if (p.use_sm90) {
    p.dtype == DType::kTF32 ? run_attention_backward_tf32_sm90(p, stream)
                            : run_attention_backward_sm90(p, stream);
    portable.dq.data = portable.dk.data = portable.dv.data = nullptr;  // dbias is left
  }
  run_for_dtype(portable, stream, attention_backward_bf16, attention_backward_fp16,
                attention_backward_tf32, attention_backward_fp32);
}

}  // namespace frx
