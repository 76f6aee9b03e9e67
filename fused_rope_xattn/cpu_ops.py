"""The operators' CPU kernels in plain PyTorch.

They make the split path run, and testable, without a GPU. Rotation, norm, masks and dropout are the
composite's own; what is written out here are the adjoints, as the CUDA kernels compute them, since
autograd records nothing below the dispatcher. Everything runs in fp32, in fp64 for fp64 arguments.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import composite, dropout, ops, rope
from .config import NORM_LAYER, NORM_NONE, BlockConfig, NormSpec, RotationSpec
from .norm import apply_norm
from .rope import Rotation


def register() -> None:
    """Hand these kernels to the dispatcher; once a process."""
    kernels = norm_rope, norm_rope_backward, attention_forward, attention_backward, block_forward
    for kernel in (*kernels, attention_forward_with_rest, project_group, gradient_products):
        ops.LIBRARY.impl(kernel.__name__, kernel, "CPU")


@torch.no_grad()
def norm_rope(
    x: Tensor,  # [B, T, H*D]
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    norm_kind: int,
    norm_inner: bool,
    norm_eps: float,
    rotary_dim: int,
    interleaved: bool,
    axes: int,
    rope_base: float,
    full_width: bool,
    dtype: torch.dtype,
) -> Tensor:
    spec = RotationSpec(rotary_dim, interleaved, axes, full_width, rope_base)
    norm = (NormSpec(norm_kind, norm_inner, norm_eps), norm_weight, norm_bias)
    wide, rotation = _biased(x, bias), Rotation(spec, positions, cos, sin)
    y = composite.project_heads(wide, None, None, num_heads, norm, rotation)
    return _fresh(y, dtype)


@torch.no_grad()
def norm_rope_backward(
    grad: Tensor,  # [B, T, H, D]
    x: Tensor | None,  # [B, T, H*D]
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    norm_kind: int,
    norm_inner: bool,
    norm_eps: float,
    rotary_dim: int,
    interleaved: bool,
    axes: int,
    rope_base: float,
    full_width: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = RotationSpec(rotary_dim, interleaved, axes, full_width, rope_base)
    norm = NormSpec(norm_kind, norm_inner, norm_eps)
    dy = _rotate_back(grad.to(composite.compute_dtype(grad)), Rotation(spec, positions, cos, sin))
    if norm_kind == NORM_NONE or x is None:
        none = dy.new_empty((0, grad.shape[-2] * grad.shape[-1] if norm_inner else grad.shape[-1]))
        return _fresh(dy.flatten(2), grad.dtype), none, none.clone()
    heads = composite.split_heads(_biased(x, bias).to(dy.dtype), num_heads)
    dx, dweight, dbias = _norm_backward(dy, heads, norm, norm_weight)
    tokens = grad.shape[0] * grad.shape[1]
    return (
        _fresh(dx.flatten(2), grad.dtype),
        _as_parts(dweight, norm_weight, tokens),
        _as_parts(dbias, norm_bias, tokens),
    )


@torch.no_grad()
def attention_forward(
    q: Tensor,  # [B, Tq, H, D]
    k: Tensor,  # [B, Tk, Hkv, D]
    v: Tensor,  # [B, Tk, Hkv, D]
    attn_bias: Tensor | None,
    keep_mask: Tensor | None,
    key_keep: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    tf32: bool,
    v_transposed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    config = _config(q, k, scale, is_causal, dropout_p)
    visible = composite.visible_pairs(config, q, k, attn_bias, kv_lengths, keep_mask, key_keep)
    heads = _attention_inputs(q, k, v, key_keep, kv_lengths)
    o, lse = composite.attention(config, *heads, attn_bias, visible, seed)
    assert lse is not None
    return _fresh(o.transpose(1, 2), q.dtype), lse.contiguous()


def attention_forward_with_rest(
    q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wide = composite.compute_dtype(q)
    exact, lse = attention_forward(q.to(wide), k.to(wide), v.to(wide), *options)
    o = exact.to(q.dtype)
    return o, lse, (exact - o).to(q.dtype)


@torch.no_grad()
def attention_backward(
    dout: Tensor,  # [B, Tq, H, D]
    dlse: Tensor | None,  # [B, H, Tq]
    q: Tensor,  # [B, Tq, H, D]
    k: Tensor,  # [B, Tk, Hkv, D]
    v: Tensor,  # [B, Tk, Hkv, D]
    o: Tensor,  # [B, Tq, H, D]
    lse: Tensor,  # [B, H, Tq]
    attn_bias: Tensor | None,
    keep_mask: Tensor | None,
    key_keep: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    tf32: bool,
    need_dq: bool,
    need_dkv: bool,
    need_dbias: bool,
    deterministic: bool,
    o_rest: Tensor | None = None,  # [B, Tq, H, D]
    q_positions: Tensor | None = None,
    q_cos: Tensor | None = None,
    q_sin: Tensor | None = None,
    k_positions: Tensor | None = None,
    k_cos: Tensor | None = None,
    k_sin: Tensor | None = None,
    q_rotary_dim: int = 0,
    q_interleaved: bool = True,
    q_axes: int = 1,
    q_rope_base: float = 1.0,
    q_full_width: bool = False,
    k_rotary_dim: int = 0,
    k_interleaved: bool = True,
    k_axes: int = 1,
    k_rope_base: float = 1.0,
    k_full_width: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_spec = RotationSpec(q_rotary_dim, q_interleaved, q_axes, q_full_width, q_rope_base)
    k_spec = RotationSpec(k_rotary_dim, k_interleaved, k_axes, k_full_width, k_rope_base)
    q_rotation = Rotation(q_spec, q_positions, q_cos, q_sin)
    k_rotation = Rotation(k_spec, k_positions, k_cos, k_sin)
    q_, k_, v_ = _attention_inputs(q, k, v, key_keep, kv_lengths)
    group = q.shape[2] // k.shape[2]  # query heads that share a key head
    k_, v_ = k_.repeat_interleave(group, dim=1), v_.repeat_interleave(group, dim=1)
    do_, o_ = (x.transpose(1, 2).to(q_.dtype) for x in (dout, o))
    if o_rest is not None:
        o_ = o_ + o_rest.transpose(1, 2).to(q_.dtype)

    # Weights again, from the scores and the log-sum-exp
    scores = q_ @ k_.transpose(-1, -2) * scale  # [B, H, Tq, Tk]
    if attn_bias is not None:
        scores = scores + attn_bias.to(scores.dtype)
    config = _config(q, k, scale, is_causal, dropout_p)
    visible = composite.visible_pairs(config, q, k, attn_bias, kv_lengths, keep_mask, key_keep)
    blind = (lse == -math.inf)[..., None]
    hidden = blind if visible is None else blind | ~visible
    p = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)

    # Gradients of the weights, then of the scores
    dp = do_ @ v_.transpose(-1, -2)
    dropped = p
    if seed is not None and dropout_p > 0:
        dropped, dp = (dropout.apply_dropout(x, seed, dropout_p) for x in (p, dp))
    delta = (do_ * o_).sum(-1) - (0.0 if dlse is None else dlse)
    ds = (p * (dp - delta[..., None])).masked_fill(hidden, 0.0)

    dq, dk, dv, dbias = (q.new_empty(0) for _ in range(4))
    if need_dq:
        dq = _fresh(_rotate_back((scale * ds @ k_).transpose(1, 2), q_rotation), q.dtype)
    if need_dkv:
        dk = _rotate_back(_sum_groups(scale * ds.transpose(-1, -2) @ q_, group), k_rotation)
        dk = _fresh(dk, k.dtype)
        dv = _fresh(_sum_groups(dropped.transpose(-1, -2) @ do_, group), v.dtype)
    if need_dbias and attn_bias is not None:
        dbias = _fresh(ds.sum_to_size(attn_bias.shape), attn_bias.dtype)
    return dq, dk, dv, dbias


@torch.no_grad()
def block_forward(
    x_query: Tensor,  # [B, Tq, Dq]
    x_kv: Tensor,  # [B, Tk, Dkv]; [B, Tk, Hkv, D] without w_k
    x_value: Tensor | None,
    w_q: Tensor,
    w_k: Tensor | None,
    w_v: Tensor | None,
    w_out: Tensor | None,
    b_q: Tensor | None,
    b_k: Tensor | None,
    b_v: Tensor | None,
    b_out: Tensor | None,
    q_positions: Tensor | None,
    q_cos: Tensor | None,
    q_sin: Tensor | None,
    k_positions: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    attn_bias: Tensor | None,
    keep_mask: Tensor | None,
    key_keep: Tensor | None,
    kv_lengths: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    *options: float,  # q_rotary_dim .. q_full_width, k_rotary_dim .. k_full_width, scale .. tf32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q_rotation, k_rotation = options[:5], options[5:10]
    scale, is_causal, tf32 = options[10:]
    q = _projected(x_query, w_q, b_q, (q_positions, q_cos, q_sin), num_heads, q_rotation)
    k, v = x_kv, x_kv if x_value is None else x_value
    if w_k is not None and w_v is not None:
        turning = (k_positions, k_cos, k_sin)
        k = _projected(k, w_k, b_k, turning, num_kv_heads, k_rotation)
        v = _projected(v, w_v, b_v, (None, None, None), num_kv_heads, _UNTURNED)
    scores = (attn_bias, keep_mask, key_keep, kv_lengths, None)
    o, lse = attention_forward(q, k, v, *scores, scale, bool(is_causal), 0.0, bool(tf32))
    y = q.new_empty(0)
    if w_out is not None:
        y = _projected(o.flatten(2), w_out, b_out, (None, None, None), 1, _UNTURNED).flatten(2)
    if w_k is None:
        k, v = q.new_empty(0), q.new_empty(0)
    return y, q, k, v, o, lse


@torch.no_grad()
def project_group(
    x_q: Tensor | None,  # [B, T, C], as the other two
    x_k: Tensor | None,
    x_v: Tensor | None,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor | None,
    b_q: Tensor | None,
    b_k: Tensor | None,
    b_v: Tensor | None,
    q_positions: Tensor | None,
    q_cos: Tensor | None,
    q_sin: Tensor | None,
    k_positions: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    *options: Any,  # q_rotary_dim .. q_full_width, k_rotary_dim .. k_full_width, tile ..
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given_last: tuple[Any, ...] = options[11:]  # without defaults, which the dispatcher leaves out
    defaults: tuple[Any, ...] = False, None, None
    transposes_v, key_keep, kv_lengths = *given_last, *defaults[len(given_last) :]
    given = [x for x in (x_q, x_k, x_v) if x is not None]
    q, k, v, v_transposed = (given[0].new_empty(0) for _ in range(4))
    if x_q is not None and w_q is not None:
        q = _projected(x_q, w_q, b_q, (q_positions, q_cos, q_sin), num_heads, options[:5])
    if x_k is not None and w_k is not None:
        k = _projected(x_k, w_k, b_k, (k_positions, k_cos, k_sin), num_kv_heads, options[5:10])
    if x_v is not None and w_v is not None:
        v = _projected(x_v, w_v, b_v, (None, None, None), num_kv_heads, _UNTURNED)
        if transposes_v:
            v_transposed = _transposed(v, key_keep, kv_lengths)
    return q, k, v, v_transposed


@torch.no_grad()
def gradient_products(
    left: list[Tensor],  # [N, I]
    right: list[Tensor],  # [I, C], or [N, C] over tokens
    num_terms: list[int],
    over_tokens: list[bool],
) -> list[Tensor]:
    terms = zip(left, right, strict=True)
    results = []
    for count, is_over_tokens in zip(num_terms, over_tokens, strict=True):
        total = None
        for x, y in itertools.islice(terms, count):
            wide = composite.compute_dtype(x)
            term = (x.t() if is_over_tokens else x).to(wide) @ y.to(wide)
            total = term if total is None else total + term
        assert total is not None
        results.append(_fresh(total, left[0].dtype))
    return results


# ------------------------------------------------------------------------------------- their parts


def _fresh(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy: results of operators never alias their arguments."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.to(composite.compute_dtype(x))
    return wide if bias is None else wide + bias.to(wide.dtype)


_UNTURNED: tuple[float, ...] = (0, True, 1, 1.0, False)  # rotary_dim .. full_width


def _projected(
    x: Tensor,  # [B, T, C]
    weight: Tensor,  # [H*D, C]
    bias: Tensor | None,
    turning: tuple[Tensor | None, Tensor | None, Tensor | None],
    num_heads: int,
    rotation: tuple[float, ...],  # rotary_dim .. full_width
) -> Tensor:  # [B, T, H, D]
    wide = composite.compute_dtype(x)
    z = x.to(wide) @ weight.to(wide).t()
    rotary_dim, interleaved, axes, base, full_width = rotation
    return norm_rope(
        *(z, bias, None, None),
        *turning,
        num_heads,
        norm_kind=NORM_NONE,
        norm_inner=False,
        norm_eps=0.0,
        rotary_dim=int(rotary_dim),
        interleaved=bool(interleaved),
        axes=int(axes),
        rope_base=base,
        full_width=bool(full_width),
        dtype=x.dtype,
    )


def _rotate_back(grad: Tensor, rotation: Rotation) -> Tensor:  # [B, T, H, D]
    """Adjoint of the rotation ``c * x + s * J(x)``, which is ``c * g - J(s * g)``."""
    spec, positions, cos, sin = rotation
    if spec.rotary_dim == 0:
        return grad
    if cos is None or sin is None:
        cos, sin = rope.cos_sin(spec, positions, grad.shape[1], grad.device, grad.dtype)
    cos, sin = cos.to(grad.dtype), sin.to(grad.dtype)
    g = grad.transpose(1, 2)
    if not spec.full_width:  # c and s are equal in a pair, so they commute with J
        return rope.rotate(g, cos, -sin, spec).transpose(1, 2)
    turning, passing = g[..., : spec.rotary_dim], g[..., spec.rotary_dim :]
    swapped = rope.rotate(sin * turning, torch.zeros_like(cos), torch.ones_like(sin), spec)
    return torch.cat([cos * turning - swapped, passing], dim=-1).transpose(1, 2)


def _norm_backward(
    dy: Tensor,  # [B, T, H, D]
    x: Tensor,  # [B, T, H, D]
    norm: NormSpec,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, T, H, D], [W], [W]
    """With ``y = w * n + b`` and ``n = x / rms(x)``: ``dx = (g - n * mean(g * n)) / rms(x)``.

    Here ``g = w * dy``. LayerNorm subtracts means from ``x`` before and from ``g`` after.
    """
    shape = x.shape
    normed = apply_norm(x, norm, None, None)
    if norm.inner:
        dy, x, normed = dy.flatten(2), x.flatten(2), normed.flatten(2)
    if norm.kind == NORM_LAYER:
        x = x - x.mean(-1, keepdim=True)
    g = dy if weight is None else dy * weight.to(dy.dtype)
    dx = g - normed * (g * normed).mean(-1, keepdim=True)
    if norm.kind == NORM_LAYER:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    width = dy.shape[-1]
    dweight = (dy * normed).reshape(-1, width).sum(0)
    return dx.view(shape), dweight, dy.reshape(-1, width).sum(0)


def _as_parts(total: Tensor, param: Tensor | None, tokens: int) -> Tensor:
    """Partial sums [G, W] that add up to ``total`` [W]: all of it in the first."""
    parts = total.new_zeros((0 if param is None else ops.norm_partials(tokens), total.shape[0]))
    parts[:1] = total
    return parts


def _attention_inputs(
    q: Tensor, k: Tensor, v: Tensor, key_keep: Tensor | None, kv_lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, heads, T, D] in the dtype of the softmax; keys that do not exist, NaN or not, are 0."""
    config = _config(q, k, scale=1.0, is_causal=False, dropout_p=0.0)
    exists = composite.visible_pairs(config, q, k, None, kv_lengths, None, key_keep)
    if exists is not None:
        k, v = (composite.keep_rows(x, exists[:, 0, 0]) for x in (k, v))
    wide = composite.compute_dtype(q)
    return q.transpose(1, 2).to(wide), k.transpose(1, 2).to(wide), v.transpose(1, 2).to(wide)


def _transposed(v: Tensor, key_keep: Tensor | None, kv_lengths: Tensor | None) -> Tensor:
    """Values as :func:`.ops.project_group` transposes them, [B, H, D, T padded to 8]."""
    heads = _attention_inputs(v, v, v, key_keep, kv_lengths)[2].transpose(2, 3)
    tokens = ops.padded_tokens(v.shape[1])
    eights = F.pad(heads, (0, tokens - v.shape[1])).unflatten(3, (tokens // 8, 8))
    transposed: Tensor = eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(3)
    return transposed


def _config(q: Tensor, k: Tensor, scale: float, is_causal: bool, dropout_p: float) -> BlockConfig:
    none = RotationSpec(), RotationSpec(), NormSpec(), NormSpec()
    return BlockConfig(q.shape[2], k.shape[2], *none, scale, is_causal, dropout_p)


def _sum_groups(x: Tensor, group: int) -> Tensor:
    """[B, H, T, D] to [B, T, Hkv, D]."""
    grouped: Tensor = x.unflatten(1, (-1, group))
    return grouped.sum(2).transpose(1, 2)
