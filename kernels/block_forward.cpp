// Host side of a small block's forward: how the work is cut for the GPU at hand, which kernels run.
#include "block_forward.h"

#include "device.h"
#include "entry.h"
#include "plan.h"

namespace frx {

namespace {

void plan_block_forward(BlockForwardParams& p, int num_sms) {
  const AttentionSizes& sizes = p.attention.attention.sizes;
  const int columns = padded_head_dim(sizes.head_dim);
  const bool is_fp32 = p.attention.attention.dtype == DType::kFloat32;
  plan_projections(p.inputs, columns, num_sms, is_fp32);
  plan_projections(p.output, columns, num_sms, is_fp32);
  p.output.follows_kernel = true;
  p.attention.query_tiles = make_divisor(ceil_div(sizes.num_queries, kBlockTileQueries));
  p.attention.heads = make_divisor(sizes.num_heads);
  p.attention.heads_a_kv_head = make_divisor(sizes.num_heads / sizes.num_kv_heads);
}

}  // namespace

void run_block_forward(const BlockForwardParams& params, cudaStream_t stream) {
  BlockForwardParams p = params;
  plan_block_forward(p, current_gpu().num_sms);
  switch (p.attention.attention.dtype) {
    case DType::kBFloat16:
      return block_forward_bf16(p, stream);
    case DType::kFloat16:
      return block_forward_fp16(p, stream);
    case DType::kTF32:
      return block_forward_tf32(p, stream);
    case DType::kFloat32:
      return block_forward_fp32(p, stream);
  }
}

}  // namespace frx
