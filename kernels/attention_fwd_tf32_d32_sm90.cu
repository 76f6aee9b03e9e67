#include "attention_fwd_sm90.cuh"

namespace frx {

void attention_forward_tf32_sm90_d32(const AttentionForwardParams& params, cudaStream_t stream) {
  // head dim, consumer warpgroups, keys a tile, stages
  using Plain = Sm90ForwardConfig<32, 3, 96, 3, float>;
  using Dropout = Sm90ForwardConfig<32, 3, 96, 3, float>;
  using Modified = Sm90ForwardConfig<32, 2, 128, 2, float>;  // bias, masks
  using Configs = Sm90ForwardConfigs<Plain, Plain, Dropout, Modified>;
  dispatch_attention_forward_sm90<32, Configs>(params, stream);
}

}  // namespace frx
