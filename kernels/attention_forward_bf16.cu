#include "attention_forward.cuh"
#include "portable.h"

namespace frx {

void attention_forward_bf16(const AttentionForwardParams& p, cudaStream_t stream) {
  dispatch_forward<HalfOp<__nv_bfloat16>>(p, stream);
}

}  // namespace frx
