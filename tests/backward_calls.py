"""Backward passes of the attention operator itself, for tests on a Hopper."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import grouped, ops
from fused_rope_xattn.config import RotationSpec
from fused_rope_xattn.ops import UNTURNED, ScoreOptions, Turning, TurningTensors


def on_hopper() -> None:
    if torch.cuda.get_device_capability() != grouped.CAPABILITY:
        pytest.skip("the kernels are Hopper's")


class Problem(NamedTuple):
    """A forward that is done."""

    tensors: tuple[
        Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
    ]  # dout, dlse, q, k, v, o, lse
    options: ScoreOptions
    o_rest: Tensor


def solved(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: Tensor | None, dropout_p: float
) -> Problem:
    seed = torch.tensor([7], device="cuda")
    options = ScoreOptions(
        None, None, None, lengths, seed, q.shape[-1] ** -0.5, False, dropout_p, False
    )
    o, lse, rest = ops.attention_forward_with_rest(q, k, v, options)
    return Problem((dout, torch.ones_like(lse), q, k, v, o, lse), options, rest)


def backward(
    p: Problem,
    spec: RotationSpec | None = None,
    *,
    deterministic: bool = False,
    need_dq: bool = True,
) -> tuple[Tensor, ...]:
    side = UNTURNED if spec is None else Turning(TurningTensors(), spec)
    return ops.attention_backward(
        *p.tensors,
        p.options,
        need_dq=need_dq,
        need_dkv=True,
        need_dbias=False,
        deterministic=deterministic,
        o_rest=p.o_rest,
        q_turning=side,
        k_turning=side,
    )
