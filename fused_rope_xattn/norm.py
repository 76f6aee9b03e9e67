"""The norm between projection and rotation: RMSNorm or LayerNorm, over a head or over all heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .config import NORM_KINDS, NORM_LAYER, NORM_NONE, NormSpec
from .rules import is_number, show


@dataclass(frozen=True, eq=False)
class Norm:
    """Immutable description of a q or k norm.

    Args:
        kind: ``"rms"`` or ``"layer"``.
        weight: ``[D]`` over a head, ``[H*D]`` (keys: ``[Hkv*D]``) over the inner width.
        bias: like ``weight``.
        eps: added to the mean square or variance; above 0.
        over: ``"head"`` normalises each head alone, ``"inner"`` all heads of a token together.
    """

    kind: Literal["rms", "layer"]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    over: Literal["head", "inner"] = "head"

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in NORM_KINDS:
            raise ValueError(f'Norm: kind must be "rms" or "layer", got {show(self.kind)}')
        if self.over not in ("head", "inner"):
            raise ValueError(f'Norm: over must be "head" or "inner", got {self.over!r}')
        if not is_number(self.eps):
            raise TypeError(f"Norm: eps must be a number, got {show(self.eps)}")
        # A removed key is a row of zeros here, which eps = 0 would turn into NaN.
        if not 0 < self.eps < math.inf:
            raise ValueError(f"Norm: eps must be a positive finite number, got {self.eps}")

    @property
    def spec(self) -> NormSpec:
        return NormSpec(NORM_KINDS[self.kind], self.over == "inner", float(self.eps))


def apply_norm(
    x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None
) -> Tensor:  # x [B, T, H, D] -> [B, T, H, D]
    """Normalise ``x`` in its own dtype (callers bring fp32 or fp64)."""
    if spec.kind == NORM_NONE:
        return x
    y = x.flatten(-2) if spec.inner else x
    if spec.kind == NORM_LAYER:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + spec.eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.unflatten(-1, (x.shape[-2], x.shape[-1])) if spec.inner else y
