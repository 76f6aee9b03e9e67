// The operators of attention over tokens: torch tensors in, token_attention.h structs out to the
// kernels.
#include <cuda_runtime.h>

#include <tuple>

#include "device.h"
#include "token_attention.h"
#include "torch_views.h"
#include "turns.cuh"

namespace frx {
namespace {

// What both directions share. The tensors must outlive the launches' enqueueing.
TokenAttentionParams token_params(const Tensor& q, const Tensor& k, const Tensor& x,
                                  const OptionalTensor& key_keep, const OptionalTensor& kv_lengths,
                                  double scale, bool is_causal) {
  TokenAttentionParams p{};
  p.sizes = sizes_of(q, k);
  const int64_t head_dim = p.sizes.head_dim, rows = q.size(1) * q.size(2);
  STD_TORCH_CHECK((head_dim == 32 || head_dim == 64 || head_dim == 128) && rows <= kTokenRows &&
                      k.size(2) * head_dim <= kTokenColumns &&
                      (rows == 0 || k.size(2) <= kTokenRows) && x.size(2) <= kTokenColumns &&
                      x.size(2) % 8 == 0,
                  "fused_rope_xattn: attention over tokens does not take these sizes");
  STD_TORCH_CHECK(x.size(0) == q.size(0) && x.size(1) == k.size(1) && x.is_contiguous(),
                  "fused_rope_xattn: tokens and keys differ in number, or tokens have gaps");
  STD_TORCH_CHECK((!kv_lengths.has_value() ||
                   (kv_lengths->numel() == q.size(0) && kv_lengths->is_contiguous() &&
                    kv_lengths->scalar_type() == ScalarType::Int)) &&
                      (!key_keep.has_value() ||
                       (key_keep->numel() == k.size(0) * k.size(1) && key_keep->is_contiguous() &&
                        key_keep->scalar_type() == ScalarType::Bool)),
                  "fused_rope_xattn: lengths or removed keys do not fit");
  p.dtype = dtype_of(q.scalar_type());
  STD_TORCH_CHECK(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
                  "fused_rope_xattn: attention over tokens takes half types");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && x.scalar_type() == q.scalar_type(),
                  "fused_rope_xattn: attention over tokens takes one dtype");
  p.scores = modifiers(std::nullopt, std::nullopt, key_keep, kv_lengths, std::nullopt, scale,
                       is_causal, 0.0);
  p.q = heads_view(q);
  p.k = heads_view(k);
  p.x = x.data_ptr();
  p.width = static_cast<int32_t>(x.size(2));
  p.num_splits = token_splits(p.sizes.batch, p.sizes.num_keys, current_gpu().num_sms);
  return p;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_attention(Tensor q_any, Tensor k_any, Tensor x_any,
                                                           Tensor w_v_any, OptionalTensor b_v,
                                                           OptionalTensor key_keep,
                                                           OptionalTensor kv_lengths, double scale,
                                                           bool is_causal, bool keep) {
  const DeviceGuard guard(q_any.get_device_index());
  const Tensor q = aligned(q_any), k = aligned(k_any), x = aligned(x_any), w_v = aligned(w_v_any);
  TokenAttentionParams p = token_params(q, k, x, key_keep, kv_lengths, scale, is_causal);
  const auto& [batch, queries, keys, heads, kv_heads, head_dim] = p.sizes;
  STD_TORCH_CHECK(w_v.scalar_type() == q.scalar_type() && w_v.size(0) == kv_heads * head_dim &&
                      w_v.size(1) == p.width && w_v.is_contiguous() &&
                      (!b_v.has_value() ||
                       (b_v->scalar_type() == q.scalar_type() && b_v->numel() == w_v.size(0))),
                  "fused_rope_xattn: the values' weight or bias does not fit");
  const int64_t width = p.width, rows = int64_t{heads} * queries;
  const std::vector<int64_t> none = {0}, u_shape = {heads, batch, queries, width};
  Tensor o = empty(q, {batch, queries, heads, head_dim}, q.scalar_type());
  Tensor lse = empty(q, {batch, heads, queries}, ScalarType::Float);
  Tensor u = empty(q, keep ? u_shape : none, q.scalar_type());
  Tensor u_rest = empty(q, keep ? u_shape : none, q.scalar_type());
  if (batch * rows == 0) return {o, lse, u, u_rest};

  Tensor part_u = empty(q, {p.num_splits, batch, rows, width}, ScalarType::Float);
  Tensor part_rows = empty(q, {p.num_splits, batch, rows, 2}, ScalarType::Float);
  p.w_v = w_v.data_ptr();
  p.b_v = data_of(b_v);
  p.o = o.data_ptr();
  p.lse = static_cast<float*>(lse.data_ptr());
  if (keep) {
    p.u = u.data_ptr();
    p.u_rest = u_rest.data_ptr();
  }
  p.part_u = static_cast<float*>(part_u.data_ptr());
  p.part_rows = static_cast<float2*>(part_rows.data_ptr());
  cudaStream_t stream = current_stream(q.get_device_index());
  p.dtype == DType::kBFloat16 ? token_attention_bf16(p, stream) : token_attention_fp16(p, stream);
  return {o, lse, u, u_rest};
}

void set_key_rotation(TokenAttentionParams& p) {
  const RotationParams& r = p.k_rotation;
  if (r.rotary_dim == 0) return;
  const bool is_whole = r.rotary_dim == p.sizes.head_dim && r.axes == 1;
  STD_TORCH_CHECK(!r.full_width && r.table_head_stride == 0 && (r.interleaved || is_whole) &&
                      r.rotary_dim <= p.sizes.head_dim && r.rotary_dim % (2 * r.axes) == 0,
                  "fused_rope_xattn: attention over tokens does not take this rotation");
  const int pairs = r.rotary_dim / r.axes / 2;
  for (int i = 0; i < pairs; ++i) {
    p.k_turns[i] = turns_a_position(inverse_frequency(i, 2 * pairs, r.log2_base));
  }
}

std::tuple<Tensor, Tensor, Tensor> token_attention_backward(
    Tensor du_any, OptionalTensor dlse, Tensor q_any, Tensor k_any, Tensor x_any, Tensor u_any,
    Tensor u_rest_any, Tensor lse, OptionalTensor key_keep, OptionalTensor kv_lengths, double scale,
    bool is_causal, OptionalTensor k_positions, OptionalTensor k_cos, OptionalTensor k_sin,
    int64_t k_rotary_dim, bool k_interleaved, int64_t k_axes, double k_rope_base, bool k_full_width,
    bool need_dq, bool need_dk, bool need_dx) {
  const DeviceGuard guard(q_any.get_device_index());
  const Tensor q = aligned(q_any), k = aligned(k_any), x = aligned(x_any);
  const Tensor du = aligned(du_any), u = aligned(u_any), u_rest = aligned(u_rest_any);
  TokenAttentionParams p = token_params(q, k, x, key_keep, kv_lengths, scale, is_causal);
  const auto& [batch, queries, keys, heads, kv_heads, head_dim] = p.sizes;
  const int64_t width = p.width, rows = int64_t{heads} * queries;
  STD_TORCH_CHECK(du.numel() == batch * rows * width && u.numel() == du.numel() &&
                      u_rest.numel() == du.numel() && du.scalar_type() == q.scalar_type() &&
                      u.scalar_type() == q.scalar_type() &&
                      u_rest.scalar_type() == q.scalar_type() && du.is_contiguous() &&
                      u.is_contiguous() && u_rest.is_contiguous(),
                  "fused_rope_xattn: u and its gradient do not fit");
  STD_TORCH_CHECK(lse.numel() == batch * rows && lse.scalar_type() == ScalarType::Float &&
                      (!dlse.has_value() ||
                       (dlse->numel() == lse.numel() && dlse->scalar_type() == ScalarType::Float)),
                  "fused_rope_xattn: lse or its gradient does not fit");
  const std::vector<int64_t> none = {0}, q_shape = {batch, queries, heads, head_dim};
  const std::vector<int64_t> k_shape = {batch, keys, kv_heads, head_dim},
                             x_shape = {batch, keys, width};
  Tensor dq = empty(q, need_dq ? q_shape : none, q.scalar_type());
  Tensor dk = empty(q, need_dk ? k_shape : none, q.scalar_type());
  Tensor dx = empty(q, need_dx ? x_shape : none, q.scalar_type());
  if (batch * rows == 0) {  // no query looks at a key, if there is one
    if (need_dk) dk = torch::stable::new_zeros(q, k_shape);
    if (need_dx) dx = torch::stable::new_zeros(q, x_shape);
    return {dq, dk, dx};
  }

  OptionalTensor part_dq;
  if (need_dq) {
    part_dq = empty(q, {p.num_splits, batch, rows, head_dim}, ScalarType::Float);
    p.part_dq = data_as<float>(part_dq);
    p.dq = dq.data_ptr();
  }
  p.lse = static_cast<float*>(lse.data_ptr());
  p.dlse = data_as<float>(dlse);
  p.du = du.data_ptr();
  p.u = u.data_ptr();
  p.u_rest = u_rest.data_ptr();
  if (need_dk) {
    p.dk = dk.data_ptr();
    set_rotation(p.k_rotation, k_positions, k_cos, k_sin, k_rotary_dim, k_interleaved, k_axes,
                 k_rope_base, k_full_width);
    set_key_rotation(p);
  }
  if (need_dx) p.dx = dx.data_ptr();
  cudaStream_t stream = current_stream(q.get_device_index());
  p.dtype == DType::kBFloat16 ? token_attention_backward_bf16(p, stream)
                              : token_attention_backward_fp16(p, stream);
  return {dq, dk, dx};
}

}  // namespace
}  // namespace frx

STABLE_TORCH_LIBRARY_IMPL(fused_rope_xattn, CUDA, m) {
  m.impl("token_attention", TORCH_BOX(&frx::token_attention));
  m.impl("token_attention_backward", TORCH_BOX(&frx::token_attention_backward));
}
