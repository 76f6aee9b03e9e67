"""The least time that a problem can take: its work at the device's own measured rates."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .accuracy import tf32
from .case import DTYPES, Case
from .timing import BRIEF, call_time

BACKWARD = 2.0  # multiplications of a backward over those of a forward
RECOMPUTED = 2.5  # the same of the attention, whose scores are computed anew


class Rates(NamedTuple):
    """What a device does in a second."""

    multiplications: float
    bytes: float


def measure_rates(device: torch.device, dtype: str) -> Rates:
    """Of a large matrix product in ``dtype``, and of a copy."""
    size, length = (8192, 1 << 28) if device.type == "cuda" else (512, 1 << 22)
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    source = torch.zeros(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with tf32(dtype == "tf32"):
        product = call_time(lambda: torch.mm(a, b), device, effort=BRIEF)
    copy = call_time(lambda: target.copy_(source), device, effort=BRIEF)
    return Rates(size**3 / product.us * 1e6, 2 * length / copy.us * 1e6)


def floor_us(case: Case, direction: str, rates: Rates) -> float:
    """Microseconds: whichever of multiplying and moving takes longer."""
    trains = direction != "forward"
    work = projections(case) * (1 + BACKWARD * trains) + scores(case) * (1 + RECOMPUTED * trains)
    moved = least_bytes(case) * (2 if trains else 1)
    return 1e6 * max(work / rates.multiplications, moved / rates.bytes)


def multiplications(case: Case) -> float:
    """Of one forward."""
    return projections(case) + scores(case)


def projections(case: Case) -> float:
    inner, kv_inner = case.H * case.D, case.kv_heads * case.D
    value_width = case.kv_width if case.Dv is None else case.Dv
    keys = 0 if case.projected else case.B * case.Tk * kv_inner * (case.kv_width + value_width)
    return case.B * case.Tq * inner * (case.Dq + case.out_width) + keys


def scores(case: Case) -> float:
    """Of q k^T and p v, half of them where no query looks ahead."""
    return 2.0 * case.B * case.H * case.Tq * case.Tk * case.D * (0.5 if case.causal else 1.0)


def least_bytes(case: Case) -> float:
    """Every input read once, the result written once."""
    inner, kv_inner = case.H * case.D, case.kv_heads * case.D
    queries = case.B * case.Tq * (case.Dq + (case.out_width or inner))
    weights = inner * (case.Dq + case.out_width)
    if case.projected:
        keys = 2 * case.B * case.Tk * kv_inner
    else:
        value_width = 0 if case.Dv is None else case.Dv
        keys = case.B * case.Tk * (case.kv_width + value_width)
        weights += kv_inner * (case.kv_width + (value_width or case.kv_width))
    return float((queries + keys + weights) * case.storage.itemsize)
