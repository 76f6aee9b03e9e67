"""The operators of attention over tokens whose values are not projected.

Kept apart from ops.py, whose conventions they follow, for its size. Defined at import; their
kernels come from cpu_token_ops.py and from the binary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .composite import compute_dtype
from .ops import (
    LIBRARY,
    NAMESPACE,
    UNTURNED,
    ScoreOptions,
    Turning,
    _flat,
    _rotation_tensors,
    readable,
)

_OPTIONS = "Tensor? key_keep, Tensor? kv_lengths, float scale, bool is_causal"
_TURNING = (
    "Tensor? k_positions, Tensor? k_cos, Tensor? k_sin,"
    " int k_rotary_dim, bool k_interleaved, int k_axes, float k_rope_base, bool k_full_width"
)

SCHEMAS = (
    f"token_attention(Tensor q, Tensor k, Tensor x, Tensor w_v, Tensor? b_v, {_OPTIONS},"
    " bool keep) -> (Tensor o, Tensor lse, Tensor u, Tensor u_rest)",
    "token_attention_backward(Tensor du, Tensor? dlse, Tensor q, Tensor k, Tensor x,"
    f" Tensor u, Tensor u_rest, Tensor lse, {_OPTIONS}, {_TURNING},"
    " bool need_dq, bool need_dk, bool need_dx)"
    " -> (Tensor dq, Tensor dk, Tensor dx)",
)


class TokenSums(NamedTuple):
    """What a head's output is a projection of, and what the backward reads."""

    u: Tensor  # [H, B, Tq, Dv], the sum of p_t x_t; [0] where it was not to be kept
    rest: Tensor  # what rounding took from it


def token_attention(
    q: Tensor,  # [B, Tq, H, D]
    k: Tensor,  # [B, Tk, Hkv, D]
    x: Tensor,  # [B, Tk, Dv]
    w_v: Tensor,  # [Hkv*D, Dv]
    b_v: Tensor | None,  # [Hkv*D]
    options: ScoreOptions,  # without bias, dropout and keep_mask
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, TokenSums]:  # [B, Tq, H, D], [B, H, Tq] fp32
    """``o, lse`` as of attention to the values ``heads(x @ w_v.T + b_v)``, and ``u``."""
    o, lse, *sums = torch.ops.fused_rope_xattn.token_attention.default(
        readable(q),
        readable(k),
        x.contiguous(),
        w_v.contiguous(),
        None if b_v is None else b_v.contiguous(),
        options.key_keep,
        options.kv_lengths,
        options.scale,
        options.is_causal,
        keep,
    )
    return o, lse, TokenSums(*sums)


def token_attention_backward(
    du: Tensor,  # [H, B, Tq, Dv]
    dlse: Tensor | None,  # [B, H, Tq]
    q: Tensor,
    k: Tensor,
    x: Tensor,
    sums: TokenSums,
    lse: Tensor,
    options: ScoreOptions,
    *,
    need_dq: bool,
    need_dk: bool,
    need_dx: bool,
    k_turning: Turning = UNTURNED,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dx``, where ``dx`` is the share of the values alone; ``[0]`` if not needed.

    ``k_turning``: how k was rotated; dk is the gradient of what it was before. All heads turn by
    the same angles, in interleaved pairs or in halves of the whole head.
    """
    return torch.ops.fused_rope_xattn.token_attention_backward.default(  # type: ignore[no-any-return]
        du.contiguous(),
        None if dlse is None else dlse.contiguous(),
        readable(q),
        readable(k),
        x.contiguous(),
        *sums,
        lse.contiguous(),
        options.key_keep,
        options.kv_lengths,
        options.scale,
        options.is_causal,
        *_rotation_tensors(*k_turning.tensors, compute_dtype(q)),
        *_flat(k_turning.spec),
        need_dq,
        need_dk,
        need_dx,
    )


for _schema in SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake(f"{NAMESPACE}::token_attention", lib=LIBRARY)
def _fake_token_attention(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    *options: object,  # w_v .. keep
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    keep = options[-1]
    shape = (heads, batch, queries, x.shape[2]) if keep else (0,)
    return (
        q.new_empty(q.shape),
        q.new_empty((batch, heads, queries), dtype=compute_dtype(q)),
        q.new_empty(shape),
        q.new_empty(shape),
    )


@torch.library.register_fake(f"{NAMESPACE}::token_attention_backward", lib=LIBRARY)
def _fake_token_attention_backward(
    du: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    *options: object,  # u .. need_dx
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dx = (
        t.new_empty(t.shape if need else 0) for t, need in zip((q, k, x), options[-3:], strict=True)
    )
    return dq, dk, dx
