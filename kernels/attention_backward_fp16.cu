#include "attention_backward.cuh"
#include "attention_row_sums.cuh"
#include "portable.h"

namespace frx {

void attention_row_sums_fp16(const AttentionBackwardParams& p, cudaStream_t stream) {
  dispatch_row_sums<HalfOp<__half>>(p, stream);
}

void attention_backward_fp16(const AttentionBackwardParams& p, cudaStream_t stream) {
  dispatch_backward<HalfOp<__half>>(p, stream);
}

}  // namespace frx
