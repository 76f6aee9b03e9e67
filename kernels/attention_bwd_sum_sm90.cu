// dq = scale * sum of its parts, turned back if q was rotated: rounds once and undoes the fragment
// order of dq_parts.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention_bwd_turn_sm90.cuh"
#include "attention_sm90.h"
#include "launch.h"

namespace frx {

namespace {

constexpr int kWarps = 4;

struct SumParams {
  AttentionBackwardParams attention;
  PairTurns turns;
};

template <int kHeadDim, class Element>
__global__ __launch_bounds__(32 * kWarps) void sum_dq_parts_kernel(
    const __grid_constant__ SumParams params) {
  extern __shared__ __align__(16) unsigned char smem[];  // for rotated queries only
  const AttentionBackwardParams& p = params.attention;
  const AttentionSizes& sizes = p.sizes;
  const int strips = ceil_div(sizes.num_queries, kWarpRows);
  const int64_t strip = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t batch_head = strip / strips;
  const int64_t batch = batch_head / sizes.num_heads;
  if (batch >= sizes.batch) return;
  const int head = static_cast<int>(batch_head % sizes.num_heads);
  const int first_query = static_cast<int>(strip % strips) * kWarpRows;
  const int lane = threadIdx.x % 32;

  float dq[kHeadDim / 2] = {};
  for (int part = 0; part < p.num_splits; ++part) {
    const float* in = dq_fragments<kHeadDim>(p, part, batch_head, first_query, lane);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(in + n * kFragment);
      dq[4 * n] += x.x;
      dq[4 * n + 1] += x.y;
      dq[4 * n + 2] += x.z;
      dq[4 * n + 3] += x.w;
    }
  }
  if (p.q_rotation.rotary_dim == 0) {
    store_heads<Element>(p.dq, dq, p.scores.scale, batch, head, first_query + lane / 4,
                         sizes.num_queries, sizes.head_dim, lane % 4);
  } else {
    auto& rows = reinterpret_cast<TurningRows<kHeadDim>*>(smem)[threadIdx.x / 32];
    store_turned_back<Element>(p.dq, dq, p.scores.scale, p.q_rotation, params.turns, rows, batch,
                               head, first_query, sizes.num_queries, sizes.head_dim, lane);
  }
}

template <int kHeadDim>
void launch_sum(const AttentionBackwardParams& p, cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  const int64_t strips = s.batch * s.num_heads * ceil_div(s.num_queries, kWarpRows);
  const size_t smem_bytes =
      p.q_rotation.rotary_dim == 0 ? 0 : kWarps * sizeof(TurningRows<kHeadDim>);
  launch(p.dtype == DType::kBFloat16 ? sum_dq_parts_kernel<kHeadDim, __nv_bfloat16>
                                     : sum_dq_parts_kernel<kHeadDim, __half>,
         "attention_backward_sum_sm90", ceil_div(strips, static_cast<int64_t>(kWarps)), 32 * kWarps,
         smem_bytes, stream, SumParams{p, plan_turns(p.q_rotation)});
}

}  // namespace

void attention_backward_sm90_sum(const AttentionBackwardParams& p, cudaStream_t stream) {
  if (p.sizes.head_dim <= 32) return launch_sum<32>(p, stream);
  if (p.sizes.head_dim <= 64) return launch_sum<64>(p, stream);
  if (p.sizes.head_dim <= 128) return launch_sum<128>(p, stream);
  launch_sum<256>(p, stream);
}

}  // namespace frx
