#include "block_backward.cuh"

namespace frx {

void block_backward_tf32(const BlockBackwardParams& p, cudaStream_t stream) {
  dispatch_block_backward<Tf32Op<1>>(p, stream);
}

}  // namespace frx
