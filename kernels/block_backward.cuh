// A small block's backward in three launches: the query side of attention, then its key side beside
// the products that do not need it, then the products that do. Each starts while the one before it
// ends.
#pragma once

#include "block_backward.h"
#include "block_key_gradients.cuh"
#include "block_query_gradients.cuh"
#include "device.h"
#include "grouped_gemm.cuh"
#include "plan.h"

namespace frx {

template <class ProductOp>
int64_t launch_products(const GemmGroup& group, bool follows_kernel, cudaStream_t stream) {
  BlockProductParams p{group, follows_kernel};
  const int64_t blocks = plan_gemms(p.group);
  using Shape = WideGemmShape<ProductOp>;
  launch_chained(grouped_gemm_kernel<ProductOp>, "grouped_gemm", blocks, Shape::kThreads,
                 sizeof(typename Shape::SharedStorage), stream, p);
  return blocks;
}

template <class Op, class ProductOp, int kD, bool kHasTwoGroups>
void launch_query_blocks(const BlockQueryParams& p, int64_t blocks, cudaStream_t stream) {
  using Shape = BlockQueryShape<Op, ProductOp, kD, kHasTwoGroups>;
  launch_chained(block_query_gradients_kernel<Op, ProductOp, kD, kHasTwoGroups>,
                 "block_query_gradients", blocks, Shape::kThreads,
                 sizeof(typename Shape::SharedStorage), stream, p);
}

template <class Op, class ProductOp, int kD>
int64_t launch_query_side(const BlockAttentionBackwardParams& attention, bool follows_kernel,
                          cudaStream_t stream) {
  const BlockQueryParams p{attention, follows_kernel};
  const AttentionSizes& sizes = attention.attention.sizes;
  const int64_t tiles = ceil_div(sizes.num_queries, kBlockBackwardRows);
  const int64_t blocks = tiles * sizes.num_heads * sizes.batch;
  if constexpr (kAllowsTwoGroups<Op, kD>) {
    if (blocks <= current_gpu().num_sms) {
      launch_query_blocks<Op, ProductOp, kD, true>(p, blocks, stream);
      return blocks;
    }
  }
  launch_query_blocks<Op, ProductOp, kD, false>(p, blocks, stream);
  return blocks;
}

template <class Op, class ProductOp, int kD>
int64_t launch_key_side(const BlockAttentionBackwardParams& attention, const GemmGroup& products,
                        bool follows_kernel, cudaStream_t stream) {
  using Shape = BlockKeyShape<Op, kD>;
  BlockKeyParams p{attention, products, 0, follows_kernel};
  const AttentionSizes& sizes = attention.attention.sizes;
  const bool is_wanted = attention.attention.dk.data != nullptr;
  const int64_t tiles = is_wanted ? ceil_div(sizes.num_keys, Shape::kRows) : 0;
  const int64_t key_blocks = tiles * sizes.num_kv_heads * sizes.batch;
  const int64_t blocks = key_blocks + plan_gemms(p.products);
  p.key_blocks = static_cast<int32_t>(key_blocks);  // no more than the grid has
  constexpr size_t kKeyBytes = sizeof(typename Shape::SharedStorage);
  constexpr size_t kProductBytes =
      sizeof(typename GemmShape<ProductOp, Shape::kThreads / 32>::SharedStorage);
  launch_chained(block_key_gradients_kernel<Op, ProductOp, kD>, "block_key_gradients", blocks,
                 Shape::kThreads, kKeyBytes > kProductBytes ? kKeyBytes : kProductBytes, stream, p);
  return blocks;
}

// A launch without blocks does not take place, so the first that does is the one that waits for
// what precedes the call.
template <class Op, class ProductOp, int kD>
void launch_block_backward(const BlockBackwardParams& p, cudaStream_t stream) {
  int64_t blocks = launch_products<ProductOp>(p.dout, false, stream);
  blocks += launch_query_side<Op, ProductOp, kD>(p.attention, blocks > 0, stream);
  blocks += launch_key_side<Op, ProductOp, kD>(p.attention, p.early, blocks > 0, stream);
  launch_products<ProductOp>(p.late, blocks > 0, stream);
}

template <class Op, class ProductOp = Op>
void dispatch_block_backward(const BlockBackwardParams& p, cudaStream_t stream) {
  switch (padded_head_dim(p.attention.attention.sizes.head_dim)) {
    case 32:
      return launch_block_backward<Op, ProductOp, 32>(p, stream);
    case 64:
      return launch_block_backward<Op, ProductOp, 64>(p, stream);
    default:
      return launch_block_backward<Op, ProductOp, 128>(p, stream);
  }
}

}  // namespace frx
