// Before a backward with few keys: per query, the sums over its keys of the weights and of weight
// times weight gradient, from the very products that the other backward kernels recompute.
//
//   weight_scale = 1 / sum p                     delta = sum p * dropped(dout v^T) / sum p - dlse
//
// The gradients of a row's scores then sum to zero as exactly as the products are, which neither
// the rounded o nor the rounded lse of the forward would give. A row without keys gets delta 0.
#pragma once

#include "attention_backward_parts.cuh"
#include "launch.h"
#include "plan.h"

namespace frx {

__device__ __forceinline__ float sum_over_row(float x) {  // the four threads that share a row
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <class Op, int kD>
__global__ __launch_bounds__(SingleStageShape<Op, kD>::kThreads, 1) void attention_row_sums_kernel(
    const __grid_constant__ AttentionBackwardParams p) {
  using Shape = SingleStageShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kThreads = Shape::kThreads;

  extern __shared__ char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const Tile q_tile{shared.q}, dout_tile{shared.dout}, k_tile{shared.k}, v_tile{shared.v};

  // Which queries of which head
  const AttentionSizes& sizes = p.sizes;
  const int num_q_tiles = ceil_div(sizes.num_queries, kRows);
  const int first_query = static_cast<int>(blockIdx.x % num_q_tiles) * kRows;
  const int h = blockIdx.x / num_q_tiles % sizes.num_heads;
  const int b = blockIdx.x / num_q_tiles / sizes.num_heads;
  const int kv_head = h / (sizes.num_heads / sizes.num_kv_heads);
  const int warp_row = threadIdx.x / 32 * 16;
  const HeadScores scores(sizes, p.scores, b, h, kScoreUnit<Element>);
  const IndexRange tiles = key_tiles_of_queries(first_query, kRows, kColumns, sizes.num_queries,
                                                scores.key_count, scores.is_causal);

  load_pair<kRows, kThreads>(q_tile, dout_tile, p.q, p.dout, b, h, first_query, sizes.head_dim,
                             [&](int query) { return query < sizes.num_queries; });
  for (int i = threadIdx.x; i < kRows; i += kThreads) {
    const int query = first_query + i;
    const float lse = query < sizes.num_queries
                          ? p.lse[scores.batch_head * sizes.num_queries + query]
                          : negative_infinity();
    shared.rows.lse[i] = lse == negative_infinity() ? -lse : lse * kScoreUnit<Element>;
    shared.rows.delta[i] = 0.f;
    shared.rows.weight_scale[i] = 1.f;
  }

  float weight_sum[2] = {}, gradient_sum[2] = {};  // of rows g and g + 8
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int first_key = tile * kColumns;
    __syncthreads();  // every warp is done with the previous keys
    load_pair<kColumns, kThreads>(k_tile, v_tile, p.k, p.v, b, kv_head, first_key, sizes.head_dim,
                                  [&](int key) { return scores.key_exists(key); });
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // this tile is here

    const int lane = opaque(threadIdx.x % 32);
    const int row = first_query + warp_row + lane / 4, column = first_key + 2 * (lane % 4);
    float weights[1][Shape::kScoreTiles][4] = {}, ds[1][Shape::kScoreTiles][4] = {};
    multiply_rows<Op, 1, Shape::kScoreTiles, kD>(weights, q_tile, warp_row, k_tile, lane);
    multiply_rows<Op, 1, Shape::kScoreTiles, kD>(ds, dout_tile, warp_row, v_tile, lane);
    weights_of_products<Element, false>(
        weights[0], scores, shared.rows, row, column, first_query,
        is_plain_tile(scores, first_query, kRows, first_key, kColumns));
#pragma unroll
    for (int n = 0; n < Shape::kScoreTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weight_sum[i / 2] += weights[0][n][i];
    }
    gradients_of_scores<false>(weights[0], ds[0], scores, shared.rows, row, column, first_query);
#pragma unroll
    for (int n = 0; n < Shape::kScoreTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) gradient_sum[i / 2] += ds[0][n][i];
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float weight = sum_over_row(weight_sum[half]);
    const float gradient = sum_over_row(gradient_sum[half]);
    const int query = first_query + warp_row + threadIdx.x % 32 / 4 + 8 * half;
    if (threadIdx.x % 4 != 0 || query >= sizes.num_queries) continue;
    const int64_t index = scores.batch_head * sizes.num_queries + query;
    const bool has_keys = weight > 0.f;
    p.weight_scale[index] = has_keys ? 1.f / weight : 1.f;
    p.delta[index] = has_keys ? gradient / weight - (p.dlse == nullptr ? 0.f : p.dlse[index]) : 0.f;
  }
}

template <class Op, int kD>
void launch_row_sums(const AttentionBackwardParams& p, cudaStream_t stream) {
  using Shape = SingleStageShape<Op, kD>;
  const int64_t blocks = static_cast<int64_t>(ceil_div(p.sizes.num_queries, Shape::kRows)) *
                         p.sizes.num_heads * p.sizes.batch;
  launch(attention_row_sums_kernel<Op, kD>, "attention_row_sums", blocks, Shape::kThreads,
         sizeof(typename Shape::SharedStorage), stream, p);
}

template <class Op>
void dispatch_row_sums(const AttentionBackwardParams& p, cudaStream_t stream) {
  switch (padded_head_dim(p.sizes.head_dim)) {
    case 32:
      return launch_row_sums<Op, 32>(p, stream);
    case 64:
      return launch_row_sums<Op, 64>(p, stream);
    case 128:
      return launch_row_sums<Op, 128>(p, stream);
    default:
      return launch_row_sums<Op, 256>(p, stream);
  }
}

}  // namespace frx
