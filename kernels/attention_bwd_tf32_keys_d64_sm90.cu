#include "attention_bwd_tf32_sm90.cuh"

namespace frx {

void attention_backward_keys_tf32_sm90_d64(const AttentionBackwardParams& p, bool follows_copies,
                                           cudaStream_t stream) {
  // rows are keys, head dim, consumer warpgroups, streamed rows a tile, stages, stages of copies
  using Keys = Tf32BackwardConfig<true, 64, 2, 64, 2, 2>;
  run_backward_tf32<Keys, Keys>(p, follows_copies, stream);
}

}  // namespace frx
