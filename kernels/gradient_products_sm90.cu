// Matrix products of a backward on Hopper, up to eight in one launch. A block computes a tile of
// 128 x 128 of one result. Two warpgroups multiply 64 rows each; one thread drives the copy engine
// through a ring of three stages, 128 bytes of the depth each. Two blocks share a multiprocessor:
// one stores while the other multiplies. docs/design/gradient-products.md has the shared-memory map
// and the barrier table.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "chained_launch.cuh"
#include "gradient_products_sm90.h"
#include "launch.h"
#include "matrix_sm90.cuh"
#include "ptx_sm90.cuh"
#include "softmax_sm90.cuh"  // defines: pack, transpose_quad
#include "tile_sm90.cuh"
#include "wgmma_sm90.cuh"

namespace frx {

constexpr int kStages = 3;
constexpr int kConsumers = 2;
constexpr int kRowsPerConsumer = kGradientTile / kConsumers;
constexpr int kBlocksPerSm = 2;
// The producer's warp comes last: a warpgroup starts at a multiple of four warps.
constexpr int kProducerWarp = kConsumers * kWarpgroup / 32;
constexpr int kThreads = 32 * (kProducerWarp + 1);
constexpr int kAccumulators = kGradientTile / 2;  // of a thread

constexpr uint32_t kRowBytes = kGradientDepthBytes;
constexpr uint32_t kOperandBytes = kGradientTile * kRowBytes;
constexpr int kSlabDepth = 64;  // of 16-bit numbers, a step
constexpr uint32_t kSlabBytes = kSlabDepth * kRowBytes;
static_assert(kGradientTile == 2 * kMatrixBoxWidth && kRowBytes == 2 * kMatrixBoxWidth);
// Either way consumer 1's rows start halfway: its slab, or its 64 rows.
constexpr uint32_t kConsumerBytes = kOperandBytes / kConsumers;
static_assert(kConsumerBytes == kSlabBytes && kConsumerBytes == kRowsPerConsumer * kRowBytes);

// left is [row][128 bytes of the depth], or as right: [slab of 64 rows or columns][depth][row or
// column]. In TF32 both are the former.
struct GradientStorage {
  alignas(1024) unsigned char left[kStages][kOperandBytes];
  alignas(1024) unsigned char right[kStages][kOperandBytes];
  uint64_t full[kStages], empty[kStages];
};
static_assert(kBlocksPerSm * (sizeof(GradientStorage) + 1024) <= 228 * 1024);

struct GradientKernelParams {
  CUtensorMap left_maps[kMaxGradientTerms], right_maps[kMaxGradientTerms];
  GradientGroup90 group;
};
static_assert(sizeof(GradientKernelParams) <= 4096, "what every driver takes as parameters");

// A [64 of the depth] x [128] operand whose contiguous dimension is not the depth.
__device__ __forceinline__ void load_slabs(unsigned char* operand, const CUtensorMap& map,
                                           uint64_t& full, int first, int depth) {
#pragma unroll
  for (int slab = 0; slab < kGradientTile / kMatrixBoxWidth; ++slab) {
    cp_async_bulk_tensor_4d(operand + slab * kSlabBytes, map, full, first + slab * kMatrixBoxWidth,
                            depth, 0, 0);
  }
}

// One thread.
template <class Element>
__device__ __forceinline__ void produce(const GradientKernelParams& params,
                                        const GradientProduct& p, GradientStorage& smem,
                                        int first_row, int first_column, IndexRange steps) {
  RingPlace<kStages> ring(0);
  for (int term = p.first_term; term < p.end_term; ++term) {
    const CUtensorMap& left_map = params.left_maps[term];
    const CUtensorMap& right_map = params.right_maps[term];
    constexpr bool kIsTf32 = std::is_same_v<Element, Tf32>;
    constexpr int kDepth = kGradientDepthBytes / (kIsTf32 ? 4 : 2);
    const int term_steps = ceil_div(params.group.terms[term].depth, kDepth);
    const int end = smaller(term_steps, steps.end);
    for (int step = larger(0, steps.begin); step < end; ++step) {
      const int depth = step * kDepth;
      uint64_t& full = smem.full[ring.stage];
      mbarrier_wait(smem.empty[ring.stage], ring.parity ^ 1);
      mbarrier_arrive_expect_tx(full, 2 * kOperandBytes);
      if (p.over_tokens && !kIsTf32) {
        load_slabs(smem.left[ring.stage], left_map, full, first_row, depth);
      } else {
        cp_async_bulk_tensor_4d(smem.left[ring.stage], left_map, full, depth, first_row, 0, 0);
      }
      if constexpr (kIsTf32) {
        cp_async_bulk_tensor_4d(smem.right[ring.stage], right_map, full, depth, first_column, 0, 0);
      } else {
        load_slabs(smem.right[ring.stage], right_map, full, first_column, depth);
      }
      ring.advance();
    }
    steps = {steps.begin - term_steps, steps.end - term_steps};
  }
}

// One warpgroup: 64 rows of the tile. kOverTokens: rows are contiguous in left.
template <class Element, bool kOverTokens>
__device__ __forceinline__ void multiply(float (&accumulators)[kAccumulators],
                                         GradientStorage& smem, int steps, int consumer, int lane) {
  // A k step further on: across rows, or 32 bytes within them.
  constexpr bool kIsTf32 = std::is_same_v<Element, Tf32>;
  constexpr uint32_t kLeftBytes = kOverTokens ? 16 * kRowBytes : 32;
  constexpr uint32_t kRightBytes = kIsTf32 ? 32 : 16 * kRowBytes;
  const SmemDescriptor left_smem =
      swizzled_descriptor<kRowBytes>(smem_address(smem.left), 0) + consumer * kConsumerBytes;
  const SmemDescriptor right_smem =
      swizzled_descriptor<kRowBytes>(smem_address(smem.right), kSlabBytes);
  RingPlace<kStages> ring(0);
  uint32_t last_stage = 0;
  pin_registers(accumulators);
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(smem.full[ring.stage], ring.parity);
    const SmemDescriptor left = left_smem + ring.stage * kOperandBytes;
    const SmemDescriptor right = right_smem + ring.stage * kOperandBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGradientDepthBytes / 32; ++k) {
      const SmemDescriptor a = left + k * kLeftBytes, b = right + k * kRightBytes;
      if constexpr (kIsTf32) {
        Wgmma<Element, kGradientTile>::ss(accumulators, a, b, true);
      } else {
        Wgmma<Element, kGradientTile>::template ss<true, kOverTokens>(accumulators, a, b, true);
      }
    }
    wgmma_commit_group();
    // The products before these are done: their stage is free.
    wgmma_wait_group<1>();
    if (step > 0 && lane == 0) mbarrier_arrive(smem.empty[last_stage]);
    last_stage = ring.stage;
    ring.advance();
  }
  wgmma_wait_group<0>();
  pin_registers(accumulators);
}

