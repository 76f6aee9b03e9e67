// Softmax and results on the fragments of wgmma_sm90.cuh: a thread holds columns 8n + 2t, 8n + 2t +
// 1 of rows g and g + 8 of its warp, as x[4n + 2i + e].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "dropout_bits.cuh"
#include "params.h"
#include "scores.cuh"
#include "storage.cuh"
#include "tf32.h"

namespace frx {

// ---- softmax ----------------------------------------------------------------------------------

struct RowState {
  float maximum[2] = {negative_infinity(), negative_infinity()};  // as the scores, unscaled
  float sum[2] = {0, 0};                                          // this thread's columns only
};

// Limits of the keys that the thread's two rows see, relative to its first column.
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (8 * (i / 4) + i % 2 >= limit[i / 2 % 2]) s[i] = negative_infinity();
  }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// kLazy: a larger maximum is adopted only when weights would exceed 2^8 otherwise, so that sums and
// outputs are rescaled a few times a row instead of once a tile. Weights of 2^8 are as exact as
// of 1.
constexpr float kMaxExponent = 8.f;

// s becomes exp2(scale * (s - running maximum)); correction is what earlier weights lose by a new
// maximum. Returns whether outputs must be corrected.
template <bool kLazy, int kCount>
__device__ __forceinline__ bool online_softmax(float (&s)[kCount], float scale, RowState& rows,
                                               float (&correction)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = rows.maximum[r], odd = negative_infinity();
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) {
      even = fmaxf(even, s[i]);
      odd = fmaxf(odd, s[i + 1]);
    }
    float maximum = quad_max(fmaxf(even, odd));
    if (kLazy && !((maximum - rows.maximum[r]) * scale > kMaxExponent)) maximum = rows.maximum[r];
    // A row that has seen no key yet: keep -inf - -inf out of the exponents.
    const float offset = maximum == negative_infinity() ? 0.f : maximum * scale;
    correction[r] = exp2_approx(fmaf(rows.maximum[r], scale, -offset));
    if (kLazy && maximum == rows.maximum[r]) correction[r] = 1.f;
    rows.maximum[r] = maximum;
    float even_sum = 0, odd_sum = 0;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) {
      s[i] = exp2_approx(fmaf(s[i], scale, -offset));
      s[i + 1] = exp2_approx(fmaf(s[i + 1], scale, -offset));
      even_sum += s[i];
      odd_sum += s[i + 1];
    }
    rows.sum[r] = fmaf(rows.sum[r], correction[r], even_sum + odd_sum);
  }
  return !kLazy || __any_sync(0xffffffff, correction[0] != 1.f || correction[1] != 1.f);
}

template <int kCount>
__device__ __forceinline__ void rescale_rows(float (&x)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= factor[i / 2 % 2];
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// One instruction, where rounding halves away from zero (mma.cuh) takes three.
__device__ __forceinline__ uint32_t nearest_tf32(float x) {
  uint32_t bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// Two weights a register; one in TF32.
template <class Element, int kRegisters, int kCount>
__device__ __forceinline__ void pack_weights(uint32_t (&p)[kRegisters], const float (&s)[kCount]) {
  if constexpr (std::is_same_v<Element, Tf32>) {
    static_assert(kRegisters == kCount);
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] = nearest_tf32(s[i]);
  } else {
    static_assert(kRegisters == kCount / 2);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
  }
}

// TF32: sum of the weights as the values see them, this thread's columns only. Outputs divided by
// it are means of the values: what all values share is not scaled by what rounding does to a sum,
// an error that would be common to a whole row of the backward.
template <int kCount>
__device__ __forceinline__ void add_rounded_weights(float (&sum)[2], const uint32_t (&p)[kCount],
                                                    const float (&correction)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) {
      even += __uint_as_float(p[i]);
      odd += __uint_as_float(p[i + 1]);
    }
    sum[r] = fmaf(sum[r], correction[r], even + odd);
  }
}

// Pairs become 0 where their bits say so: negative first, then clamped, because the integer pipe
// has more to do than the one that multiplies.
template <class Element, int kCount, class Bits>
__device__ __forceinline__ void drop_pairs(uint32_t (&p)[kCount], const Bits& dropped) {
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
  const uint32_t one = pack<Element>(1.f, 1.f), minus_zero = 0x80008000u;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t negated = p[i] ^ (dropped.signs(i) & 0x80008000u);
    const Pair clamped =
        __hfma2_relu(reinterpret_cast<const Pair&>(negated), reinterpret_cast<const Pair&>(one),
                     reinterpret_cast<const Pair&>(minus_zero));
    p[i] = reinterpret_cast<const uint32_t&>(clamped);
  }
}

