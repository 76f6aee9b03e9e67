#include "block_backward.cuh"

namespace frx {

void block_backward_bf16(const BlockBackwardParams& p, cudaStream_t stream) {
  dispatch_block_backward<HalfOp<__nv_bfloat16>>(p, stream);
}

}  // namespace frx
