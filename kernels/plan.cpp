#include "plan.h"

#include <algorithm>

#include "attention_sm90.h"
#include "mask.cuh"
#include "transpose_heads_sm90.h"

namespace frx {

namespace {

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

}  // namespace

int padded_head_dim(int head_dim) {
  for (int padded : {32, 64, 128}) {
    if (head_dim <= padded) return padded;
  }
  return 256;
}

ForwardPlan plan_attention_forward(const AttentionForwardParams& params, const Gpu& gpu) {
  const AttentionSizes& sizes = params.sizes;
  if (gpu.capability == 90 && attention_forward_sm90_supports(params) &&
      attention_forward_sm90_pays(params)) {
    const Sm90ForwardTile tile = sm90_forward_tile(params.dtype, sizes.head_dim, sizes.num_queries);
    const int splits = attention_forward_sm90_splits(sizes, params.dtype, gpu.num_sms);
    const int64_t v_transposed =
        params.dtype == DType::kTF32
            ? transposed_floats(sizes.batch, sizes.num_keys, sizes.num_kv_heads, sizes.head_dim)
            : 0;
    return {true, {tile.queries, tile.keys}, splits, v_transposed};
  }

  const int padded = padded_head_dim(sizes.head_dim);
  const int64_t heads = sizes.batch * sizes.num_heads;

  // Two row tiles a warp halve the shared-memory traffic of K and V; worth it only when the
  // larger tiles still give every multiprocessor a block.
  const bool wide = is_half(params.dtype) && padded <= 128 &&
                    heads * ceil_div(sizes.num_queries, 128) >= gpu.num_sms;
  const int tile_queries = wide ? 128 : 64;
  const int tile_keys = forward_tile_keys(is_half(params.dtype), padded, tile_queries);

  // Too few query tiles to fill the GPU: split the keys, but leave each block four key tiles.
  const int64_t blocks = std::max<int64_t>(1, heads * ceil_div(sizes.num_queries, tile_queries));
  const int64_t possible = std::clamp(ceil_div(sizes.num_keys, tile_keys) / 4, 1, 64);
  const int64_t splits = std::clamp<int64_t>(2 * gpu.num_sms / blocks, 1, possible);
  return {false, {tile_queries, tile_keys}, static_cast<int>(splits), 0};
}

}  // namespace frx
