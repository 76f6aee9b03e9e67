"""Checks random problems against fp64, and can record how many passed.

The problems follow from the seed: the same command checks the same ones again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from ..verify.fuzz import Outcome, Run, summary
from ..verify.record import merge_section
from ._extras import need
from ._screen import progress
from ._speed import fresh_seed

HELP = "check thousands of random problems against fp64"
PATHS = ("auto", "split", "fused")
CHUNK = 50  # problems between two words to the progress bar
# Small problems leave a GPU idle while a host thread prepares the next one.
MOST_JOBS = 4
MOST_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", type=int, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--seed", type=int, help="of the problems (default: another each run)")
    parser.add_argument("--first", type=int, default=0, metavar="INDEX", help="where to start")
    parser.add_argument(
        "--path",
        choices=PATHS,
        default="auto",
        help="the path to take wherever it can be; with 'fused' all problems are such",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes that share the device (default: 4 on a GPU, else 1)",
    )
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="write the summary into the record of the device"
    )


def run(args: argparse.Namespace) -> int:
    need("bench", "numpy", "rich")
    started = time.perf_counter()
    seed = fresh_seed() if args.seed is None else args.seed
    todo = Run(seed, args.device, args.path)
    jobs = args.jobs or (
        min(MOST_JOBS, os.cpu_count() or 1) if torch.device(args.device).type == "cuda" else 1
    )
    chunks = [
        range(start, min(start + CHUNK, args.first + args.problems))
        for start in range(args.first, args.first + args.problems, CHUNK)
    ]
    outcomes: list[Outcome] = []
    with progress(len(chunks)) as report:
        for found in _checked(todo, chunks, jobs):
            outcomes += found
            report(f"{sum(bool(o.faults) for o in outcomes)} of {len(outcomes)} failed")
    result = summary(todo, outcomes, time.perf_counter() - started)
    _print(todo, outcomes, result["seconds"])
    if args.record:
        merge_section(args.record, "fuzz", result)
    return int(bool(result["failed"]))


def _checked(todo: Run, chunks: list[range], jobs: int) -> Iterator[list[Outcome]]:
    """The outcomes of the chunks in order, from processes of their own where there are several."""
    if jobs == 1:
        yield from map(todo.check_all, chunks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_alone) as pool:
        yield from pool.map(todo.check_all, chunks)


def _alone() -> None:
    """Several processes share the cores already."""
    torch.set_num_threads(1)


def _print(todo: Run, outcomes: list[Outcome], seconds: float) -> None:
    failed = [o for o in outcomes if o.faults]
    for outcome in failed[:MOST_SHOWN]:
        print(f"FAILED {outcome.index} ({outcome.path}, {outcome.dtype}): {outcome.faults[0]}")
        for fault in outcome.faults[1:]:
            print(f"  {fault}")
        print(f"  {todo.problem(outcome.index)}")
        print(
            f"  again: python -m fused_rope_xattn fuzz --seed {todo.seed} --first {outcome.index}"
            f" --problems 1 --path {todo.path} --device {todo.device}"
        )
    if len(failed) > MOST_SHOWN:
        print(f"... and {len(failed) - MOST_SHOWN} more")
    several = sum(o.draws > 1 for o in outcomes)
    share = max((o.share for o in outcomes if not o.faults), default=0.0)
    print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} random problems passed in {seconds:.0f}"
        f" s (seed {todo.seed}); {several} were judged on several draws; the largest share of a"
        f" budget was {share:.2f}"
    )
