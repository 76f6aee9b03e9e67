#include "attention_fwd_sm90.cuh"

namespace frx {

void attention_forward_sm90_d128(const AttentionForwardParams& params, cudaStream_t stream) {
  // head dim, consumer warpgroups, keys a tile, stages
  using Configs = Sm90ForwardConfigs<Sm90ForwardConfig<128, 2, 176, 2>,   // plain
                                     Sm90ForwardConfig<128, 1, 64, 3>,    // at most 64 queries
                                     Sm90ForwardConfig<128, 2, 128, 2>,   // dropout
                                     Sm90ForwardConfig<128, 2, 128, 2>>;  // bias, masks
  dispatch_attention_forward_sm90<128, Configs>(params, stream);
}

}  // namespace frx
