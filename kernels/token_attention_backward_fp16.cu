#include "token_attention_backward.cuh"

namespace frx {

void token_attention_backward_fp16(const TokenAttentionParams& p, cudaStream_t stream) {
  dispatch_token_gradients<HalfOp<__half>>(p, stream);
}

}  // namespace frx
