// The adjoint of norm_rope: dx, and partial sums of the norm's weight and bias gradients. Without a
// norm one launch serves up to two tensors.
//
// Laid out like the forward. The norm's statistics are computed anew from x. Block g sums the
// weight gradients of its own tiles in a fixed order and writes row g of the partial sums.
#include "chained_launch.cuh"
#include "entry.h"
#include "norm_rope.cuh"

namespace frx {
namespace norm_rope {
namespace {

// Averages that the norm's backward takes off the gradient of its result before the weight's turn:
// of g * w, and of g * w * normalised x.
struct GradientMeans {
  float plain = 0.f, projected = 0.f;
};

template <class X, class Grad, int kVec>
__device__ __forceinline__ GradientMeans inner_gradient_means(const Worker<kVec>& worker,
                                                              const Tile& tile,
                                                              const Moments& moments) {
  const NormRopeParams& p = worker.p;
  float sums[2] = {0.f, 0.f};
  worker.for_each_row(tile, [&](const Row& row) {
    auto x = biased_x<X>(worker, row, worker.template fetch<X>(p.x, p.input_dtype, row));
    auto g = worker.template unpack<Grad>(worker.template fetch<Grad>(p.grad, p.output_dtype, row));
    normalise(x, moments);
    worker.template turn<true>(g, tile, row);
    worker.scale_by_norm_weight(g, row);
    sums[0] += worker.sum_dims(row, [&](int k, int v, int i) { return g.v[k][v][i]; });
    sums[1] +=
        worker.sum_dims(row, [&](int k, int v, int i) { return g.v[k][v][i] * x.v[k][v][i]; });
  });
  sum_over_block(sums, worker.shared.scratch);
  const bool has_mean = p.norm_kind == NormKind::kLayer;
  return {has_mean ? sums[0] / inner_width(worker) : 0.f, sums[1] / inner_width(worker)};
}

// g is the gradient times the weight, x normalised.
template <int kVec>
__device__ __forceinline__ GradientMeans head_gradient_means(const Worker<kVec>& worker,
                                                             const Row& row,
                                                             const HeadPart<kVec>& g,
                                                             const HeadPart<kVec>& x) {
  const auto mean_of = [&](auto f) {
    return sum_over_lanes(worker.sum_dims(row, f), worker.g.lanes_per_head) / worker.p.head_dim;
  };
  GradientMeans means;
  means.projected = mean_of([&](int k, int v, int i) { return g.v[k][v][i] * x.v[k][v][i]; });
  if (worker.p.norm_kind == NormKind::kLayer) {
    means.plain = mean_of([&](int k, int v, int i) { return g.v[k][v][i]; });
  }
  return means;
}

// g * w to the gradient of the norm's argument.
template <int kVec>
__device__ __forceinline__ void take_off_means(HeadPart<kVec>& g, const HeadPart<kVec>& x,
                                               float rstd, const GradientMeans& means) {
#pragma unroll
  for (int k = 0; k < HeadPart<kVec>::kUnits; ++k) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        g.v[k][v][i] = rstd * (g.v[k][v][i] - means.plain - x.v[k][v][i] * means.projected);
      }
    }
  }
}

// The gradients of the norm's weight and bias, summed over this block's rows. A head's norm sums in
// registers, since a lane sees the same dims of every head. An inner norm's dims outnumber
// registers: it sums in memory, where each element belongs to one thread.
template <int kVec>
struct WeightGradients {
  static constexpr int kUnits = kUnitsPerLane<kVec>;

  const Worker<kVec>& worker;
  const bool is_inner;
  HeadPart<kVec> dweight = {}, dbias = {};
  // [H*D], of an inner norm; null when not wanted
  float *dweight_memory = nullptr, *dbias_memory = nullptr;

