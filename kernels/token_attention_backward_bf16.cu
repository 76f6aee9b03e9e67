#include "token_attention_backward.cuh"

namespace frx {

void token_attention_backward_bf16(const TokenAttentionParams& p, cudaStream_t stream) {
  dispatch_token_gradients<HalfOp<__nv_bfloat16>>(p, stream);
}

}  // namespace frx
