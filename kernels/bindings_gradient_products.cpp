// The gradient products' operator: torch tensors in, gradient_products_sm90.h structs out to the
// kernel.
#include <cuda_runtime.h>

#include <vector>

#include "device.h"
#include "gradient_products_sm90.h"
#include "torch_views.h"
#include "transpose_heads_sm90.h"

namespace frx {
namespace {

// The next num_terms of all terms, which have the sizes of the first one but for its depth.
GradientProduct& add_product(GradientGroup90& group, const std::vector<Tensor>& left,
                             const std::vector<Tensor>& right, int64_t num_terms,
                             bool over_tokens) {
  const int rows_axis = over_tokens ? 1 : 0, depth_axis = 1 - rows_axis;
  const int64_t first = group.num_terms;
  STD_TORCH_CHECK(num_terms > 0 && num_terms <= static_cast<int64_t>(left.size()) - first,
                  "fused_rope_xattn: a gradient product needs terms");
  GradientProduct& p = group.products[group.num_products++];
  p.over_tokens = over_tokens;
  p.rows = int32_of(left[first].size(rows_axis));
  p.columns = int32_of(right[first].size(1));
  p.first_term = group.num_terms;
  for (int64_t i = first; i < first + num_terms; ++i) {
    const int64_t depth = left[i].size(depth_axis);
    STD_TORCH_CHECK(left[i].size(rows_axis) == p.rows && right[i].size(0) == depth &&
                        right[i].size(1) == p.columns,
                    "fused_rope_xattn: the sizes of a gradient product do not fit together");
    STD_TORCH_CHECK(left[i].scalar_type() == left[0].scalar_type() &&
                        right[i].scalar_type() == left[0].scalar_type(),
                    "fused_rope_xattn: gradient products must share a dtype");
    group.terms[group.num_terms++] = {left[i].data_ptr(), right[i].data_ptr(), int32_of(depth),
                                      int32_of(left[i].size(1)), p.columns};
  }
  p.end_term = group.num_terms;
  return p;
}

// Copies of a group's operands that have the depth contiguous, as TF32 products need it.
class TransposedOperands {
 public:
  explicit TransposedOperands(const Tensor& like) : like_(like) {}

  // Puts the copy of an operand [depth, width], [width, stride], in its place. The same operand is
  // copied once.
  void replace(const void*& operand, int32_t& stride, int32_t depth, int32_t width) {
    int job = 0;
    while (job < count_ && (jobs_[job].in.data != operand || jobs_[job].head_dim != width)) ++job;
    if (job == count_) {
      copies_.push_back(empty(like_, {width, padded_tokens(depth)}, like_.scalar_type()));
      HeadsTranspose& added = jobs_[count_++];
      added.in = {const_cast<void*>(operand), 0, width, 0};
      added.out = static_cast<float*>(copies_.back().data_ptr());
      added.batch = added.num_heads = 1;
      added.num_tokens = depth;
      added.head_dim = width;
      added.keeps_order = true;
    }
    operand = jobs_[job].out;
    stride = static_cast<int32_t>(padded_tokens(depth));
  }

  void make(cudaStream_t stream) const {
    if (count_ > 0) transpose_heads_sm90(jobs_, count_, stream);
  }

 private:
  Tensor like_;
  std::vector<Tensor> copies_;  // which must outlive the launches' enqueueing
  HeadsTranspose jobs_[kMaxTransposes] = {};
  int count_ = 0;
};
static_assert(kMaxTransposes >= 2 * kMaxGradientTerms);

void replace_operands(GradientGroup90& group, TransposedOperands& copies) {
  for (int i = 0; i < group.num_products; ++i) {
    const GradientProduct& p = group.products[i];
    for (int j = p.first_term; j < p.end_term; ++j) {
      GradientTerm& term = group.terms[j];
      if (term.depth == 0) continue;
      // As they are, rows lie side by side: a stride is a width.
      const int32_t left_width = term.left_stride, right_width = term.right_stride;
      if (p.over_tokens) copies.replace(term.left, term.left_stride, term.depth, left_width);
      copies.replace(term.right, term.right_stride, term.depth, right_width);
    }
  }
}

std::vector<Tensor> gradient_products(std::vector<Tensor> left, std::vector<Tensor> right,
                                      std::vector<int64_t> num_terms,
                                      std::vector<bool> over_tokens) {
  STD_TORCH_CHECK(
      !left.empty() && left.size() <= kMaxGradientTerms && right.size() == left.size() &&
          over_tokens.size() == num_terms.size() && num_terms.size() <= left.size(),
      "fused_rope_xattn: one launch takes up to ", kMaxGradientTerms, " pairs of operands");
  const DeviceGuard guard(left[0].get_device_index());
  STD_TORCH_CHECK(current_gpu().capability == 90,
                  "fused_rope_xattn: gradient products need compute capability 9.0");
  // Aligned copies must outlive the launch's enqueueing.
  for (Tensor& t : left) t = aligned(t);
  for (Tensor& t : right) t = aligned(t);
  GradientGroup90 group{};
  group.dtype = dtype_of(left[0].scalar_type());
  if (group.dtype == DType::kFloat32) group.dtype = DType::kTF32;
  std::vector<Tensor> results;
  for (size_t i = 0; i < num_terms.size(); ++i) {
    GradientProduct& p = add_product(group, left, right, num_terms[i], over_tokens[i]);
    results.push_back(empty(left[0], {p.rows, p.columns}, left[0].scalar_type()));
    p.out = results.back().data_ptr();
  }
  cudaStream_t stream = current_stream(left[0].get_device_index());
  TransposedOperands copies(left[0]);
  if (group.dtype == DType::kTF32) {
    replace_operands(group, copies);
    copies.make(stream);
  }
  plan_gradient_products(group, current_gpu().num_sms);
  std::vector<Tensor> parts;  // which must outlive the launches' enqueueing
  for (int i = 0; i < group.num_products; ++i) {
    GradientProduct& p = group.products[i];
    if (p.splits == 1) continue;
    parts.push_back(empty(left[0], {gradient_part_floats(p)}, ScalarType::Float));
    p.parts = static_cast<float*>(parts.back().data_ptr());
  }
  run_gradient_products_sm90(group, stream);
  return results;
}

}  // namespace
}  // namespace frx

STABLE_TORCH_LIBRARY_IMPL(fused_rope_xattn, CUDA, m) {
  m.impl("gradient_products", TORCH_BOX(&frx::gradient_products));
}
