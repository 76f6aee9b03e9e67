"""The block written out from its formulas in fp64: the judge of every other path.

Independent on purpose: nothing of the package is imported, rotations and norms are read by
attribute, and the dropout mask comes from a plain numpy Philox. ``storage`` turns the same lines
into an ordinary eager block, whose matrix products leave their results in that dtype: the yardstick
of the composite path. That of the others is the block of eager.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Scores of one chunk of samples; above this the chunks are recomputed in the backward.
_MAX_SCORES = 1 << 29


class _DefaultRope(NamedTuple):
    base: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = True
    axes: int = 1


_DEFAULT_ROPE = _DefaultRope()


class _Precision(NamedTuple):
    compute: torch.dtype
    storage: torch.dtype | None

    def wide(self, x: Tensor) -> Tensor:
        return x.to(self.compute)

    def rounded(self, x: Tensor) -> Tensor:
        """Rounds to the storage dtype, in the gradient as well, and comes back."""
        return x if self.storage is None else x.to(self.storage).to(self.compute)


class _Attention(NamedTuple):
    """What the scores need beside q, k and v; every tensor is indexed by sample on axis 0."""

    kept: Tensor  # bool [B, 1|H, 1|Tq, Tk]
    bias: Tensor | None  # [B|1, H|1, Tq|1, Tk|1], finite
    scale: float
    dropout_p: float
    seed: int
    precision: _Precision


def reference(
    x_query: Tensor,  # [B, Tq, Dq]
    x_kv: Any,  # [B, Tk, Dkv], or a pair of k and v [B, Hkv, Tk, D]
    w_q: Tensor,
    w_k: Tensor | None,
    w_v: Tensor | None,
    w_out: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    b_q: Tensor | None = None,
    b_k: Tensor | None = None,
    b_v: Tensor | None = None,
    b_out: Tensor | None = None,
    x_value: Tensor | None = None,
    rope: Any = _DEFAULT_ROPE,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    q_norm: Any = None,
    k_norm: Any = None,
    kv_lengths: Tensor | None = None,
    kv_keep_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    path: str = "auto",
    return_lse: bool = False,
    seed: int | None = None,
    storage: torch.dtype | None = None,
) -> Any:
    """cross_attention, whatever ``path`` says, in fp64 (in fp32 with ``storage``)."""
    precision = _Precision(torch.float64 if storage is None else torch.float32, storage)
    if storage == torch.float64:
        precision = _Precision(torch.float64, None)
    batch, num_queries = x_query.shape[:2]
    kv_heads = num_kv_heads or num_heads
    head_dim = w_q.shape[0] // num_heads
    q_rope, k_rope = rope if type(rope) is tuple else (rope, rope)
    num_keys = x_kv.k.shape[2] if hasattr(x_kv, "k") else x_kv.shape[1]

    kept = kept_keys(
        batch, num_queries, num_keys, kv_lengths, kv_keep_mask, is_causal, x_query.device
    )
    alive = kept.any(dim=2).any(dim=1)[:, :, None]  # [B, Tk, 1]; what no query keeps does not exist

    q = project(x_query, w_q, b_q, num_heads, precision)
    q = precision.rounded(rotate(normed(q, q_norm, precision), q_rope, q_positions))
    if hasattr(x_kv, "k"):
        k, v = (precision.wide(t).transpose(1, 2) for t in (x_kv.k, x_kv.v))
        k, v = (t.masked_fill(~alive[..., None], 0.0) for t in (k, v))
    else:
        x_k = x_kv.masked_fill(~alive, 0.0)
        x_v = x_k if x_value is None else x_value.masked_fill(~alive, 0.0)
        k = project(x_k, w_k, b_k, kv_heads, precision)
        k = precision.rounded(rotate(normed(k, k_norm, precision), k_rope, k_positions))
        v = project(x_v, w_v, b_v, kv_heads, precision)

    if dropout_p > 0 and seed is None:
        seed = draw_seed(x_query.device)
    bias = None
    if attn_bias is not None:
        bias = precision.wide(attn_bias)[(None,) * (4 - attn_bias.dim())]
        removed = bias == -torch.inf
        kept, bias = kept & ~removed, bias.masked_fill(removed, 0.0)
    scale = head_dim**-0.5 if scale is None else scale
    o, lse = attend(q, k, v, _Attention(kept, bias, scale, dropout_p, seed or 0, precision))
    y = precision.rounded(o.reshape(batch, num_queries, num_heads * head_dim))
    if w_out is not None:
        y = y @ precision.wide(w_out).T
        y = precision.rounded(y if b_out is None else y + precision.wide(b_out))
    return (y, lse) if return_lse else y


def project(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, heads: int, precision: _Precision
) -> Tensor:
    """x @ weight.T + bias, split into heads: [B, T, H, D]."""
    assert weight is not None
    y = torch.einsum("btc,oc->bto", precision.wide(x), precision.wide(weight))
    if bias is not None:
        y = y + precision.wide(bias)
    return precision.rounded(y).reshape(*y.shape[:2], heads, weight.shape[0] // heads)


def normed(x: Tensor, norm: Any, precision: _Precision) -> Tensor:
    """The norm over each head, or over all the heads of a token, of x [B, T, H, D]."""
    if norm is None:
        return x
    shape = x.shape
    x = x.flatten(2) if norm.over == "inner" else x
    if norm.kind == "layer":
        x = x - x.mean(dim=-1, keepdim=True)
    x = x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps)
    if norm.weight is not None:
        x = x * precision.wide(norm.weight)
    if norm.bias is not None:
        x = x + precision.wide(norm.bias)
    return x.reshape(shape)


def pair_dims(rotary_dim: int, interleaved: bool, axes: int) -> tuple[list[int], list[int]]:
    """The first and the second dim of every pair, axis by axis."""
    first, second = [], []
    width = rotary_dim // axes
    for axis in range(axes):
        for j in range(width // 2):
            start = axis * width
            first.append(start + 2 * j if interleaved else start + j)
            second.append(start + 2 * j + 1 if interleaved else start + j + width // 2)
    return first, second


def angles(
    rope: Any, rotary_dim: int, positions: Tensor | None, tokens: int, device: Any
) -> Tensor:
    """fp64 angle of every pair, [B|1, T, 1, R/2]."""
    if positions is None:
        positions = torch.arange(tokens, device=device)
    positions = positions.to(torch.float64)
    if rope.axes == 1 and positions.dim() <= 2:
        positions = positions[..., None]
    if positions.dim() == 2:
        positions = positions[None]
    width = rotary_dim // rope.axes
    blocks = []
    for axis in range(rope.axes):
        for j in range(width // 2):
            blocks.append(positions[..., axis] * float(rope.base) ** (-2.0 * j / width))
    return torch.stack(blocks, dim=-1)[:, :, None, :]


def rotate(x: Tensor, rope: Any, positions: Tensor | None) -> Tensor:
    """RoPE of x [B, T, H, D] by a description or by tables; None leaves x alone."""
    if rope is None:
        return x
    if hasattr(rope, "cos"):  # tables [B|1, H|1, T, R/2 or R]
        cos, sin = (
            t.to(x.dtype)[(None,) * (4 - t.dim())].transpose(1, 2) for t in (rope.cos, rope.sin)
        )
        full, axes = rope.full_width, 1
        rotary_dim = cos.shape[-1] * (1 if full else 2)
    else:
        rotary_dim = x.shape[-1] if rope.rotary_dim is None else rope.rotary_dim
        if rotary_dim == 0 or x.shape[1] == 0:
            return x
        phase = angles(rope, rotary_dim, positions, x.shape[1], x.device)
        cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
        full, axes = False, rope.axes
    first, second = pair_dims(rotary_dim, rope.interleaved, axes)
    cos_first, cos_second = (cos[..., first], cos[..., second]) if full else (cos, cos)
    sin_first, sin_second = (sin[..., first], sin[..., second]) if full else (sin, sin)
    u, v = x[..., first], x[..., second]
    turned = torch.cat([cos_first * u - sin_first * v, sin_second * u + cos_second * v], dim=-1)
    order = torch.tensor(first + second, device=x.device).argsort()
    return torch.cat([turned[..., order], x[..., rotary_dim:]], dim=-1)


def kept_keys(
    batch: int,
    num_queries: int,
    num_keys: int,
    lengths: Tensor | None,
    keep_mask: Tensor | None,
    is_causal: bool,
    device: torch.device,
) -> Tensor:
    """bool [B, 1|H, 1|Tq, Tk]: the keys that lengths, mask and causality leave to each query.

    The query axis is kept at its true length where Tq is 0, so that nothing is kept by nobody.
    """
    i = torch.arange(num_queries, device=device)[:, None]
    j = torch.arange(num_keys, device=device)[None, :]
    if lengths is None:
        length = torch.full((batch, 1, 1, 1), num_keys, device=device)
    else:
        length = lengths.to(torch.int64).clamp(0, num_keys)[:, None, None, None]
    kept = (j < length).expand(batch, 1, min(num_queries, 1), num_keys)
    if is_causal:
        kept = kept & (j <= i + length - num_queries)
    if keep_mask is not None:
        kept = kept & (keep_mask[:, None, None, :] if keep_mask.dim() == 2 else keep_mask)
    return kept


def attend(q: Tensor, k: Tensor, v: Tensor, rule: _Attention) -> tuple[Tensor, Tensor]:
    """o [B, Tq, H, D] and lse [B, H, Tq], some samples at a time."""
    batch, num_queries, heads, _ = q.shape
    scores = max(1, heads * num_queries * k.shape[1])
    step = max(1, _MAX_SCORES // scores)
    if batch <= step:
        return _attend_samples(q, k, v, rule, 0)
    outputs = []
    for b in range(0, batch, step):
        part = slice(b, b + step)
        bias = rule.bias
        if bias is not None and bias.shape[0] > 1:
            bias = bias[part]
        kept = rule.kept if rule.kept.shape[0] == 1 else rule.kept[part]
        share = rule._replace(kept=kept, bias=bias)
        outputs.append(
            checkpoint(_attend_samples, q[part], k[part], v[part], share, b, use_reentrant=False)
        )
    return torch.cat([o for o, _ in outputs]), torch.cat([lse for _, lse in outputs])


def _attend_samples(
    q: Tensor, k: Tensor, v: Tensor, rule: _Attention, first_sample: int
) -> tuple[Tensor, Tensor]:
    batch, num_queries, heads, _ = q.shape
    num_keys, group = k.shape[1], heads // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    s = rule.scale * rule.precision.rounded(torch.einsum("bihd,bjhd->bhij", q, k))
    if rule.bias is not None:
        s = s + rule.bias
    kept = rule.kept.expand_as(s)
    s = s.masked_fill(~kept, -torch.inf)
    top = s.detach().amax(dim=-1, keepdim=True) if num_keys else s.new_zeros((*s.shape[:3], 1))
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = torch.exp(s - top)
    total = weight.sum(dim=-1, keepdim=True)
    lost = total == 0  # rows that keep no key
    safe_total = total.masked_fill(lost, 1.0)
    lse = (top + safe_total.log()).masked_fill(lost, -torch.inf).squeeze(-1)
    p = weight / safe_total
    if rule.dropout_p > 0:
        shape = (batch, heads, num_queries, num_keys)
        mask = dropout_keep(rule.seed, shape, rule.dropout_p, first_sample)
        keep = torch.from_numpy(mask).to(q.device)
        p = torch.where(keep, p / (1 - rule.dropout_p) if rule.dropout_p < 1 else p, 0.0)
    return torch.einsum("bhij,bjhd->bihd", rule.precision.rounded(p), v), lse


def draw_seed(device: torch.device) -> int:
    """The dropout seed that a call made now on this device would draw."""
    return int(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device).item())


def philox4x32_10(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10 of Salmon et al. 2011 on arrays of 32-bit words held in uint64."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (right >> half) ^ c1 ^ np.uint64(k0),
            right & low,
            (left >> half) ^ c3 ^ np.uint64(k1),
            left & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def dropout_keep(
    seed: int, shape: tuple[int, int, int, int], p: float, first_sample: int = 0
) -> np.ndarray:
    """bool [B, H, Tq, Tk], True = kept: one Philox call for each element, nothing shared."""
    batch, heads, num_queries, num_keys = shape
    keep = np.empty((batch * heads, num_queries, num_keys), dtype=bool)
    threshold = round((1.0 - p) * 65536)
    q = np.arange(num_queries, dtype=np.int64)[:, None]
    k = np.arange(num_keys, dtype=np.int64)[None, :]
    element = ((q >> 3) & 1) * 4 + ((k >> 3) & 1) * 2 + (k & 1)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    for row in range(batch * heads):
        bh = first_sample * heads + row
        last = ((k >> 1) & 3) | ((q & 7) << 2) | ((bh >> 32) << 5)
        counter = [k >> 4, q >> 4, np.asarray(bh & 0xFFFFFFFF), last]
        counter = list(np.broadcast_arrays(*counter))
        words = np.stack(philox4x32_10(counter, key))
        word = np.take_along_axis(words, (element >> 1)[None], axis=0)[0]
        half = (word >> (16 * (element & 1)).astype(np.uint64)) & np.uint64(0xFFFF)
        keep[row] = half < threshold
    return keep.reshape(shape)
