"""Times real blocks before and after the swap, as they are and compiled, and measures their errors.

The truth of a block is its own code in fp64, on the same rounded weights and tokens.
"""

from __future__ import annotations

import copy
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..swap import swap_cross_attention
from .bench import first_line
from .swap_cases import Built, SwapCase
from .timing import Deadline, Effort, call_time, synchronize

PLAIN = ("original", "swapped")
COMPILED = ("original compiled", "swapped compiled")
LATE = "the time was up"
# What compiling one block takes at first; later ones are judged by the slowest so far.
COMPILE_S = 15.0
SWAPPING_EFFORT = Effort(0.05, 0.15)

Step = Callable[[], tuple[Tensor, ...]]  # y and the gradients of every leaf
Report = Callable[[str], None]


def measure_swaps(
    cases: Sequence[SwapCase],
    device: torch.device,
    *,
    small: bool,
    compile: bool,
    seed: int,
    deadline: Deadline,
    report: Report,
) -> list[dict[str, Any]]:
    """A row of plain data for each block; ``report`` is told what comes next.

    Blocks are compiled after everything else, as long as the time lasts. ``small`` takes sizes that
    a CPU gets through.
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        report(case.name)
        row: dict[str, Any] = {"name": case.name, "why": LATE}
        if case.missing:
            row["why"] = f"{case.missing} is not installed"
        elif not deadline.passed:
            with deadline.until_interrupted():
                row = _measure(case, PLAIN, device, small, seed)
        rows.append(row)
    slowest = COMPILE_S
    for case, row in zip(cases, rows, strict=True):
        for variant in COMPILED if compile and "variants" in row else ():
            report(f"{case.name}: {variant}")
            row["variants"][variant] = {"why": LATE}
            if deadline.left < slowest:
                continue
            started = time.perf_counter()
            with deadline.until_interrupted():
                row["variants"] |= _measure(case, (variant,), device, small, seed)["variants"]
            slowest = max(slowest, time.perf_counter() - started)
    return rows


def steps_of(cases: Sequence[SwapCase], compile: bool) -> int:
    """How often ``measure_swaps`` reports, at most."""
    return len(cases) * (1 + len(COMPILED) * compile)


def _measure(
    case: SwapCase, variants: Sequence[str], device: torch.device, small: bool, seed: int
) -> dict[str, Any]:
    """The row of a block with some of its variants; always the same weights and tokens."""
    torch.manual_seed(seed)
    built = case.build(device, case.dtype, **(case.small if small else {}))
    built.module.eval()
    swapped = copy.deepcopy(built.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries = list(swap_cross_attention(swapped, verify=True))
        with torch.no_grad():
            grad = torch.randn_like(_first(built.module(*built.args, **built.kwargs)))
        truth = _truth(built, grad)
        found = {}
        for variant in variants:
            module = swapped if variant.startswith("swapped") else built.module
            with _compiled(module) if variant in COMPILED else _as_it_is(module) as runs:
                found[variant] = _variant(runs, built, grad, truth, device)
            _tidy(device)
    del built, swapped, truth
    _tidy(device)
    return {
        "name": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "sizes": "small" if small else "full",
        "seed": seed,
        "attentions": [
            {"path": e.path, "swapped": e.swapped, "why": e.why, "probe": e.difference}
            for e in entries
        ],
        "variants": found,
    }


def _variant(
    module: nn.Module, built: Built, grad: Tensor, truth: tuple[Tensor, ...], device: torch.device
) -> dict[str, Any]:
    """Time, memory and errors of one way of running a block, or why it does not run."""

    def forward() -> Tensor:
        with torch.no_grad():
            return _first(module(*built.args, **built.kwargs))

    step = _training_step(module, built, grad)
    try:
        found: dict[str, Any] = {"forward": _cost(forward, device)}
        found["error"] = _errors(step(), truth)
        # Dropout is timed where a block has it; without, another mode would only compile again.
        module.train(_drops(built.module))
        found["training"] = _cost(step, device)
    except Exception as error:  # a compiler may raise anything
        return {"why": first_line(error)}
    finally:
        module.eval()
    return found


def _cost(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    timing = call_time(call, device, effort=SWAPPING_EFFORT)
    return {**timing._asdict(), "peak_mib": _peak_mib(call, device)}


def _peak_mib(call: Callable[[], Any], device: torch.device) -> float | None:
    """Memory that one call needs on top of what is there; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    _tidy(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = call()
    synchronize(device)
    del results
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _training_step(module: nn.Module, built: Built, grad: Tensor) -> Step:
    args = tuple(x.detach().requires_grad_() if _is_tokens(x) else x for x in built.args)
    leaves = [*filter(_is_tokens, args), *module.parameters()]

    def step() -> tuple[Tensor, ...]:
        y = _first(module(*args, **built.kwargs))
        grads = torch.autograd.grad(y, leaves, grad, allow_unused=True)
        used = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))
        return y.detach(), *used

    return step


def _truth(built: Built, grad: Tensor) -> tuple[Tensor, ...]:
    wide = copy.deepcopy(built.module).double()
    args = tuple(x.double() if _is_tokens(x) else x for x in built.args)
    return _training_step(wide, Built(wide, args, built.kwargs), grad.double())()


def _errors(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> dict[str, float]:
    """Of y and of all gradients together: norm of the error over norm of the truth."""

    def share(pairs: list[tuple[Tensor, Tensor]]) -> float:
        error = sum(float((a.double() - b).square().sum()) for a, b in pairs)
        return math.sqrt(error / sum(float(b.square().sum()) for _, b in pairs))

    (y, *grads) = zip(found, truth, strict=True)
    return {"y": share([y]), "gradients": share(grads)}


@contextmanager
def _as_it_is(module: nn.Module) -> Iterator[nn.Module]:
    yield module


@contextmanager
def _compiled(module: nn.Module) -> Iterator[nn.Module]:
    torch.compiler.reset()
    compiled: Any = torch.compile(module, dynamic=False)
    yield compiled
    torch.compiler.reset()


def _drops(module: nn.Module) -> bool:
    return any(
        (isinstance(m, nn.Dropout) and m.p > 0) or getattr(m, "dropout_p", 0.0) > 0
        for m in module.modules()
    )


def _is_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _first(y: Any) -> Tensor:
    """The result of a module without its attention weights."""
    result: Tensor = y[0] if isinstance(y, tuple) else y
    return result


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
