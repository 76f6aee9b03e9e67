#include "attention_backward.cuh"
#include "portable.h"

namespace frx {

void attention_backward_fp16(const AttentionBackwardParams& p, cudaStream_t stream) {
  dispatch_backward<HalfOp<__half>>(p, stream);
}

}  // namespace frx
