// What the two Hopper backward kernels share: products, weights and their gradients on the
// fragments of wgmma_sm90.cuh, row statistics, and the way results leave.
//
//   p  = exp(score - lse)                   dv = dropped(p)^T dout
//   ds = p * (dropped(dout v^T) - delta)    dk = scale ds^T q    dq = scale ds k
//   delta = rowsum(dout * o) - dlse         (dlse: gradient of the returned log-sum-exp)
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "host_device.h"
#include "key_pieces.h"
#include "mask.cuh"
#include "params.h"
#include "ptx_sm90.cuh"
#include "scores.cuh"
#include "softmax_sm90.cuh"
#include "tile_sm90.cuh"
#include "wgmma_sm90.cuh"

namespace frx {

// Tiles of heads are slabs of at most 64 dims: [slab][token][dim].
template <int kHeadDim>
constexpr int kSlabDims = kHeadDim < 64 ? kHeadDim : 64;
template <int kHeadDim>
constexpr int kHeadRowBytes = 2 * kSlabDims<kHeadDim>;
template <int kHeadDim>
using HeadRow = uint16_t[kSlabDims<kHeadDim>];

constexpr int kRowBytes = 128;  // of other tiles: a consumer's 64 keys in 16 bits, 32 floats
using SlabRow = uint16_t[kRowBytes / 2];

constexpr int kConsumers = 2;  // warpgroups that multiply, 64 rows each
constexpr int kRowsPerConsumer = 64;
constexpr int kTileRows = kConsumers * kRowsPerConsumer;  // of the side that stays
constexpr int kConsumerWarps = 4 * kConsumers;
static_assert(kTileRows == kKeysPerBlock);
constexpr int kBackwardThreads = kWarpgroup * (1 + kConsumers);
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kMaxSmemBytes = 227 * 1024;  // a block's

enum NamedBarrier : int {
  // 0 is __syncthreads
  kConsumerBarrier = 1,  // + consumer: its four warps meet
  kGradientsFull = 3,    // + consumer: score gradients that it makes dq of are written
  kGradientsEmpty = 5,   // + consumer: and may be overwritten
  kProductsDone = 7,     // all that multiply meet: shared memory may be used for something else
};

// ---- products ---------------------------------------------------------------------------------

// d = a b^T: a [64, D] and b [kColumns, D], both [slab][row][dim] in shared memory.
template <class Element, int kColumns, int kHeadDim>
__device__ __forceinline__ void multiply_dims(float (&d)[kColumns / 2], SmemDescriptor a,
                                              uint32_t slab_bytes_a, SmemDescriptor b,
                                              uint32_t slab_bytes_b) {
  constexpr int kSlabSteps = kSlabDims<kHeadDim> / 16;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int slab = step / kSlabSteps, within = step % kSlabSteps * 32;
    Wgmma<Element, kColumns>::ss(d, a + (slab * slab_bytes_a + within),
                                 b + (slab * slab_bytes_b + within), step > 0);
  }
}

// d += a b: a [64, kRows] in registers, b [kRows, D] as [slab][row][dim] in shared memory.
template <class Element, int kHeadDim, int kRows>
__device__ __forceinline__ void multiply_rows(float (&d)[kHeadDim / 2],
                                              const uint32_t (&a)[kRows / 4], SmemDescriptor b) {
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    Wgmma<Element, kHeadDim>::rs(d, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                                 b + step * 16 * kHeadRowBytes<kHeadDim>);
  }
}

// ---- weights and gradients --------------------------------------------------------------------

// lse in units of log 2; +inf where the row has no key or does not exist, so that its weights
// become exp2(-inf) = 0.
// Statistics of rows come from L2: a kernel that overlaps those before it may read what was written
// after kernels on its multiprocessor had read that memory, and finds it in no stale line of L1.
__device__ __forceinline__ float row_lse_log2(const AttentionBackwardParams& p, int64_t batch_head,
                                              int query) {
  if (query >= p.sizes.num_queries) return -negative_infinity();
  const float lse = __ldcg(p.lse + batch_head * p.sizes.num_queries + query);
  return lse == negative_infinity() ? -negative_infinity() : lse * kLog2e;
}

__device__ __forceinline__ float row_delta(const AttentionBackwardParams& p, int64_t batch_head,
                                           int query) {
  return query < p.sizes.num_queries ? __ldcg(p.delta + batch_head * p.sizes.num_queries + query)
                                     : 0.f;
}

// Gradient of a score. dp is the gradient of the weight as the values see it, after dropout.
template <bool kDropout>
__device__ __forceinline__ float score_gradient(float p, float dp, float delta, bool dropped,
                                                float keep_scale) {
  if constexpr (!kDropout) return p * (dp - delta);
  return p * fmaf(dropped ? 0.f : dp, keep_scale, -delta);
}

