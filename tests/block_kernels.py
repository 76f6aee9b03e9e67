"""What the emulated tests of a small block's forward and backward share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fused_rope_xattn.config import RotationSpec
from margins import Margins

SCALE = 0.2
BASE = 100.0
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # all others are stored as fp32
EPS = {
    "bf16": 2.0**-7,
    "fp16": 2.0**-10,
    "fp32": 2.0**-23,
    "tf32": 2.0**-10,
}  # of what is multiplied


class Buffers(Margins):
    """Tensors in the middle of NaN, all of one dtype unless said otherwise."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = TYPES.get(dtype, torch.float32)

    def drawn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.place((torch.randn(shape) * scale).to(self.dtype))

    def blank(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.place(torch.full(shape, math.nan, dtype=dtype or self.dtype))


def half(rotary_dim: int, axes: int = 1, full_width: bool = False) -> RotationSpec:
    return RotationSpec(rotary_dim, False, axes, full_width, BASE)


def neighbours(rotary_dim: int, axes: int = 1, full_width: bool = False) -> RotationSpec:
    return RotationSpec(rotary_dim, True, axes, full_width, BASE)
