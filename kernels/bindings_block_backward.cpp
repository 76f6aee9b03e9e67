// The small block's backward: torch tensors in, block_backward_params.h structs out to the kernels.
#include <cuda_runtime.h>

#include <tuple>

#include "device.h"
#include "entry.h"
#include "plan.h"
#include "torch_views.h"

namespace frx {
namespace {

int32_t checked_size(int64_t value) {
  STD_TORCH_CHECK(value <= INT32_MAX, "fused_rope_xattn: too large for the small block's backward");
  return static_cast<int32_t>(value);
}

int32_t checked_width(int64_t value) {
  STD_TORCH_CHECK(value % 8 == 0,
                  "fused_rope_xattn: the small block's backward takes multiples of 8 as widths");
  return checked_size(value);
}

// One projection z = x @ weight^T + bias on its way back from dz; all contiguous.
struct ProjectionBackward {
  const void* dz;      // [batch, tokens, inner]
  const void* x;       // [batch, tokens, x_width] or null
  const void* weight;  // [inner, x_width] or null
  int64_t batch, tokens, inner, x_width;
  const int32_t* kv_lengths;  // [batch] or null
  const bool* key_keep;       // [batch, tokens] or null
};

// Adds dx = dz @ weight, or the sum of two such.
void add_dx(GemmGroup& group, const Tensor& dx, const ProjectionBackward& p,
            const ProjectionBackward* other = nullptr) {
  GemmTask& task = group.tasks[group.count++];
  task.rows = checked_size(p.batch * p.tokens);
  task.columns = checked_width(p.x_width);
  task.depth = checked_width(p.inner);
  task.out = dx.data_ptr();
  for (const ProjectionBackward* term : {&p, other}) {
    if (term == nullptr) continue;
    task.terms[task.num_terms++] = {term->dz, term->weight};
  }
}

// Adds dweight = dz^T @ x and dbias = sum of dz, or one of them.
void add_dweight(GemmGroup& group, const Tensor& dweight, const Tensor& dbias, bool need_weight,
                 bool need_bias, const ProjectionBackward& p) {
  if (!need_weight && !need_bias) return;
  GemmTask& task = group.tasks[group.count++];
  task.terms[0] = {p.dz, p.x};
  task.num_terms = 1;
  task.depth = checked_size(p.batch * p.tokens);
  task.left_transposed = true;
  task.rows = checked_width(p.inner);
  task.columns = need_weight ? checked_width(p.x_width) : 0;
  task.out = need_weight ? dweight.data_ptr() : nullptr;
  task.left_sums = need_bias ? dbias.data_ptr() : nullptr;
  task.tokens = make_divisor(checked_size(p.tokens));
  task.kv_lengths = p.kv_lengths;
  task.key_keep = p.key_keep;
}

OptionalTensor aligned_if_any(const OptionalTensor& t) {
  return t.has_value() ? OptionalTensor(aligned(*t)) : t;
}

using BlockGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                  Tensor, Tensor, Tensor>;

BlockGradients block_backward(
    Tensor dy_any, OptionalTensor dlse, OptionalTensor x_query_any, OptionalTensor x_kv_any,
    OptionalTensor x_value_any, OptionalTensor w_q_any, OptionalTensor w_k_any,
    OptionalTensor w_v_any, OptionalTensor w_out_any, Tensor q_any, Tensor k_any, Tensor v_any,
    Tensor o_any, Tensor lse, OptionalTensor q_positions, OptionalTensor q_cos,
    OptionalTensor q_sin, OptionalTensor k_positions, OptionalTensor k_cos, OptionalTensor k_sin,
    OptionalTensor attn_bias, OptionalTensor keep_mask, OptionalTensor key_keep,
    OptionalTensor kv_lengths, int64_t q_rotary_dim, bool q_interleaved, int64_t q_axes,
    double q_rope_base, bool q_full_width, int64_t k_rotary_dim, bool k_interleaved, int64_t k_axes,
    double k_rope_base, bool k_full_width, double scale, bool is_causal, bool tf32,
    bool need_x_query, bool need_x_kv, bool need_x_value, bool need_w_q, bool need_w_k,
    bool need_w_v, bool need_w_out, bool need_b_q, bool need_b_k, bool need_b_v, bool need_b_out) {
  const DeviceGuard guard(dy_any.get_device_index());
  const Tensor dy = aligned(dy_any), o = aligned(o_any);
  const Tensor q = aligned(q_any), k = aligned(k_any), v = aligned(v_any);
  const OptionalTensor x_query = aligned_if_any(x_query_any), x_kv = aligned_if_any(x_kv_any);
  const OptionalTensor x_value = aligned_if_any(x_value_any), w_q = aligned_if_any(w_q_any);
  const OptionalTensor w_k = aligned_if_any(w_k_any), w_v = aligned_if_any(w_v_any),
                       w_out = aligned_if_any(w_out_any);
  const auto type = q.scalar_type();
  BlockBackwardParams p{};
  AttentionBackwardParams& a = p.attention.attention;
  a.sizes = sizes_of(q, k);
  const auto& [batch, queries, keys, heads, kv_heads, head_dim] = a.sizes;
  STD_TORCH_CHECK(head_dim <= kBlockBackwardLargestHeadDim,
                  "fused_rope_xattn: the small block's backward takes head dims up to 128");
  const std::vector<int64_t> none = {0}, q_shape = {batch, queries, heads, head_dim};
  const std::vector<int64_t> kv_shape = {batch, keys, kv_heads, head_dim};
  auto wanted = [&](bool need, const std::vector<int64_t>& shape) {
    return empty(q, need ? shape : none, type);
  };
  auto wanted_like = [&](bool need, const OptionalTensor& t) {
    if (!need) return empty(q, none, type);
    const auto shape = t->sizes();
    return empty(q, {shape.begin(), shape.end()}, type);
  };

  // Attention. Without projections of k and v, what it gives for x_kv and x_value is the result.
  const bool need_q = need_x_query || need_w_q || need_b_q;
  const bool need_k = need_x_kv || need_w_k || need_b_k;
  const bool need_v = need_x_value || need_w_v || need_b_v || (need_x_kv && !x_value);
  const bool is_projected = !w_k.has_value();
  Tensor dz_q = wanted(need_q, q_shape), dz_k = wanted(need_k || need_v, kv_shape);
  Tensor dz_v = wanted(need_k || need_v, kv_shape);
  Tensor row_terms = empty(q, {batch, heads, queries, 4}, ScalarType::Float);
  Tensor dout = wanted(w_out.has_value(), q_shape);
  a.scores = modifiers(attn_bias, keep_mask, key_keep, kv_lengths, OptionalTensor(), scale,
                       is_causal, 0.0);
  a.dtype = dtype_of(type, tf32);
  a.q = heads_view(q);
  a.k = heads_view(k);
  a.v = heads_view(v);
  const int64_t inner = int64_t{heads} * head_dim, kv_inner = int64_t{kv_heads} * head_dim;
  a.dout = {w_out ? dout.data_ptr() : dy.data_ptr(), queries * inner, inner, head_dim};
  a.lse = static_cast<const float*>(lse.data_ptr());
  a.dlse = data_as<float>(dlse);
  p.attention.row_terms = static_cast<RowTerms*>(row_terms.data_ptr());
  if (need_q) a.dq = heads_view(dz_q);
  if (need_k || need_v) {
    a.dk = heads_view(dz_k);
    a.dv = heads_view(dz_v);
  }
  set_rotation(p.attention.q_rotation, q_positions, q_cos, q_sin, q_rotary_dim, q_interleaved,
               q_axes, q_rope_base, q_full_width);
  set_rotation(p.attention.k_rotation, k_positions, k_cos, k_sin, k_rotary_dim, k_interleaved,
               k_axes, k_rope_base, k_full_width);
  if (is_projected) p.attention.k_rotation.rotary_dim = 0;  // keys came rotated
  p.attention.dy = dy.data_ptr();
  p.attention.w_out = data_of(w_out);
  p.attention.out_width = checked_width(dy.size(2));

  // Products, the longest first
  const OptionalTensor& values = x_value ? x_value : x_kv;
  auto width = [](const OptionalTensor& x) { return x ? x->size(2) : 0; };
  const int32_t* lengths = data_as<int32_t>(kv_lengths);
  const bool* keep = data_as<bool>(key_keep);
  const ProjectionBackward on_q{dz_q.data_ptr(), data_of(x_query), data_of(w_q), batch, queries,
                                inner,           width(x_query)};
  const ProjectionBackward on_k{dz_k.data_ptr(), data_of(x_kv), data_of(w_k), batch, keys,
                                kv_inner,        width(x_kv),   lengths,      keep};
  const ProjectionBackward on_v{dz_v.data_ptr(), data_of(values), data_of(w_v), batch, keys,
                                kv_inner,        width(values),   lengths,      keep};
  const ProjectionBackward on_out{dy.data_ptr(), o.data_ptr(), nullptr, batch,
                                  queries,       dy.size(2),   inner};
  const bool need_kv = !is_projected;
  Tensor dx_kv = wanted_like(need_kv && need_x_kv, x_kv);
  Tensor dx_value = wanted_like(need_kv && need_x_value, x_value);
  Tensor dw_k = wanted_like(need_w_k, w_k), dw_v = wanted_like(need_w_v, w_v);
  Tensor db_k = wanted(need_b_k, {kv_inner});
  Tensor db_v = wanted(need_b_v, {kv_inner});
  Tensor dx_query = wanted_like(need_x_query, x_query), dw_q = wanted_like(need_w_q, w_q);
  Tensor db_q = wanted(need_b_q, {inner});
  Tensor dw_out = wanted_like(need_w_out, w_out), db_out = wanted(need_b_out, {dy.size(2)});
  if (need_kv) {
    if (need_x_kv) add_dx(p.late, dx_kv, on_k, x_value ? nullptr : &on_v);
    if (need_x_value) add_dx(p.late, dx_value, on_v);
    add_dweight(p.late, dw_k, db_k, need_w_k, need_b_k, on_k);
    add_dweight(p.late, dw_v, db_v, need_w_v, need_b_v, on_v);
  }
  if (need_x_query) add_dx(p.early, dx_query, on_q);
  add_dweight(p.early, dw_q, db_q, need_w_q, need_b_q, on_q);
  add_dweight(p.early, dw_out, db_out, need_w_out, need_b_out, on_out);

  run_block_backward(p, current_stream(q.get_device_index()));
  if (is_projected && need_x_kv) dx_kv = dz_k;
  if (is_projected && need_x_value) dx_value = dz_v;
  return {dx_query, dx_kv, dx_value, dw_q, dw_k, dw_v, dw_out, db_q, db_k, db_v, db_out};
}

}  // namespace
}  // namespace frx

STABLE_TORCH_LIBRARY_IMPL(fused_rope_xattn, CUDA, m) {
  m.impl("block_backward", TORCH_BOX(&frx::block_backward));
}
