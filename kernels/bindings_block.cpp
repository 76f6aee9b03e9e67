// The operator of small problems: torch tensors in, block_params.h structs out to the kernel.
#include <cuda_runtime.h>

#include <tuple>

#include "device.h"
#include "entry.h"
#include "plan.h"
#include "torch_views.h"

namespace frx {
namespace {

// Adds out = x @ weight^T + bias to the group, x seen as [batch * tokens, depth].
ProjectionParams& add_projection(ProjectionGroup& group, const Tensor& x, const Tensor& weight,
                                 const OptionalTensor& bias, const Tensor& out) {
  ProjectionParams& p = group.members[group.count++];
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.bias = data_of(bias);
  p.out = out.data_ptr();
  p.rows = int32_of(x.size(0) * x.size(1));
  p.tokens = make_divisor(int32_of(x.size(1)));
  p.columns = int32_of(weight.size(0));
  p.depth = int32_of(weight.size(1));
  STD_TORCH_CHECK(p.columns % 8 == 0 && p.depth % 8 == 0,
                  "fused_rope_xattn: path 'fused' takes widths that are multiples of 8");
  return p;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> block_forward(
    Tensor x_query_any, Tensor x_kv_any, OptionalTensor x_value_any, Tensor w_q_any,
    OptionalTensor w_k_any, OptionalTensor w_v_any, OptionalTensor w_out_any, OptionalTensor b_q,
    OptionalTensor b_k, OptionalTensor b_v, OptionalTensor b_out, OptionalTensor q_positions,
    OptionalTensor q_cos, OptionalTensor q_sin, OptionalTensor k_positions, OptionalTensor k_cos,
    OptionalTensor k_sin, OptionalTensor attn_bias, OptionalTensor keep_mask,
    OptionalTensor key_keep, OptionalTensor kv_lengths, int64_t num_heads, int64_t num_kv_heads,
    int64_t q_rotary_dim, bool q_interleaved, int64_t q_axes, double q_rope_base, bool q_full_width,
    int64_t k_rotary_dim, bool k_interleaved, int64_t k_axes, double k_rope_base, bool k_full_width,
    double scale, bool is_causal, bool tf32) {
  const DeviceGuard guard(x_query_any.get_device_index());
  const Tensor x_query = aligned(x_query_any), x_kv = aligned(x_kv_any);
  const Tensor x_value = x_value_any ? aligned(*x_value_any) : x_kv, w_q = aligned(w_q_any);
  const auto type = x_query.scalar_type();
  const int64_t batch = x_query.size(0), queries = x_query.size(1), keys = x_kv.size(1);
  const int64_t inner = w_q.size(0), head_dim = inner / num_heads;
  STD_TORCH_CHECK(head_dim <= kBlockLargestHeadDim &&
                      padded_head_dim(static_cast<int>(head_dim)) % head_dim == 0 &&
                      head_dim % 8 == 0,
                  "fused_rope_xattn: path 'fused' takes head dims of 8, 16, 32, 64 and 128");
  int32_t head_shift = 0;
  while ((int64_t{1} << head_shift) < head_dim) ++head_shift;
  BlockForwardParams p{};

  // Queries, keys and values
  Tensor q = empty(x_query, {batch, queries, num_heads, head_dim}, type);
  ProjectionParams& q_projection = add_projection(p.inputs, x_query, w_q, b_q, q);
  q_projection.head_shift = head_shift;
  set_rotation(q_projection.rotation, q_positions, q_cos, q_sin, q_rotary_dim, q_interleaved,
               q_axes, q_rope_base, q_full_width);
  const bool is_projected = !w_k_any.has_value();
  const std::vector<int64_t> none = {0}, kv_shape = {batch, keys, num_kv_heads, head_dim};
  Tensor k = empty(x_query, is_projected ? none : kv_shape, type);
  Tensor v = empty(x_query, is_projected ? none : kv_shape, type);
  OptionalTensor w_k, w_v, w_out;
  if (!is_projected) {
    w_k = aligned(*w_k_any);
    w_v = aligned(*w_v_any);
    ProjectionParams& k_projection = add_projection(p.inputs, x_kv, *w_k, b_k, k);
    k_projection.head_shift = head_shift;
    set_rotation(k_projection.rotation, k_positions, k_cos, k_sin, k_rotary_dim, k_interleaved,
                 k_axes, k_rope_base, k_full_width);
    add_projection(p.inputs, x_value, *w_v, b_v, v);
  }

  // Attention
  Tensor o = empty(x_query, {batch, queries, num_heads, head_dim}, type);
  Tensor lse = empty(x_query, {batch, num_heads, queries}, ScalarType::Float);
  p.attention.has_finished_keys = is_projected;
  AttentionForwardParams& attention = p.attention.attention;
  const Tensor& all_keys = is_projected ? x_kv : k;
  attention.sizes = sizes_of(q, all_keys);
  attention.scores = modifiers(attn_bias, keep_mask, key_keep, kv_lengths, OptionalTensor(), scale,
                               is_causal, 0.0);
  attention.dtype = dtype_of(type, tf32);
  attention.q = heads_view(q);
  attention.k = heads_view(all_keys);
  attention.v = heads_view(is_projected ? x_value : v);
  attention.o = heads_view(o);
  attention.lse = static_cast<float*>(lse.data_ptr());

  // Output
  if (w_out_any) w_out = aligned(*w_out_any);
  Tensor y =
      empty(x_query, w_out ? std::vector<int64_t>{batch, queries, w_out->size(0)} : none, type);
  if (w_out) add_projection(p.output, o, *w_out, b_out, y);
  if (batch > 0) run_block_forward(p, current_stream(x_query.get_device_index()));
  return {y, q, k, v, o, lse};
}

}  // namespace
}  // namespace frx

STABLE_TORCH_LIBRARY_IMPL(fused_rope_xattn, CUDA, m) {
  m.impl("block_forward", TORCH_BOX(&frx::block_forward));
}
