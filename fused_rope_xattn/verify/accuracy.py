"""The accuracy rule as code.

Against the reference in fp64, every output and gradient of a path may err by twice what an eager
block errs in the same dtype, plus 2 ulp, and on average by 1.2 times (1.5 in fp32). Tensors of
fewer than 256 elements are judged on several draws of the data together, and a verdict against one
of them only counts if four times as many new draws repeat it, so that none hangs on luck: elements
of a gradient that is a sum over all tokens err together, and one row that a norm divides by next to
nothing outweighs all other errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rope_xattn import cross_attention

from .case import Case, Inputs, draw_inputs
from .eager import eager_composite
from .reference import reference
from .tf32 import RoundedFactors

MIN_ELEMENTS = 256
LARGEST_TOGETHER = 2**22  # elements of a tensor that is compared in one piece with others
MAX_DRAWS = 16
CONFIRMATION = 4  # times as many new draws before a small tensor is found out of its budget
MAX_FACTOR = 2.0
MEAN_FACTOR = {"fp32": 1.5, "tf32": 1.2, "fp16": 1.2, "bf16": 1.2}
MAX_ULP = 2.0
# Two eager blocks in fp32: a grouped product sums over all heads of a group at once, or one by one.
EAGER_MEAN_FACTOR = {**MEAN_FACTOR, "fp32": 2.0}
# fp64 has no wider reference: an a-priori bound on sums of some hundred terms takes its place.
FP64_ULP = 512.0


class Verdict(NamedTuple):
    """What the rule says about one tensor."""

    tensor: str
    ok: bool
    message: str
    max_error: float
    max_budget: float
    mean_error: float
    mean_budget: float


@contextlib.contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Sets what fp32 matrix products may use, and restores it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def run(
    fn: Callable[..., Any], inputs: Inputs, dtype: torch.dtype | None = None, backward: bool = True
) -> dict[str, Tensor]:
    """Outputs and the gradient of every leaf, with the leaves in another dtype if asked.

    The generator is seeded by the inputs, so that every fn draws the same dropout mask.
    """
    leaves = {
        name: leaf.detach().to(dtype or leaf.dtype).clone().requires_grad_(backward)
        for name, leaf in inputs.leaves.items()
    }
    args, kwargs = inputs.call(leaves)
    torch.manual_seed(inputs.seed)
    with torch.set_grad_enabled(backward):
        returned = fn(*args, **kwargs)
    outputs = dict(zip(("y", "lse"), returned if inputs.case.lse else (returned,), strict=False))
    if not backward:
        return outputs
    grads = torch.autograd.grad(
        list(outputs.values()),
        list(leaves.values()),
        [inputs.grads[name].to(out.dtype) for name, out in outputs.items()],
        allow_unused=True,
    )
    results = {name: out.detach() for name, out in outputs.items()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of dtype at this magnitude."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(torch.tensor(max(magnitude, info.tiny), dtype=torch.float64))
    return float(2.0 ** (int(exponent) - 1) * info.eps)


@dataclass
class Tally:
    """Errors of one tensor, gathered over the draws of its data."""

    name: str
    dtype: torch.dtype
    count: int = 0
    ref_max: float = 0.0
    ours: list[float] = field(default_factory=lambda: [0.0, 0.0])  # max, sum
    eager: list[float] = field(default_factory=lambda: [0.0, 0.0])
    fault: str = ""
    is_small: bool = False  # in a single draw
    worst_draw: int = 0  # the number of the draw that has the largest error or the fault

    def add(
        self,
        draw: int,
        count: int,
        ours_max: float,
        ours_sum: float,
        eager_max: float,
        eager_sum: float,
        ref_max: float,
    ) -> None:
        """What :func:`measure` found of it in one draw."""
        if self.fault:
            return
        if ours_max >= self.ours[0]:
            self.worst_draw = draw
        if eager_max == torch.inf:
            self.fault = "the eager block is not finite where it should be, or the reverse"
        elif ours_max == torch.inf:
            self.fault = "not finite where it should be, or the reverse"
        self.count += count
        self.is_small = count < MIN_ELEMENTS
        self.ours = [max(self.ours[0], ours_max), self.ours[1] + ours_sum]
        self.eager = [max(self.eager[0], eager_max), self.eager[1] + eager_sum]
        self.ref_max = max(self.ref_max, ref_max)

    def judge(self, mean_factor: float) -> Verdict:
        count = max(1, self.count)
        max_budget = MAX_FACTOR * self.eager[0] + MAX_ULP * ulp(self.ref_max, self.dtype)
        mean_budget = mean_factor * self.eager[1] / count
        if self.count < MIN_ELEMENTS:
            mean_budget = float("inf")
        return self._verdict(max_budget, mean_budget)

    def judge_fp64(self, amplification: float) -> Verdict:
        """``amplification``: by how much rounding of a position is magnified in an angle."""
        bound = FP64_ULP * torch.finfo(self.dtype).eps * amplification * max(1.0, self.ref_max)
        return self._verdict(bound, float("inf"))

    def _verdict(self, max_budget: float, mean_budget: float) -> Verdict:
        mean = self.ours[1] / max(1, self.count)
        message = self.fault
        if not message and self.ours[0] > max_budget:
            message = f"max error {self.ours[0]:.3e} > {max_budget:.3e} (eager {self.eager[0]:.3e})"
        elif not message and mean > mean_budget:
            message = f"mean error {mean:.3e} > {mean_budget:.3e}"
        return Verdict(self.name, not message, message, self.ours[0], max_budget, mean, mean_budget)


def add_draw(
    tallies: dict[str, Tally],
    draw: int,
    ours: dict[str, Tensor],
    eager: dict[str, Tensor],
    truth: dict[str, Tensor],
) -> None:
    """Errors of one draw, of all tensors at once: a GPU is waited for once, not for each number."""
    fitting = []
    for name, want in truth.items():
        tally = tallies.setdefault(name, Tally(name, ours[name].dtype))
        if ours[name].shape == want.shape:
            fitting.append(name)
        else:
            tally.fault = f"shape {tuple(ours[name].shape)}, want {tuple(want.shape)}"
    found = measure([[x[name] for name in fitting] for x in (ours, eager, truth)]).tolist()
    for name, *errors in zip(fitting, *found, strict=True):
        tallies[name].add(draw, truth[name].numel(), *errors)


def measure(lists: list[list[Tensor]]) -> Tensor:
    """Of our results, the eager block's and the true ones, for each tensor: our largest error and
    their sum, the eager block's two, and the largest true number. fp64 [5, tensors], without
    waiting for a GPU.

    Where the truth is not finite an error is 0 or, if anything else was found, infinite.
    """
    if not lists[0]:
        return torch.zeros(5, 0)
    largest = max(t.numel() for t in lists[2])
    if len(lists[0]) > 1 and largest > LARGEST_TOGETHER:
        columns = [measure([[t] for t in tensors]) for tensors in zip(*lists, strict=True)]
        return torch.cat(columns, 1)
    ours, eager, truth = (torch.cat([t.detach().flatten().double() for t in x]) for x in lists)
    lengths = torch.tensor([t.numel() for t in lists[2]], device=truth.device)
    is_finite = truth.isfinite()

    def per_tensor(x: Tensor, reduce: str) -> Tensor:
        return torch.segment_reduce(x, reduce, lengths=lengths, initial=0.0, unsafe=True)

    rows = []
    for found in (ours, eager):
        error = torch.where(is_finite, (found - truth).abs(), (found != truth) * torch.inf)
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        error = torch.where(~is_finite & (found == truth), 0.0, error)
        rows += [per_tensor(error, "max"), per_tensor(error, "sum")]
    rows.append(per_tensor(truth.abs().masked_fill(~is_finite, 0.0), "max"))
    return torch.stack(rows)


def worst_place(ours: Tensor, truth: Tensor) -> str:
    """Where the largest error is, for a message."""
    if ours.shape != truth.shape or not truth.numel():
        return ""
    error = (ours.double() - truth.double()).abs()
    error = torch.where(ours.double() == truth.double(), 0.0, error.nan_to_num(nan=torch.inf))
    index = int(error.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), truth.shape))
    got, want = float(ours.flatten()[index]), float(truth.flatten()[index])
    return f"; worst at {place}: got {got:.9g}, want {want:.9g}"


def verdicts(
    case: Case,
    *,
    fn: Callable[..., Any] | None = None,
    device: str | torch.device = "cpu",
    path: str | Sequence[str] = "auto",
    yardstick: str = "composite",
    backward: bool = True,
    seed: int = 1,
) -> list[Verdict]:
    """The rule on every output and gradient of a case (on the outputs alone without ``backward``).

    Several paths are judged on the same data; ``fn`` replaces them.
    ``yardstick``: "composite", the eager block of eager.py, or "eager", the reference's own lines
    in the storage dtype, with which the composite path is judged.
    """
    paths = [path] if isinstance(path, str) else path
    ours = {p: fn or partial(cross_attention, path=p) for p in paths}
    eager: Callable[..., Any] = partial(reference, storage=case.storage)
    if yardstick == "composite" and case.dtype != "fp64":
        eager = eager_composite

    def outcome(seed: int) -> tuple[dict[str, Tensor], ...]:
        """Ours, the eager block's and the true ones, by the names of their tallies."""
        inputs = draw_inputs(case, device, seed)
        with RoundedFactors() if case.dtype == "tf32" else contextlib.nullcontext():
            ruler = run(eager, inputs, backward=backward)
        with tf32(case.dtype == "tf32"):
            results = {p: run(f, inputs, backward=backward) for p, f in ours.items()}
        truth = run(reference, inputs, torch.float64, backward)
        found: tuple[dict[str, Tensor], ...] = {}, {}, {}
        for p, result in results.items():
            for name in truth:
                if name not in case.vanishing:
                    key = name if len(paths) == 1 else f"{name} ({p})"
                    for group, tensors in zip(found, (result, ruler, truth), strict=True):
                        group[key] = tensors[name]
        return found

    def draw(seed: int, tallies: dict[str, Tally]) -> None:
        add_draw(tallies, seed, *outcome(seed))

    def located(v: Verdict, tally: Tally) -> Verdict:
        got, _, truth = outcome(tally.worst_draw)
        return v._replace(message=v.message + worst_place(got[v.tensor], truth[v.tensor]))

    tallies: dict[str, Tally] = {}
    draw(seed, tallies)
    if case.dtype == "fp64":
        amplification = 1e6 if case.positions == "huge" else 1e3
        return [
            t.judge_fp64(amplification if case.positions != "default" else 1.0)
            for t in tallies.values()
        ]
    draws = 1
    while draws < MAX_DRAWS and _starved(tallies):
        draw(seed + draws, tallies)
        draws += 1
    factor = (MEAN_FACTOR if yardstick == "composite" else EAGER_MEAN_FACTOR)[case.dtype]
    found = {key: t.judge(factor) for key, t in tallies.items()}
    doubted = [
        key for key, t in tallies.items() if t.is_small and not t.fault and not found[key].ok
    ]
    if doubted:
        again: dict[str, Tally] = {}
        for i in range(draws, (1 + CONFIRMATION) * draws):
            draw(seed + i, again)
        found |= {key: again[key].judge(factor) for key in doubted}
        tallies |= {key: again[key] for key in doubted}
    return [v if v.ok else located(v, tallies[v.tensor]) for v in found.values()]


def _starved(tallies: dict[str, Tally]) -> bool:
    """Whether some tensor has too few elements still, and none has failed outright."""
    few = any(0 < t.count < MIN_ELEMENTS for t in tallies.values())
    return few and not any(t.fault for t in tallies.values())


def assert_accurate(case: Case, **options: Any) -> None:
    """Raises AssertionError that lists each tensor out of its budget, where and by how much."""
    failures = [v for v in verdicts(case, **options) if not v.ok]
    lines = "\n".join(f"  {v.tensor}: {v.message}" for v in failures)
    assert not failures, f"{case.name} ({case.dtype}, {options}):\n{lines}\n  {case}"
