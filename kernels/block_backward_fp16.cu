#include "block_backward.cuh"

namespace frx {

void block_backward_fp16(const BlockBackwardParams& p, cudaStream_t stream) {
  dispatch_block_backward<HalfOp<__half>>(p, stream);
}

}  // namespace frx
