#include "block_forward.cuh"

namespace frx {

void block_forward_tf32(const BlockForwardParams& p, cudaStream_t stream) {
  dispatch_block_forward<Tf32Op<1>>(p, stream);
}

}  // namespace frx
