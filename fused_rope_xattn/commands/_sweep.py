"""``bench sweep``: every path over a grid of sizes, and what the planner makes of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ..verify.record import merge_rows
from ..verify.roofline import multiplications
from ..verify.sweep import failures, grid, summary, sweep
from ..verify.timing import Deadline
from ._screen import console, progress
from ._speed import fresh_seed
from ._tables import sweep_table


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Measure, print, record, draw: (the rows, whether something failed)."""
    device = torch.device(args.device)
    small = args.small or device.type != "cuda"
    if small and args.record:
        raise SystemExit("--record needs the whole grid, which takes a GPU")
    cases = sorted(grid(small), key=multiplications)
    passes = ("forward",) if args.forward_only else ("forward", "forward+backward")
    with progress(len(cases) * len(passes)) as report:
        rows = sweep(
            cases,
            device,
            passes=passes,
            seed=fresh_seed() if args.seed is None else args.seed,
            deadline=Deadline(args.time_limit),
            report=report,
        )
    console().print(sweep_table(rows))
    reached = sum(len(row["passes"]) for row in rows)
    print(f"{reached} of {len(cases) * len(passes)} measured.\n{summary(rows)}")
    failed = failures(rows)
    for failure in failed:
        print(f"FAILED {failure}")
    if args.record:
        merge_rows(args.record, "sweep", rows)
    if args.plot:
        _draw(rows, args.plot, str(device))
    return rows, bool(failed)


def draw(record: dict[str, Any], target: Path) -> None:
    """The figure of a verification file."""
    if "sweep" not in record:
        raise SystemExit("--plot: the file has no sweep")
    _draw(record["sweep"]["result"]["rows"], target, record["device"])


def _draw(rows: list[dict[str, Any]], target: Path, where: str) -> None:
    from ..verify.figures import draw_sweep

    draw_sweep(rows, target, f"Eager SDPA in CUDA graphs over ours, {where}")
    print(f"Drawn: {target}")
