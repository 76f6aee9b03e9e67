"""Attention of other packages, between the same projections and rotations as SDPA's.

Each takes q [B, H, Tq, D], k and v [B, Hkv, Tk, D] and returns o [B, Tq, H, D]; their own layout is
[B, T, H, D], which transposing costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .case import Case

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HALF = (torch.float16, torch.bfloat16)


class Core(NamedTuple):
    """The attention of one package."""

    name: str
    module: str
    build: Callable[[Any, Case], Attend]  # from the imported module
    dropout: bool = True
    grouped: bool = True
    dtypes: tuple[torch.dtype, ...] = HALF

    @property
    def installed(self) -> bool:
        top = self.module.partition(".")[0]
        return importlib.util.find_spec(top) is not None

    def covers(self, case: Case) -> bool:
        """Whether it can compute a problem; none of them takes any mask or bias that SDPA does."""
        return (
            case.storage in self.dtypes
            and all(option == "none" for option in (case.lengths, case.mask, case.bias))
            and (self.dropout or case.dropout_p == 0)
            and (self.grouped or case.kv_heads == case.H)
        )

    def attend(self, case: Case) -> Attend:
        return self.build(importlib.import_module(self.module), case)


def _scale(case: Case) -> float:
    return case.D**-0.5 if case.scale is None else case.scale


def _tokens_first(*heads_first: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in heads_first]


def _flash_2(module: Any, case: Case) -> Attend:
    options = {"dropout_p": case.dropout_p, "softmax_scale": _scale(case), "causal": case.causal}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = module.flash_attn_func(*_tokens_first(q, k, v), **options)
        return o

    return attend


def _flash_3(module: Any, case: Case) -> Attend:
    options = {"softmax_scale": _scale(case), "causal": case.causal}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = module.flash_attn_func(*_tokens_first(q, k, v), **options)
        result: Tensor = o[0] if isinstance(o, tuple) else o  # some versions add the lse
        return result

    return attend


def _xformers(module: Any, case: Case) -> Attend:
    bias = module.fmha.attn_bias.LowerTriangularFromBottomRightMask() if case.causal else None
    options = {"attn_bias": bias, "p": case.dropout_p, "scale": _scale(case)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = module.memory_efficient_attention(*_tokens_first(q, k, v), **options)
        return o

    return attend


def _transformer_engine(module: Any, case: Case) -> Attend:
    attention = module.DotProductAttention(
        case.H,
        case.D,
        num_gqa_groups=case.kv_heads,
        attention_dropout=case.dropout_p,
        qkv_format="bshd",
        attn_mask_type="causal_bottom_right" if case.causal else "no_mask",
        softmax_scale=_scale(case),
    ).train()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.contiguous() for x in _tokens_first(q, k, v))  # it insists
        o: Tensor = attention(q, k, v).unflatten(-1, (case.H, case.D))
        return o

    return attend


CORES: dict[str, Core] = {
    core.name: core
    for core in (
        Core("flash-attn", "flash_attn", _flash_2),
        Core("flash-attn-3", "flash_attn_interface", _flash_3, dropout=False),
        Core("xformers", "xformers.ops", _xformers, grouped=False, dtypes=(*HALF, torch.float32)),
        Core("TransformerEngine", "transformer_engine.pytorch", _transformer_engine),
    )
}
