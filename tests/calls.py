"""A small valid call of each entry point, with some arguments replaced: for tests of refusals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fused_rope_xattn import FusedRoPECrossAttention, ProjectedKV, cross_attention, project_kv

B, TQ, TK, H, D, DQ, DKV, DOUT = 2, 5, 7, 4, 8, 24, 40, 48
NAMES = ("x_query", "x_kv", "w_q", "w_k", "w_v", "w_out")


def tensors() -> dict[str, Tensor]:
    """A valid value of every tensor argument of cross_attention."""
    return {
        "x_query": torch.randn(B, TQ, DQ),
        "x_kv": torch.randn(B, TK, DKV),
        "w_q": torch.randn(H * D, DQ),
        "w_k": torch.randn(H * D, DKV),
        "w_v": torch.randn(H * D, DKV),
        "w_out": torch.randn(DOUT, H * D),
        "b_q": torch.randn(H * D),
        "b_k": torch.randn(H * D),
        "b_v": torch.randn(H * D),
        "b_out": torch.randn(DOUT),
        "x_value": torch.randn(B, TK, DKV),
        "q_positions": torch.arange(TQ),
        "k_positions": torch.arange(TK),
        "kv_lengths": torch.full((B,), TK),
        "kv_keep_mask": torch.ones(B, TK, dtype=torch.bool),
        "attn_bias": torch.randn(B, H, TQ, TK),
    }


def call(**changes: Any) -> Any:
    """cross_attention; besides the tensors that it needs it gets none but those of ``changes``."""
    valid = tensors()
    arguments: dict[str, Any] = {name: valid[name] for name in NAMES}
    arguments |= {"num_heads": H, **changes}
    return cross_attention(*[arguments.pop(name) for name in NAMES], **arguments)


def cached(**changes: Any) -> Any:
    """cross_attention on a ProjectedKV."""
    kv = ProjectedKV(torch.randn(B, H, TK, D), torch.randn(B, H, TK, D))
    return call(**{"x_kv": kv, "w_k": None, "w_v": None, **changes})


def project(**changes: Any) -> Any:
    """project_kv."""
    valid = tensors()
    arguments: dict[str, Any] = {name: valid[name] for name in ("x_kv", "w_k", "w_v")}
    return project_kv(**{**arguments, "num_heads": H, **changes})


def build(**changes: Any) -> Any:
    """The module's constructor."""
    return FusedRoPECrossAttention(**{"dim": 32, "num_heads": 4, **changes})


def forwarded(**changes: Any) -> Any:
    """The module's forward."""
    return _forward(FusedRoPECrossAttention(DQ, H, kv_dim=DKV, inner_dim=H * D), changes)


def forwarded_by_children(**changes: Any) -> Any:
    """The module's forward where children were changed, and so are called themselves."""
    return _forward(_with_changed_children(), changes)


def projected_by_children(**changes: Any) -> Any:
    """The module's project_kv where children were changed."""
    return _with_changed_children().project_kv(**{"x_kv": tensors()["x_kv"], **changes})


def _with_changed_children() -> Any:
    module = FusedRoPECrossAttention(DQ, H, kv_dim=DKV, inner_dim=H * D)
    for name in ("q_proj", "k_proj"):
        setattr(module, name, nn.Sequential(getattr(module, name)))
    return module


def _forward(module: nn.Module, changes: dict[str, Any]) -> Any:
    valid = tensors()
    arguments: dict[str, Any] = {name: valid[name] for name in ("x_query", "x_kv")}
    return module(**{**arguments, **changes})
