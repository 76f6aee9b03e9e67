"""The operator ``block_backward``: every gradient of a small block in a few launches.

Kept apart from ops.py, whose conventions it follows, for its size. Defined at import; its kernels
come from cpu_block_ops.py and from the binary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .composite import compute_dtype
from .config import RotationSpec
from .ops import (
    LIBRARY,
    NAMESPACE,
    ScoreOptions,
    TurningTensors,
    _contiguous,
    _flat,
    _rotation_tensors,
    readable,
)

SCHEMA = """block_backward(
    Tensor dy, Tensor? dlse,
    Tensor? x_query, Tensor? x_kv, Tensor? x_value,
    Tensor? w_q, Tensor? w_k, Tensor? w_v, Tensor? w_out,
    Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
    Tensor? q_positions, Tensor? q_cos, Tensor? q_sin,
    Tensor? k_positions, Tensor? k_cos, Tensor? k_sin,
    Tensor? attn_bias, Tensor? keep_mask, Tensor? key_keep, Tensor? kv_lengths,
    int q_rotary_dim, bool q_interleaved, int q_axes, float q_rope_base, bool q_full_width,
    int k_rotary_dim, bool k_interleaved, int k_axes, float k_rope_base, bool k_full_width,
    float scale, bool is_causal, bool tf32,
    bool need_x_query, bool need_x_kv, bool need_x_value,
    bool need_w_q, bool need_w_k, bool need_w_v, bool need_w_out,
    bool need_b_q, bool need_b_k, bool need_b_v, bool need_b_out)"""
SCHEMA += """ -> (Tensor dx_query, Tensor dx_kv, Tensor dx_value,
    Tensor dw_q, Tensor dw_k, Tensor dw_v, Tensor dw_out,
    Tensor db_q, Tensor db_k, Tensor db_v, Tensor db_out)"""


class BlockNeeds(NamedTuple):
    """Which gradients of a block are wanted of block_backward."""

    x_query: bool
    x_kv: bool
    x_value: bool
    w_q: bool
    w_k: bool
    w_v: bool
    w_out: bool
    b_q: bool
    b_k: bool
    b_v: bool
    b_out: bool


class BlockGradients(NamedTuple):
    """What block_backward gives; None: not wanted."""

    x_query: Tensor | None
    x_kv: Tensor | None
    x_value: Tensor | None
    w_q: Tensor | None
    w_k: Tensor | None
    w_v: Tensor | None
    w_out: Tensor | None
    b_q: Tensor | None
    b_k: Tensor | None
    b_v: Tensor | None
    b_out: Tensor | None


def block_backward(
    dy: Tensor,  # [B, Tq, Dout], [B, Tq, H*D] without w_out
    dlse: Tensor | None,  # [B, H, Tq]
    x_query: Tensor | None,  # [B, Tq, Dq]
    x_kv: Tensor | None,  # [B, Tk, Dkv]; finished keys [B, Tk, Hkv, D] without w_k
    x_value: Tensor | None,  # [B, Tk, Dv]; finished values without w_v; None: x_kv
    w_q: Tensor | None,  # [H*D, Dq]
    w_k: Tensor | None,  # [Hkv*D, Dkv]
    w_v: Tensor | None,  # [Hkv*D, Dv]
    w_out: Tensor | None,  # [Dout, H*D]
    q: Tensor,  # [B, Tq, H, D]
    k: Tensor,  # [B, Tk, Hkv, D]
    v: Tensor,  # [B, Tk, Hkv, D]
    o: Tensor,  # [B, Tq, H, D]
    lse: Tensor,  # [B, H, Tq]
    q_turning: TurningTensors,
    k_turning: TurningTensors,
    options: ScoreOptions,  # without dropout
    *,
    q_rotation: RotationSpec,
    k_rotation: RotationSpec,
    needs: BlockNeeds,
) -> BlockGradients:
    """The wanted gradients of a block without norms.

    An input that no wanted gradient depends on may be None. Where values come from ``x_kv``, its
    gradient is the sum of both. The gradient of ``attn_bias`` is not among them.
    """
    if w_k is None:  # finished keys and values, of which the gradients alone are wanted
        x_kv, x_value = (None if x is None else readable(x) for x in (x_kv, x_value))
    else:
        x_kv, x_value = _contiguous(x_kv, x_value)
    wide = compute_dtype(dy)
    results = torch.ops.fused_rope_xattn.block_backward.default(
        *_contiguous(dy, dlse, x_query),
        *(x_kv, x_value),
        *_contiguous(w_q, w_k, w_v, w_out),
        *(readable(q), readable(k), readable(v), o.contiguous(), lse.contiguous()),
        *_rotation_tensors(*q_turning, wide),
        *_rotation_tensors(*k_turning, wide),
        options.attn_bias,
        options.keep_mask,
        options.key_keep,
        options.kv_lengths,
        *_flat(q_rotation),
        *_flat(k_rotation),
        options.scale,
        options.is_causal,
        options.tf32,
        *needs,
    )
    return BlockGradients(*(g if need else None for g, need in zip(results, needs, strict=True)))


LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake(f"{NAMESPACE}::block_backward", lib=LIBRARY)
def _fake_block_backward(
    dy: Tensor,
    dlse: Tensor | None,
    x_query: Tensor | None,
    x_kv: Tensor | None,
    x_value: Tensor | None,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor | None,
    w_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    *options: object,  # v .. need_b_out
) -> tuple[Tensor, ...]:
    inner, kv_inner = q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]
    needs = options[-len(BlockNeeds._fields) :]
    shapes = [
        None if x is None else x.shape for x in (x_query, x_kv, x_value, w_q, w_k, w_v, w_out)
    ]
    shapes += [torch.Size([n]) for n in (inner, kv_inner, kv_inner, dy.shape[2])]
    return tuple(
        q.new_empty(shape if need and shape is not None else 0)
        for need, shape in zip(needs, shapes, strict=True)
    )
