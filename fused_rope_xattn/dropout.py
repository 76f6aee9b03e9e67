"""The dropout mask: Philox4x32-10 on (seed, b, h, q, k), the same bits on every path and device.

One Philox call serves 8 weights of a 16 x 16 tile of the scores: queries ``q`` and ``q + 8``, keys
``k``, ``k + 1``, ``k + 8`` and ``k + 9``, which is what one thread of a tensor-core tile holds.
Counter and key, with ``n = b * H + h``::

    key     = (seed low 32, seed high 32)
    counter = (k >> 4, q >> 4, n low 32, (k >> 1 & 3) | (q & 7) << 2 | (n >> 32) << 5)
    half    = 16 bits of the 4 words, number ((q >> 3) & 1) * 4 + ((k >> 3) & 1) * 2 + (k & 1)

A weight is kept where ``half < threshold(p)`` and then divided by ``1 - p``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """How many of the 65536 values of a half keep the weight."""
    return math.floor((1.0 - dropout_p) * 65536 + 0.5)


def draw_seed(device: torch.device) -> Tensor:
    """A fresh seed, int64 ``[1]``, from torch's generator of ``device``; never synchronises."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def apply_dropout(weights: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    """Drop attention weights ``[B, H, Tq, Tk]`` and rescale the ones that stay."""
    if threshold(dropout_p) == 0:
        return weights * 0.0
    keep = keep_mask(seed, dropout_p, *weights.shape)
    return torch.where(keep, weights / (1.0 - dropout_p), 0.0)


def keep_mask(
    seed: Tensor, dropout_p: float, batch: int, heads: int, queries: int, keys: int
) -> Tensor:
    """Bool ``[B, H, Tq, Tk]``, True where the weight stays."""
    if torch.compiler.is_compiling():
        return _keep_each(seed, dropout_p, batch, heads, queries, keys)
    q_tiles, k_tiles = (queries + 15) // 16, (keys + 15) // 16

    def axis(
        size: int, dim: int
    ) -> Tensor:  # 0..size-1 along dim of [n, q >> 4, q & 7, k >> 4, k >> 1 & 3]
        shape = [1] * 5
        shape[dim] = size
        return torch.arange(size, device=seed.device, dtype=torch.int64).view(shape)

    head = axis(batch * heads, 0)
    counter = (
        axis(k_tiles, 3),
        axis(q_tiles, 1),
        head & _LOW32,
        axis(4, 4) | axis(8, 2) << 2 | head >> 32 << 5,
    )
    words = philox4x32(counter, (seed & _LOW32, seed >> 32 & _LOW32))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    # [n, q >> 4, q & 7, k >> 4, k >> 1 & 3, q >> 3 & 1, k >> 3 & 1, k & 1]
    tiles = torch.stack(torch.broadcast_tensors(*halves), dim=-1).unflatten(-1, (2, 2, 2))
    keep: Tensor = tiles.permute(0, 1, 5, 2, 3, 6, 4, 7) < threshold(dropout_p)
    keep = keep.reshape(batch, heads, q_tiles * 16, k_tiles * 16)
    return keep[:, :, :queries, :keys]


def _keep_each(
    seed: Tensor, dropout_p: float, batch: int, heads: int, queries: int, keys: int
) -> Tensor:
    """:func:`keep_mask` with a call for every weight: eight times the arithmetic, but no shape that
    depends on how lengths divide by 16, for which compiled code would be specialised."""
    q, k = (torch.arange(size, device=seed.device) for size in (queries, keys))
    q = q[:, None]
    sample, head = (torch.arange(size, device=seed.device) for size in (batch, heads))
    row = (sample[:, None] * heads + head)[..., None, None]  # [B, H, 1, 1]
    counter = (k >> 4, q >> 4, row & _LOW32, k >> 1 & 3 | (q & 7) << 2 | row >> 32 << 5)
    words = philox4x32(counter, (seed & _LOW32, seed >> 32 & _LOW32))
    element = (q >> 3 & 1) * 4 + (k >> 3 & 1) * 2 + (k & 1)
    word = words[0]
    for index in (1, 2, 3):
        word = torch.where(element >> 1 == index, words[index], word)
    keep: Tensor = (word >> 16 * (element & 1) & 0xFFFF) < threshold(dropout_p)
    return keep


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product wraps modulo 2**64; shift and mask recover the right bits from it.
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (odd >> 32 & _LOW32) ^ c1 ^ k0, odd & _LOW32
        c2, c3 = (even >> 32 & _LOW32) ^ c3 ^ k1, even & _LOW32
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return c0, c1, c2, c3
