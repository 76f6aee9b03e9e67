#include "attention_forward.cuh"
#include "portable.h"

namespace frx {

void attention_forward_fp32(const AttentionForwardParams& p, cudaStream_t stream) {
  dispatch_forward<Tf32Op<4>>(p, stream);
}

}  // namespace frx
