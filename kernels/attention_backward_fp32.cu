#include "attention_backward.cuh"
#include "attention_row_sums.cuh"
#include "portable.h"

namespace frx {

void attention_row_sums_fp32(const AttentionBackwardParams& p, cudaStream_t stream) {
  dispatch_row_sums<Tf32Op<4>>(p, stream);
}

void attention_backward_fp32(const AttentionBackwardParams& p, cudaStream_t stream) {
  dispatch_backward<Tf32Op<4>>(p, stream);
}

}  // namespace frx
