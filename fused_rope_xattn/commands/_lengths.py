"""``bench own --lengths --plot``: one problem at several lengths."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..verify.bench import passes_of
from ..verify.case import Case
from ..verify.roofline import floor_us, measure_rates

OCTAVES = (0.25, 0.5, 1.0, 2.0, 4.0)


def parse(text: str) -> tuple[int, ...]:
    """Numbers of queries on the command line."""
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"want numbers like 64,128,256, got {text!r}")
    return tuple(sorted({int(number) for number in numbers}))


def cases(case: Case, lengths: tuple[int, ...] | None, *, series: bool) -> list[Case]:
    """The problem at each number of queries, keys in proportion; ``series``: at several."""
    if lengths is None and not series:
        return [case]
    lengths = lengths or tuple(sorted({max(1, round(case.Tq * octave)) for octave in OCTAVES}))
    return [_at(case, length) for length in lengths]


def _at(case: Case, length: int) -> Case:
    keys = max(1, round(length * case.Tk / case.Tq))
    return replace(case, name=f"{case.name} {length}x{keys}", Tq=length, Tk=keys)


def draw(rows: list[dict[str, Any]], device: torch.device, target: Path) -> None:
    """Time against length, over the roofline of this device."""
    from ..verify.figures import draw_lengths

    if not rows:
        raise SystemExit("--plot: nothing was measured that it could show")
    every = [Case(**row["case"]) for row in rows]
    case, rates = every[0], measure_rates(device, every[0].dtype)
    floors = {
        direction: [floor_us(c, direction, rates) for c in every] for direction in passes_of(case)
    }
    flushed = any(t.get("flushed") for row in rows for t in row["passes"]["forward"].values())
    title = (
        f"B={case.B}, {case.H} heads of {case.D}, width {case.Dq}, {case.dtype};"
        f" L2 cache {'flushed' if flushed else 'warm'}; roofline: measured"
        f" {2e-12 * rates.multiplications:.3g} TFLOP/s, {1e-9 * rates.bytes:.0f} GB/s"
    )
    draw_lengths(rows, floors, target, title)
    print(f"Drawn: {target}")
