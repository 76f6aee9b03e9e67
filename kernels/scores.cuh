// From a raw product q.k to a score, and the dropout draws, in the accumulator layout of mma.cuh.
// Forward and backward share this file, so that both see the same bias, masks and dropout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "dropout.cuh"
#include "mask.cuh"
#include "params.h"
#include "ptx.cuh"

namespace frx {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLog2eRest = 1.925963e-8f;  // log2(e) - kLog2e
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// Scores are kept in units of 1 / kScoreUnit. 16-bit inputs: log 2, which saves a product an
// element. fp32: natural, so that only the difference to the maximum, small where it matters, is
// rounded again.
template <class Element>
constexpr float kScoreUnit = sizeof(Element) == 2 ? kLog2e : 1.f;

// exp of a difference of scores. In fp32 what rounding drops of the exponent enters to first order:
// it would be the largest error of a weight.
template <class Element>
__device__ __forceinline__ float weight_of(float difference) {
  if constexpr (sizeof(Element) == 2) {
    return exp2_approx(difference * (kLog2e / kScoreUnit<Element>));
  } else {
    const float exponent = difference * kLog2e;
    const float rest = fmaf(difference, kLog2eRest, fmaf(difference, kLog2e, -exponent));
    const float weight = exp2_approx(exponent);
    return difference == negative_infinity() ? 0.f : fmaf(weight, rest * kLn2, weight);
  }
}

__device__ __forceinline__ float load_float(const void* data, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

__device__ __forceinline__ void store_float(void* data, int64_t index, float value, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

template <class Element>
__device__ __forceinline__ const Element* head_of(const HeadsView& view, int64_t b, int h) {
  return static_cast<const Element*>(view.data) + b * view.batch_stride + h * view.head_stride;
}

// The modifiers of one (batch, head): pointers moved there, sizes at hand.
struct HeadScores {
  const ScoreModifiers& modifiers;  // in constant memory: read there, not kept in registers
  const void* bias;
  const bool* keep_mask;
  const bool* key_keep;
  int num_queries;
  int key_count;
  bool is_causal;
  float unit;
  float scale;  // in units
  uint64_t batch_head;
  uint32_t keep_threshold;
  float keep_scale;
  bool has_dropout;

  __device__ HeadScores(const AttentionSizes& sizes, const ScoreModifiers& m, int64_t b, int h,
                        float unit = kLog2e)
      : modifiers(m),
        bias(m.bias.data),
        keep_mask(nullptr),
        key_keep(m.key_keep == nullptr ? nullptr : m.key_keep + b * sizes.num_keys),
        num_queries(sizes.num_queries),
        key_count(frx::key_count(m.kv_lengths, b, sizes.num_keys)),
        is_causal(m.is_causal),
        unit(unit),
        scale(m.scale * unit),
        batch_head(static_cast<uint64_t>(b) * sizes.num_heads + h),
        keep_threshold(m.keep_threshold),
        keep_scale(m.keep_scale),
        has_dropout(m.seed != nullptr) {
    if (bias != nullptr) {
      const int64_t offset = b * m.bias.batch_stride + h * m.bias.head_stride;
      const int bytes = m.bias_dtype == DType::kFloat32 ? 4 : 2;
      bias = static_cast<const char*>(bias) + offset * bytes;
    }
    if (m.keep_mask.data != nullptr) {
      keep_mask = static_cast<const bool*>(m.keep_mask.data) + b * m.keep_mask.batch_stride +
                  h * m.keep_mask.head_stride;
    }
  }

  // With dropout only. Read where it is used: a register a thread is dearer than the cached load.
  __device__ __forceinline__ uint64_t seed() const {
    return static_cast<uint64_t>(*modifiers.seed);
  }

  __device__ __forceinline__ bool key_exists(int key) const {
    return key < key_count && (key_keep == nullptr || key_keep[key]);
  }

  // Scores of a tile inside every limit need scaling only.
  __device__ __forceinline__ bool is_plain() const {
    return bias == nullptr && keep_mask == nullptr && key_keep == nullptr;
  }

  // The score in units; -inf where the key is removed, whatever the product holds.
  __device__ __forceinline__ float score(float product, int query, int key) const {
    if (query >= num_queries || key >= keys_visible(query, num_queries, key_count, is_causal)) {
      return negative_infinity();
    }
    if (key_keep != nullptr && !key_keep[key]) return negative_infinity();
    const ScoresView &mask_view = modifiers.keep_mask, &bias_view = modifiers.bias;
    if (keep_mask != nullptr &&
        !keep_mask[query * mask_view.query_stride + key * mask_view.key_stride]) {
      return negative_infinity();
    }
    if (bias == nullptr) return product * scale;
    const float added = load_float(
        bias, query * bias_view.query_stride + key * bias_view.key_stride, modifiers.bias_dtype);
    // A bias of -inf removes the key also where the product is not finite.
    if (added == negative_infinity()) return added;
    return fmaf(product, scale, added * unit);
  }
};

// Turns kNT accumulator tiles of raw products into scores. Rows are queries and columns keys, or
// the reverse when kTransposed; (row, column) is the thread's first element, `plain` says that the
// tile lies inside every limit and has no modifiers.
template <bool kTransposed, int kNT>
__device__ __forceinline__ void apply_modifiers(float (&s)[kNT][4], const HeadScores& scores,
                                                int row, int column, bool plain) {
  if (plain) {
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= scores.scale;
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < kNT; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + 8 * (i / 2), c = column + 8 * n + i % 2;
      s[n][i] = scores.score(s[n][i], kTransposed ? c : r, kTransposed ? r : c);
    }
  }
}

// Calls use(n, i, keep) for the elements of accumulator tiles n and n + 1 (n even). `row` is g
// beyond a multiple of 16 and `column` 2t beyond one, so a thread's elements fill whole Philox
// groups and which of a group's words an element takes is known at compile time (see dropout.cuh).
template <bool kTransposed, class Use>
__device__ __forceinline__ void draw_dropout(const HeadScores& scores, int n, int row, int column,
                                             Use use) {
  const int c = column + 8 * n;
  if constexpr (!kTransposed) {
    const PhiloxWords words = dropout_words(scores.seed(), scores.batch_head, row, c);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int half = e / 4, tile = e / 2 % 2, odd = e % 2;
      const uint32_t draw = words.w[2 * half + tile] >> (16 * odd) & 0xFFFFu;
      use(n + tile, 2 * half + odd, draw < scores.keep_threshold);
    }
  } else {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const PhiloxWords words = dropout_words(scores.seed(), scores.batch_head, c + odd, row);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e / 2, tile = e % 2;
        const uint32_t draw = words.w[2 * tile + half] >> (16 * (row & 1)) & 0xFFFFu;
        use(n + tile, 2 * half + odd, draw < scores.keep_threshold);
      }
    }
  }
}

}  // namespace frx
