"""The operators' schemas, as the dispatcher takes them; ops.py defines and documents them."""

from __future__ import annotations

_NORM_ROPE_OPTIONS = """
    Tensor? bias, Tensor? norm_weight, Tensor? norm_bias,
    Tensor? positions, Tensor? cos, Tensor? sin,
    int num_heads, int norm_kind, bool norm_inner, float norm_eps,
    int rotary_dim, bool interleaved, int axes, float rope_base, bool full_width"""

_ATTENTION_OPTIONS = """
    Tensor? attn_bias, Tensor? keep_mask, Tensor? key_keep, Tensor? kv_lengths, Tensor? seed,
    float scale, bool is_causal, float dropout_p, bool tf32"""

_ATTENTION_FORWARD = f"""
    Tensor q, Tensor k, Tensor v, {_ATTENTION_OPTIONS},
    Tensor? v_transposed=None) -> (Tensor, Tensor)"""

_BLOCK_ARGUMENTS = """
    Tensor x_query, Tensor x_kv, Tensor? x_value,
    Tensor w_q, Tensor? w_k, Tensor? w_v, Tensor? w_out,
    Tensor? b_q, Tensor? b_k, Tensor? b_v, Tensor? b_out,
    Tensor? q_positions, Tensor? q_cos, Tensor? q_sin,
    Tensor? k_positions, Tensor? k_cos, Tensor? k_sin,
    Tensor? attn_bias, Tensor? keep_mask, Tensor? key_keep, Tensor? kv_lengths,
    int num_heads, int num_kv_heads,
    int q_rotary_dim, bool q_interleaved, int q_axes, float q_rope_base, bool q_full_width,
    int k_rotary_dim, bool k_interleaved, int k_axes, float k_rope_base, bool k_full_width,
    float scale, bool is_causal, bool tf32"""

_ATTENTION_BACKWARD = f"""
    Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
    {_ATTENTION_OPTIONS}, bool need_dq, bool need_dkv, bool need_dbias,
    bool deterministic, Tensor? o_rest=None,
    Tensor? q_positions=None, Tensor? q_cos=None, Tensor? q_sin=None,
    Tensor? k_positions=None, Tensor? k_cos=None, Tensor? k_sin=None,
    int q_rotary_dim=0, bool q_interleaved=True, int q_axes=1, float q_rope_base=1.0,
    bool q_full_width=False,
    int k_rotary_dim=0, bool k_interleaved=True, int k_axes=1, float k_rope_base=1.0,
    bool k_full_width=False) -> (Tensor, Tensor, Tensor, Tensor)"""

_GROUP_ARGUMENTS = """
    Tensor? x_q, Tensor? x_k, Tensor? x_v, Tensor? w_q, Tensor? w_k, Tensor? w_v,
    Tensor? b_q, Tensor? b_k, Tensor? b_v,
    Tensor? q_positions, Tensor? q_cos, Tensor? q_sin,
    Tensor? k_positions, Tensor? k_cos, Tensor? k_sin,
    int num_heads, int num_kv_heads,
    int q_rotary_dim, bool q_interleaved, int q_axes, float q_rope_base, bool q_full_width,
    int k_rotary_dim, bool k_interleaved, int k_axes, float k_rope_base, bool k_full_width,
    int tile, bool transposes_v=False, Tensor? key_keep=None, Tensor? kv_lengths=None"""

SCHEMAS = (
    f"norm_rope(Tensor x, {_NORM_ROPE_OPTIONS}, ScalarType dtype) -> Tensor",
    f"norm_rope_backward(Tensor grad, Tensor? x, {_NORM_ROPE_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    f"attention_forward({_ATTENTION_FORWARD}",
    f"attention_forward_with_rest(Tensor q, Tensor k, Tensor v, {_ATTENTION_OPTIONS})"
    " -> (Tensor o, Tensor lse, Tensor o_rest)",
    # The binary's kernels for GPUs older than Hopper, on any GPU: for tests.
    f"attention_forward_portable({_ATTENTION_FORWARD}",
    f"attention_backward({_ATTENTION_BACKWARD}",
    f"attention_backward_portable({_ATTENTION_BACKWARD}",  # for tests, too
    f"block_forward({_BLOCK_ARGUMENTS})"
    " -> (Tensor y, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse)",
    f"project_group({_GROUP_ARGUMENTS}) -> (Tensor q, Tensor k, Tensor v, Tensor v_transposed)",
    "gradient_products"
    "(Tensor[] left, Tensor[] right, int[] num_terms, bool[] over_tokens) -> Tensor[]",
    "build_info() -> str",  # defined by the binary alone: JSON of what it was built from and for
)
