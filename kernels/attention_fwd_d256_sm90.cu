#include "attention_fwd_sm90.cuh"

namespace frx {

void attention_forward_sm90_d256(const AttentionForwardParams& params, cudaStream_t stream) {
  // head dim, consumer warpgroups, keys a tile, stages
  using Configs = Sm90ForwardConfigs<Sm90ForwardConfig<256, 2, 80, 2>,   // plain
                                     Sm90ForwardConfig<256, 2, 80, 2>,   // at most 64 queries
                                     Sm90ForwardConfig<256, 2, 64, 2>,   // dropout
                                     Sm90ForwardConfig<256, 2, 32, 3>>;  // bias, masks
  dispatch_attention_forward_sm90<256, Configs>(params, stream);
}

}  // namespace frx
