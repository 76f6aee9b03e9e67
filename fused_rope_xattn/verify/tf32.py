"""An eager block in TF32 by definition, whatever library multiplies its matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Matrix products, and which of their arguments are factors.
_FACTORS: dict[Callable[..., Any], slice] = {
    torch.ops.aten.mm.default: slice(0, 2),
    torch.ops.aten.bmm.default: slice(0, 2),
    torch.ops.aten.addmm.default: slice(1, 3),
    torch.ops.aten.baddbmm.default: slice(1, 3),
}


class RoundedFactors(TorchDispatchMode):
    """Within it, every fp32 matrix product takes its factors rounded to TF32.

    That is what a TF32 tensor core does. cuBLAS, told that it may, uses one or not as the shape
    suggests, so its error says nothing about what TF32 costs.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        factors = _FACTORS.get(func)
        if factors is not None:
            args = list(args)
            args[factors] = [round_to_tf32(x) for x in args[factors]]
        return func(*args, **(kwargs or {}))


def round_to_tf32(x: Tensor) -> Tensor:
    """The nearest number with 10 bits of mantissa; halves away from zero."""
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
