#include "attention_bwd_keys_sm90.cuh"
#include "attention_bwd_queries_sm90.cuh"
#include "attention_sm90.h"

namespace frx {

void attention_backward_sm90_d256(const AttentionBackwardParams& p, cudaStream_t stream) {
  // head dim, streamed rows a tile, stages of Q (K) and of dO (V); then whether it makes dk, dv, dq
  using KeysForDv = KeySideConfig<256, 64, 2, 2, false, true, false>;
  using KeysForDk = KeySideConfig<256, 64, 2, 1, true, false, false>;
  using Queries = QuerySideConfig<256, 64, 2, 1>;
  if (p.dk.data != nullptr) {
    run_backward_keys<KeysForDv>(p, true, stream);
    run_backward_keys<KeysForDk>(p, false, stream);
  }
  if (p.dq.data != nullptr) run_backward_queries<Queries>(p, p.dk.data == nullptr, stream);
}

}  // namespace frx
