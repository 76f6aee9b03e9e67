// What norm_rope's forward and backward share: sums, moments, launch.
#pragma once

#include "device.h"
#include "launch.h"
#include "norm_rope_lane.cuh"

namespace frx::norm_rope {

// Sum over `lanes` neighbouring lanes (a power of two), the same bits in each of them.
__device__ __forceinline__ float sum_over_lanes(float x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
  }
  return x;
}

// Sums over the block, for every thread. scratch [kCount, warps]
template <int kCount>
__device__ __forceinline__ void sum_over_block(float (&sums)[kCount], float* scratch) {
  const int warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i] = sum_over_lanes(sums[i], kWarpSize);
    if (threadIdx.x % kWarpSize == 0) scratch[i * num_warps + warp] = sums[i];
  }
  __syncthreads();  // every warp's sums are there
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i] = 0.f;
    for (int w = 0; w < num_warps; ++w) sums[i] += scratch[i * num_warps + w];
  }
  __syncthreads();  // scratch may be written again
}

struct Moments {
  float mean = 0.f, rstd = 1.f;
};

// mean_of(f) averages f(x) over the norm's dims. RMS norms keep the mean at 0. One loop for both
// moments, so that the code of a norm over the inner width is there once.
template <class MeanOf>
__device__ __forceinline__ Moments moments(const NormRopeParams& p, MeanOf mean_of) {
  Moments result;
#pragma unroll 1
  for (int order = p.norm_kind == NormKind::kLayer ? 1 : 2; order <= 2; ++order) {
    const float moment = mean_of([&](float x) {
      const float centred = x - result.mean;
      return order == 1 ? centred : centred * centred;
    });
    if (order == 1) {
      result.mean = moment;
    } else {
      result.rstd = rsqrtf(moment + p.norm_eps);
    }
  }
  return result;
}

template <int kVec>
__device__ __forceinline__ Moments head_moments(const Worker<kVec>& worker, const Row& row,
                                                const HeadPart<kVec>& x) {
  return moments(worker.p, [&](auto f) {
    const float sum = worker.sum_dims(row, [&](int k, int v, int i) { return f(x.v[k][v][i]); });
    return sum_over_lanes(sum, worker.g.lanes_per_head) / worker.p.head_dim;
  });
}

template <int kVec>
__device__ __forceinline__ float inner_width(const Worker<kVec>& worker) {
  return static_cast<float>(worker.p.num_heads) * worker.p.head_dim;
}

template <class X, int kVec>
__device__ __forceinline__ HeadPart<kVec> biased_x(const Worker<kVec>& worker, const Row& row,
                                                   const RawPart<X, kVec>& raw) {
  HeadPart<kVec> x = worker.template unpack<X>(raw);
  worker.add_bias(x, row);
  return x;
}

template <class X, int kVec>
__device__ __forceinline__ Moments inner_moments(const Worker<kVec>& worker, const Tile& tile) {
  const NormRopeParams& p = worker.p;
  return moments(p, [&](auto f) {
    float sum[1] = {0.f};
    worker.for_each_row(tile, [&](const Row& row) {
      const auto x = biased_x<X>(worker, row, worker.template fetch<X>(p.x, p.input_dtype, row));
      sum[0] += worker.sum_dims(row, [&](int k, int v, int i) { return f(x.v[k][v][i]); });
    });
    sum_over_block(sum, worker.shared.scratch);
    return sum[0] / inner_width(worker);
  });
}

template <int kVec>
__device__ __forceinline__ void normalise(HeadPart<kVec>& x, const Moments& moments) {
#pragma unroll
  for (int k = 0; k < HeadPart<kVec>::kUnits; ++k) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        x.v[k][v][i] = (x.v[k][v][i] - moments.mean) * moments.rstd;
      }
    }
  }
}

// Angles of the tile into shared memory, between barriers.
template <int kVec>
__device__ __forceinline__ void stage_angles(const Worker<kVec>& worker, const Tile& tile) {
  if (!worker.g.stages_angles) return;
  __syncthreads();  // frequencies are written, and the last tile's angles have been read
  worker.stage_angles(tile);
  __syncthreads();  // angles are written
}

// Launch ------------------------------------------------------------------------------------------

using Kernel = void (*)(Launch);

// num_sms: how many multiprocessors the work is laid out for.
inline Launch plan_launch(const NormRopeParams& params, const char* name, int num_sms) {
  if (!is_supported(params)) {
    throw std::runtime_error(std::string("fused_rope_xattn: ") + name +
                             " does not cover these sizes");
  }
  int device = 0, max_smem = 0;
  check_cuda(cudaGetDevice(&device), "current device");
  check_cuda(cudaDeviceGetAttribute(&max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "shared memory a block");
  return {params, make_geometry(params, num_sms, max_smem)};
}

// choose(params, is_wide) names the kernel.
template <class Choose>
void run(Choose choose, const char* name, const NormRopeParams& params, cudaStream_t stream) {
  const Launch work = plan_launch(params, name, current_gpu().num_sms);
  const Geometry& g = work.geometry;
  launch(choose(params, g.is_wide), name, g.blocks, g.threads, g.smem.total, stream, work);
}

}  // namespace frx::norm_rope
