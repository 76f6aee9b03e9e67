#include "attention_fwd_sm90.cuh"

namespace frx {

void attention_forward_sm90_d32(const AttentionForwardParams& params, cudaStream_t stream) {
  // head dim, consumer warpgroups, keys a tile, stages
  using Configs = Sm90ForwardConfigs<Sm90ForwardConfig<32, 3, 128, 2>,   // plain
                                     Sm90ForwardConfig<32, 1, 128, 4>,   // at most 64 queries
                                     Sm90ForwardConfig<32, 3, 128, 2>,   // dropout
                                     Sm90ForwardConfig<32, 2, 128, 2>>;  // bias, masks
  dispatch_attention_forward_sm90<32, Configs>(params, stream);
}

}  // namespace frx
