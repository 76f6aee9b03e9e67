"""Calls of cross_attention that a planner can look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ProjectedKV, plan
from ..verify.cases import Case, draw_inputs


def why_not(case: Case, path: str, device: torch.device) -> str | None:
    """Why a path cannot take a problem on a device; None if it can."""
    inputs = draw_inputs(case, device)
    try:
        plan(*inputs.args, **{**inputs.kwargs, "path": path})
    except ValueError as error:
        return str(error).rpartition("cannot be taken: ")[2]
    return None


def meta_call(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a problem given by sizes alone, on tensors without storage."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=case.storage, device="meta")

    inner, kv_inner = case.H * case.D, case.kv_heads * case.D
    x_kv: Tensor | ProjectedKV = meta(case.B, case.Tk, case.kv_width)
    w_k = w_v = None
    if case.projected:
        heads = (case.B, case.kv_heads, case.Tk, case.D)
        x_kv = ProjectedKV(meta(*heads), meta(*heads))
    else:
        w_k, w_v = meta(kv_inner, case.kv_width), meta(kv_inner, case.kv_width)
    args = [meta(case.B, case.Tq, case.Dq), x_kv, meta(inner, case.Dq), w_k, w_v]
    args.append(meta(case.out_width, inner))
    widths = {"b_q": inner, "b_k": kv_inner, "b_v": kv_inner, "b_out": case.out_width}
    biases = {
        name: meta(width)
        for name, width in widths.items()
        if case.biases and not (case.projected and name in ("b_k", "b_v"))
    }
    options = {
        "num_heads": case.H,
        "num_kv_heads": case.Hkv,
        "is_causal": case.causal,
        "dropout_p": case.dropout_p,
    }
    return args, {**options, **biases}
