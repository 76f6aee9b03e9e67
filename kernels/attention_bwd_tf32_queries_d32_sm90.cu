#include "attention_bwd_tf32_sm90.cuh"

namespace frx {

void attention_backward_queries_tf32_sm90_d32(const AttentionBackwardParams& p, bool follows_copies,
                                              cudaStream_t stream) {
  // rows are keys, head dim, consumer warpgroups, streamed rows a tile, stages, stages of copies
  using Plain = Tf32BackwardConfig<false, 32, 3, 64, 3, 2>;
  using Modified = Tf32BackwardConfig<false, 32, 2, 64, 3, 2>;  // bias, masks
  run_backward_tf32<Plain, Modified>(p, follows_copies, stream);
}

}  // namespace frx
