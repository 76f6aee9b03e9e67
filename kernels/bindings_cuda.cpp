// CUDA kernels of the operators that ops.py defines: torch tensors in, params.h structs out to the
// kernels, on libtorch's stable ABI alone. The block of small problems has its own file,
// bindings_block.cpp.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "attention_sm90.h"
#include "attention_tf32_sm90.h"
#include "device.h"
#include "entry.h"
#include "plan.h"
#include "torch_views.h"

namespace frx {
namespace {

// o, lse and, if wanted, what rounding took from o; else an empty tensor. kPortable plans as for a
// GPU without Hopper's kernels.
template <bool kPortable, bool kWithRest>
std::tuple<Tensor, Tensor, Tensor> attend(const Tensor& q_any, const Tensor& k_any,
                                          const Tensor& v_any, const ScoreModifiers& scores,
                                          bool tf32, OptionalTensor v_transposed = {}) {
  const Tensor q = aligned(q_any), k = aligned(k_any), v = aligned(v_any);
  AttentionForwardParams p{};
  p.sizes = sizes_of(q, k);
  const auto& [batch, queries, keys, heads, kv_heads, head_dim] = p.sizes;
  const std::vector<int64_t> none = {0}, shape = {batch, queries, heads, head_dim};
  Tensor o = empty(q, shape, q.scalar_type());
  Tensor o_rest = empty(q, kWithRest ? shape : none, q.scalar_type());
  Tensor lse = empty(q, {batch, heads, queries}, ScalarType::Float);
  if (batch * queries == 0) return {o, lse, o_rest};

  p.scores = scores;
  p.dtype = dtype_of(q.scalar_type(), tf32);
  p.q = heads_view(q);
  p.k = heads_view(k);
  p.v = heads_view(v);
  p.o = heads_view(o);
  if (kWithRest) p.o_rest = heads_view(o_rest);
  p.lse = static_cast<float*>(lse.data_ptr());

  Gpu gpu = current_gpu();
  if (kPortable) gpu.capability = 80;
  const ForwardPlan plan = plan_attention_forward(p, gpu);
  p.use_sm90 = plan.use_sm90;
  p.tile_queries = plan.tile.queries;
  p.num_splits = plan.num_splits;
  OptionalTensor partial_o, partial_lse;
  if (plan.v_transposed_floats > 0) {
    p.has_transposed = v_transposed.has_value();
    if (!p.has_transposed) v_transposed = empty(q, {plan.v_transposed_floats}, ScalarType::Float);
    STD_TORCH_CHECK(v_transposed->scalar_type() == ScalarType::Float &&
                        v_transposed->is_contiguous() &&
                        v_transposed->get_device_index() == q.get_device_index() &&
                        v_transposed->numel() == plan.v_transposed_floats,
                    "fused_rope_xattn: transposed values are not what project_group makes of v");
    p.v_transposed = data_as<float>(v_transposed);
  }
  if (plan.num_splits > 1) {
    partial_o = empty(q, {plan.num_splits, batch, heads, queries, head_dim}, ScalarType::Float);
    partial_lse = empty(q, {plan.num_splits, batch, heads, queries}, ScalarType::Float);
    p.partial_o = data_as<float>(partial_o);
    p.partial_lse = data_as<float>(partial_lse);
  }
  run_attention_forward(p, current_stream(q.get_device_index()));
  return {o, lse, o_rest};
}

template <bool kPortable>
std::tuple<Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, OptionalTensor attn_bias,
                                             OptionalTensor keep_mask, OptionalTensor key_keep,
                                             OptionalTensor kv_lengths, OptionalTensor seed,
                                             double scale, bool is_causal, double dropout_p,
                                             bool tf32, OptionalTensor v_transposed) {
  const DeviceGuard guard(q.get_device_index());
  const auto scores =
      modifiers(attn_bias, keep_mask, key_keep, kv_lengths, seed, scale, is_causal, dropout_p);
  const auto [o, lse, rest] = attend<kPortable, false>(q, k, v, scores, tf32, v_transposed);
  return {o, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention_forward_with_rest(
    Tensor q, Tensor k, Tensor v, OptionalTensor attn_bias, OptionalTensor keep_mask,
    OptionalTensor key_keep, OptionalTensor kv_lengths, OptionalTensor seed, double scale,
    bool is_causal, double dropout_p, bool tf32) {
  const DeviceGuard guard(q.get_device_index());
  const auto scores =
      modifiers(attn_bias, keep_mask, key_keep, kv_lengths, seed, scale, is_causal, dropout_p);
  return attend<false, true>(q, k, v, scores, tf32);
}

// Takes the gradient of heads [B, T, H, D] back through their rotation, in place.
NormRopeParams turning_back(const Tensor& grad, const RotationParams& rotation) {
  NormRopeParams p{};
  static_cast<RotationParams&>(p) = rotation;
  p.batch = grad.size(0);
  p.num_tokens = grad.size(1);
  p.num_heads = static_cast<int32_t>(grad.size(2));
  p.head_dim = static_cast<int32_t>(grad.size(3));
  p.input_dtype = p.output_dtype = dtype_of(grad.scalar_type());
  p.grad = p.out = grad.data_ptr();
  return p;
}

template <bool kPortable>
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor dout_any, OptionalTensor dlse, Tensor q_any, Tensor k_any, Tensor v_any, Tensor o_any,
    Tensor lse, OptionalTensor attn_bias, OptionalTensor keep_mask, OptionalTensor key_keep,
    OptionalTensor kv_lengths, OptionalTensor seed, double scale, bool is_causal, double dropout_p,
    bool tf32, bool need_dq, bool need_dkv, bool need_dbias, bool deterministic,
    OptionalTensor o_rest_any, OptionalTensor q_positions, OptionalTensor q_cos,
    OptionalTensor q_sin, OptionalTensor k_positions, OptionalTensor k_cos, OptionalTensor k_sin,
    int64_t q_rotary_dim, bool q_interleaved, int64_t q_axes, double q_rope_base, bool q_full_width,
    int64_t k_rotary_dim, bool k_interleaved, int64_t k_axes, double k_rope_base,
    bool k_full_width) {
  const DeviceGuard guard(q_any.get_device_index());
  const Tensor q = aligned(q_any), k = aligned(k_any), v = aligned(v_any);
  const Tensor o = aligned(o_any), dout = aligned(dout_any);
  AttentionBackwardParams p{};
  p.sizes = sizes_of(q, k);
  const auto& [batch, queries, keys, heads, kv_heads, head_dim] = p.sizes;
  const std::vector<int64_t> none = {0}, kv_shape = {batch, keys, kv_heads, head_dim};
  const std::vector<int64_t> q_shape = {batch, queries, heads, head_dim};
  Tensor dq = empty(q, need_dq ? q_shape : none, q.scalar_type());
  Tensor dk = empty(k, need_dkv ? kv_shape : none, k.scalar_type());
  Tensor dv = empty(v, need_dkv ? kv_shape : none, v.scalar_type());
  Tensor dbias = empty(q, none, q.scalar_type());
  if (need_dbias) {
    STD_TORCH_CHECK(attn_bias->size(3) == keys,
                    "fused_rope_xattn: dbias is computed for a bias with a key axis");
    const auto shape = attn_bias->sizes();
    dbias = torch::stable::new_zeros(*attn_bias, {shape.begin(), shape.end()});
  }

  p.scores =
      modifiers(attn_bias, keep_mask, key_keep, kv_lengths, seed, scale, is_causal, dropout_p);
  p.dtype = dtype_of(q.scalar_type(), tf32);
  p.q = heads_view(q);
  p.k = heads_view(k);
  p.v = heads_view(v);
  p.o = heads_view(o);
  p.dout = heads_view(dout);
  p.lse = static_cast<const float*>(lse.data_ptr());
  p.dlse = data_as<float>(dlse);
  Tensor delta = empty(q, {batch, heads, queries}, ScalarType::Float);
  p.delta = static_cast<float*>(delta.data_ptr());
  OptionalTensor weight_scale, o_rest;
  if (o_rest_any.has_value()) {
    o_rest = aligned(*o_rest_any);
    p.o_rest = heads_view(*o_rest);
  } else if (keys <= kMaxRowSumKeys) {
    weight_scale = empty(q, {batch, heads, queries}, ScalarType::Float);
    p.weight_scale = data_as<float>(weight_scale);
  }
  if (need_dq && dq.numel() > 0) p.dq = heads_view(dq);
  if (need_dkv && dk.numel() > 0) {
    p.dk = heads_view(dk);
    p.dv = heads_view(dv);
  }
  if (need_dbias && dbias.numel() > 0) p.dbias = scores_view(dbias);
  p.deterministic = deterministic;

  // Rotations that a kernel of its own takes the gradients back through
  RotationParams q_rotation{}, k_rotation{};
  if (p.dq.data != nullptr) {
    set_rotation(q_rotation, q_positions, q_cos, q_sin, q_rotary_dim, q_interleaved, q_axes,
                 q_rope_base, q_full_width);
  }
  if (p.dk.data != nullptr) {
    set_rotation(k_rotation, k_positions, k_cos, k_sin, k_rotary_dim, k_interleaved, k_axes,
                 k_rope_base, k_full_width);
  }

  const Gpu gpu = current_gpu();
  OptionalTensor dq_parts, dkv_parts, window, copies;
  if (!kPortable && gpu.capability == 90 && attention_backward_tf32_sm90_pays(p)) {
    p.use_sm90 = true;
    p.weight_scale = nullptr;  // o is not rounded: delta needs no sums of rows
    copies = empty(q, {tf32_backward_copies(p).floats}, ScalarType::Float);
    p.copies = data_as<float>(copies);
  }
  if (!kPortable && gpu.capability == 90 && attention_backward_sm90_supports(p)) {
    const Sm90BackwardPlan plan = plan_attention_backward_sm90(p, gpu.num_sms);
    p.use_sm90 = true;
    p.dq_with_dkv = plan.dq_with_dkv;
    p.num_splits = plan.num_splits;
    if (backward_sm90_turns(q_rotation)) std::swap(p.q_rotation, q_rotation);
    if (backward_sm90_turns_keys(p.sizes, k_rotation)) std::swap(p.k_rotation, k_rotation);
    if (plan.dq_parts_floats > 0) {
      dq_parts = empty(q, {plan.dq_parts_floats}, ScalarType::Float);
      p.dq_parts = data_as<float>(dq_parts);
      p.dq_parts_floats = plan.dq_parts_floats;
    }
    p.key_cut = plan.key_cut;
    if (plan.dkv_parts_floats > 0) {
      dkv_parts = empty(q, {plan.dkv_parts_floats}, ScalarType::Float);
      p.dkv_parts = data_as<float>(dkv_parts);
    }
    if (plan.windows.blocks > 0) {
      window = empty(q, {plan.window_bytes}, ScalarType::Byte);
      p.windows = {plan.windows, data_as<void>(window)};
    }
  }
  const cudaStream_t stream = current_stream(q.get_device_index());
  run_attention_backward(p, stream);
  NormRopeParams turned[kMaxTurnedBack];
  int count = 0;
  if (q_rotation.rotary_dim > 0) turned[count++] = turning_back(dq, q_rotation);
  if (k_rotation.rotary_dim > 0) turned[count++] = turning_back(dk, k_rotation);
  run_rope_backward(turned, count, stream);
  return {dq, dk, dv, dbias};
}

// What norm_rope and its backward share; x, grad, out and the partial sums are the caller's.
NormRopeParams norm_rope_params(const OptionalTensor& bias, const OptionalTensor& norm_weight,
                                const OptionalTensor& norm_bias, const OptionalTensor& positions,
                                const OptionalTensor& cos, const OptionalTensor& sin,
                                int64_t num_heads, int64_t norm_kind, bool norm_inner,
                                double norm_eps, int64_t rotary_dim, bool interleaved, int64_t axes,
                                double rope_base, bool full_width) {
  NormRopeParams p{};
  p.num_heads = static_cast<int32_t>(num_heads);
  p.bias = data_of(bias);
  if (bias.has_value()) p.bias_dtype = dtype_of(bias->scalar_type());
  p.norm_kind = static_cast<NormKind>(norm_kind);
  p.norm_inner = norm_inner;
  p.norm_eps = static_cast<float>(norm_eps);
  p.norm_weight = data_of(norm_weight);
  p.norm_bias = data_of(norm_bias);
  if (norm_weight.has_value()) p.norm_dtype = dtype_of(norm_weight->scalar_type());
  if (norm_bias.has_value()) {
    STD_TORCH_CHECK(
        !norm_weight.has_value() || norm_weight->scalar_type() == norm_bias->scalar_type(),
        "fused_rope_xattn: a norm's weight and bias must share a dtype");
    p.norm_dtype = dtype_of(norm_bias->scalar_type());
  }
  set_rotation(p, positions, cos, sin, rotary_dim, interleaved, axes, rope_base, full_width);
  return p;
}

Tensor norm_rope(Tensor x, OptionalTensor bias, OptionalTensor norm_weight,
                 OptionalTensor norm_bias, OptionalTensor positions, OptionalTensor cos,
                 OptionalTensor sin, int64_t num_heads, int64_t norm_kind, bool norm_inner,
                 double norm_eps, int64_t rotary_dim, bool interleaved, int64_t axes,
                 double rope_base, bool full_width, ScalarType dtype) {
  const DeviceGuard guard(x.get_device_index());
  NormRopeParams p =
      norm_rope_params(bias, norm_weight, norm_bias, positions, cos, sin, num_heads, norm_kind,
                       norm_inner, norm_eps, rotary_dim, interleaved, axes, rope_base, full_width);
  p.batch = x.size(0);
  p.num_tokens = x.size(1);
  p.head_dim = static_cast<int32_t>(x.size(2) / num_heads);
  Tensor y = empty(x, {p.batch, p.num_tokens, num_heads, p.head_dim}, dtype);
  p.input_dtype = dtype_of(x.scalar_type());
  p.output_dtype = dtype_of(dtype);
  p.x = x.data_ptr();
  p.out = y.data_ptr();
  run_norm_rope(p, current_stream(x.get_device_index()));
  return y;
}

// Equals norm_partials in ops.py, which compiled graphs see.
constexpr int64_t kMaxNormPartials = 512;

std::tuple<Tensor, Tensor, Tensor> norm_rope_backward(
    Tensor grad, OptionalTensor x, OptionalTensor bias, OptionalTensor norm_weight,
    OptionalTensor norm_bias, OptionalTensor positions, OptionalTensor cos, OptionalTensor sin,
    int64_t num_heads, int64_t norm_kind, bool norm_inner, double norm_eps, int64_t rotary_dim,
    bool interleaved, int64_t axes, double rope_base, bool full_width) {
  const DeviceGuard guard(grad.get_device_index());
  NormRopeParams p =
      norm_rope_params(bias, norm_weight, norm_bias, positions, cos, sin, num_heads, norm_kind,
                       norm_inner, norm_eps, rotary_dim, interleaved, axes, rope_base, full_width);
  p.batch = grad.size(0);
  p.num_tokens = grad.size(1);
  p.head_dim = static_cast<int32_t>(grad.size(3));
  const int64_t inner = num_heads * p.head_dim, width = norm_inner ? inner : p.head_dim;
  const int64_t partials = std::min(p.batch * p.num_tokens, kMaxNormPartials);
  Tensor dx = empty(grad, {p.batch, p.num_tokens, inner}, grad.scalar_type());
  Tensor dweight = empty(grad, {norm_weight ? partials : 0, width}, ScalarType::Float);
  Tensor dbias = empty(grad, {norm_bias ? partials : 0, width}, ScalarType::Float);
  p.output_dtype = dtype_of(grad.scalar_type());
  p.input_dtype = x.has_value() ? dtype_of(x->scalar_type()) : p.output_dtype;
  p.x = data_of(x);
  p.grad = grad.data_ptr();
  p.out = dx.data_ptr();
  p.num_partials = static_cast<int32_t>(partials);
  if (norm_weight) p.dnorm_weight = static_cast<float*>(dweight.data_ptr());
  if (norm_bias) p.dnorm_bias = static_cast<float*>(dbias.data_ptr());
  run_norm_rope_backward(p, current_stream(grad.get_device_index()));
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace frx

STABLE_TORCH_LIBRARY_IMPL(fused_rope_xattn, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&frx::attention_forward<false>));
  m.impl("attention_forward_with_rest", TORCH_BOX(&frx::attention_forward_with_rest));
  m.impl("attention_forward_portable", TORCH_BOX(&frx::attention_forward<true>));
  m.impl("attention_backward", TORCH_BOX(&frx::attention_backward<false>));
  m.impl("attention_backward_portable", TORCH_BOX(&frx::attention_backward<true>));
  m.impl("norm_rope", TORCH_BOX(&frx::norm_rope));
  m.impl("norm_rope_backward", TORCH_BOX(&frx::norm_rope_backward));
}