// A warpgroup's 64 rows, rounded, 16 bytes a lane.
template <class Element>
__device__ __forceinline__ void store(const float (&accumulators)[kAccumulators],
                                      const GradientProduct& p, int first_row, int first_column,
                                      int thread) {
  const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 16 * warp + g + 8 * half;
    Element* const out = static_cast<Element*>(p.out) + static_cast<int64_t>(row) * p.columns;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 16) {
      uint32_t pairs[4];
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        const float* const x = accumulators + i + 4 * chunk + 2 * half;
        pairs[chunk] = pack<Element>(x[0], x[1]);
      }
      const uint4 eight = transpose_quad(pairs, t);
      const int column = first_column + 2 * i + 8 * t;
      if (row < p.rows && column < p.columns) *reinterpret_cast<uint4*>(out + column) = eight;
    }
  }
}

// The same in fp32, 32 bytes a quad.
__device__ __forceinline__ void store_wide(float* all, const float (&accumulators)[kAccumulators],
                                           const GradientProduct& p, int first_row,
                                           int first_column, int thread) {
  const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 16 * warp + g + 8 * half;
    float* const out = all + static_cast<int64_t>(row) * p.columns;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
      const int column = first_column + 2 * i + 2 * t;
      if (row < p.rows && column < p.columns) {
        *reinterpret_cast<float2*>(out + column) =
            make_float2(accumulators[i + 2 * half], accumulators[i + 2 * half + 1]);
      }
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    gradient_products_sm90_kernel(const __grid_constant__ GradientKernelParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<GradientStorage*>(smem_bytes);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  // Barriers: a full one completes by the copies' bytes, an empty one by every consumer warp.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(smem.full[stage], 1);
      mbarrier_init(smem.empty[stage], kProducerWarp);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int block = static_cast<int>(blockIdx.x);
  int which = 0;
  while (which + 1 < params.group.num_products &&
         block >= params.group.products[which + 1].first_block) {
    ++which;
  }
  const GradientProduct& p = params.group.products[which];
  if (threadIdx.x == 0) {
    for (int term = p.first_term; term < p.end_term; ++term) {
      if (params.group.terms[term].depth == 0) continue;  // has no map
      prefetch_tensormap(params.left_maps[term]);
      prefetch_tensormap(params.right_maps[term]);
    }
  }
  // Whatever the operands come from may be under way until here.
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int tile = (block - p.first_block) / p.splits, row_tile = tile / p.column_tiles;
  const int split = block - p.first_block - tile * p.splits;
  const IndexRange steps = part_of_range({0, p.steps}, split, p.splits);
  const int first_row = row_tile * kGradientTile;
  const int first_column = (tile - row_tile * p.column_tiles) * kGradientTile;

  if (warp == kProducerWarp) {
    if (threadIdx.x % 32 == 0) produce<Element>(params, p, smem, first_row, first_column, steps);
  } else {
    const int consumer = warp / 4, thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    float accumulators[kAccumulators] = {};
    const int row = first_row + consumer * kRowsPerConsumer;
    const int num_steps = steps.end - steps.begin;
    constexpr bool kIsTf32 = std::is_same_v<Element, Tf32>;
    if (p.over_tokens && !kIsTf32) {
      multiply<Element, !kIsTf32>(accumulators, smem, num_steps, consumer, thread % 32);
    } else {
      multiply<Element, false>(accumulators, smem, num_steps, consumer, thread % 32);
    }
    if (kIsTf32 || p.splits > 1) {
      float* const out = p.splits > 1 ? p.parts + static_cast<int64_t>(split) * p.rows * p.columns
                                      : static_cast<float*>(p.out);
      store_wide(out, accumulators, p, row, first_column, thread);
    } else if constexpr (!kIsTf32) {
      store<Element>(accumulators, p, row, first_column, thread);
    }
  }
#else
  __trap();
#endif
}

// ---- sums of parts ----------------------------------------------------------------------------

constexpr int kSumThreads = 256;
constexpr int kSumVector = 8;  // elements of a thread

template <class Element>
__global__ __launch_bounds__(kSumThreads) void sum_gradient_parts_kernel(
    const __grid_constant__ GradientGroup90 group) {
  int64_t index = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;  // of vectors with parts
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int n = 0; n < group.num_products; ++n) {
    const GradientProduct& p = group.products[n];
    if (p.splits == 1) continue;
    const int64_t all = static_cast<int64_t>(p.rows) * p.columns, vectors = all / kSumVector;
    if (index >= vectors) {
      index -= vectors;
      continue;
    }
    float sum[kSumVector] = {};
    for (int split = 0; split < p.splits; ++split) {
      const float* const part = p.parts + split * all + index * kSumVector;
#pragma unroll
      for (int i = 0; i < kSumVector; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(part + i);
        sum[i] += x.x;
        sum[i + 1] += x.y;
        sum[i + 2] += x.z;
        sum[i + 3] += x.w;
      }
    }
    if constexpr (std::is_same_v<Element, Tf32>) {
      float4* const out = static_cast<float4*>(p.out) + 2 * index;
      out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
      static_cast<uint4*>(p.out)[index] =
          make_uint4(pack<Element>(sum[0], sum[1]), pack<Element>(sum[2], sum[3]),
                     pack<Element>(sum[4], sum[5]), pack<Element>(sum[6], sum[7]));
    }
    return;
  }
}

