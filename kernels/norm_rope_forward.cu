// y = rope(norm(x + bias)) for whole tokens.
//
// A block takes tiles of tokens in turn. A head lies in the registers of up to 32 lanes, so a
// head's norm needs shuffles only; a norm over the inner width reads its token again from L1 for
// every sum. Cosines and sines of a tile are computed once, in shared memory, for all heads.
#include "entry.h"
#include "norm_rope.cuh"

namespace frx {
namespace norm_rope {
namespace {

template <class In, class Out, int kVec>
__global__ void __launch_bounds__(kMaxThreads, 3) forward(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(16) unsigned char smem[];
  const NormRopeParams& p = launch.params;
  const Worker<kVec> worker(launch, smem);
  const bool is_normed = p.norm_kind != NormKind::kNone, is_inner = has_inner_norm(p);
  worker.prepare_angles();

  for (int64_t index = blockIdx.x; index < launch.geometry.num_tiles; index += gridDim.x) {
    const Tile tile = worker.tile_at(index);
    // Loads run one row ahead of their use; the first one's latency hides behind the angles.
    auto raw = worker.template fetch<In>(p.x, p.input_dtype, worker.row_at(tile, 0));
    stage_angles(worker, tile);
    Moments moments;
    if (is_inner) moments = inner_moments<In>(worker, tile);

    worker.for_each_row(tile, [&](const Row& row, const Row& next) {
      HeadPart<kVec> x = worker.template unpack<In>(raw);
      raw = worker.template fetch<In>(p.x, p.input_dtype, next);
      worker.add_bias(x, row);
      if (is_normed) {
        if (!is_inner) moments = head_moments(worker, row, x);
        normalise(x, moments);
        worker.scale_by_norm_weight(x, row);
        worker.add_norm_bias(x, row);
      }
      worker.template turn<false>(x, tile, row);
      worker.template store<Out>(row, x);
    });
  }
}

template <class Out>
Kernel forward_kernel(DType input) {
  return element_bytes(input) == 4 ? forward<float, Out, kWideVector>
                                   : forward<Out, Out, kWideVector>;
}

Kernel forward_kernel(const NormRopeParams& p, bool is_wide) {
  if (!is_wide) return forward<AnyType, AnyType, 1>;
  switch (p.output_dtype) {
    case DType::kFloat16:
      return forward_kernel<__half>(p.input_dtype);
    case DType::kBFloat16:
      return forward_kernel<__nv_bfloat16>(p.input_dtype);
    default:
      return forward<float, float, kWideVector>;
  }
}

}  // namespace
}  // namespace norm_rope

void run_norm_rope(const NormRopeParams& params, cudaStream_t stream) {
  norm_rope::run(
      [](const NormRopeParams& p, bool is_wide) { return norm_rope::forward_kernel(p, is_wide); },
      "norm_rope", params, stream);
}

}  // namespace frx
