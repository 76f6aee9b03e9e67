"""Small whole models around the blocks of repositories that are no packages (CroCo, SAM 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fused_rope_xattn.verify.blocks.croco import CrossAttention, DecoderBlock, RoPE2D
from fused_rope_xattn.verify.blocks.sam2 import MemoryAttentionLayer, RoPEAttention

__all__ = ["CrocoDecoder", "CrossAttention", "MemoryAttention", "RoPE2D", "RoPEAttention"]


class CrocoDecoder(nn.Module):
    """Two decoders that look at each other, as in DUSt3R; one rotation object for all blocks."""

    def __init__(self, dim: int = 32, heads: int = 2, depth: int = 2, F0: float = 1.0) -> None:
        super().__init__()
        rope = RoPE2D(100.0, F0)
        self.blocks = nn.ModuleList(DecoderBlock(dim, heads, 2, rope) for _ in range(depth))
        self.blocks2 = nn.ModuleList(DecoderBlock(dim, heads, 2, rope) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor, xpos: Tensor, ypos: Tensor) -> Tensor:
        for first, second in zip(self.blocks, self.blocks2):
            (x, _), (y, _) = first(x, y, xpos, ypos), second(y, x, ypos, xpos)
        return torch.cat([x, y], dim=1)


class MemoryAttention(nn.Module):
    """Two layers, as SAM 2 has four."""

    def __init__(
        self, dim: int = 32, feat_sizes: tuple[int, int] = (4, 4), dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MemoryAttentionLayer(dim, 16, 1, 64, dropout, feat_sizes) for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, tgt: Tensor, memory: Tensor, pos: Tensor, pointers: int = 0) -> Tensor:
        for layer in self.layers:
            tgt = layer(tgt, memory, pos, num_k_exclude_rope=pointers)
        return self.norm(tgt)
