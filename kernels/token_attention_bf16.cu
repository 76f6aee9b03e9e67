#include "token_attention_forward.cuh"

namespace frx {

void token_attention_bf16(const TokenAttentionParams& p, cudaStream_t stream) {
  dispatch_token_attention<HalfOp<__nv_bfloat16>>(p, stream);
}

}  // namespace frx
