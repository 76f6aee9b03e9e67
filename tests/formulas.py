"""The operators' results by their definitions: pair for pair, row for row, in fp64."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from fused_rope_xattn.config import NORM_LAYER, NORM_RMS, NormSpec, RotationSpec
from fused_rope_xattn.ops import ScoreOptions


def plain_angles(spec: RotationSpec, positions: Tensor) -> Tensor:
    """[B|1, T, R/2]"""
    width = spec.rotary_dim // spec.axes
    columns = [
        positions[..., axis].double() * spec.base ** (-2 * j / width)
        for axis, j in itertools.product(range(spec.axes), range(width // 2))
    ]
    return torch.stack(columns, dim=-1)


def plain_norm_rope(
    x: Tensor,  # [B, T, H*D] fp64
    num_heads: int,
    bias: Tensor | None,
    norm: NormSpec,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    spec: RotationSpec,
    tensors: tuple[Tensor | None, ...],
) -> Tensor:
    x = x if bias is None else x + bias
    heads = (*x.shape[:2], num_heads, x.shape[2] // num_heads)
    x = x if norm.inner else x.view(heads)
    if norm.kind == NORM_RMS:
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, norm.eps)
        x = x if norm_bias is None else x + norm_bias
    elif norm.kind == NORM_LAYER:
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, norm_bias, norm.eps)
    x = x.view(heads)
    if spec.rotary_dim == 0:
        return x
    positions, cos, sin = tensors
    if cos is None or sin is None:
        counted = torch.arange(x.shape[1], device=x.device)[None, :, None]
        angles = plain_angles(spec, counted if positions is None else positions)[:, None]
        cos, sin = angles.cos(), angles.sin()
    columns = list(x.unbind(-1))
    width = spec.rotary_dim // spec.axes
    for pair in range(spec.rotary_dim // 2):
        axis, j = divmod(pair, width // 2)
        first, second = axis * width + j, axis * width + j + width // 2
        if spec.interleaved:
            first, second = 2 * pair, 2 * pair + 1
        at = (first, second) if spec.full_width else (pair, pair)
        c1, c2 = (cos[..., i].transpose(1, 2) for i in at)
        s1, s2 = (sin[..., i].transpose(1, 2) for i in at)
        u, v = columns[first], columns[second]
        columns[first], columns[second] = c1 * u - s1 * v, c2 * v + s2 * u
    return torch.stack(columns, dim=-1)


def plain_turned_back(
    grad: Tensor, spec: RotationSpec, tensors: tuple[Tensor | None, ...]
) -> Tensor:  # [B, T, H, D]
    """The gradient of heads before their rotation, in fp64, by autograd through the formula."""
    tensors = tuple(None if t is None else t.double() for t in tensors)
    x = torch.zeros(*grad.shape[:2], grad.shape[2] * grad.shape[3], dtype=torch.float64)
    x = x.to(grad.device).requires_grad_()
    y = plain_norm_rope(x, grad.shape[2], None, NormSpec(), None, None, spec, tensors)
    (dx,) = torch.autograd.grad(y, x, grad.double())
    return dx.view(grad.shape)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, o: ScoreOptions, dropped: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Row by row in fp64, over the list of keys that a row keeps."""
    batch, queries, heads, _ = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    rows, lse = [], []
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        length = keys if o.kv_lengths is None else int(o.kv_lengths[b])
        kept = [
            j
            for j in range(length)
            if (o.key_keep is None or o.key_keep[b, j])
            and (o.keep_mask is None or o.keep_mask.expand(batch, heads, queries, keys)[b, h, i, j])
            and (not o.is_causal or j <= i + length - queries)
        ]
        if not kept:
            lse.append(q.new_tensor(-math.inf))
            rows.append(torch.zeros_like(q[b, i, h]))
            continue
        scores = o.scale * (k[b, kept, h // group] @ q[b, i, h])
        if o.attn_bias is not None:
            scores = scores + o.attn_bias.expand(batch, heads, queries, keys)[b, h, i, kept]
        lse.append(scores.logsumexp(0))
        p = (scores - lse[-1]).exp()
        if dropped is not None:
            p = p * dropped[b, h, i, kept] / (1 - o.dropout_p)
        rows.append(p @ v[b, kept, h // group])
    shape = (batch, heads, queries)
    return torch.stack(rows).view(*shape, -1).transpose(1, 2), torch.stack(lse).view(shape)


def transposed_values(v: Tensor, exists: Tensor | None = None) -> Tensor:
    """v [B, T, H, D] as TF32 attention on a Hopper reads it: [B, H, D, T padded to 8].

    ``exists`` [B, T]: of which tokens; the others are zeros, as is the padding.
    """
    batch, tokens, heads, head_dim = v.shape
    result = v.new_zeros(batch, heads, head_dim, (tokens + 7) // 8 * 8)
    for token in range(tokens):
        place = token // 8 * 8 + (0, 4, 1, 5, 2, 6, 3, 7)[token % 8]
        result[..., place] = v[:, token]
        if exists is not None:
            result[~exists[:, token], ..., place] = 0.0
    return result
