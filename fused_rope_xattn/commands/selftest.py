"""Checks accuracy and speed on this machine, and can record the result in a file."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..verify import outcomes
from ..verify.bench import OURS, Protocol, accuracy, lines_of
from ..verify.cases import NAMED, ROWS
from ..verify.environment import why_not
from ..verify.record import merge_rows, merge_section, read_section
from ..verify.timing import Deadline
from ._extras import need
from ._screen import console, progress
from ._speed import fresh_seed, measure_all, rows_for
from ._tables import accuracy_table, speed_table

HELP = "check accuracy and speed on this machine"
PARTS = ("accuracy", "speed", "tests")

CHECKED = (
    "odd_sizes", "head_dim_72", "head_dim_256", "grouped", "causal_mask_bias", "no_out",
    "dropout_all", "cached", "geometry", "video_memory", "audio_video", "text_to_image",
)  # fmt: skip
DTYPES = ("fp32", "tf32", "bf16", "fp16")
PATHS = ("fused", "split", "composite")
QUICK_ROWS = ("seed_fp32", "seed_bf16")
# Slower than plain eager code by more than this means that something is wrong with the build.
SLOWEST = 1.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: another each run)")
    parser.add_argument(
        "--only",
        type=_parts,
        metavar="PART,...",
        help=f"of {', '.join(PARTS)} (default: accuracy, speed, and tests where --tests is given)",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="measure every row, and put each part into DIR's verification file of this GPU",
    )
    parser.add_argument(
        "--tests",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="also run the GPU tests of these folders or files; needs pytest",
    )
    parser.add_argument(
        "--compile",
        choices=("all", "best", "none"),
        default="all",
        help="with --record: which eager blocks torch.compile gets too (each takes a while)",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=tuple(ROWS),
        metavar="ROW",
        help="of the speed part only these; others stay as they are recorded",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="start no further row or test after this; what was not reached is named",
    )


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return parts


def run(args: argparse.Namespace) -> int:
    need("bench", "numpy", "rich")
    parts = args.only or (PARTS if args.tests else PARTS[:2])
    if "tests" in parts and not args.tests:
        raise SystemExit("--only tests needs --tests PATH")
    deadline = Deadline(args.time_limit)
    seed = fresh_seed() if args.seed is None else args.seed
    fine = True
    if "accuracy" in parts:
        fine &= _accuracy_part(args, seed)
    if "speed" in parts:
        fine &= _speed_part(args, seed, deadline)
    if "tests" in parts:
        fine &= _tests_part(args, deadline)
    return 0 if fine else 1


def _accuracy_part(args: argparse.Namespace, seed: int) -> bool:
    checks = check_accuracy(torch.device(args.device), seed)
    console().print(accuracy_table(checks))
    failed = [c for c in checks if not all(e["ok"] for e in c["errors"])]
    for check in failed:
        _explain(check)
    if args.record:
        merge_section(args.record, "accuracy", {"seed": seed, "checks": checks})
    return not failed


def _speed_part(args: argparse.Namespace, seed: int, deadline: Deadline) -> bool:
    device = torch.device(args.device)
    if args.record and not args.rows:
        cases = rows_for(device)
    else:
        cases = [ROWS[name] for name in args.rows or QUICK_ROWS]
    protocol = Protocol(compile=args.compile if args.record else "none")
    rows = measure_all(cases, device, protocol=protocol, seed=seed, deadline=deadline)
    console().print(speed_table(line for row in rows for line in lines_of(row)))
    slow = _too_slow(rows) if device.type == "cuda" else []
    for complaint in slow:
        print(complaint)
    if args.record:
        merge_rows(args.record, "speed", rows)
    return not slow


def _tests_part(args: argparse.Namespace, deadline: Deadline) -> bool:
    rows, unfinished = run_tests(args.tests, deadline)
    counts = outcomes.totals(rows)
    print(", ".join(f"{counts[kind]} {kind}" for kind in outcomes.KINDS))
    if unfinished:
        print(f"Not finished: {' '.join(unfinished)}")
    if args.record:
        before = read_section(args.record, "tests") or {"unfinished": []}
        finished = {row["name"] for row in rows}
        left = sorted({*before["unfinished"], *unfinished} - finished)
        merge_rows(args.record, "tests", rows, unfinished=left)
    return not (counts["failed"] or unfinished)


def check_accuracy(device: torch.device, seed: int) -> list[dict[str, Any]]:
    """The rule on each case, dtype and path that can run here."""
    todo = [
        (case, path)
        for dtype in DTYPES
        if dtype != "tf32" or device.type == "cuda"
        for case in (NAMED[name].at(dtype) for name in CHECKED)
        for path in PATHS
        if why_not(case, path, device) is None
    ]
    checks = []
    with progress(len(todo)) as report:
        for case, path in todo:
            report(f"{case.name} {case.dtype} {path}")
            # The composite is what the others are measured by; it is itself measured by plain code.
            yardstick = "eager" if path == "composite" else "composite"
            errors = accuracy(case, device, path=path, yardstick=yardstick, seed=seed)
            checks.append({"case": case.name, "dtype": case.dtype, "path": path, "errors": errors})
    return checks


def run_tests(paths: list[Path], deadline: Deadline) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the tests marked ``gpu`` in a process of their own.

    Counts of each test file that was finished, and the names of those that were not.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", outcomes.__name__]
        command += ["--outcomes", str(report), *map(str, paths)]
        if deadline.left < math.inf:
            command += ["--stop-after", str(max(0.0, deadline.left))]
        with deadline.until_interrupted():
            subprocess.run(command, check=False)
        if not report.exists():
            raise SystemExit("pytest wrote no outcomes; what it printed is above")
        return outcomes.summary(report)


def _explain(check: dict[str, Any]) -> None:
    for error in check["errors"]:
        if not error["ok"]:
            where = f"{check['case']} {check['dtype']} {check['path']}"
            print(f"FAILED {where}: {error['tensor']}: {error['message']}")


def _too_slow(rows: list[dict[str, Any]]) -> list[str]:
    complaints = []
    for row in rows:
        for direction, timings in row["passes"].items():
            ours, eager = (timings.get(name, {}).get("us") for name in (OURS, "eager default"))
            if ours and eager and ours > SLOWEST * eager:
                complaints.append(
                    f"FAILED {row['name']} {direction}: {ours:.1f} us, eager {eager:.1f} us"
                )
    return complaints
