"""Random problems by the thousand against the reference in fp64, forward and backward.

Every problem is first judged by the rule of accuracy.py on one draw of its data, which takes one
synchronisation; nearly all pass that. Among thousands of problems with few tokens some break it for
no other reason than the order of a sum, or a row that a norm divides by next to nothing. Such a one
passes if fresh draws together are within ``SLACK`` times the rule, unless the first draw is out of
twice that by more than ``SMALL`` of the tensor's largest number. A wrong result is out of this by
orders of magnitude in fp32, and by far in half precision; whether kernels are as accurate as they
can be is what the tests of named problems ask.

An eager block may be exact, as where a single key is seen, and its mean error 0: ours may then be
half an ulp of fp32. A gradient has no ratio to an eager block's error where it is 0 in exact
arithmetic, or nearly: where no query sees more than a few keys, or where something shifts whole
rows of scores. There it may instead be small beside the problem's largest gradient.

Beside the numbers each call is watched for writing to its inputs, and one by the kernels for other
bits when it is repeated without gradients.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rope_xattn import cross_attention, plan

from .accuracy import EAGER_MEAN_FACTOR, MEAN_FACTOR, Tally, Verdict, measure, tf32
from .case import Inputs
from .eager import eager_composite
from .fuzz_problems import FuzzProblem, draw_problem, laid_out, most_visible, poison
from .reference import reference
from .tf32 import RoundedFactors

FRESH_DRAWS = 16  # judged together, where the first was out of its budget
SLACK = {"fp64": 1.0, "fp32": 8.0, "tf32": 2.0, "fp16": 2.0, "bf16": 2.0}
FEW_KEYS = 8  # with fewer for every query, gradients of scores may vanish
VANISHED = 2.0**-36  # of the problem's largest gradient: 0 but for rounding in fp64
ROUNDING = 2.0**-24  # of fp32, in which every path computes
# What a gradient that vanishes may hold, of the largest gradient: some ulps of a sum's terms.
SMALL = {"fp32": 2.0**-15, "tf32": 2.0**-6, "fp16": 2.0**-6, "bf16": 2.0**-3}
# A shift of all keys shifts rows of scores, where keys are not rotated behind it.
SHIFTS_OF_KEYS, UNROTATED_KEYS = ("db_k", "dk_norm_bias"), ("none", "q_only")


class Judgement(NamedTuple):
    """What the rule says about one problem."""

    draws: int  # that it took
    share: float  # the largest part of its budget that any tensor uses
    faults: list[str]


@dataclass(frozen=True)
class Outcome:
    """What became of one problem; plain data."""

    index: int
    path: str  # that was taken
    dtype: str
    draws: int
    share: float
    faults: list[str]


class Results(NamedTuple):
    """Outputs and gradients by name, and whether the call kept its promises."""

    tensors: dict[str, Tensor]
    promises: dict[str, Tensor]  # bool, without axes


@dataclass(frozen=True)
class Run:
    """One run: which problems, where and by which path."""

    seed: int
    device: str
    path: str = "auto"

    def problem(self, index: int) -> FuzzProblem:
        return draw_problem(self.seed, index, torch.device(self.device).type, self.path)

    def check(self, index: int) -> Outcome:
        """One problem; whatever is raised becomes one of its faults."""
        problem = self.problem(index)
        taken, found = self.path, Judgement(0, 0.0, [])
        try:
            taken = self._path_of(problem)
            found = judge(problem, torch.device(self.device), taken)
        except Exception as error:  # the run goes on, and the problem is named
            text = str(error).strip().splitlines() or [""]
            found = found._replace(faults=[f"{type(error).__name__}: {text[0]}"])
        return Outcome(index, taken, problem.case.dtype, *found)

    def check_all(self, indices: Iterable[int]) -> list[Outcome]:
        return [self.check(index) for index in indices]

    def _path_of(self, problem: FuzzProblem) -> str:
        """The path asked for where it can take the problem, else that of "auto"."""
        args, kwargs = problem.draw(torch.device(self.device)).call()
        with contextlib.suppress(ValueError):
            return plan(*args, **kwargs, path=self.path).path
        return plan(*args, **kwargs).path


def judge(problem: FuzzProblem, device: torch.device, path: str) -> Judgement:
    """The rule on one problem, on one draw of its data or on several."""
    slack = SLACK[problem.case.dtype]
    first = Draws(problem, device, path)
    first.add(0)
    faults, share = first.judge()
    if not faults or first.judge(2 * slack, SMALL.get(problem.case.dtype, 0.0))[0]:
        return Judgement(1, share, faults)
    fresh = Draws(problem, device, path)
    for repeat in range(1, 1 + FRESH_DRAWS):
        fresh.add(repeat)
    faults, _ = fresh.judge(slack)
    return Judgement(1 + FRESH_DRAWS, share, faults)


class Draws:
    """Errors of one problem, over one or more draws of its data."""

    def __init__(self, problem: FuzzProblem, device: torch.device, path: str) -> None:
        self.problem, self.device = problem, device
        self.path = "auto" if path == "composite" else path
        case = problem.case
        self.ruler: Callable[..., Any] = eager_composite
        self.mean_factors = MEAN_FACTOR
        if path == "composite":  # which eager_composite shares its lines with
            self.ruler = partial(reference, storage=case.storage)
            self.mean_factors = EAGER_MEAN_FACTOR
        self.tallies: dict[str, Tally] = {}
        self.largest_gradient = 0.0
        self.most_keys = 0
        self.broken: list[str] = []

    def judge(self, slack: float = 1.0, small: float = 0.0) -> tuple[list[str], float]:
        """Faults, with budgets ``slack`` times as large and at least ``small`` of the largest
        number, and the largest share of a budget."""
        verdicts = [self._verdict(tally) for tally in self.tallies.values()]
        faults = list(self.broken)
        for v in verdicts:
            tally = self.tallies[v.tensor]
            max_floor, mean_floor = small * tally.ref_max, max(small, ROUNDING) * tally.ref_max
            is_within = v.max_error <= max(slack * v.max_budget, max_floor) and (
                v.mean_error <= max(slack * v.mean_budget, mean_floor)
            )
            if not v.ok and (tally.fault or not is_within):
                faults.append(f"{v.tensor}: {v.message}")
        return faults, max([share_of(v) for v in verdicts], default=0.0)

    def add(self, repeat: int) -> None:
        problem, case = self.problem, self.problem.case
        inputs = problem.draw(self.device, repeat)
        ours_inputs = inputs
        if problem.poisoned:
            copies = {name: leaf.clone() for name, leaf in inputs.leaves.items()}
            ours_inputs = replace(inputs, leaves=copies)
            poison(ours_inputs)
        ours = partial(cross_attention, path=self.path)
        with tf32(case.dtype == "tf32"):
            found = run(ours, problem, ours_inputs, layouts=True, repeat=self.path != "auto")
        truth = run(reference, problem, inputs, torch.float64).tensors
        ruler = truth
        if case.dtype != "fp64":
            with RoundedFactors() if case.dtype == "tf32" else contextlib.nullcontext():
                ruler = run(self.ruler, problem, inputs).tensors
        facts = [most_visible(inputs), torch.cat([g.flatten() for g in inputs.grads.values()])]
        facts[1] = facts[1].abs().amax() if facts[1].numel() else facts[1].new_zeros(())
        facts += found.promises.values()
        self._tally(repeat, found, ruler, truth, facts)

    def _tally(
        self,
        repeat: int,
        found: Results,
        ruler: dict[str, Tensor],
        truth: dict[str, Tensor],
        facts: list[Tensor],
    ) -> None:
        names = [name for name in truth if name not in self.problem.case.vanishing]
        ours = found.tensors
        for name in names:
            if ours[name].shape != truth[name].shape:
                wrong = f"shape {tuple(ours[name].shape)}, want {tuple(truth[name].shape)}"
                self.broken.append(f"{name}: {wrong}")
        if self.broken:
            return
        measured = measure([[x[name] for name in names] for x in (ours, ruler, truth)])
        # The one synchronisation.
        numbers = torch.cat([measured.flatten(), *(x.double()[None] for x in facts)]).tolist()
        rows = [numbers[i * len(names) : (i + 1) * len(names)] for i in range(5)]
        most_keys, largest_incoming, *kept = numbers[5 * len(names) :]
        self.most_keys = max(self.most_keys, int(most_keys))
        self.largest_gradient = max(self.largest_gradient, largest_incoming)
        self.broken += [name for name, ok in zip(found.promises, kept, strict=True) if not ok]
        for name, *errors in zip(names, *rows, strict=True):
            tally = self.tallies.setdefault(name, Tally(name, ours[name].dtype))
            tally.add(repeat, ours[name].numel(), *errors)
            if name not in ("y", "lse"):
                self.largest_gradient = max(self.largest_gradient, errors[4])

    def _verdict(self, tally: Tally) -> Verdict:
        case = self.problem.case
        if case.dtype == "fp64":
            amplification = 1e6 if case.positions == "huge" else 1e3
            return tally.judge_fp64(amplification if case.positions != "default" else 1.0)
        verdict = tally.judge(self.mean_factors[case.dtype])
        if verdict.ok or tally.fault or not self._vanishes(tally):
            return verdict
        bound = SMALL[case.dtype] * self.largest_gradient
        message = f"max error {tally.ours[0]:.3e} > {bound:.3e}, for a gradient that vanishes"
        if tally.ours[0] <= bound:
            message = ""
        return verdict._replace(
            ok=not message, message=message, max_budget=bound, mean_budget=torch.inf
        )

    def _vanishes(self, tally: Tally) -> bool:
        if tally.name in ("y", "lse"):
            return False
        shifts = tally.name in SHIFTS_OF_KEYS and self.problem.case.rope in UNROTATED_KEYS
        is_zero = tally.ref_max <= VANISHED * self.largest_gradient
        return shifts or is_zero or self.most_keys < FEW_KEYS


def run(
    fn: Callable[..., Any],
    problem: FuzzProblem,
    inputs: Inputs,
    dtype: torch.dtype | None = None,
    layouts: bool = False,
    repeat: bool = False,
) -> Results:
    """Outputs and the gradients that the problem wants, with the leaves in another dtype if asked.

    With ``layouts`` the leaves stand in the problem's memory layouts, and the call is watched; with
    ``repeat`` it must have the same bits again. PyTorch's own operators do not promise that.
    """
    leaves: dict[str, Tensor] = {}
    for name, leaf in inputs.leaves.items():
        copy = leaf.detach() if dtype is None else leaf.detach().to(dtype)
        copy = laid_out(copy, problem.layout(name)) if layouts else copy.view_as(copy)
        leaves[name] = copy.requires_grad_(not problem.is_frozen(name))
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    args, kwargs = inputs.call(leaves)
    torch.manual_seed(inputs.seed)
    with torch.set_grad_enabled(bool(wanted)):
        returned = fn(*args, **kwargs)
    outputs = dict(zip(("y", "lse"), returned if inputs.case.lse else (returned,), strict=False))
    results = {name: out.detach() for name, out in outputs.items()}
    into = {name: out for name, out in outputs.items() if out.requires_grad}
    grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if into and wanted:
        incoming = {name: inputs.grads[name].to(out.dtype) for name, out in into.items()}
        if layouts and problem.grad_layout != "expanded":
            incoming["y"] = laid_out(incoming["y"], problem.grad_layout)
        grads = torch.autograd.grad(
            list(into.values()),
            list(wanted.values()),
            [incoming[name] for name in into],
            allow_unused=True,
        )
    for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
        results[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    promises: dict[str, Tensor] = {}
    if layouts:
        promises["an input was written to"] = same(leaves.values(), inputs.leaves.values())
    if repeat:
        torch.manual_seed(inputs.seed)
        with torch.no_grad():
            again = fn(*args, **kwargs)
        again = list(again) if inputs.case.lse else [again]
        promises["a repeated call has other bits"] = same(again, outputs.values())
    return Results(results, promises)


def same(got: Iterable[Tensor], want: Iterable[Tensor]) -> Tensor:
    """Whether two lists of tensors hold the same numbers, without waiting; NaN equals NaN."""
    a, b = (torch.cat([t.detach().flatten().double() for t in x]) for x in (got, want))
    return ((a == b) | (a.isnan() & b.isnan())).all()


def share_of(verdict: Verdict) -> float:
    """Of its budget, what a tensor uses.

    Where the ruler is exact there is no budget to share: ``Draws.judge`` then goes by what counts
    as small.
    """
    errors = (verdict.max_error, verdict.mean_error)
    budgets = (verdict.max_budget, verdict.mean_budget)
    return max((e / b for e, b in zip(errors, budgets, strict=True) if b), default=0.0)


def summary(run: Run, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """A run as plain data."""
    failed = [o for o in outcomes if o.faults]
    return {
        "seed": run.seed,
        "path": run.path,
        "problems": len(outcomes),
        "failed": len(failed),
        "judged_on_several_draws": sum(o.draws > 1 for o in outcomes),
        "paths": dict(sorted(Counter(o.path for o in outcomes).items())),
        "dtypes": dict(sorted(Counter(o.dtype for o in outcomes).items())),
        "largest_share": max((o.share for o in outcomes if not o.faults), default=0.0),
        "seconds": round(seconds, 1),
        "failures": [{"index": o.index, "path": o.path, "faults": o.faults} for o in failed],
    }
