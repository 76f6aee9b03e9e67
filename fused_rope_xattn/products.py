"""The product of a projection that is normed or rotated next: its sums are not rounded in between.

q and k are rounded to the storage type once, after norm and rotation, on every path.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of norm, rotation and softmax."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # [B, T, N]
    """``F.linear`` of a half type with its result in fp32."""
    wide = compute_dtype(x)
    if x.dtype == wide:
        return F.linear(x, weight, bias)
    if _tensor_cores_may_widen(x, weight):
        rows: Tensor = WideProduct.apply(x.flatten(0, 1), weight)
        y: Tensor = rows.unflatten(0, x.shape[:2])
    else:
        y = F.linear(x.to(wide), weight.to(wide))
    return y if bias is None else y + bias.to(wide)


def _tensor_cores_may_widen(x: Tensor, weight: Tensor) -> bool:
    """Whether :class:`WideProduct` serves; wherever else, fp32 copies give the same result."""
    return (
        x.is_cuda
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in (x, weight))
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class WideProduct(torch.autograd.Function):
    """``rows @ weight.T`` straight out of the accumulators.

    torch can compute that but not differentiate it. The backward is made of ordinary products, as
    that of ``F.linear`` is, and so can be differentiated any number of times.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # [N, C], [M, C] -> [N, M]
        ctx.save_for_backward(rows, weight)
        return product(rows, weight)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight = ctx.needs_input_grad
        dz = dz.to(rows.dtype)
        return dz @ weight if wants_rows else None, dz.t() @ rows if wants_weight else None


def product(rows: Tensor, weight: Tensor) -> Tensor:  # [N, C], [M, C] -> [N, M]
    """``rows @ weight.T`` with its sums in :func:`compute_dtype`; not differentiable on a GPU."""
    wide = compute_dtype(rows)
    if rows.is_cuda and rows.dtype != wide:
        return torch.mm(rows, weight.t(), out_dtype=wide)
    return rows.to(wide) @ weight.to(wide).t()
