// Matrix products of a backward for Hopper (sm_90a): what one launch computes, and how it is cut in
// tiles. Nothing here needs CUDA or a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host_device.h"
#include "mask.cuh"  // defines: ceil_div
#include "params.h"

struct CUstream_st;  // what cudaStream_t points to

namespace frx {

constexpr int kMaxGradientTerms = 8;      // of all products of a launch
constexpr int kGradientTile = 128;        // rows and columns of a result that a block computes
constexpr int kGradientDepthBytes = 128;  // of the common dimension, a step

// In TF32 both operands have the depth contiguous: left is [rows, depth], right [columns, depth].
struct GradientTerm {
  const void* left;   // [rows, depth]; [depth, rows] in a product over tokens
  const void* right;  // [depth, columns]
  int32_t depth;
  int32_t left_stride, right_stride;  // numbers between rows
};

// out = the sum of left @ right over the terms; of left^T @ right in a product over tokens.
struct GradientProduct {
  void* out;  // [rows, columns]
  int32_t rows;
  int32_t columns;
  bool over_tokens;
  int32_t first_term, end_term;
  int32_t steps;         // in depth, of all terms
  int32_t splits;        // blocks that share the depth of a tile
  int32_t first_block;   // in the launch
  int32_t column_tiles;  // tiles go along rows
  float* parts;          // [splits, rows, columns] where splits > 1
};

// Every tensor is contiguous and of one dtype.
struct GradientGroup90 {
  DType dtype;
  int32_t num_products, num_terms;
  int32_t num_blocks;
  GradientProduct products[kMaxGradientTerms];
  GradientTerm terms[kMaxGradientTerms];
};

// Of the common dimension, a step.
inline int gradient_depth(DType dtype) {
  return kGradientDepthBytes / (dtype == DType::kTF32 ? 4 : 2);
}

// Why the kernel cannot take a group; null when it can.
inline const char* gradient_products_obstacle(const GradientGroup90& group) {
  if (group.dtype != DType::kBFloat16 && group.dtype != DType::kFloat16 &&
      group.dtype != DType::kTF32) {
    return "gradient products are of bf16, fp16 and TF32 only";
  }
  for (int i = 0; i < group.num_products; ++i) {
    const GradientProduct& p = group.products[i];
    if (p.columns % 8 != 0 || (p.over_tokens && p.rows % 8 != 0)) {
      return "gradient products need widths that are multiples of 8";
    }
    for (int j = p.first_term; j < p.end_term; ++j) {
      const GradientTerm& term = group.terms[j];
      if (!p.over_tokens && term.depth % 8 != 0) {
        return "gradient products need widths that are multiples of 8";
      }
      for (const void* pointer : {term.left, term.right, static_cast<const void*>(p.out)}) {
        if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
          return "gradient products need tensors that start at multiples of 16 bytes";
        }
      }
    }
  }
  return nullptr;
}

inline int gradient_tiles(const GradientProduct& p) {
  return ceil_div(p.rows, kGradientTile) * ceil_div(p.columns, kGradientTile);
}

// Gradients of narrow weights over many tokens are a few tiles that take long: then several blocks
// share the depth of a tile. gradient_products.py relies on it.
inline int gradient_splits(const GradientProduct& p, int num_sms) {
  constexpr int kFewSteps = 48, kStepsAPart = 24;
  const int tiles = gradient_tiles(p);
  if (!p.over_tokens || p.steps <= kFewSteps || 4 * tiles > num_sms) return 1;
  return std::min(ceil_div(p.steps, kStepsAPart), num_sms / tiles);
}

// Longest blocks first, so that what is left over at the end is short; without products that have
// no results.
inline void plan_gradient_products(GradientGroup90& group, int num_sms) {
  GradientProduct* const begin = group.products;
  GradientProduct* const end =
      std::remove_if(begin, begin + group.num_products,
                     [](const GradientProduct& p) { return p.rows == 0 || p.columns == 0; });
  group.num_products = static_cast<int32_t>(end - begin);
  for (GradientProduct* p = begin; p != end; ++p) {
    p->steps = 0;
    for (int j = p->first_term; j < p->end_term; ++j) {
      p->steps += ceil_div(group.terms[j].depth, gradient_depth(group.dtype));
    }
    p->splits = gradient_splits(*p, num_sms);
    p->column_tiles = ceil_div(p->columns, kGradientTile);
  }
  std::stable_sort(begin, end, [](const GradientProduct& a, const GradientProduct& b) {
    return ceil_div(a.steps, a.splits) > ceil_div(b.steps, b.splits);
  });
  group.num_blocks = 0;
  for (GradientProduct* p = begin; p != end; ++p) {
    p->first_block = group.num_blocks;
    group.num_blocks += gradient_tiles(*p) * p->splits;
  }
}

inline int64_t gradient_part_floats(const GradientProduct& p) {
  return p.splits > 1 ? int64_t{p.splits} * p.rows * p.columns : 0;
}

// A planned group, whose products with parts have room for them.
void run_gradient_products_sm90(const GradientGroup90& group, CUstream_st* stream);

}  // namespace frx
