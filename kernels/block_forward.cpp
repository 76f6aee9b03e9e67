// Host side of the one-launch block: how the work is cut for the GPU at hand, which kernel runs.
#include "block_forward.h"

#include <algorithm>
#include <cstdint>

#include "device.h"
#include "entry.h"
#include "plan.h"

namespace frx {

namespace {

void plan_block_forward(BlockForwardParams& p, int num_sms) {
  const AttentionSizes& sizes = p.attention.sizes;
  const int columns = padded_head_dim(sizes.head_dim);
  p.inputs.tile_rows = choose_tile_rows(p.inputs, columns, num_sms);
  p.output.tile_rows = choose_tile_rows(p.output, columns, num_sms);
  const int64_t most_tiles =
      std::max({projection_tiles(p.inputs, p.inputs.tile_rows, columns),
                sizes.batch * sizes.num_heads * ceil_div(sizes.num_queries, kBlockTileQueries),
                projection_tiles(p.output, p.output.tile_rows, columns)});
  p.num_blocks = static_cast<int32_t>(std::clamp<int64_t>(most_tiles, 1, num_sms));
}

}  // namespace

void run_block_forward(const BlockForwardParams& params, cudaStream_t stream) {
  BlockForwardParams p = params;
  plan_block_forward(p, current_gpu().num_sms);
  switch (p.attention.dtype) {
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
