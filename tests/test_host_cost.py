"""What Python does between a call and its operators: a count of frames, since time is noisy."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import fused_rope_xattn
from fused_rope_xattn import (
    FusedRoPECrossAttention,
    RoPE,
    cross_attention,
    inputs,
    planner,
    prepare,
)
from fused_rope_xattn.verify.cases import BASELINE, draw_inputs
from pretence import Operators, kernels_everywhere

SMALL = replace(BASELINE, B=2, Tq=8, Tk=16, Dq=64, H=4, D=16, dtype="bf16")
PACKAGE = fused_rope_xattn.__path__[0]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from kernels_everywhere(monkeypatch)


def frames(call: Callable[[], Any]) -> Counter[str]:
    """Python functions of the package that a call enters, without those below its operators."""
    seen: Counter[str] = Counter()
    below = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal below
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return
        if name.endswith(("cpu_ops.py", "cpu_block_ops.py")):
            below += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not below:
            seen[f"{name.removeprefix(PACKAGE)}:{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def calls() -> dict[str, Callable[[], Any]]:
    case = draw_inputs(SMALL)
    args, kwargs = case.call()
    module = FusedRoPECrossAttention(64, 4, dtype=torch.bfloat16).eval()
    normed = FusedRoPECrossAttention(64, 4, dtype=torch.bfloat16, qk_norm="rms").eval()
    x, kv = args[0], args[1]
    return {
        "fused": lambda: cross_attention(*args, **kwargs),
        "split": lambda: cross_attention(*args, **kwargs, path="split"),
        "module": lambda: module(x, kv),
        "module with norms": lambda: normed(x, kv),
    }


# Frames of a repeated call under no_grad: 30, 69, 46 and 95 when these bounds were set.
MOST_FRAMES = {"fused": 40, "split": 80, "module": 55, "module with norms": 105}


@pytest.mark.parametrize("name", MOST_FRAMES)
def test_a_repeated_call_enters_few_functions(name: str) -> None:
    call = calls()[name]
    with torch.no_grad():
        call()
        seen = frames(call)
    assert sum(seen.values()) <= MOST_FRAMES[name], seen.most_common()
    checks = [n for n in seen if "inputs.py" in n or ":_choose" in n or "_obstacle" in n]
    assert checks == ["/planner.py:_passing_obstacle"], checks


def test_equal_calls_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    check = inputs.check
    monkeypatch.setattr(prepare, "check", lambda *a: checked.append(1) or check(*a))
    case = draw_inputs(SMALL)
    args, kwargs = case.call()
    with torch.no_grad():
        for _ in range(3):
            cross_attention(*args, **kwargs)
            cross_attention(*[t.clone() for t in args], **kwargs)
        assert len(checked) == 1
        for change in ({"scale": 0.5}, {"dropout_p": 0.5}, {"is_causal": True}, {"path": "split"}):
            cross_attention(*args, **{**kwargs, **change})
        cross_attention(args[0][:, 1:], *args[1:], **kwargs)
        assert len(checked) == 6


def test_no_field_of_a_rotation_is_forgotten() -> None:
    """Calls that differ in one of them are not equal; nor is a call with what looks like them."""
    others = {"base": 9.0, "rotary_dim": 8, "interleaved": False, "axes": 2}
    assert others.keys() == {field.name for field in fields(RoPE) if field.init}
    case = draw_inputs(SMALL)
    args, kwargs = case.call()
    results = [cross_attention(*args, **kwargs | {"rope": RoPE()})]
    for name, other in others.items():
        positions = {
            f"{side}_positions": torch.arange(tokens)[:, None].expand(-1, 2)
            if name == "axes"
            else None
            for side, tokens in (("q", SMALL.Tq), ("k", SMALL.Tk))
        }
        changed = {"rope": RoPE(**{name: other}), **positions}
        results.append(cross_attention(*args, **kwargs | changed))
    for a, b in itertools.combinations(results, 2):
        assert not torch.equal(a, b)
    with pytest.raises(TypeError, match="rope"):
        cross_attention(*args, **kwargs | {"rope": ("10000.0", None, True, 1)})


def operators(call: Callable[[], Any]) -> Operators:
    recorder = Operators()
    with torch.no_grad():
        call()
        with recorder:
            call()
    return recorder


def test_a_small_call_is_one_operator() -> None:
    """No copy, no cast and no arithmetic on the way: views apart, that is all that is launched."""
    for name in ("fused", "module"):
        found = [n for n in operators(calls()[name]).names if n != "detach"]
        assert found == ["block_forward"], found


def test_switches_are_read_in_every_call() -> None:
    """What torch's global switches say is no part of what is remembered."""
    case = draw_inputs(replace(SMALL, dtype="fp32"))
    args, kwargs = case.call()
    seen = []
    for deterministic in (False, True, False):
        torch.use_deterministic_algorithms(deterministic)
        prepared = planner.prepare(_arguments(args, kwargs))
        seen.append(prepared.config.deterministic)
    assert seen == [False, True, False]


def test_the_path_follows_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes the path that plan() names, though a call like it was made under another
    switch: in plain TF32 fewer problems are small."""
    case = draw_inputs(replace(SMALL, B=8, Tq=160, H=8, dtype="fp32"))
    args, kwargs = case.call()
    for tf32 in (False, True, False):
        monkeypatch.setattr(prepare, "allows_tf32", lambda device_type, on=tf32: on)
        ran = operators(lambda: cross_attention(*args, **kwargs)).names
        planned = planner.plan(*args, **kwargs).path
        assert planned == ("split" if tf32 else "fused")
        assert ("block_forward" in ran) is (planned == "fused"), (tf32, ran)


def _arguments(args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = ("x_query", "x_kv", "w_q", "w_k", "w_v", "w_out")
    return fused_rope_xattn.arguments.Arguments(**dict(zip(names, args)), **kwargs)


def test_what_passes_is_asked_in_every_call() -> None:
    """Transforms and trainable tables decide anew, though the signature is the same."""
    case = draw_inputs(SMALL)
    args, kwargs = case.call()

    def path(**changes: Any) -> str:
        prepared = planner.prepare(_arguments(args, {**kwargs, **changes}))
        known = prepare.check_once(_arguments(args, {**kwargs, **changes}), "block", False)
        return planner.choose(prepared, "auto", known=known.choices).path

    positions = torch.arange(8.0)
    assert path() == path() == path(q_positions=positions) == "fused"
    assert path(q_positions=positions.clone().requires_grad_()) == "composite"
    assert path(q_positions=positions) == "fused"
    seen = []
    torch.func.vmap(lambda x: seen.append(path()) or x)(torch.ones(2))
    assert seen == ["composite"] and path() == "fused"
