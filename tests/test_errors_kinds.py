"""Arguments of the wrong kind, wherever they are given: refused by name, as what they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calls import (
    DKV,
    DQ,
    TK,
    TQ,
    B,
    D,
    H,
    build,
    cached,
    call,
    forwarded,
    forwarded_by_children,
    project,
    projected_by_children,
    tensors,
)
from fused_rope_xattn import Norm, ProjectedKV, RoPE, RotaryTable, plan

TENSORS = tuple(tensors())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def refused(argument: str, kinds: Any, run: Callable[..., Any], **changes: Any) -> None:
    with pytest.raises(kinds) as caught:
        run(**changes)
    assert argument in str(caught.value), str(caught.value)
    assert "expected" in str(caught.value) or "must" in str(caught.value), str(caught.value)


# ---- tensors ----

NO_TENSORS = {
    "list": [[1.0]],
    "tuple": (1.0, 2.0),
    "number": 1.0,
    "bool": True,
    "word": "auto",
    "array": np.zeros((2, 3), np.float32),
    "module": nn.Linear(2, 3),
}


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize("argument", TENSORS)
def test_what_is_no_tensor(argument: str, kind: str) -> None:
    refused(argument, TypeError, call, **{argument: NO_TENSORS[kind]})


@pytest.mark.parametrize("argument", TENSORS)
def test_sparse_tensors(argument: str) -> None:
    """Also after the same call with dense ones, which was checked."""
    dense = tensors()[argument]
    call(**{argument: dense})
    refused(argument, TypeError, call, **{argument: dense.to_sparse()})


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("argument", ["x_query", "x_kv", "x_value", "w_q", "attn_bias"])
def test_nested_tensors(argument: str, layout: torch.layout) -> None:
    parts = [torch.randn(3, DQ), torch.randn(5, DQ)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    refused(argument, TypeError, call, **{argument: nested})


@pytest.mark.parametrize("argument", TENSORS)
def test_other_devices(argument: str) -> None:
    refused(argument, ValueError, call, **{argument: tensors()[argument].to("meta")})


@pytest.mark.parametrize("argument", [n for n in TENSORS if n != "kv_keep_mask"])
def test_complex_tensors(argument: str) -> None:
    values = tensors()[argument].to(torch.complex64)
    refused(argument, TypeError, call, **{argument: values})


@pytest.mark.parametrize("argument", TENSORS)
def test_one_axis_too_many(argument: str) -> None:
    refused(argument, ValueError, call, **{argument: tensors()[argument][None, None]})


@pytest.mark.parametrize("argument", [n for n in TENSORS if n != "attn_bias"])
def test_scalars(argument: str) -> None:
    """attn_bias alone may be one: it is broadcast."""
    scalar = tensors()[argument].flatten()[0].clone()
    refused(argument, ValueError, call, **{argument: scalar})


@pytest.mark.parametrize(
    "argument", [n for n in TENSORS if n not in ("x_query", "w_out", "attn_bias")]
)
def test_one_more_in_the_first_axis(argument: str) -> None:
    wrong = torch.cat([tensors()[argument], tensors()[argument][:1]])
    refused(argument, ValueError, call, **{argument: wrong})


@pytest.mark.parametrize("argument", ["x_query", "x_kv", "w_q", "w_k", "b_q", "x_value"])
def test_under_autocast(argument: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        refused(argument, TypeError, call, **{argument: [1.0]})
        refused(argument, TypeError, call, **{argument: tensors()[argument].long()})


def _pair(side: str, cos: Any, sin: Any) -> dict[str, Any]:
    table = RotaryTable(cos, sin)
    return {"rope": (table, None) if side == "q" else (None, table)}


@pytest.mark.parametrize("kind", [None, [1.0], 1.0, np.ones((TQ, 4), np.float32)], ids=type)
@pytest.mark.parametrize("part", ["cos", "sin"])
def test_tables_of_no_tensors(part: str, kind: Any) -> None:
    good = torch.ones(TQ, D // 2)
    parts = (kind, good) if part == "cos" else (good, kind)
    refused(f"rope[0].{part}", TypeError, call, **_pair("q", *parts))


@pytest.mark.parametrize("part", ["cos", "sin"])
def test_tables_of_wrong_tensors(part: str) -> None:
    good = torch.ones(TK, D // 2)
    for wrong, error in (
        (good.long(), TypeError),
        (good.to_sparse(), TypeError),
        (good.to("meta"), ValueError),
        (good[0], ValueError),
        (good.flatten()[0], ValueError),
        (good[None, None, None], ValueError),
        (good[1:], ValueError),
    ):
        parts = (wrong, good) if part == "cos" else (good, wrong)
        refused(f"rope[1].{part}", error, call, **_pair("k", *parts))


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("side", ["q", "k"])
def test_norms_of_wrong_tensors(side: str, part: str) -> None:
    good = torch.ones(D)
    for wrong, error in (
        ([1.0] * D, TypeError),
        (1.0, TypeError),
        (good.long(), TypeError),
        (good.to_sparse(), TypeError),
        (good.to("meta"), ValueError),
        (good[1:], ValueError),
        (good[None], ValueError),
    ):
        norm = Norm("layer", **{"weight": good, part: wrong})
        refused(f"{side}_norm.{part}", error, call, **{f"{side}_norm": norm})


KEYS = torch.randn(B, H, TK, D)


@pytest.mark.parametrize(
    "kv, argument, error",
    [
        (ProjectedKV(None, None), "x_kv.k", TypeError),
        (ProjectedKV(KEYS, None), "x_kv.v", TypeError),
        (ProjectedKV([1], KEYS), "x_kv.k", TypeError),
        (ProjectedKV(KEYS.to_sparse(), KEYS), "x_kv.k", TypeError),
        (ProjectedKV(KEYS[:1], KEYS[:1]), "x_kv.k", ValueError),
        (ProjectedKV(KEYS.to("meta"), KEYS), "x_kv.k", ValueError),
        (ProjectedKV(KEYS, KEYS[:, :2]), "x_kv.v", ValueError),
        (ProjectedKV(KEYS, KEYS.half()), "x_kv.v", TypeError),
        ((KEYS, KEYS), "x_kv", TypeError),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_wrong_projected_keys_and_values(kv: Any, argument: str, error: type[Exception]) -> None:
    refused(argument, error, cached, x_kv=kv)


# ---- numbers, words and descriptions ----

NUMBERS: dict[str, list[Any]] = {
    "num_heads": [None, "4", 4.0, True, [4], torch.tensor(4), 0, -4],
    "num_kv_heads": ["2", 2.0, False, [2], 0, -1, 3],
    "dropout_p": [None, "0.1", True, 1j, [0.1], torch.tensor(0.1), -0.1, 1.01, float("nan")],
    "scale": ["1", True, 1j, [1.0], torch.tensor(0.1), float("nan"), -float("inf")],
    "is_causal": [None, 0, 1, "True", torch.tensor(True)],
    "return_lse": [None, 0, 1, "False"],
    "path": [None, 1, ["auto"], "Fused", ""],
    "rope": ["half", RoPE, [RoPE(), RoPE()], (RoPE(),), (1.0, None), {"base": 1.0}, 10000.0],
    "q_norm": ["rms", Norm, torch.ones(D), nn.RMSNorm(D)],
    "k_norm": ["rms", 1.0, (Norm("rms"),)],
}


@pytest.mark.parametrize("argument", NUMBERS)
def test_numbers_and_descriptions(argument: str) -> None:
    for value in NUMBERS[argument]:
        refused(argument, (TypeError, ValueError), call, **{argument: value})


def test_what_project_kv_shares() -> None:
    for argument in ("num_heads", "num_kv_heads", "rope", "k_norm"):
        for value in NUMBERS[argument]:
            refused(argument, (TypeError, ValueError), project, **{argument: value})
    for argument in ("x_kv", "w_k", "w_v", "b_k", "b_v", "x_value", "k_positions"):
        for value in (*NO_TENSORS.values(), tensors()[argument].to_sparse()):
            refused(argument, TypeError, project, **{argument: value})
    kv = ProjectedKV(KEYS, KEYS)
    for argument, value in (("x_kv", None), ("x_kv", kv), ("w_k", None), ("w_v", None)):
        refused(argument, TypeError, project, **{argument: value})


DESCRIPTIONS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "base": (RoPE, ["10000", None, True, torch.tensor(10.0), 0.0, -1, float("inf")]),
    "rotary_dim": (RoPE, ["4", 4.0, True, -2, 3]),
    "axes": (RoPE, ["2", 2.0, None, True, 0]),
    "interleaved": (RoPE, [None, "half", 1]),
    "kind": (Norm, [None, "batch", 1, torch.ones(2)]),
    "eps": (lambda **o: Norm("rms", **o), ["1e-6", None, True, 0.0, -1.0, float("nan")]),
    "over": (lambda **o: Norm("rms", **o), [None, "all", 1]),
    "full_width": (lambda **o: RotaryTable(KEYS, KEYS, **o), [None, 1, "yes"]),
}


@pytest.mark.parametrize("field", DESCRIPTIONS)
def test_descriptions_name_their_fields(field: str) -> None:
    make, values = DESCRIPTIONS[field]
    for value in values:
        refused(field, (TypeError, ValueError), make, **{field: value})


# ---- the module ----

OPTIONS: dict[str, list[Any]] = {
    "dim": [None, "32", 32.0, 0, -32],
    "num_heads": [None, "4", 4.0, 0, -4, 5],
    "dropout": [None, "0.1", True, -0.5, 1.5, float("nan")],
    "base": [],
    "kv_dim": ["8", 2.5, 0, -1],
    "value_dim": ["8", 2.5, 0, -1],
    "inner_dim": ["8", 2.5, 0],
    "out_dim": ["8", 2.5, 0],
    "num_kv_heads": ["2", 2.0, 0, 3, 8],
    "bias": [None, "yes", 1],
    "out_bias": ["no", 0],
    "qk_norm": [True, "batch", nn.LayerNorm],
    "qk_norm_over": [None, "all"],
    "scale": ["1", True, float("nan")],
    "rope": ["other", 1.0, RotaryTable(KEYS, KEYS), RoPE(rotary_dim=64), (RoPE(),) * 3],
    "dtype": [torch.int32, torch.complex64, "float32"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_module(option: str) -> None:
    for value in OPTIONS[option]:
        refused(option, (TypeError, ValueError), build, **{option: value})
    if option == "base":
        for value in ("x", None, 0.0):
            refused(option, (TypeError, ValueError), build, rope_base=value)


FORWARD: dict[str, list[Any]] = {
    "x_query": [None, [1.0], torch.randn(TQ, DQ), torch.randn(B, TQ, DQ).to_sparse()],
    "x_kv": [None, [1.0], torch.randn(TK, DKV), torch.randn(3, TK, DKV), (KEYS, KEYS)],
    "x_value": [[1.0], torch.randn(B, TK + 1, DKV), torch.randn(TK, DKV)],
    "q_positions": [[1.0], torch.ones(TQ + 1)],
    "k_positions": [[1.0], torch.ones(TK + 1)],
    "kv_lengths": [[7, 7], torch.ones(B), torch.ones(3).int()],
    "kv_keep_mask": [[True], torch.ones(B, TK), torch.ones(TK).bool()],
    "attn_bias": [0.5, torch.ones(TQ, TQ), torch.ones(TQ, TK).bool()],
    "is_causal": [None, 1],
    "return_lse": [None, 1],
    "rope": ["other", 1.0, (RoPE(),)],
}


@pytest.mark.parametrize("argument", FORWARD)
@pytest.mark.parametrize("run", [forwarded, forwarded_by_children])
def test_arguments_of_forward(argument: str, run: Callable[..., Any]) -> None:
    for value in FORWARD[argument]:
        refused(argument, (TypeError, ValueError), run, **{argument: value})


@pytest.mark.parametrize("argument", ["x_kv", "x_value", "k_positions", "rope"])
def test_arguments_of_the_modules_project_kv(argument: str) -> None:
    for value in FORWARD[argument]:
        if not (argument == "x_kv" and isinstance(value, torch.Tensor) and len(value) == 3):
            refused(argument, (TypeError, ValueError), projected_by_children, **{argument: value})


def test_a_plan_is_for_a_gpu() -> None:
    valid = tensors()
    args = [valid[name] for name in ("x_query", "x_kv", "w_q", "w_k", "w_v", "w_out")]
    for gpu in ("h100", 0, SimpleNamespace()):
        refused("gpu", TypeError, lambda gpu=gpu: plan(*args, num_heads=H, gpu=gpu))


def test_the_calls_they_spoil_are_right() -> None:
    valid = tensors()
    assert call(**valid).shape == (B, TQ, 48)
    assert call().shape == cached().shape == (B, TQ, 48)
    assert project().k.shape == (B, H, TK, D)
    assert forwarded().shape == forwarded_by_children().shape == (B, TQ, DQ)
    assert build().num_heads == 4
