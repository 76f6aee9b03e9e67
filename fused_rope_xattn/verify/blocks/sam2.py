"""The memory attention layer of SAM 2: self-attention over a frame, cross-attention to memories.

A table of complex numbers is made for a grid of width w: token t turns its pair p (dims 2p and
2p + 1) by ``(t mod w) * theta ** (-4p / D)`` for p < D/4, and by ``(t div w)`` times the same
frequencies for the other half. Keys repeat the table of the queries, and the last ones are not
rotated.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_axial_cis(dim: int, end_x: float, end_y: float, theta: float = 10000.0) -> Tensor:
    """Complex ``[end_x * end_y, dim / 2]``."""
    width, tokens = int(end_x), int(end_x) * int(end_y)
    t = torch.arange(tokens)
    frequency = theta ** (-4.0 * torch.arange(dim // 4, dtype=torch.float64) / dim)
    angle = torch.cat([(t % width)[:, None] * frequency, (t // width)[:, None] * frequency], -1)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


class RoPEAttention(nn.Module):
    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        downsample_rate: int = 1,
        dropout: float = 0.0,
        kv_in_dim: int | None = None,
        *,
        rope_theta: float = 10000.0,
        rope_k_repeat: bool = False,
        feat_sizes: tuple[int, int] = (64, 64),  # width, height
    ) -> None:
        super().__init__()
        self.embedding_dim, self.num_heads = embedding_dim, num_heads
        self.kv_in_dim = embedding_dim if kv_in_dim is None else kv_in_dim
        self.internal_dim = embedding_dim // downsample_rate
        self.q_proj = nn.Linear(embedding_dim, self.internal_dim)
        self.k_proj = nn.Linear(self.kv_in_dim, self.internal_dim)
        self.v_proj = nn.Linear(self.kv_in_dim, self.internal_dim)
        self.out_proj = nn.Linear(self.internal_dim, embedding_dim)
        self.dropout_p = dropout
        head_dim = self.internal_dim // num_heads
        self.compute_cis = partial(compute_axial_cis, dim=head_dim, theta=rope_theta)
        self.freqs_cis = self.compute_cis(end_x=feat_sizes[0], end_y=feat_sizes[1])
        self.rope_k_repeat = rope_k_repeat

    def forward(self, q: Tensor, k: Tensor, v: Tensor, num_k_exclude_rope: int = 0) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, x in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        )
        queries, rotated = q.shape[2], k.shape[2] - num_k_exclude_rope
        if self.freqs_cis.shape[0] != queries:
            side = math.sqrt(queries)
            self.freqs_cis = self.compute_cis(end_x=side, end_y=side)
        self.freqs_cis = self.freqs_cis.to(q.device)
        if queries != k.shape[2]:
            assert self.rope_k_repeat
        q = _turn(q, self.freqs_cis)
        if rotated:
            repeats = rotated // queries if self.rope_k_repeat else 1
            turned = _turn(k[:, :, :rotated], self.freqs_cis.repeat(repeats, 1))
            k = torch.cat([turned, k[:, :, rotated:]], dim=2)
        p = self.dropout_p if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        y: Tensor = self.out_proj(o.transpose(1, 2).flatten(2))
        return y


class MemoryAttentionLayer(nn.Module):
    """``tgt`` ``[B, Tq, 256]`` looks at ``memory`` ``[B, Tk, 64]``, which ends with pointers."""

    def __init__(
        self,
        d_model: int = 256,
        kv_in_dim: int = 64,
        num_heads: int = 1,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        feat_sizes: tuple[int, int] = (64, 64),
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {"dropout": dropout, "feat_sizes": feat_sizes}
        self.self_attn = RoPEAttention(d_model, num_heads, **shared)
        self.cross_attn_image = RoPEAttention(
            d_model, num_heads, kv_in_dim=kv_in_dim, rope_k_repeat=True, **shared
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, tgt: Tensor, memory: Tensor, pos: Tensor, num_k_exclude_rope: int = 0
    ) -> Tensor:
        x = self.norm1(tgt)
        tgt = tgt + self.dropout(self.self_attn(x, x, x))
        seen = self.cross_attn_image(
            self.norm2(tgt), memory + pos, memory, num_k_exclude_rope=num_k_exclude_rope
        )
        tgt = tgt + self.dropout(seen)
        x = self.linear2(self.dropout(F.relu(self.linear1(self.norm3(tgt)))))
        y: Tensor = tgt + self.dropout(x)
        return y


def _turn(x: Tensor, table: Tensor) -> Tensor:  # [B, H, T, D], complex [T, D/2]
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)
