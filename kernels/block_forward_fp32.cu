#include "block_forward.cuh"

namespace frx {

void block_forward_fp32(const BlockForwardParams& p, cudaStream_t stream) {
  dispatch_block_forward<Tf32Op<4>, Bf16x6Op>(p, stream);
}

}  // namespace frx
