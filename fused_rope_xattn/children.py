"""What became of a module's children: whether their weights may be used without calling them."""

from __future__ import annotations

from typing import Literal

from torch import nn

from .norm import Norm
from .planner import PLAIN_TENSORS

_NORM_KINDS: dict[type, Literal["rms", "layer"]] = {nn.RMSNorm: "rms", nn.LayerNorm: "layer"}


def change_of(child: nn.Module | None) -> str | None:
    """What was done to a child that only calling it honours; None if its weights say it all."""
    if child is None:
        return None
    kind = type(child)
    if kind is not nn.Linear and kind not in _NORM_KINDS:
        return f"is a {kind.__name__}"
    if (
        child._forward_hooks
        or child._forward_pre_hooks
        or child._backward_hooks
        or child._backward_pre_hooks
    ):
        return "has hooks"
    if "forward" in child.__dict__:
        return "has another forward"
    for parameter in child._parameters.values():
        if type(parameter) not in PLAIN_TENSORS:
            return f"holds a {type(parameter).__name__}"
    if kind is not nn.Linear and not child.eps:
        return f"has eps {child.eps}"
    return None


def as_norm(child: nn.Module | None, over: Literal["head", "inner"]) -> Norm | None:
    """An unchanged ``nn.RMSNorm`` or ``nn.LayerNorm`` as the description of its norm."""
    if not isinstance(child, (nn.RMSNorm, nn.LayerNorm)):
        return None
    bias = child.bias if isinstance(child, nn.LayerNorm) else None
    return Norm(_NORM_KINDS[type(child)], child.weight, bias, child.eps or 0.0, over)
