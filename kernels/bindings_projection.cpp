// The grouped projections' operator: torch tensors in, projection_sm90.h structs out to the kernel.
#include <cuda_runtime.h>

#include <tuple>

#include "device.h"
#include "projection_sm90.h"
#include "torch_views.h"
#include "transpose_heads_sm90.h"

namespace frx {
namespace {

// One projection's tensors, aligned as the copy engine needs them: copies must outlive the launch's
// enqueueing, hence a member each.
struct ProjectionTensors {
  Tensor x, weight, out;
  OptionalTensor bias;
};

ProjectionTensors tensors_of(const Tensor& x, const OptionalTensor& weight,
                             const OptionalTensor& bias, int64_t num_heads) {
  STD_TORCH_CHECK(weight.has_value(), "fused_rope_xattn: a projection needs a weight");
  STD_TORCH_CHECK(weight->scalar_type() == x.scalar_type() &&
                      (!bias.has_value() || bias->scalar_type() == x.scalar_type()),
                  "fused_rope_xattn: x, weight and bias of a projection must share a dtype");
  const int64_t columns = weight->size(0);
  OptionalTensor aligned_bias;
  if (bias.has_value()) aligned_bias = aligned(*bias);
  return {aligned(x), aligned(*weight),
          empty(x, {x.size(0), x.size(1), num_heads, columns / num_heads}, x.scalar_type()),
          aligned_bias};
}

// Adds out = heads(x @ weight^T + bias) to the group, x seen as [batch * tokens, depth].
GroupedProjection& add_projection(ProjectionGroup90& group, const ProjectionTensors& t) {
  GroupedProjection& p = group.members[group.count++];
  p.x = t.x.data_ptr();
  p.weight = t.weight.data_ptr();
  p.bias = data_of(t.bias);
  p.out = t.out.data_ptr();
  p.rows = int32_of(t.x.size(0) * t.x.size(1));
  p.tokens = int32_of(t.x.size(1));
  p.columns = int32_of(t.weight.size(0));
  p.depth = int32_of(t.weight.size(1));
  p.head_dim = static_cast<int32_t>(t.out.size(3));
  return p;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> project_group(
    OptionalTensor x_q, OptionalTensor x_k, OptionalTensor x_v, OptionalTensor w_q,
    OptionalTensor w_k, OptionalTensor w_v, OptionalTensor b_q, OptionalTensor b_k,
    OptionalTensor b_v, OptionalTensor q_positions, OptionalTensor q_cos, OptionalTensor q_sin,
    OptionalTensor k_positions, OptionalTensor k_cos, OptionalTensor k_sin, int64_t num_heads,
    int64_t num_kv_heads, int64_t q_rotary_dim, bool q_interleaved, int64_t q_axes,
    double q_rope_base, bool q_full_width, int64_t k_rotary_dim, bool k_interleaved, int64_t k_axes,
    double k_rope_base, bool k_full_width, int64_t tile, bool transposes_v, OptionalTensor key_keep,
    OptionalTensor kv_lengths) {
  STD_TORCH_CHECK(x_q.has_value() || x_k.has_value() || x_v.has_value(),
                  "fused_rope_xattn: there is nothing to project");
  const Tensor any = x_q.has_value() ? *x_q : x_k.has_value() ? *x_k : *x_v;
  const DeviceGuard guard(any.get_device_index());
  STD_TORCH_CHECK(current_gpu().capability == 90,
                  "fused_rope_xattn: grouped projections need compute capability 9.0");
  ProjectionGroup90 group{};
  group.dtype = dtype_of(any.scalar_type());
  if (group.dtype == DType::kFloat32) group.dtype = DType::kTF32;
  const Tensor none = empty(any, {0}, any.scalar_type());
  ProjectionTensors q{none, none, none, {}}, k = q, v = q;
  Tensor v_transposed = none;
  if (x_q.has_value()) {
    q = tensors_of(*x_q, w_q, b_q, num_heads);
    set_rotation(add_projection(group, q).rotation, q_positions, q_cos, q_sin, q_rotary_dim,
                 q_interleaved, q_axes, q_rope_base, q_full_width);
  }
  if (x_k.has_value()) {
    k = tensors_of(*x_k, w_k, b_k, num_kv_heads);
    set_rotation(add_projection(group, k).rotation, k_positions, k_cos, k_sin, k_rotary_dim,
                 k_interleaved, k_axes, k_rope_base, k_full_width);
  }
  if (x_v.has_value()) {
    v = tensors_of(*x_v, w_v, b_v, num_kv_heads);
    GroupedProjection& p = add_projection(group, v);
    p.rotation.axes = 1;
    p.is_transposed = transposes_v;
    if (transposes_v) {
      const int64_t batch = v.x.size(0), tokens = v.x.size(1);
      STD_TORCH_CHECK(
          !kv_lengths.has_value() || (kv_lengths->dim() == 1 && kv_lengths->size(0) == batch),
          "fused_rope_xattn: kv_lengths must have one entry for each of the values' batch");
      STD_TORCH_CHECK(
          !key_keep.has_value() ||
              (key_keep->dim() == 2 && key_keep->size(0) == batch && key_keep->size(1) == tokens),
          "fused_rope_xattn: key_keep must have the values' batch and tokens");
      v_transposed =
          empty(v.x, {batch, num_kv_heads, p.head_dim, padded_tokens(p.tokens)}, ScalarType::Float);
      group.transposed = {static_cast<float*>(v_transposed.data_ptr()),
                          data_as<int32_t>(kv_lengths), data_as<bool>(key_keep)};
    }
  }
  run_projections_sm90(group, static_cast<int>(tile), current_stream(any.get_device_index()));
  // An empty result of its own for each absent one: results never alias each other.
  const auto out = [&](const OptionalTensor& x, const ProjectionTensors& t) {
    return x.has_value() ? t.out : empty(any, {0}, any.scalar_type());
  };
  return {out(x_q, q), out(x_k, k), out(x_v, v), v_transposed};
}

}  // namespace
}  // namespace frx

STABLE_TORCH_LIBRARY_IMPL(fused_rope_xattn, CUDA, m) {
  m.impl("project_group", TORCH_BOX(&frx::project_group));
}
