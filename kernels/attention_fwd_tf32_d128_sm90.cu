#include "attention_fwd_sm90.cuh"

namespace frx {

void attention_forward_tf32_sm90_d128(const AttentionForwardParams& params, cudaStream_t stream) {
  // head dim, consumer warpgroups, keys a tile, stages
  using Plain = Sm90ForwardConfig<128, 2, 64, 2, float>;
  using Dropout = Sm90ForwardConfig<128, 2, 64, 2, float>;
  using Modified = Sm90ForwardConfig<128, 2, 64, 2, float>;  // bias, masks
  using Configs = Sm90ForwardConfigs<Plain, Plain, Dropout, Modified>;
  dispatch_attention_forward_sm90<128, Configs>(params, stream);
}

}  // namespace frx
