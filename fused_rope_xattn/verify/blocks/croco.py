"""The decoder block of CroCo, DUSt3R and MASt3R: self-attention, cross-attention, MLP.

Both attentions rotate q and k in two dimensions. With Q = D / 4, a head is ``[u_y|v_y|u_x|v_x]``,
and ``(u, v)`` of axis a turns by ``position_a * F0 * base ** (-j / Q)``, j = 0..Q-1. Angles are
fp32 at least, and rotated tokens are rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RoPE2D(nn.Module):
    """Rotates ``[B, H, T, D]`` by positions ``[B, T, 2]``, (y, x)."""

    def __init__(self, freq: float = 100.0, F0: float = 1.0) -> None:
        super().__init__()
        self.base, self.F0 = freq, F0

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        quarter = tokens.shape[-1] // 4
        j = torch.arange(quarter, device=tokens.device, dtype=torch.float64)
        frequency = self.F0 * self.base ** (-j / quarter)
        angle = (positions.double()[..., None] * frequency)[:, None]  # [B, 1, T, 2, Q]
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        u, v = tokens.to(wide).unflatten(-1, (2, 2, quarter)).unbind(-2)  # [B, H, T, 2, Q]
        turned = torch.stack([u * cos - v * sin, v * cos + u * sin], dim=-2)
        return turned.flatten(-3).to(tokens.dtype)


class CrossAttention(nn.Module):
    """Scores are written out and stored, as upstream does; with ``sdpa`` they are not."""

    def __init__(
        self,
        dim: int,
        rope: nn.Module | None = None,
        num_heads: int = 8,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        sdpa: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.scale, self.sdpa = num_heads, (dim // num_heads) ** -0.5, sdpa
        self.projq = nn.Linear(dim, dim, bias=qkv_bias)
        self.projk = nn.Linear(dim, dim, bias=qkv_bias)
        self.projv = nn.Linear(dim, dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.rope = rope

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, qpos: Tensor | None, kpos: Tensor | None
    ) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, x in ((self.projq, query), (self.projk, key), (self.projv, value))
        )
        if self.rope is not None:
            q = q if qpos is None else self.rope(q, qpos)
            k = k if kpos is None else self.rope(k, kpos)
        o = attend(q, k, v, self.scale, self.attn_drop, self.sdpa)
        y: Tensor = self.proj_drop(self.proj(o))
        return y


class Attention(nn.Module):
    """Self-attention with one projection for q, k and v."""

    def __init__(
        self, dim: int, rope: nn.Module | None = None, num_heads: int = 8, sdpa: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.scale, self.sdpa = num_heads, (dim // num_heads) ** -0.5, sdpa
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.rope = rope

    def forward(self, x: Tensor, xpos: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.rope is not None:
            q, k = self.rope(q, xpos), self.rope(k, xpos)
        y: Tensor = self.proj(attend(q, k, v, self.scale, self.attn_drop, self.sdpa))
        return y


class DecoderBlock(nn.Module):
    """``x`` ``[B, Tq, C]`` looks at ``y`` ``[B, Tk, C]``; returns both."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: int = 4,
        rope: nn.Module | None = None,
        sdpa: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, rope, num_heads, sdpa)
        self.norm_y = nn.LayerNorm(dim, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.cross_attn = CrossAttention(dim, rope, num_heads, sdpa=sdpa)
        self.norm3 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim)
        )

    def forward(self, x: Tensor, y: Tensor, xpos: Tensor, ypos: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm1(x), xpos)
        seen = self.norm_y(y)
        x = x + self.cross_attn(self.norm2(x), seen, seen, xpos, ypos)
        return x + self.mlp(self.norm3(x)), y


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: nn.Dropout, sdpa: bool
) -> Tensor:  # [B, H, T, D] -> [B, T, H*D]
    if sdpa:
        p = dropout.p if dropout.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=p, scale=scale)
    else:
        o = dropout((q @ k.transpose(-2, -1) * scale).softmax(dim=-1)) @ v
    return o.transpose(1, 2).flatten(2)
