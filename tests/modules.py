"""Modules and data that tests of the module share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fused_rope_xattn import FusedRoPECrossAttention, cross_attention

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def build(device: str = "cpu", dim: int = 64, heads: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    return FusedRoPECrossAttention(dim, heads, device=device, **options)


def data(
    device: str = "cpu", dim: int = 64, kv_dim: int = 64, **options: Any
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return (
        torch.randn(2, 17, dim, device=device, **options),
        torch.randn(2, 29, kv_dim, device=device, **options),
    )


def functional(module: Any, x: Tensor, kv: Tensor, **options: Any) -> Any:
    """The same call written with the function."""
    linears = [getattr(module, n) for n in PROJECTIONS]
    biases = dict(zip(("b_q", "b_k", "b_v", "b_out"), (m.bias for m in linears)))
    return cross_attention(x, kv, *(m.weight for m in linears), num_heads=4, **biases, **options)


def grads_of(module: nn.Module, y: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)
    y.backward(torch.randn_like(y))
    grads = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    return grads
