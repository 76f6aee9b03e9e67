"""Puts an adapter into a module, and takes it out: the module stays, its class changes.

The new class is a subclass of the old one with another ``forward``, as ``parametrize`` and FSDP
make theirs. Parameters, their names, buffers, hooks, optimizers and everybody's references to the
module therefore stay what they are, and the old forward remains for calls that are not served.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..planner import warn_once
from .adapter import Adapter, Unserved
from .children import change_of_children
from .registry import adapter_of_kind

_STATE = "swap_state"
_classes: dict[tuple[type, str], type] = {}


def install(module: nn.Module, adapter: Adapter, state: Any) -> None:
    module.__dict__[_STATE] = state
    module.__class__ = _swapped_class(type(module), adapter)


def uninstall(module: nn.Module) -> None:
    original = vars(type(module)).get("_swapped_from")
    if original is None:
        raise RuntimeError(
            f"unswap: the class of the module was changed once more since, to "
            f"{type(module).__name__}; undo that first"
        )
    module.__class__ = original
    module.__dict__.pop(_STATE, None)


def is_swapped(module: nn.Module) -> bool:
    return hasattr(type(module), "_swapped_from")


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a swapped module computed before."""
    original: Any = type(module)._swapped_from  # type: ignore[attr-defined]
    return original.forward(module, *args, **kwargs)


def _swapped_class(original: type, adapter: Adapter) -> type:
    key = (original, adapter.kind)
    if key not in _classes or _classes[key].__dict__["_swap_adapter"] is not adapter:
        _classes[key] = _make_class(original, adapter)
    return _classes[key]


def _make_class(original: Any, adapter: Adapter) -> type:
    kind, children, compute = adapter.kind, adapter.children, adapter.forward

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        obstacle = change_of_children(self, children)
        if obstacle is None:
            result = compute(self, *args, **kwargs)
            if not isinstance(result, Unserved):
                return result
            obstacle = result.reason
        warn_once(f"a swapped {kind} runs its own forward: {obstacle}")
        return original.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # The class is made at run time, so it travels as the recipe for it.
        _, _, *rest = original.__reduce_ex__(self, max(2, int(protocol)))
        return (_revive, (original, kind), *rest)

    namespace = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "_swapped_from": original,
        "_swap_adapter": adapter,
    }
    return type(f"Swapped{original.__name__}", (original,), namespace)


def _revive(original: type, kind: str) -> Any:
    cls: Any = _swapped_class(original, adapter_of_kind(kind))
    return cls.__new__(cls)
