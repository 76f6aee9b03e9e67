"""Tensors in the middle of NaN: what a kernel reads there shows in its result, what it writes there
in the margin."""

from __future__ import annotations

import math

import torch
from torch import Tensor

WIDTH = 64  # elements on either side


class Margins:
    """Places tensors, and knows whether what surrounds them is as it was."""

    def __init__(self) -> None:
        self._margins: list[Tensor] = []

    def place(self, x: Tensor) -> Tensor:
        """A copy of ``x`` that starts at a multiple of 16 bytes."""
        whole = torch.full((x.numel() + 2 * WIDTH,), math.nan, dtype=x.dtype)
        assert whole.data_ptr() % 16 == 0
        inside = whole[WIDTH : WIDTH + x.numel()].view(x.shape)
        inside.copy_(x)
        self._margins += [whole[:WIDTH], whole[WIDTH + x.numel() :]]
        return inside

    @property
    def are_untouched(self) -> bool:
        return all(bool(margin.isnan().all()) for margin in self._margins)
