// The order of launches of attention forward and backward, and the two small kernels around the
// tiled ones: combining split keys, and delta.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention_sm90.h"
#include "entry.h"
#include "launch.h"
#include "mask.cuh"
#include "portable.h"
#include "scores.cuh"

namespace frx {

namespace {

constexpr int kRowWarps = 8;  // rows a block; a warp handles one (batch, head, query)
constexpr int kThreads = 32 * kRowWarps;

struct Row {
  int64_t b, index;  // index = (b * H + h) * Tq + query
  int h, query;
  bool exists;
};

__device__ __forceinline__ Row row_of_warp(const AttentionSizes& sizes) {
  Row row;
  row.index = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  row.query = static_cast<int>(row.index % sizes.num_queries);
  const int64_t batch_head = row.index / sizes.num_queries;
  row.h = static_cast<int>(batch_head % sizes.num_heads);
  row.b = batch_head / sizes.num_heads;
  row.exists = row.b < sizes.batch;
  return row;
}

int64_t row_blocks(const AttentionSizes& sizes) {
  return ceil_div(sizes.batch * sizes.num_heads * sizes.num_queries,
                  static_cast<int64_t>(kRowWarps));
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// o = sum_s exp(lse_s - lse) o_s with lse = log sum_s exp(lse_s), over the parts of the keys.
__global__ __launch_bounds__(kThreads) void combine_splits_kernel(
    const __grid_constant__ AttentionForwardParams p) {
  const Row row = row_of_warp(p.sizes);
  if (!row.exists) return;
  const int lane = threadIdx.x % 32, head_dim = p.sizes.head_dim;
  const int64_t rows = p.sizes.batch * p.sizes.num_heads * p.sizes.num_queries;

  float lse_max = negative_infinity();
  for (int s = 0; s < p.num_splits; ++s) {
    lse_max = fmaxf(lse_max, p.partial_lse[s * rows + row.index]);
  }
  const bool has_keys = lse_max > negative_infinity();
  float sum = 0.f;
  for (int s = 0; has_keys && s < p.num_splits; ++s) {
    sum += expf(p.partial_lse[s * rows + row.index] - lse_max);
  }
  if (lane == 0) p.lse[row.index] = has_keys ? lse_max + logf(sum) : negative_infinity();

  for (int d = lane; d < head_dim; d += 32) {
    float o = 0.f;
    for (int s = 0; has_keys && s < p.num_splits; ++s) {
      const int64_t part = s * rows + row.index;
      const float weight = expf(p.partial_lse[part] - lse_max) / sum;
      if (weight > 0.f) o += weight * p.partial_o[part * head_dim + d];
    }
    store_float(p.o.data, offset_in(p.o, row.b, row.query, row.h) + d, o, p.dtype);
  }
}

// delta = rowsum(dout * o) - dlse
__global__ __launch_bounds__(kThreads) void delta_kernel(
    const __grid_constant__ AttentionBackwardParams p) {
  const Row row = row_of_warp(p.sizes);
  if (!row.exists) return;
  const int lane = threadIdx.x % 32;
  const int64_t o = offset_in(p.o, row.b, row.query, row.h);
  const int64_t dout = offset_in(p.dout, row.b, row.query, row.h);
  float sum = 0.f;
  for (int d = lane; d < p.sizes.head_dim; d += 32) {
    sum =
        fmaf(load_float(p.dout.data, dout + d, p.dtype), load_float(p.o.data, o + d, p.dtype), sum);
  }
  sum = warp_sum(sum);
  // A row without keys is constant: nothing flows through it, not even a gradient of its lse.
  const bool has_keys = p.lse[row.index] > negative_infinity();
  if (lane == 0) {
    p.delta[row.index] = !has_keys ? 0.f : sum - (p.dlse == nullptr ? 0.f : p.dlse[row.index]);
  }
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
    launch(combine_splits_kernel, "combine_splits", row_blocks(p.sizes), kThreads, 0, stream, p);
  }
}

void run_attention_backward(const AttentionBackwardParams& p, cudaStream_t stream) {
  if (p.weight_scale != nullptr) {
    run_for_dtype(p, stream, attention_row_sums_bf16, attention_row_sums_fp16,
                  attention_row_sums_tf32, attention_row_sums_fp32);
  } else {
    launch(delta_kernel, "attention_delta", row_blocks(p.sizes), kThreads, 0, stream, p);
  }
  AttentionBackwardParams portable = p;
  if (p.use_sm90) {
    run_attention_backward_sm90(p, stream);
    portable.dq.data = portable.dk.data = portable.dv.data = nullptr;  // dbias is left
  }
  run_for_dtype(portable, stream, attention_backward_bf16, attention_backward_fp16,
                attention_backward_tf32, attention_backward_fp32);
}

}  // namespace frx
