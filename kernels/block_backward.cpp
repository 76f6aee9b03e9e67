// Host side of a small block's backward: which launch makes dout, which kernel runs.
#include "block_backward.h"

#include <cstdint>

#include "entry.h"

namespace frx {

namespace {

// Multiplications up to which every block of the query side makes its own 16 rows of dout. Beyond,
// reading w_out once for 16 rows costs more than a launch of its own.
constexpr int64_t kMostFusedProducts = int64_t{1} << 26;

// Gives dout a launch of its own where it is too large for the query side.
void plan_dout(BlockBackwardParams& p) {
  BlockAttentionBackwardParams& attention = p.attention;
  const AttentionSizes& sizes = attention.attention.sizes;
  const int64_t rows = sizes.batch * sizes.num_queries;
  const int32_t inner = sizes.num_heads * sizes.head_dim;
  if (attention.w_out == nullptr || rows * inner * attention.out_width <= kMostFusedProducts) {
    return;
  }
  GemmTask& task = p.dout.tasks[p.dout.count++];
  task.terms[0] = {attention.dy, attention.w_out};
  task.num_terms = 1;
  task.depth = attention.out_width;
  task.rows = static_cast<int32_t>(rows);
  task.columns = inner;
  task.out = attention.attention.dout.data;
  attention.w_out = nullptr;
}

void plan_tiles(BlockAttentionBackwardParams& p) {
  const AttentionSizes& sizes = p.attention.sizes;
  p.query_tiles = make_divisor(ceil_div(sizes.num_queries, kBlockBackwardRows));
  p.key_tiles = make_divisor(ceil_div(sizes.num_keys, kBlockBackwardRows));
  p.heads = make_divisor(sizes.num_heads);
  p.kv_heads = make_divisor(sizes.num_kv_heads);
  p.heads_a_kv_head = make_divisor(sizes.num_heads / sizes.num_kv_heads);
}

}  // namespace

void run_block_backward(const BlockBackwardParams& params, cudaStream_t stream) {
  BlockBackwardParams p = params;
  plan_dout(p);
  plan_tiles(p.attention);
  plan_rotation(p.attention.q_rotation);
  plan_rotation(p.attention.k_rotation);
  switch (p.attention.attention.dtype) {
    case DType::kBFloat16:
      return block_backward_bf16(p, stream);
    case DType::kFloat16:
      return block_backward_fp16(p, stream);
    case DType::kTF32:
      return block_backward_tf32(p, stream);
    case DType::kFloat32:
      return block_backward_fp32(p, stream);
  }
}

}  // namespace frx
