"""CPU tensors that stand for a GPU's: the planner is told that their device has kernels.

The operators' CPU implementations then run wherever a GPU would run its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rope_xattn import planner, prepare


def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The body of a fixture."""
    monkeypatch.setattr(planner, "_device_obstacle", lambda device, gpu: None)
    prepare._checked.clear()
    yield
    prepare._checked.clear()  # choices that were made under this pretence


class Operators(TorchDispatchMode):
    """Names of the operators that run, with the shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func._overloadpacket.__name__)
        results = out if isinstance(out, tuple | list) else (out,)
        self.shapes += [tuple(t.shape) for t in results if isinstance(t, Tensor)]
        return out
