#include "block_forward.cuh"

namespace frx {

void block_forward_bf16(const BlockForwardParams& p, cudaStream_t stream) {
  dispatch_block_forward<HalfOp<__nv_bfloat16>>(p, stream);
}

}  // namespace frx
