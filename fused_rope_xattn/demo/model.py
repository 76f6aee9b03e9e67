"""A small vision transformer that completes one view by looking into another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import FusedRoPECrossAttention, RoPE
from .photographs import GRID, PIXELS, Pairs

TOKENS = GRID * GRID
ROPE = RoPE(base=100.0, axes=2, interleaved=False)  # as in CroCo
SAME_PLACE = 5.0  # against contents of about 0.6


class Block(nn.Module):
    """Self-attention, cross-attention into ``memory`` where there is one, and an MLP."""

    def __init__(self, dim: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.norm_self = nn.LayerNorm(dim)
        self.self_attention = FusedRoPECrossAttention(dim, heads, rope=ROPE, bias=True)
        if cross:
            self.norm_query = nn.LayerNorm(dim)
            self.cross_attention = FusedRoPECrossAttention(dim, heads, rope=ROPE, bias=True)
            self._look_at_the_same_place()
        self.norm_mlp = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def _look_at_the_same_place(self) -> None:
        """Equal vectors, rotated, score highest at equal positions: a start that saves steps."""
        for projection in (self.cross_attention.q_proj, self.cross_attention.k_proj):
            nn.init.constant_(projection.bias, SAME_PLACE)

    def forward(
        self,
        x: Tensor,  # [B, T, dim]
        positions: Tensor,  # [B, T, 2], (y, x) in patches
        memory: Tensor | None = None,
        memory_positions: Tensor | None = None,
    ) -> Tensor:
        y = self.norm_self(x)
        x = x + self.self_attention(y, y, q_positions=positions, k_positions=positions)
        if memory is not None:
            # The memory is not normed: that would take away how light and how sharp a patch is.
            x = x + self.cross_attention(
                self.norm_query(x), memory, q_positions=positions, k_positions=memory_positions
            )
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class CompletionModel(nn.Module):
    """One encoder for both views; the decoder fills the first from the second.

    Args:
        sees_second_view: without it the cross-attention is cut off and nothing else changes.
    """

    def __init__(
        self,
        sees_second_view: bool = True,
        dim: int = 128,
        heads: int = 4,
        encoder_depth: int = 1,
        decoder_depth: int = 2,
    ) -> None:
        super().__init__()
        self.sees_second_view = sees_second_view
        self.embed = nn.Linear(PIXELS, dim)
        self.encoder = nn.ModuleList(Block(dim, heads) for _ in range(encoder_depth))
        self.mask_token = nn.Parameter(0.02 * torch.randn(dim))
        self.decoder = nn.ModuleList(Block(dim, heads, cross=True) for _ in range(decoder_depth))
        self.head = nn.Linear(dim, PIXELS)
        axis = torch.arange(GRID, dtype=torch.float32)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1).flatten(0, 1)
        self.register_buffer("grid", grid, persistent=False)
        self.grid: Tensor

    def encode(self, patches: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.embed(patches)
        for block in self.encoder:
            x = block(x, positions)
        return x

    def forward(self, pairs: Pairs, visible: Tensor) -> Tensor:
        """Every patch of view 1 from those at the indices ``visible`` [B, V] and from view 2."""
        batch = visible.shape[0]
        grid = self.grid.expand(batch, -1, -1)
        seen = self.encode(_rows(pairs.view_1, visible), _rows(grid, visible))
        hidden = self.mask_token.to(seen.dtype).expand(batch, TOKENS, -1)
        x = hidden.scatter(1, visible[..., None].expand_as(seen), seen)

        memory = self.encode(pairs.view_2, grid) if self.sees_second_view else None
        # Both views are placed in one plane, so that tokens of the same spot have equal positions.
        memory_positions = grid + pairs.shift[:, None]
        for block in self.decoder:
            x = block(x, grid, memory, memory_positions)
        out: Tensor = self.head(x)
        return out


def random_visible(count: int, mask_ratio: float, generator: torch.Generator) -> Tensor:
    """Indices [B, V] of the patches that stay visible, others for each sample."""
    kept = max(1, round(TOKENS * (1 - mask_ratio)))
    return torch.rand(count, TOKENS, generator=generator).argsort(dim=1)[:, :kept]


def hidden_mask(visible: Tensor) -> Tensor:
    """Bool [B, TOKENS], True where a patch is to be completed."""
    hidden = torch.ones(visible.shape[0], TOKENS, dtype=torch.bool, device=visible.device)
    return hidden.scatter(1, visible, False)


def completion_loss(prediction: Tensor, target: Tensor, visible: Tensor) -> Tensor:
    """Mean squared error over the pixels of hidden patches, in normalised units."""
    return (prediction - target).square().mean(-1)[hidden_mask(visible)].mean()


def _rows(x: Tensor, index: Tensor) -> Tensor:  # [B, T, C], [B, V] -> [B, V, C]
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
