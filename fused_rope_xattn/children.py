"""What became of a module's children: whether their weights may be used without calling them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .norm import Norm
from .planner import PLAIN_TENSORS

_NORM_KINDS: dict[type, Literal["rms", "layer"]] = {nn.RMSNorm: "rms", nn.LayerNorm: "layer"}


def changes_of(children: dict[str, nn.Module | None], names: tuple[str, ...]) -> dict[str, str]:
    """What was done to each of these children that only calling it honours.

    A child that is not there, and one whose weights say it all, is left out.
    """
    changes = {}
    for name in names:
        change = change_of(children[name])
        if change is not None:
            changes[name] = change
    return changes


def change_of(child: nn.Module | None) -> str | None:
    """What was done to a child that only calling it honours; None if its weights say it all."""
    if child is None:
        return None
    kind = type(child)
    is_linear = kind is nn.Linear
    if not is_linear and kind not in _NORM_KINDS:
        return f"is a {kind.__name__}"
    if (
        child._forward_hooks
        or child._forward_pre_hooks
        or child._backward_hooks
        or child._backward_pre_hooks
    ):
        return "has hooks"
    if _has_any_global_hook():  # those of torch.nn.modules.module.register_module_forward_hook
        return "has global hooks"
    if "forward" in child.__dict__:
        return "has another forward"
    parameters = child._parameters
    if is_linear and not ("weight" in parameters and "bias" in parameters):
        return "holds no parameters"
    for parameter in parameters.values():
        if type(parameter) not in PLAIN_TENSORS:
            return f"holds a {type(parameter).__name__}"
    if not is_linear and not child.eps:
        return f"has eps {child.eps}"
    return None


def weight_and_bias(child: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """The parameters of an unchanged ``nn.Linear``, past the slow attributes of modules."""
    assert child is not None
    return child._parameters["weight"], child._parameters["bias"]


def as_norm(child: nn.Module | None, over: Literal["head", "inner"]) -> Norm | None:
    """An unchanged ``nn.RMSNorm`` or ``nn.LayerNorm`` as the description of its norm."""
    if not isinstance(child, (nn.RMSNorm, nn.LayerNorm)):
        return None
    bias = child.bias if isinstance(child, nn.LayerNorm) else None
    return Norm(_NORM_KINDS[type(child)], child.weight, bias, child.eps or 0.0, over)
