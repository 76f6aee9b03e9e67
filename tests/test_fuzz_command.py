"""Problems by the thousand: a few hundred of them here, and that a wrong result would be found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import cross_attention
from fused_rope_xattn.__main__ import main
from fused_rope_xattn.verify import fuzz
from fused_rope_xattn.verify.accuracy import Verdict
from fused_rope_xattn.verify.fuzz import Run
from fused_rope_xattn.verify.fuzz_problems import LARGEST_TOKENS, draw_problem

PROBLEMS = 160
FEW = 10


def failures(run: Run, indices: range) -> list[str]:
    return [f"{run.problem(o.index)}: {o.faults}" for o in run.check_all(indices) if o.faults]


def test_hundreds_of_random_problems() -> None:
    assert not failures(Run(20, "cpu"), range(PROBLEMS))


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["auto", "split", "fused"])
def test_hundreds_of_random_problems_by_the_kernels(path: str) -> None:
    run = Run(20, "cuda", path)
    outcomes = run.check_all(range(300))
    assert not [f"{run.problem(o.index)}: {o.faults}" for o in outcomes if o.faults]
    taken = [o.path for o in outcomes]
    wanted = {"auto": "split"}.get(path, path)
    assert taken.count(wanted) > 150
    assert path != "fused" or taken.count("fused") == 300


def test_problems_follow_from_two_numbers() -> None:
    for index in range(20):
        a, b = (draw_problem(3, index, "cuda") for _ in range(2))
        assert a == b
        x, y = (p.draw(torch.device("cpu")) for p in (a, b))
        assert all(torch.equal(x.leaves[n], y.leaves[n]) for n in x.leaves)
    assert draw_problem(3, 0, "cuda") != draw_problem(4, 0, "cuda")


def test_problems_reach_every_corner() -> None:
    problems = [draw_problem(1, i, "cuda") for i in range(3000)]
    sizes = [(p.case.B, p.case.Tq, p.case.Tk) for p in problems]
    for axis, largest in enumerate((7, *[LARGEST_TOKENS["cuda"]] * 2)):
        found = {s[axis] for s in sizes}
        assert {0, 1, 2} <= found and max(found) == largest
    for field, values in {
        "dtype": {"fp64", "fp32", "tf32", "bf16", "fp16"},
        "D": {8, 15, 16, 32, 64, 72, 128, 256, 264},
        "bias": {"none", "b1qk-inf", "bhq1"},
        "lengths": {"none", "ragged", "zero"},
        "causal": {False, True},
        "projected": {False, True},
        "dropout_p": {0.0, 0.1, 1.0},
        "Dout": {None, 0},
    }.items():
        assert values <= {getattr(p.case, field) for p in problems}, field
    for flag in ("mirrored", "poisoned"):
        assert {getattr(p, flag) for p in problems} == {False, True}
    layouts = {p.layout(n) for p in problems[:200] for n in ("x_query", "w_k", "attn_bias")}
    assert layouts == {"solid", "transposed", "sliced", "misaligned"}
    frozen = [p.is_frozen("w_q") for p in problems]
    assert 300 < sum(frozen) < 2700


# ---- what is wrong is found ----


def _one_key_less(*args: Any, **kwargs: Any) -> Any:
    keys = args[1].k.shape[2] if hasattr(args[1], "k") else args[1].shape[1]
    if kwargs.get("kv_keep_mask") is None and keys > 1:
        keep = torch.ones(args[0].shape[0], keys, dtype=torch.bool)
        keep[:, -1] = False
        kwargs["kv_keep_mask"] = keep
    return cross_attention(*args, **kwargs)


def _scaled_gradient(*args: Any, **kwargs: Any) -> Any:
    return cross_attention(args[0], args[1], _OnePercentMore.apply(args[2]), *args[3:], **kwargs)


class _OnePercentMore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.01


def _writing(*args: Any, **kwargs: Any) -> Any:
    returned = cross_attention(*args, **kwargs)
    args[0].data.mul_(1.5)
    return returned


def _not_a_number(*args: Any, **kwargs: Any) -> Any:
    returned = cross_attention(*args, **kwargs)
    y = returned[0] if isinstance(returned, tuple) else returned
    y.data[..., -1:] = torch.nan
    return returned


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (_one_key_less, "y: max error"),
        (_scaled_gradient, "dw_q: "),
        (_not_a_number, "y: not finite"),
        (_writing, "an input was written to"),
    ],
)
def test_what_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any], fault: str
) -> None:
    """In nearly all problems of fp32, with data as they come."""
    monkeypatch.setattr(fuzz, "cross_attention", wrong)
    tried = found = 0
    for index in range(24):
        problem = draw_problem(5, index, "cpu")
        plain = {"dtype": "fp32", "mask": "none", "lengths": "none", "dropout_p": 0.0}
        case = replace(problem.case, scale=None, bias="none", **plain)
        if min(case.B, case.Tq) > 0 and case.Tk > FEW:
            whole = replace(problem, case=case, frozen_share=0.0, poisoned=False)
            tried += 1
            faults = fuzz.judge(whole, torch.device("cpu"), "composite").faults
            found += any(text.startswith(fault) for text in faults)
    assert tried >= 8
    assert found >= 0.8 * tried


# ---- the command ----


def test_the_summary_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fuzz", "--problems", "8", "--seed", "1", "--device", "cpu", "--record", str(tmp_path)]
    assert main(argv) == 0
    assert "8 of 8 random problems passed" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())["fuzz"]["result"]
    assert (result["problems"], result["failed"], result["seed"]) == (8, 0, 1)
    assert sum(result["dtypes"].values()) == sum(result["paths"].values()) == 8


def test_the_largest_share_is_of_budgets_that_there_are() -> None:
    """An exact ruler gives a budget of 0, of which no error is a share."""
    verdict = Verdict("db_k", True, "", 1e-9, 0.0, 2e-10, 1e-9)
    assert fuzz.share_of(verdict) == pytest.approx(0.2)
    assert fuzz.share_of(verdict._replace(mean_budget=0.0)) == 0.0


def test_a_failure_prints_the_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fuzz, "cross_attention", broken)
    assert main(["fuzz", "--problems", "2", "--first", "6", "--seed", "1", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in text
    assert "fuzz --seed 1 --first 7 --problems 1 --path auto --device cpu" in text
