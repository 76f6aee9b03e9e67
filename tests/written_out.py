"""Pieces of published blocks, written out from their formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# fp32 on both sides; sums of some hundred terms in another order.
TOLERANCE = 2e-5


def heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge(o: Tensor) -> Tensor:
    return o.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (s if mask is None else s.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def j_interleaved(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def j_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def linears(device: str, bias: bool = True, **shapes: tuple[int, int]) -> dict[str, nn.Linear]:
    torch.manual_seed(0)
    return {n: nn.Linear(i, o, bias=bias, device=device) for n, (i, o) in shapes.items()}


def weights(layers: dict[str, nn.Linear]) -> tuple[list[Tensor], dict[str, Any]]:
    """Positional weights and keyword biases of cross_attention for layers q, k, v and out."""
    biases = {f"b_{n}": layers[n].bias for n in layers if layers[n].bias is not None}
    return [layers[n].weight for n in ("q", "k", "v", "out")], biases


def agree(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    """Outputs and the gradients of all leaves."""
    grad = torch.randn_like(theirs)
    got = [ours, *torch.autograd.grad(ours, leaves, grad, retain_graph=True)]
    want = [theirs, *torch.autograd.grad(theirs, leaves, grad)]
    for a, b in zip(got, want):
        assert float((a - b).abs().max()) <= TOLERANCE * max(1.0, float(b.abs().max()))


def leaves_of(layers: dict[str, nn.Linear], *tensors: Tensor) -> list[Tensor]:
    return [*tensors, *(p for m in layers.values() for p in m.parameters())]


def sam2_angles(width: int, height: int, head_dim: int, device: str) -> Tensor:
    """[w*h, D/2], x first, then y."""
    t = torch.arange(width * height, device=device)
    frequency = 1e4 ** (-4.0 * torch.arange(head_dim // 4, device=device) / head_dim)
    return torch.cat([(t % width)[:, None] * frequency, (t // width)[:, None] * frequency], dim=-1)


def complex_rotate(x: Tensor, angle: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
