"""Measures problems one after the other; ``bench`` and ``selftest`` share it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import torch

from ..verify.bench import Protocol, measure, steps_of
from ..verify.cases import ROWS, Case
from ..verify.roofline import multiplications
from ..verify.timing import Deadline
from ._screen import progress

# Multiply-adds of a forward that a CPU gets through while somebody waits.
CPU_WORK = 1e9


def measure_all(
    cases: Iterable[Case],
    device: torch.device,
    *,
    protocol: Protocol,
    seed: int,
    deadline: Deadline,
) -> list[dict[str, Any]]:
    """Measure problem after problem behind a progress bar; say which the time left out.

    None starts for which less time is left than the slowest one took.
    """
    cases, late, slowest = list(cases), [], 0.0
    rows: list[dict[str, Any]] = []
    with progress(sum(steps_of(case, protocol) for case in cases)) as report:
        for case in cases:
            started, finished = time.perf_counter(), len(rows)

            def describe(what: str, name: str = case.name) -> None:
                report(f"{name}: {what}")

            if deadline.left > slowest:
                with deadline.until_interrupted():
                    rows.append(
                        measure(case, device, protocol=protocol, seed=seed, report=describe)
                    )
            if len(rows) == finished:
                late.append(case.name)
            slowest = max(slowest, time.perf_counter() - started)
    if late:
        print(f"Not measured, the time was up: {', '.join(late)}")
    return rows


def fresh_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def rows_for(device: torch.device) -> list[Case]:
    """The rows that are worth waiting for on a device."""
    if device.type == "cuda":
        return list(ROWS.values())
    return [c for c in ROWS.values() if c.dtype != "tf32" and multiplications(c) <= CPU_WORK]
