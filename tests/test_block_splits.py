"""Small blocks with few tiles: blocks that share keys or depth, and rows with a single key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_rope_xattn import fused, planner, prepare
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.cases import ROWS, Case
from pretence import Operators
from problems import assert_bits, forward, small
from test_fused import DTYPES, planned

DECODE = ROWS["decode_cached_bf16"]
STREAMED = Case("streamed", 2, 3, 2100, H=4, Hkv=2, D=64, Dq=1024, projected=True, biases="qo")


@pytest.mark.parametrize("changes", [{}, {"Tq": 8, "B": 1}, {"Tk": 700, "D": 128, "H": 8}])
def test_few_queries_take_any_number_of_finished_keys(changes: dict[str, Any]) -> None:
    assert planned(replace(DECODE, **changes)).path == "fused"


@pytest.mark.parametrize(
    "changes",
    [
        {"Tq": fused.FEW_QUERIES + 1, "B": 1},
        {"Tq": fused.FEW_QUERIES, "B": 32},
        {"bias": "h11"},
        {"Tk": fused.MOST_STREAMED_KEYS + 1},
        {"projected": False, "Dkv": 8, "Dv": 8},
    ],
    ids=lambda c: "-".join(c),
)
def test_others_do_not(changes: dict[str, Any]) -> None:
    assert planned(replace(DECODE, **changes)).path == "split"


def test_training_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it after the same call without gradients, whose choice is remembered."""
    monkeypatch.setattr(planner, "_device_obstacle", lambda device, gpu: None)
    inputs = small("cpu", Tq=3, Tk=1500, D=16, Dq=64, projected=True)
    prepare._checked.clear()
    paths = []
    for recorded in (False, True, False):
        with torch.set_grad_enabled(recorded), Operators() as operators:
            forward(inputs)
        paths.append("block_forward" in operators.names)
    prepare._checked.clear()
    assert paths == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"D": 32, "lengths": "ragged", "mask": "keys", "lse": True},
        {"D": 128, "B": 1, "Tq": 17, "Tk": 1100, "causal": True, "lse": True},
        {"B": 1, "Tq": 1, "Tk": 700, "H": 16, "Hkv": 16, "Dout": 0},
        {"Tk": 512, "projected": False, "Dkv": 40, "biases": "qkvo", "lengths": "zero"},
    ],
    ids=lambda c: "-".join(c) or "plain",
)
def test_shared_tiles_meet_the_budget(changes: dict[str, Any], dtype: str) -> None:
    assert_accurate(replace(STREAMED, dtype=dtype, **changes), path="fused", device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("D", fused.HEAD_DIMS)
def test_a_single_key_keeps_the_gradient_of_lse(D: int) -> None:
    """A score's gradient is that of lse there: nothing of dout may be left of it."""
    case = Case("single", 16, 1, 1, H=4, D=D, Dq=64, biases="qkvo", lse=True, dtype="fp32")
    assert_accurate(case, path="fused", device="cuda")


@pytest.mark.gpu
def test_shared_tiles_give_the_same_bits() -> None:
    inputs = small("cuda", B=1, Tk=900, lse=True)
    first = dict(zip(("y", "lse"), forward(inputs, "fused"), strict=True))
    for _ in range(20):
        assert_bits(dict(zip(("y", "lse"), forward(inputs, "fused"), strict=True)), first)
    assert all(bool(torch.isfinite(x).all()) for x in first.values())