  __device__ __forceinline__ explicit WeightGradients(const Worker<kVec>& worker)
      : worker(worker), is_inner(has_inner_norm(worker.p)) {
    if (!is_inner) return;
    const NormRopeParams& p = worker.p;
    const int width = p.num_heads * p.head_dim;
    float* smem = worker.shared.accumulated;
    const bool in_smem = worker.g.accumulates_in_smem;
    dweight_memory = in_smem && p.dnorm_weight ? smem : partial(p.dnorm_weight, width);
    dbias_memory = in_smem && p.dnorm_bias ? smem + width : partial(p.dnorm_bias, width);
    // The barriers of the token's block-wide sums stand between these zeros and the first addition.
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      if (dweight_memory) dweight_memory[i] = 0.f;
      if (dbias_memory) dbias_memory[i] = 0.f;
    }
  }

  // This block's row of the partial sums [num_partials, width].
  __device__ __forceinline__ float* partial(float* sums, int width) const {
    return sums == nullptr ? nullptr : sums + static_cast<int64_t>(blockIdx.x) * width;
  }

  __device__ __forceinline__ void add(const Row& row, const HeadPart<kVec>& g,
                                      const HeadPart<kVec>& x) {
    if (!row.is_active) return;
    worker.for_each_vector([&](int k, int v) {
      if (is_inner) {
        const int dim = row.head * worker.p.head_dim + worker.place[k].dim[v];
        Packed<float, kVec> product;
#pragma unroll
        for (int i = 0; i < kVec; ++i) product.elements[i] = g.v[k][v][i] * x.v[k][v][i];
        add_to_memory(dweight_memory, dim, product.elements);
        add_to_memory(dbias_memory, dim, g.v[k][v]);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          dweight.v[k][v][i] += g.v[k][v][i] * x.v[k][v][i];
          dbias.v[k][v][i] += g.v[k][v][i];
        }
      }
    });
  }

  static __device__ __forceinline__ void add_to_memory(float* memory, int dim,
                                                       const float (&values)[kVec]) {
    if (memory == nullptr) return;
    auto& target = *reinterpret_cast<Packed<float, kVec>*>(memory + dim);
    Packed<float, kVec> sum = target;
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum.elements[i] += values[i];
    target = sum;
  }

  // Writes this block's partial sums.
  __device__ __forceinline__ void finish() {
    const NormRopeParams& p = worker.p;
    __syncthreads();  // angles have been read, and every sum in memory is complete
    if (is_inner) {
      if (!worker.g.accumulates_in_smem) return;
      const int width = p.num_heads * p.head_dim;
      for (int i = threadIdx.x; i < width; i += blockDim.x) {
        if (p.dnorm_weight) partial(p.dnorm_weight, width)[i] = dweight_memory[i];
        if (p.dnorm_bias) partial(p.dnorm_bias, width)[i] = dbias_memory[i];
      }
      return;
    }
    const int num_warps = blockDim.x / kWarpSize;
    float* warps_dweight = worker.shared.angles;  // [warps, D]
    float* warps_dbias = warps_dweight + num_warps * p.head_dim;
    sum_over_warp(dweight, warps_dweight);
    sum_over_warp(dbias, warps_dbias);
    __syncthreads();  // the warps' sums are written
    for (int dim = threadIdx.x; dim < p.head_dim; dim += blockDim.x) {
      if (p.dnorm_weight) partial(p.dnorm_weight, p.head_dim)[dim] = column_sum(warps_dweight, dim);
      if (p.dnorm_bias) partial(p.dnorm_bias, p.head_dim)[dim] = column_sum(warps_dbias, dim);
    }
  }

  // Adds up the heads that a warp holds side by side; the first head's lanes write the warp's row.
  __device__ __forceinline__ void sum_over_warp(const HeadPart<kVec>& part, float* warps) const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          float sum = part.v[k][v][i];
          for (int offset = worker.g.lanes_per_head; offset < kWarpSize; offset *= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
          }
          if (lane < worker.g.lanes_per_head && worker.has[k][v]) {
            warps[warp * worker.p.head_dim + worker.place[k].dim[v] + i] = sum;
          }
        }
      }
    }
  }

  __device__ __forceinline__ float column_sum(const float* warps, int dim) const {
    float sum = 0.f;
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) {
      sum += warps[w * worker.p.head_dim + dim];
    }
    return sum;
  }
};

// One block's tiles of one side. Without a norm x is not read. A kernel that waits is behind the
// attention's backward: its first angles come before, since none of those kernels writes positions.
// Tables are read later, beside the gradients.
template <class Grad, int kVec>
__device__ __forceinline__ void turn_tiles_back(const Launch& side, int first_tile, bool waits,
                                                unsigned char* smem) {
  const NormRopeParams& p = side.params;
  const Worker<kVec> worker(side, smem);
  worker.prepare_angles();

  for (int64_t index = first_tile; index < side.geometry.num_tiles; index += side.geometry.blocks) {
    const Tile tile = worker.tile_at(index);
    const Row first = worker.row_at(tile, 0);
    RawPart<Grad, kVec> raw;
    if (!waits) raw = worker.template fetch<Grad>(p.grad, p.output_dtype, first);
    stage_angles(worker, tile);
    if (waits) {
      wait_for_previous_kernel();
      let_next_kernel_start();
      waits = false;
      raw = worker.template fetch<Grad>(p.grad, p.output_dtype, first);
    }
    worker.for_each_row(tile, [&](const Row& row, const Row& next) {
      HeadPart<kVec> g = worker.template unpack<Grad>(raw);
      raw = worker.template fetch<Grad>(p.grad, p.output_dtype, next);
      worker.template turn<true>(g, tile, row);
      worker.template store<Grad>(row, g);
    });
  }
}

// A branch a side: parameters at constant addresses are operands, indexed ones are loads.
template <class Grad, int kVec>
__global__ void __launch_bounds__(kMaxThreads, 4)
    rope_backward(const __grid_constant__ RopeBackwardLaunch launch) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int block = static_cast<int>(blockIdx.x), before = launch.sides[0].geometry.blocks;
  const bool waits = launch.follows_attention;
  if (block < before) {
    turn_tiles_back<Grad, kVec>(launch.sides[0], block, waits, smem);
  } else {
    turn_tiles_back<Grad, kVec>(launch.sides[1], block - before, waits, smem);
  }
}

