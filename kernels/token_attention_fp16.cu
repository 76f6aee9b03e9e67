#include "token_attention_forward.cuh"

namespace frx {

void token_attention_fp16(const TokenAttentionParams& p, cudaStream_t stream) {
  dispatch_token_attention<HalfOp<__half>>(p, stream);
}

}  // namespace frx
