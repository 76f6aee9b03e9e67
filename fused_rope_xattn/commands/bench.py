"""Times this package against eager PyTorch and torch.compile over every SDPA backend."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..verify.bench import lines_of, measure, steps_of
from ..verify.cases import NAMED, ROWS, Case
from ._extras import need
from ._sizes import add_size_arguments, case_from
from ._tables import console, markdown, speed_table, write_between_markers
from .info import environment

HELP = "time against eager PyTorch and torch.compile over SDPA"
OWN = "own"
# Multiply-adds of a forward that a CPU gets through while somebody waits.
CPU_WORK = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"problems: {', '.join(ROWS)}, or '{OWN}' for the sizes below; default: those that"
        " suit the device",
    )
    parser.add_argument(
        "--compile",
        choices=("all", "best", "none"),
        default="all",
        help="which eager blocks torch.compile gets too (each takes a while)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: another each run)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="print a verification file as Markdown instead"
    )
    parser.add_argument(
        "--into", type=Path, metavar="README", help="with --render: put it between the markers"
    )
    add_size_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.render:
        return _render(args.render, args.into)
    need("bench", "numpy", "rich")
    device = torch.device(args.device)
    seed = fresh_seed() if args.seed is None else args.seed
    rows = measure_all(_cases(args, device), device, compile=args.compile, seed=seed)
    console().print(speed_table(line for row in rows for line in lines_of(row)))
    if args.json:
        found = {"environment": environment(), "seed": seed, "bench": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def measure_all(
    cases: Iterable[Case], device: torch.device, *, compile: str, seed: int
) -> list[dict[str, Any]]:
    """Measure one problem after the other behind a progress bar."""
    cases, rows = list(cases), []
    with progress(sum(steps_of(case, compile) for case in cases)) as report:
        for case in cases:

            def describe(what: str, name: str = case.name) -> None:
                report(f"{name}: {what}")

            rows.append(measure(case, device, compile=compile, seed=seed, report=describe))
    return rows


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar that moves on each time it is told what comes next."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("", total=total + 1)
        yield lambda what: bar.update(task, advance=1, description=what)


def fresh_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def rows_for(device: torch.device) -> list[Case]:
    """The rows that are worth waiting for on a device."""
    if device.type == "cuda":
        return list(ROWS.values())
    return [c for c in ROWS.values() if c.dtype != "tf32" and _work(c) <= CPU_WORK]


def _cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    known = ROWS | NAMED
    unknown = [name for name in args.names if name != OWN and name not in known]
    if unknown:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. Known: {OWN}, {', '.join(known)}")
    if not args.names:
        return rows_for(device)
    return [case_from(args) if name == OWN else known[name] for name in args.names]


def _work(case: Case) -> float:
    """Multiply-adds of one forward."""
    inner, kv_inner = case.H * case.D, case.kv_heads * case.D
    queries, keys = case.B * case.Tq, case.B * case.Tk
    kv_work = 0 if case.projected else keys * 2 * case.kv_width * kv_inner
    return queries * inner * (case.Dq + case.out_width + 2 * case.Tk) + kv_work


def _render(source: Path, target: Path | None) -> int:
    section = markdown(json.loads(source.read_text(encoding="utf-8")))
    if target is None:
        print(section)
    else:
        write_between_markers(target, section)
    return 0
