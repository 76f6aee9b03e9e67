#include "attention_forward.cuh"
#include "portable.h"

namespace frx {

void attention_forward_fp16(const AttentionForwardParams& p, cudaStream_t stream) {
  dispatch_forward<HalfOp<__half>>(p, stream);
}

}  // namespace frx
