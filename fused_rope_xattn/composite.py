"""The block in plain PyTorch: its definition, and its fallback.

Runs on any device and for every option. Matrix products run in the inputs' dtype, as in any eager
model, but those whose result is normed or rotated keep it in fp32: norm, rotation and softmax run
in fp32 (all in fp64 for fp64 inputs), and q and k are rounded once, behind them. Every step
supports double backward, forward-mode AD, ``torch.func``, ``torch.compile`` and ``torch.export``:
no branch depends on data.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dropout, rope
from .config import NORM_NONE, BlockConfig, NormSpec
from .norm import apply_norm
from .products import compute_dtype as compute_dtype
from .products import wide_linear
from .rope import Rotation


def cross_attention(
    config: BlockConfig,
    x_query: Tensor,  # [B, Tq, Dq]; finished queries [B, Tq, H, D] without w_q
    x_kv: Tensor,  # [B, Tk, Dkv]; finished keys [B, Tk, Hkv, D] without w_k
    x_value: Tensor | None,  # [B, Tk, Dv]; finished values [B, Tk, Hkv, D] without w_v
    w_q: Tensor | None,  # [H*D, Dq]
    w_k: Tensor | None,  # [Hkv*D, Dkv]
    w_v: Tensor | None,  # [Hkv*D, Dv]
    w_out: Tensor | None,  # [Dout, H*D]
    b_q: Tensor | None,
    b_k: Tensor | None,
    b_v: Tensor | None,
    b_out: Tensor | None,
    q_norm_weight: Tensor | None,  # [D] or, over the inner width, [H*D]
    q_norm_bias: Tensor | None,
    k_norm_weight: Tensor | None,
    k_norm_bias: Tensor | None,
    attn_bias: Tensor | None,  # [B|1, H|1, Tq|1, Tk|1]
    q_positions: Tensor | None,  # [B|1, Tq, axes]
    q_cos: Tensor | None,  # [B|1, H|1, Tq, R/2 or R]
    q_sin: Tensor | None,
    k_positions: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    kv_lengths: Tensor | None,  # int [B], within 0..Tk
    keep_mask: Tensor | None,  # bool [B|1, H|1, Tq|1, Tk|1]
    key_keep: Tensor | None,  # bool [B, Tk]
    seed: Tensor | None,  # int64 [1]
    *,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The whole block; arguments as for ``CrossAttentionFunction.apply``. Returns ``(y, lse)``."""
    visible = visible_pairs(config, x_query, x_kv, attn_bias, kv_lengths, keep_mask, key_keep)
    x_value = x_kv if x_value is None else x_value
    if visible is not None:
        # Whatever stands in a key that no query sees, NaN included, becomes 0 before it can spread.
        seen = visible.any(dim=2).any(dim=1)  # [B|1, Tk|1]
        x_kv, x_value = keep_rows(x_kv, seen), keep_rows(x_value, seen)
    q_norm = (config.q_norm, q_norm_weight, q_norm_bias)
    k_norm = (config.k_norm, k_norm_weight, k_norm_bias)
    q_rotation = Rotation(config.q_rotation, q_positions, q_cos, q_sin)
    k_rotation = Rotation(config.k_rotation, k_positions, k_cos, k_sin)
    q = project_heads(x_query, w_q, b_q, config.num_heads, q_norm, q_rotation)
    k, v = x_kv, x_value
    if w_k is not None:
        k = project_heads(x_kv, w_k, b_k, config.num_kv_heads, k_norm, k_rotation)
    if w_v is not None:
        v = split_heads(F.linear(x_value, w_v, b_v), config.num_kv_heads)
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    o, lse = attention(config, q, k, v, attn_bias, visible, seed, need_lse=need_lse)
    o = o.transpose(1, 2).flatten(2)
    return (o if w_out is None else F.linear(o, w_out, b_out)), lse


def project_heads(
    x: Tensor,  # [B, T, Din]; without weight the projection itself, heads split or not
    weight: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    norm: tuple[NormSpec, Tensor | None, Tensor | None],
    rotation: Rotation,
) -> Tensor:  # [B, T, H, D]
    """``rope(norm(heads(x @ weight.T + bias)))``; norm and rotation in fp32, rounded once."""
    is_plain = norm[0].kind == NORM_NONE and rotation.spec.rotary_dim == 0
    y = x
    if weight is not None:
        y = (F.linear if is_plain else wide_linear)(x, weight, bias)
    y = split_heads(y, num_heads) if y.dim() == 3 else y
    if is_plain:
        return y
    wide = apply_norm(y.to(compute_dtype(y)), *norm)
    return _turn(wide, rotation).to(x.dtype)


