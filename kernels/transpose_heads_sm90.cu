#include <cstdint>

#include "chained_launch.cuh"
#include "mask.cuh"
#include "tf32.h"
#include "transpose_heads_sm90.h"

namespace frx {

namespace {

// A block's part: so many tokens and dims of one (batch, head).
constexpr int kTokens = 64;
constexpr int kDims = 32;
constexpr int kThreads = 256;
constexpr int kVector = 4;  // floats a thread moves at a time

struct TransposeParams {
  HeadsTranspose jobs[kMaxTransposes];
  uint32_t first_block[kMaxTransposes];  // of each job; jobs that are not there have none
};

struct Part {
  int64_t batch;
  int head;
  int first_token, first_dim;
};

// Dims vary fastest, then heads, as they lie in memory.
__device__ __forceinline__ Part locate_part(const HeadsTranspose& job, uint32_t index) {
  const uint32_t dim_parts = ceil_div(job.head_dim, kDims);
  const uint32_t token_parts = ceil_div(job.num_tokens, kTokens);
  Part part;
  part.first_dim = static_cast<int>(index % dim_parts) * kDims;
  index /= dim_parts;
  part.head = static_cast<int>(index % job.num_heads);
  index /= job.num_heads;
  part.first_token = static_cast<int>(index % token_parts) * kTokens;
  part.batch = index / token_parts;
  return part;
}

__global__ __launch_bounds__(kThreads) void transpose_heads_kernel(
    const __grid_constant__ TransposeParams params) {
  int number = 0;
  while (number + 1 < kMaxTransposes && blockIdx.x >= params.first_block[number + 1]) ++number;
  const HeadsTranspose& job = params.jobs[number];
  const Part part = locate_part(job, blockIdx.x - params.first_block[number]);
  const float* in = static_cast<const float*>(job.in.data) + part.batch * job.in.batch_stride +
                    part.head * job.in.head_stride;
  __shared__ float tile[kTokens][kDims + 1];  // padded: columns are read with few bank conflicts
  // Whatever the heads, lengths and masks come from may be under way until here.
  wait_for_previous_kernel();
  let_next_kernel_start();  // it waits for this one before it reads what is written here

  constexpr int kRowThreads = kDims / kVector;
#pragma unroll
  for (int i = 0; i < kTokens * kRowThreads / kThreads; ++i) {
    const int row = threadIdx.x / kRowThreads + i * (kThreads / kRowThreads);
    const int column = threadIdx.x % kRowThreads * kVector;
    const int token = part.first_token + row, dim = part.first_dim + column;
    float4 x = make_float4(0, 0, 0, 0);
    if (dim < job.head_dim &&
        key_exists(job.lengths, job.keep, part.batch, token, job.num_tokens)) {
      x = *reinterpret_cast<const float4*>(in + token * job.in.token_stride + dim);
    }
    tile[row][column] = x.x;
    tile[row][column + 1] = x.y;
    tile[row][column + 2] = x.z;
    tile[row][column + 3] = x.w;
  }
  __syncthreads();

  // Half an eight of tokens a thread: depths 0 to 3, or 4 to 7.
  constexpr int kColumnThreads = kTokens / kVector;
  const int64_t num_columns = padded_tokens(job.num_tokens);
  const int64_t first_row = (part.batch * job.num_heads + part.head) * job.head_dim;
  float* out = job.out + (first_row + part.first_dim) * num_columns + part.first_token;
#pragma unroll
  for (int i = 0; i < kDims * kColumnThreads / kThreads; ++i) {
    const int row = threadIdx.x / kColumnThreads + i * (kThreads / kColumnThreads);
    const int column = threadIdx.x % kColumnThreads * kVector;
    if (part.first_dim + row >= job.head_dim || part.first_token + column >= num_columns) continue;
    float x[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int k = column % 8 + j;
      x[j] = tile[column - column % 8 + (job.keeps_order ? k : tf32_key(k))][row];
    }
    *reinterpret_cast<float4*>(out + row * num_columns + column) =
        make_float4(x[0], x[1], x[2], x[3]);
  }
}

int64_t parts_of(int64_t batch, int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
  return batch * num_heads * ceil_div(num_tokens, int64_t{kTokens}) *
         ceil_div(head_dim, int64_t{kDims});
}

}  // namespace

bool is_transposable(int64_t batch, int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
  return num_tokens <= INT32_MAX - 8 &&
         batch <= INT32_MAX / kMaxTransposes / parts_of(1, num_tokens, num_heads, head_dim);
}

void transpose_heads_sm90(const HeadsTranspose* jobs, int count, cudaStream_t stream) {
  TransposeParams params = {};
  int64_t blocks = 0;
  for (int i = 0; i < kMaxTransposes; ++i) {
    params.first_block[i] = static_cast<uint32_t>(i < count ? blocks : INT32_MAX);
    if (i >= count) continue;
    const HeadsTranspose& job = params.jobs[i] = jobs[i];
    blocks += parts_of(job.batch, job.num_tokens, job.num_heads, job.head_dim);
  }
  launch_chained(transpose_heads_kernel, "transpose_heads", blocks, kThreads, 0, stream, params);
}

}  // namespace frx
