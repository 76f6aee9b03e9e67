// Heads with their tokens contiguous, as the second operand of TF32 products on Hopper wants them
// where the sum runs over tokens.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "host_device.h"
#include "params.h"

namespace frx {

// in [B, T, H, D] -> out [B, H, D, T padded to 8], the padding zeros. Within each eight, tokens
// stand in the order in which accumulator columns serve as the first operand (tf32_key in tf32.h),
// unless they keep theirs.
struct HeadsTranspose {
  HeadsView in;
  float* out;
  int64_t batch;
  int32_t num_tokens, num_heads, head_dim;
  // Which tokens exist; the others become zeros, whatever they hold. Null: all.
  const int32_t* lengths;  // [B]
  const bool* keep;        // [B, T]
  bool keeps_order;
};

FRX_HOST_DEVICE int64_t padded_tokens(int64_t num_tokens) { return (num_tokens + 7) / 8 * 8; }

inline int64_t transposed_floats(int64_t batch, int64_t num_tokens, int64_t num_heads,
                                 int64_t head_dim) {
  return batch * num_heads * head_dim * padded_tokens(num_tokens);
}

// Whether a launch can count the parts of the work.
bool is_transposable(int64_t batch, int64_t num_tokens, int64_t num_heads, int64_t head_dim);

// What out holds, as a view whose tokens are dims and whose dims are tokens.
inline HeadsView transposed_view(float* out, int64_t num_tokens, int64_t num_heads,
                                 int64_t head_dim) {
  const int64_t tokens = padded_tokens(num_tokens);
  return {out, num_heads * head_dim * tokens, tokens, head_dim * tokens};
}

// Up to kMaxTransposes tensors in one launch, which is chained; so may the next kernel be.
constexpr int kMaxTransposes = 16;
void transpose_heads_sm90(const HeadsTranspose* jobs, int count, cudaStream_t stream);

}  // namespace frx
