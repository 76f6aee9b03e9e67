"""``bench swap``: blocks of models before and after the swap."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ..verify.record import merge_rows
from ..verify.swap_bench import LATE, measure_swaps, steps_of
from ..verify.swap_cases import SWAP_CASES, SwapCase
from ..verify.timing import Deadline
from ._screen import console, progress
from ._speed import fresh_seed
from ._tables import swap_gaps, swap_table


def run(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Measure, print, record; the rows go into ``--json`` too."""
    device = torch.device(args.device)
    small = args.small or device.type != "cuda"
    if small and args.record:
        raise SystemExit("--record needs the real sizes, which take a GPU")
    cases = _cases(names)
    compile = args.compile != "none"
    with progress(steps_of(cases, compile)) as report:
        rows = measure_swaps(
            cases,
            device,
            small=small,
            compile=compile,
            seed=fresh_seed() if args.seed is None else args.seed,
            deadline=Deadline(args.time_limit),
            report=report,
        )
    console().print(swap_table(rows))
    for gap in swap_gaps(rows):
        print(f"Not measured, {gap}")
    if args.record:
        merge_rows(args.record, "swap", [row for row in rows if row.get("why") != LATE])
    return rows


def _cases(names: list[str]) -> list[SwapCase]:
    unknown = [name for name in names if name not in SWAP_CASES]
    if unknown:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. Known: {', '.join(SWAP_CASES)}")
    return [SWAP_CASES[name] for name in names or SWAP_CASES]
