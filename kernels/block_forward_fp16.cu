#include "block_forward.cuh"

namespace frx {

void block_forward_fp16(const BlockForwardParams& p, cudaStream_t stream) {
  dispatch_block_forward<HalfOp<__half>>(p, stream);
}

}  // namespace frx
