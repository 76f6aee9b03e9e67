"""Whether the children that an adapter reads are what they were when it was written."""

from __future__ import annotations

from torch import nn

from ..children import change_of


def change_of_children(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """What was done to a child, by its name, that only calling it honours; None if nothing."""
    for name in names:
        child: nn.Module | None = module
        for part in name.split("."):
            child = None if child is None else child._modules.get(part)
        what = change_of(child)
        if what is not None:
            return f"{name} {what}"
    return None
