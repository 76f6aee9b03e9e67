"""The CPU kernels of attention over tokens, in plain PyTorch: see cpu_ops.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import composite, cpu_ops, ops
from .config import RotationSpec
from .rope import Rotation


def register() -> None:
    """Hand these kernels to the dispatcher; once a process."""
    for kernel in (token_attention, token_attention_backward):
        ops.LIBRARY.impl(kernel.__name__, kernel, "CPU")


@torch.no_grad()
def token_attention(
    q: Tensor,  # [B, Tq, H, D]
    k: Tensor,  # [B, Tk, Hkv, D]
    x: Tensor,  # [B, Tk, Dv]
    w_v: Tensor,  # [Hkv*D, Dv]
    b_v: Tensor | None,
    key_keep: Tensor | None,
    kv_lengths: Tensor | None,
    scale: float,
    is_causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, x_, _ = _scores(q, k, x, key_keep, kv_lengths, scale, is_causal)
    lse = scores.logsumexp(-1)
    u = _weights(scores, lse) @ x_  # [B, H, Tq, Dv]
    o = torch.einsum("bhqc,hdc->bqhd", u, _heads_of(w_v, q, k).to(u.dtype))
    if b_v is not None:
        sees_any = (lse > -math.inf).transpose(1, 2)[..., None]
        o = o + _heads_of(b_v, q, k).to(u.dtype) * sees_any
    kept = u.transpose(0, 1) if keep else u.new_empty(0)
    rounded = cpu_ops._fresh(kept, q.dtype)
    rest = cpu_ops._fresh(kept - rounded.to(u.dtype), q.dtype)
    return cpu_ops._fresh(o, q.dtype), lse.contiguous(), rounded, rest


@torch.no_grad()
def token_attention_backward(
    du: Tensor,  # [H, B, Tq, Dv]
    dlse: Tensor | None,  # [B, H, Tq]
    q: Tensor,
    k: Tensor,
    x: Tensor,
    u: Tensor,  # [H, B, Tq, Dv]
    u_rest: Tensor,
    lse: Tensor,
    key_keep: Tensor | None,
    kv_lengths: Tensor | None,
    scale: float,
    is_causal: bool,
    k_positions: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    k_rotary_dim: int,
    k_interleaved: bool,
    k_axes: int,
    k_rope_base: float,
    k_full_width: bool,
    need_dq: bool,
    need_dk: bool,
    need_dx: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, x_, k_ = _scores(q, k, x, key_keep, kv_lengths, scale, is_causal)
    p = _weights(scores, lse)
    du_, u_, rest = (t.to(p.dtype).transpose(0, 1) for t in (du, u, u_rest))
    delta = (du_ * (u_ + rest)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    ds = p * (du_ @ x_.transpose(-1, -2) - delta[..., None])
    ds = ds.masked_fill(scores == -math.inf, 0.0) * scale
    dq, dk, dx = q.new_empty(0), k.new_empty(0), x.new_empty(0)
    if need_dq:
        dq = cpu_ops._fresh((ds @ k_).transpose(1, 2), q.dtype)
    if need_dk:
        q_ = q.transpose(1, 2).to(p.dtype)
        group = q.shape[2] // k.shape[2]
        spec = RotationSpec(k_rotary_dim, k_interleaved, k_axes, k_full_width, k_rope_base)
        turned = cpu_ops._sum_groups(ds.transpose(-1, -2) @ q_, group)
        rotation = Rotation(spec, k_positions, k_cos, k_sin)
        dk = cpu_ops._fresh(cpu_ops._rotate_back(turned, rotation), k.dtype)
    if need_dx:
        dx = cpu_ops._fresh((p.transpose(-1, -2) @ du_).sum(1), x.dtype)
    return dq, dk, dx


def _scores(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    key_keep: Tensor | None,
    kv_lengths: Tensor | None,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, H, Tq, Tk], [B, 1, Tk, Dv], [B, H, Tk, D]
    """-inf where a query does not see a key; tokens and keys wide, those that do not exist 0."""
    config = cpu_ops._config(q, k, scale, is_causal, dropout_p=0.0)
    visible = composite.visible_pairs(config, q, k, None, kv_lengths, None, key_keep)
    q_, k_, x_ = cpu_ops._attention_inputs(q, k, x[:, :, None], key_keep, kv_lengths)
    k_ = k_.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = q_ @ k_.transpose(-1, -2) * scale
    return scores if visible is None else scores.masked_fill(~visible, -math.inf), x_, k_


def _weights(scores: Tensor, lse: Tensor) -> Tensor:  # [B, H, Tq, Tk]
    """A query that sees nothing gives no key any weight."""
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    return (scores - shift[..., None]).exp()


def _heads_of(param: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A projection's weight or bias ``[Hkv*D, ..]`` as ``[H, D, ..]``, one a query head."""
    heads: Tensor = param.unflatten(0, (k.shape[2], -1))
    return heads.repeat_interleave(q.shape[2] // k.shape[2], dim=0)
