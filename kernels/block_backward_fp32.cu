#include "block_backward.cuh"

namespace frx {

void block_backward_fp32(const BlockBackwardParams& p, cudaStream_t stream) {
  dispatch_block_backward<Tf32Op<4>, StagedBf16x6Op>(p, stream);
}

}  // namespace frx
