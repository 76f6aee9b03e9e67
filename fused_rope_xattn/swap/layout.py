"""Rows of projections in another order: between RoPE pairings, and between orders of heads.

A rotation fixes which two dims of a head turn together. Moving the rows of ``w_q`` and ``w_k``, and
their biases, in the same way moves the pairs; scores do not change. ``w_v`` and ``w_out`` stay.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import Tensor

Pairing = Literal["interleaved", "half"]
MaybeTensor = TypeVar("MaybeTensor", Tensor, "Tensor | None")


def pair_rows(
    head_dim: int,
    num_heads: int,
    *,
    source: Pairing,
    target: Pairing,
    rotary_dim: int | None = None,
    axes: int = 1,
    device: torch.device | str | None = None,
) -> Tensor:  # int64 [H*D]
    """Rows that bring a projection made for one pairing into another: ``w[rows]``.

    Axial RoPE has a pairing in each of its ``axes`` blocks; dims beyond ``rotary_dim`` stay.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if not 0 <= rotary_dim <= head_dim or rotary_dim % (2 * axes):
        raise ValueError(
            f"rotary_dim: expected a multiple of 2 * axes = {2 * axes} up to {head_dim}, "
            f"got {rotary_dim}"
        )
    dims = torch.arange(head_dim, device=device)
    old, new = (_members(dims[:rotary_dim], axes, pairing) for pairing in (source, target))
    rows = dims.clone()
    rows[new] = old
    heads = torch.arange(num_heads, device=device)[:, None] * head_dim
    return (heads + rows).flatten()


def _members(dims: Tensor, axes: int, pairing: Pairing) -> Tensor:  # [R] -> [R]
    """The dims in the order: axis by axis, pair by pair, first member and second member."""
    if pairing == "interleaved":
        return dims
    if pairing != "half":
        raise ValueError(f'pairing: expected "interleaved" or "half", got {pairing!r}')
    if dims.numel() == 0:
        return dims
    members: Tensor = dims.unflatten(0, (axes, 2, -1)).transpose(1, 2).flatten()
    return members


def head_rows(order: Tensor, head_dim: int) -> Tensor:  # int64 [H] -> [H*D]
    """Rows of whole heads in the given order."""
    dims = torch.arange(head_dim, device=order.device)
    return (order[:, None] * head_dim + dims).flatten()


def select_rows(x: MaybeTensor, rows: Tensor) -> MaybeTensor:
    """``x[rows]`` of a weight ``[I, C]`` or bias ``[I]``; differentiable, None stays None."""
    return None if x is None else x.index_select(0, rows.to(x.device))