def attention(
    config: BlockConfig,
    q: Tensor,  # [B, H, Tq, D]
    k: Tensor,  # [B, Hkv, Tk, D]
    v: Tensor,  # [B, Hkv, Tk, D]
    attn_bias: Tensor | None,
    visible: Tensor | None,  # bool, broadcastable to [B, H, Tq, Tk]
    seed: Tensor | None,
    *,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``softmax(scale * q @ k.T + attn_bias) @ v`` over the visible pairs, and its log-sum-exp.

    A query that sees no key gets output 0, log-sum-exp -inf and gradients of exactly 0.
    """
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    rows = (batch, kv_heads, heads // kv_heads * queries)  # query heads of a group share its keys
    # A power of two of the scale goes onto q: exact, and it keeps fp16 scores from overflowing.
    power = 2.0 ** min(math.frexp(config.scale)[1], 0)
    scores = (q * power).reshape(*rows, head_dim) @ k.transpose(-1, -2)
    scores = scores.reshape(batch, heads, queries, keys).to(compute_dtype(q))
    scores = scores * (config.scale / power)
    if attn_bias is not None:
        scores = scores + attn_bias.to(scores.dtype)
    blind = None  # rows that see nothing: kept finite inside, cleared outside, for clean gradients
    if visible is not None:
        blind = ~visible.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~visible, -math.inf).masked_fill(blind, 0.0)
    weights = torch.softmax(scores, dim=-1)
    lse = torch.logsumexp(scores, dim=-1) if need_lse else None
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
        lse = None if lse is None else lse.masked_fill(blind[..., 0], -math.inf)
    if seed is not None and config.dropout_p > 0:
        weights = dropout.apply_dropout(weights, seed, config.dropout_p)
    o = weights.to(v.dtype).reshape(*rows, keys) @ v
    return o.reshape(batch, heads, queries, head_dim), lse


def visible_pairs(
    config: BlockConfig,
    x_query: Tensor,
    x_kv: Tensor,
    attn_bias: Tensor | None,
    kv_lengths: Tensor | None,
    keep_mask: Tensor | None,
    key_keep: Tensor | None,
) -> Tensor | None:
    """Which query sees which key: bool ``[B|1, H|1, Tq|1, Tk|1]``, or None for all of them."""
    queries, keys, device = x_query.shape[1], x_kv.shape[1], x_query.device
    rules = []
    if key_keep is not None:
        rules.append(key_keep[:, None, None, :])
    if keep_mask is not None:
        rules.append(keep_mask)
    if attn_bias is not None:
        rules.append(attn_bias.detach() != -math.inf)
    if kv_lengths is not None or config.is_causal:
        length = keys if kv_lengths is None else kv_lengths[:, None, None, None]
        key = torch.arange(keys, device=device)[None, None, None, :]
        if kv_lengths is not None:
            rules.append(key < length)
        if config.is_causal:
            query = torch.arange(queries, device=device)[None, None, :, None]
            rules.append(key <= query + (length - queries))
    visible = None
    for rule in rules:
        visible = rule if visible is None else visible & rule
    return visible


def keep_rows(x: Tensor, keep: Tensor) -> Tensor:
    """``x`` ``[B, T, ...]`` with the tokens where ``keep`` ``[B|1, T|1]`` is False set to 0."""
    return x.masked_fill(~keep.reshape(*keep.shape, *[1] * (x.dim() - 2)), 0.0)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """``[B, T, H*D]`` to ``[B, T, H, D]``."""
    heads: Tensor = x.unflatten(-1, (num_heads, -1))
    return heads


def _turn(x: Tensor, rotation: Rotation) -> Tensor:  # [B, T, H, D]
    spec, positions, cos, sin = rotation
    if spec.rotary_dim == 0:
        return x
    if cos is None or sin is None:
        cos, sin = rope.cos_sin(spec, positions, x.shape[1], x.device, x.dtype)
    turned = rope.rotate(x.transpose(1, 2), cos.to(x.dtype), sin.to(x.dtype), spec)
    return turned.transpose(1, 2)