template <class X, class Grad, int kVec>
__global__ void __launch_bounds__(kMaxThreads, 2)
    norm_rope_backward(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(16) unsigned char smem[];
  const NormRopeParams& p = launch.params;
  const Worker<kVec> worker(launch, smem);
  const bool is_inner = has_inner_norm(p);
  worker.prepare_angles();
  WeightGradients<kVec> weight_gradients(worker);

  for (int64_t index = blockIdx.x; index < launch.geometry.num_tiles; index += gridDim.x) {
    const Tile tile = worker.tile_at(index);
    const Row first = worker.row_at(tile, 0);
    auto raw_g = worker.template fetch<Grad>(p.grad, p.output_dtype, first);
    auto raw_x = worker.template fetch<X>(p.x, p.input_dtype, first);
    stage_angles(worker, tile);
    Moments moments;
    GradientMeans means;
    if (is_inner) {
      moments = inner_moments<X>(worker, tile);
      means = inner_gradient_means<X, Grad>(worker, tile, moments);
    }

    worker.for_each_row(tile, [&](const Row& row, const Row& next) {
      HeadPart<kVec> g = worker.template unpack<Grad>(raw_g);
      HeadPart<kVec> x = biased_x<X>(worker, row, raw_x);
      raw_g = worker.template fetch<Grad>(p.grad, p.output_dtype, next);
      raw_x = worker.template fetch<X>(p.x, p.input_dtype, next);
      worker.template turn<true>(g, tile, row);
      if (!is_inner) moments = head_moments(worker, row, x);
      normalise(x, moments);
      weight_gradients.add(row, g, x);
      worker.scale_by_norm_weight(g, row);
      if (!is_inner) means = head_gradient_means(worker, row, g, x);
      take_off_means(g, x, moments.rstd, means);
      worker.template store<Grad>(row, g);
    });
  }
  if (sums_weight_gradients(p)) weight_gradients.finish();
}

Kernel norm_kernel(const NormRopeParams& p, bool is_wide) {
  if (!is_wide) return norm_rope_backward<AnyType, AnyType, 1>;
  switch (p.output_dtype) {
    case DType::kFloat16:
      return norm_rope_backward<float, __half, kWideVector>;
    case DType::kBFloat16:
      return norm_rope_backward<float, __nv_bfloat16, kWideVector>;
    default:
      return norm_rope_backward<float, float, kWideVector>;
  }
}

using RopeKernel = void (*)(RopeBackwardLaunch);

RopeKernel rope_kernel(const NormRopeParams& p) {
  if (!can_be_wide(p)) return rope_backward<AnyType, 1>;
  switch (p.output_dtype) {
    case DType::kFloat16:
      return rope_backward<__half, kWideVector>;
    case DType::kBFloat16:
      return rope_backward<__nv_bfloat16, kWideVector>;
    default:
      return rope_backward<float, kWideVector>;
  }
}

double num_elements(const NormRopeParams& p) {
  return static_cast<double>(p.batch) * p.num_tokens * p.num_heads * p.head_dim;
}

// All sides by the first one's kernel, each on its share of the multiprocessors.
void launch_rope_backward(const NormRopeParams* sides, int count, bool follows_attention,
                          cudaStream_t stream) {
  constexpr const char* kName = "rope_backward";
  double all = 0;
  for (int i = 0; i < count; ++i) all += num_elements(sides[i]);
  RopeBackwardLaunch work = {};
  work.follows_attention = follows_attention;
  int64_t blocks = 0;
  int threads = 0, smem_bytes = 0;
  for (int i = 0; i < count; ++i) {
    const double share = all > 0 ? current_gpu().num_sms * num_elements(sides[i]) / all : 0;
    work.sides[i] = plan_launch(sides[i], kName, std::max(1, static_cast<int>(share)));
    const Geometry& g = work.sides[i].geometry;
    blocks += g.blocks;
    threads = std::max(threads, g.threads);
    smem_bytes = std::max(smem_bytes, g.smem.total);
  }
  const RopeKernel kernel = rope_kernel(sides[0]);
  if (follows_attention) {
    launch_chained(kernel, kName, blocks, threads, smem_bytes, stream, work);
  } else {
    launch(kernel, kName, blocks, threads, smem_bytes, stream, work);
  }
}

}  // namespace
}  // namespace norm_rope

void run_norm_rope_backward(const NormRopeParams& params, cudaStream_t stream) {
  if (params.norm_kind == NormKind::kNone) {
    return norm_rope::launch_rope_backward(&params, 1, false, stream);
  }
  norm_rope::run(norm_rope::norm_kernel, "norm_rope_backward", params, stream);
}

void run_rope_backward(const NormRopeParams* sides, int count, cudaStream_t stream) {
  const bool is_split =
      count == 2 && norm_rope::rope_kernel(sides[0]) != norm_rope::rope_kernel(sides[1]);
  const int together = is_split ? 1 : count;
  for (int i = 0; i < count; i += together) {
    norm_rope::launch_rope_backward(sides + i, together, true, stream);
  }
}

}  // namespace frx
