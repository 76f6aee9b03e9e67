#include "attention_bwd_keys_sm90.cuh"
#include "attention_bwd_queries_sm90.cuh"
#include "attention_sm90.h"

namespace frx {

void attention_backward_sm90_d32(const AttentionBackwardParams& p, cudaStream_t stream) {
  // head dim, streamed rows a tile, stages of Q (K) and of dO (V); then whether it makes dk, dv, dq
  using Keys = KeySideConfig<32, 64, 2, 2, true, true, false>;
  using KeysAndQueries = KeySideConfig<32, 64, 2, 2, true, true, true>;
  using Queries = QuerySideConfig<32, 128, 2, 2>;
  if (p.dq_with_dkv) return run_backward_keys<KeysAndQueries>(p, true, stream);
  if (p.dk.data != nullptr) run_backward_keys<Keys>(p, true, stream);
  if (p.dq.data != nullptr) run_backward_queries<Queries>(p, p.dk.data == nullptr, stream);
}

}  // namespace frx