template <class Element>
void launch_sum(const GradientGroup90& group, CUstream_st* stream) {
  int64_t vectors = 0;
  for (int i = 0; i < group.num_products; ++i) {
    const GradientProduct& p = group.products[i];
    if (p.splits > 1) vectors += static_cast<int64_t>(p.rows) * p.columns / kSumVector;
  }
  if (vectors == 0) return;
  launch_chained(sum_gradient_parts_kernel<Element>, "sum_gradient_parts",
                 ceil_div(vectors, int64_t{kSumThreads}), kSumThreads, 0, stream, group);
}

// ---- launch -----------------------------------------------------------------------------------

template <class Element>
void launch_gradient_products(const GradientKernelParams& params, CUstream_st* stream) {
  constexpr const char* kName = "gradient_products_sm90";
  launch_chained(gradient_products_sm90_kernel<Element>, kName, params.group.num_blocks, kThreads,
                 sizeof(GradientStorage), stream, params);
  launch_sum<Element>(params.group, stream);
}

void run_gradient_products_sm90(const GradientGroup90& group, CUstream_st* stream) {
  if (const char* obstacle = gradient_products_obstacle(group)) {
    throw std::runtime_error(std::string("fused_rope_xattn: ") + obstacle);
  }
  GradientKernelParams params{};
  params.group = group;
  for (int i = 0; i < group.num_products; ++i) {
    const GradientProduct& p = group.products[i];
    for (int j = p.first_term; j < p.end_term; ++j) {
      const GradientTerm& term = group.terms[j];
      if (term.depth == 0) continue;  // no map describes nothing, and no step reads it
      const auto map = [&](const void* data, int rows, int width, int stride, int box_rows) {
        return matrix_map(data, group.dtype, rows, width, stride, box_rows);
      };
      const bool is_tf32 = group.dtype == DType::kTF32;
      params.left_maps[j] =
          p.over_tokens && !is_tf32
              ? map(term.left, term.depth, p.rows, term.left_stride, kSlabDepth)
              : map(term.left, p.rows, term.depth, term.left_stride, kGradientTile);
      params.right_maps[j] =
          is_tf32 ? map(term.right, p.columns, term.depth, term.right_stride, kGradientTile)
                  : map(term.right, term.depth, p.columns, term.right_stride, kSlabDepth);
    }
  }
  if (group.dtype == DType::kTF32) {
    launch_gradient_products<Tf32>(params, stream);
  } else if (group.dtype == DType::kBFloat16) {
    launch_gradient_products<__nv_bfloat16>(params, stream);
  } else {
    launch_gradient_products<__half>(params, stream);
  }
}

}  // namespace frx
