#include "attention_backward.cuh"
#include "attention_row_sums.cuh"
#include "portable.h"

namespace frx {

void attention_row_sums_bf16(const AttentionBackwardParams& p, cudaStream_t stream) {
  dispatch_row_sums<HalfOp<__nv_bfloat16>>(p, stream);
}

void attention_backward_bf16(const AttentionBackwardParams& p, cudaStream_t stream) {
  dispatch_backward<HalfOp<__nv_bfloat16>>(p, stream);
}

}  // namespace frx