// Packed weights become 0 where their bits (dropout_bits.cuh) say so.
template <class Element, int kCount, class Bits>
__device__ __forceinline__ void drop_weights(uint32_t (&p)[kCount], const Bits& dropped) {
  if constexpr (std::is_same_v<Element, Tf32>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] = dropped.is_dropped(i / 2, i % 2) ? 0 : p[i];
  } else {
    drop_pairs<Element>(p, dropped);
  }
}

// ---- results ----------------------------------------------------------------------------------

// Four lanes of a quad hold x[0..3] each; afterwards lane t holds every lane's x[t], in lane order.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&x)[4], int t) {
  const bool is_odd = t & 1, is_upper = t & 2;
  uint32_t even_lane[2], odd_lane[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t kept = is_odd ? x[2 * half + 1] : x[2 * half];
    const uint32_t sent = is_odd ? x[2 * half] : x[2 * half + 1];
    const uint32_t received = __shfl_xor_sync(0xffffffff, sent, 1);
    even_lane[half] = is_odd ? received : kept;
    odd_lane[half] = is_odd ? kept : received;
  }
  const uint32_t kept0 = is_upper ? even_lane[1] : even_lane[0];
  const uint32_t kept1 = is_upper ? odd_lane[1] : odd_lane[0];
  const uint32_t received0 = __shfl_xor_sync(0xffffffff, is_upper ? even_lane[0] : even_lane[1], 2);
  const uint32_t received1 = __shfl_xor_sync(0xffffffff, is_upper ? odd_lane[0] : odd_lane[1], 2);
  return is_upper ? make_uint4(received0, received1, kept0, kept1)
                  : make_uint4(kept0, kept1, received0, received1);
}

// Leaves of o what rounding it takes.
template <class Element, int kCount>
__device__ __forceinline__ void subtract_rounded(float (&o)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<Element, Tf32>) {
      o[i] = 0.f;
    } else {
      o[i] -= to_float(from_float<Element>(o[i]));
    }
  }
}

// x into rows `row` and `row` + 8 of `out`, 8 bytes a lane.
template <int kCount>
__device__ __forceinline__ void store_fp32_rows(float* out, int64_t stride,
                                                const float (&x)[kCount], int row, int num_rows,
                                                int head_dim, int t) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= num_rows) continue;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int dim = 2 * i + 2 * t;
      if (dim < head_dim) {
        *reinterpret_cast<float2*>(out + (row + 8 * r) * stride + dim) =
            make_float2(x[i + 2 * r], x[i + 2 * r + 1]);
      }
    }
  }
}

// o in the view [B, Tq, H, D], rows query and query + 8, 16 bytes a lane.
template <class Element, int kCount>
__device__ __forceinline__ void store_half_output(const HeadsView& view,
                                                  const AttentionSizes& sizes,
                                                  const float (&o)[kCount], int batch, int head,
                                                  int query, int t) {
  Element* out =
      static_cast<Element*>(view.data) + batch * view.batch_stride + head * view.head_stride;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = query + 8 * r;
#pragma unroll
    for (int i = 0; i < kCount; i += 16) {
      const uint32_t pairs[4] = {pack<Element>(o[i + 2 * r], o[i + 2 * r + 1]),
                                 pack<Element>(o[i + 4 + 2 * r], o[i + 5 + 2 * r]),
                                 pack<Element>(o[i + 8 + 2 * r], o[i + 9 + 2 * r]),
                                 pack<Element>(o[i + 12 + 2 * r], o[i + 13 + 2 * r])};
      const uint4 chunk = transpose_quad(pairs, t);
      const int dim = 2 * i + 8 * t;
      if (row < sizes.num_queries && dim < sizes.head_dim) {
        *reinterpret_cast<uint4*>(out + row * view.token_stride + dim) = chunk;
      }
    }
  }
}

// o in the view [B, Tq, H, D], rows query and query + 8.
template <class Element, int kCount>
__device__ __forceinline__ void store_output(const HeadsView& view, const AttentionSizes& sizes,
                                             const float (&o)[kCount], int batch, int head,
                                             int query, int t) {
  if constexpr (std::is_same_v<Element, Tf32>) {
    float* out =
        static_cast<float*>(view.data) + batch * view.batch_stride + head * view.head_stride;
    store_fp32_rows(out, view.token_stride, o, query, sizes.num_queries, sizes.head_dim, t);
  } else {
    store_half_output<Element>(view, sizes, o, batch, head, query, t);
  }
}

// partial_o [num_splits, B, H, Tq, D] in fp32.
template <int kCount>
__device__ __forceinline__ void store_partial(const AttentionForwardParams& p,
                                              const float (&o)[kCount], int64_t first_row,
                                              int query, int t) {
  const int head_dim = p.sizes.head_dim;
  store_fp32_rows(p.partial_o + first_row * head_dim, head_dim, o, query, p.sizes.num_queries,
                  head_dim, t);
}

}  // namespace frx
