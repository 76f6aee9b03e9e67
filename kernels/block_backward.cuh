// A small block's backward in three launches: attention with the rotations undone, query side and
// key side, then every product with a weight or an input. Each starts while the one before it ends.
#pragma once

#include "block_backward.h"
#include "block_key_gradients.cuh"
#include "block_query_gradients.cuh"
#include "grouped_gemm.cuh"
#include "plan.h"

namespace frx {

template <class Op>
void launch_grouped_gemm(const GemmGroup& group, bool is_chained, cudaStream_t stream) {
  using Shape = GemmShape<Op>;
  const auto launch_it = is_chained ? launch_chained<GemmGroup> : launch<GemmGroup>;
  launch_it(grouped_gemm_kernel<Op>, "grouped_gemm", gemm_tiles(group), Shape::kThreads,
            sizeof(typename Shape::SharedStorage), stream, group);
}

// The order of launches. A launch without blocks does not take place, so the next is not chained.
template <class Op, int kD>
void launch_block_backward(const BlockBackwardParams& p, cudaStream_t stream) {
  const AttentionSizes& sizes = p.attention.attention.sizes;
  bool is_chained = false;
  if (gemm_tiles(p.dout) > 0) {
    launch_grouped_gemm<Op>(p.dout, is_chained, stream);
    is_chained = true;
  }
  launch_block_queries<Op, kD>(p.attention, is_chained, stream);
  is_chained = is_chained || sizes.batch * sizes.num_queries > 0;
  if (p.attention.attention.dk.data != nullptr) {
    launch_block_keys<Op, kD>(p.attention, is_chained, stream);
    is_chained = is_chained || sizes.batch * sizes.num_keys > 0;
  }
  launch_grouped_gemm<Op>(p.gradients, is_chained, stream);
}

template <class Op>
void dispatch_block_backward(const BlockBackwardParams& p, cudaStream_t stream) {
  switch (padded_head_dim(p.attention.attention.sizes.head_dim)) {
    case 32:
      return launch_block_backward<Op, 32>(p, stream);
    case 64:
      return launch_block_backward<Op, 64>(p, stream);
    default:
      return launch_block_backward<Op, 128>(p, stream);
  }
}

}  // namespace frx