// Calls run(Element{}, std::bool_constant<kDropout>{}) with what the problem needs.
template <class Run>
void choose_plain_variant(const AttentionBackwardParams& p, Run run) {
  const auto choose = [&](auto element) {
    p.scores.seed != nullptr ? run(element, std::true_type{}) : run(element, std::false_type{});
  };
  p.dtype == DType::kBFloat16 ? choose(__nv_bfloat16{}) : choose(__half{});
}

// The same with std::bool_constant<kModified>{}: a bias, a mask over scores or removed keys.
template <class Run>
void choose_backward_variant(const AttentionBackwardParams& p, Run run) {
  choose_plain_variant(p, [&](auto element, auto dropout) {
    is_modified(p.scores) ? run(element, dropout, std::true_type{})
                          : run(element, dropout, std::false_type{});
  });
}

// ---- results ----------------------------------------------------------------------------------

// dq_parts holds 16 queries by all dims as one warp's accumulators: dims 8n, .. 8n + 7 of the 16
// queries are 32 pieces of 16 bytes, one a lane, so that every access of a warp is contiguous. This
// is the lane's first piece; the n-th is n * kFragment further on. `query` is a multiple of 16.
constexpr int kFragment = 4 * 32;

template <int kHeadDim>
FRX_HOST_DEVICE float* dq_fragments(const AttentionBackwardParams& p, int part, int64_t batch_head,
                                    int query, int lane) {
  const int64_t padded_queries = ceil_div(p.sizes.num_queries, 64) * int64_t{64};
  const int64_t row =
      (part * p.sizes.batch * p.sizes.num_heads + batch_head) * padded_queries + query;
  return p.dq_parts + row * kHeadDim + 4 * lane;
}

// The same of the 16 keys of a consumer's warp in dkv_parts. `piece` counts from the first one on.
enum KeyGradient : int { kKeyGradientDk, kKeyGradientDv, kKeyGradients };

// With windows of score gradients dk has no parts.
FRX_HOST_DEVICE int first_part_gradient(const AttentionBackwardParams& p) {
  return p.windows.blocks > 0 ? kKeyGradientDv : kKeyGradientDk;
}

template <int kHeadDim>
FRX_HOST_DEVICE float* dkv_fragments(const AttentionBackwardParams& p, int64_t piece, int gradient,
                                     int warp, int lane) {
  const int first = first_part_gradient(p);
  const int64_t strip =
      (piece * (kKeyGradients - first) + gradient - first) * kConsumerWarps + warp;
  return p.dkv_parts + strip * 16 * kHeadDim + 4 * lane;
}

// Score gradients of a window: of a block's 128 keys and 64 queries, [8 keys][8 queries] core
// matrices (wgmma_sm90.cuh) of a row for each key. Then come the other queries, the query heads
// that share the keys, and the blocks.
constexpr int kGradientQueries = 64;
using CoreMatrix = uint16_t[8][8];
using GradientTile = CoreMatrix[kKeysPerBlock / 8][kGradientQueries / 8];

FRX_HOST_DEVICE GradientTile& gradient_tile(const AttentionBackwardParams& p, int64_t window_block,
                                            int head_of_group, int query) {
  const int group = p.sizes.num_heads / p.sizes.num_kv_heads;
  const int tiles = ceil_div(p.sizes.num_queries, kGradientQueries);
  const int64_t index = (window_block * group + head_of_group) * tiles + query / kGradientQueries;
  return static_cast<GradientTile*>(p.windows.gradients)[index];
}

// factor * x into rows `row` and `row` + 8 of one head of a [B, T, H, D] view, 16 bytes a lane.
template <class Element, int kCount>
__device__ __forceinline__ void store_heads(const HeadsView& view, const float (&x)[kCount],
                                            float factor, int64_t batch, int head, int row,
                                            int num_rows, int head_dim, int t) {
  Element* out =
      static_cast<Element*>(view.data) + batch * view.batch_stride + head * view.head_stride;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 16) {
      uint32_t pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        pairs[n] = pack<Element>(x[i + 4 * n] * factor, x[i + 4 * n + 1] * factor);
      }
      const uint4 chunk = transpose_quad(pairs, t);
      const int dim = 2 * (i - 2 * r) + 8 * t;
      if (row + 8 * r < num_rows && dim < head_dim) {
        *reinterpret_cast<uint4*>(out + (row + 8 * r) * view.token_stride + dim) = chunk;
      }
    }
  }
}

}  // namespace frx
