"""Measures problems one after the other; ``bench`` and ``selftest`` share it."""

from __future__ import annotations

import random
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
    """Measure problem after problem behind a progress bar; say which the time left out."""
    cases, rows, late = list(cases), [], []
    with progress(sum(steps_of(case, protocol) for case in cases)) as report:
        for case in cases:
            if deadline.passed:
                late.append(case.name)
                continue

            def describe(what: str, name: str = case.name) -> None:
                report(f"{name}: {what}")

            rows.append(measure(case, device, protocol=protocol, seed=seed, report=describe))
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
