"""Times this package against eager PyTorch, torch.compile and other packages.

``bench`` times the rows whose speed counts, ``bench own`` any sizes, ``bench swap`` blocks of
models before and after the swap, ``bench sweep`` a grid of sizes on every path. Times are medians:
on a GPU of CUDA-graph replays with 20 calls a graph (5 of long ones), on random inputs, L2 cache as
the call before left it unless --flush is given; on a CPU of calls in a row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ..verify.bench import Protocol, lines_of
from ..verify.cases import NAMED, ROWS, Case
from ..verify.environment import environment
from ..verify.peers import not_installed
from ..verify.record import merge_rows
from ..verify.timing import Deadline
from . import _lengths, _swap, _sweep
from ._extras import need
from ._markdown import sections, write_between_markers
from ._screen import console
from ._sizes import add_size_arguments, case_from
from ._speed import fresh_seed, measure_all, rows_for
from ._tables import peers_table, speed_table

HELP = "time against eager PyTorch, torch.compile and other packages"
OWN, SWAP, SWEEP = "own", "swap", "sweep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"problems: {', '.join(ROWS)}, or '{OWN}' for the sizes below; default: those that"
        f" suit the device. Or first '{SWAP}', then blocks of models; default: all. Or '{SWEEP}'",
    )
    parser.add_argument(
        "--compile",
        choices=("all", "best", "none"),
        default="all",
        help="which eager blocks torch.compile gets too (each takes a while)",
    )
    parser.add_argument(
        "--flush", action="store_true", help="empty the L2 cache ahead of every call"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"with '{OWN}': time against length; with '{SWEEP}', or --render of a file that has"
        " one: ratios against size (.png, .svg, ...)",
    )
    parser.add_argument(
        "--lengths",
        type=_lengths.parse,
        metavar="N,...",
        help=f"with '{OWN}': measure at each of these numbers of queries, keys in proportion;"
        " default with --plot: five around --tq",
    )
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="put it into DIR's verification file of this GPU"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="start nothing further after this; what was not reached is named",
    )
    parser.add_argument("--seed", type=int, help="of the random inputs (default: another each run)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--small", action="store_true", help=f"with {SWAP} and {SWEEP}: sizes as on a CPU"
    )
    parser.add_argument("--forward-only", action="store_true", help=f"with {SWEEP}")
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="print a verification file as Markdown instead"
    )
    parser.add_argument(
        "--into", type=Path, metavar="README", help="with --render: put it between the markers"
    )
    add_size_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.plot:
        need("bench", "matplotlib")
    if args.render:
        return _render(args)
    need("bench", "numpy", "rich")
    mode, rest = (args.names or [""])[0], args.names[1:]
    failed = False
    if mode == SWAP:
        rows = _swap.run(args, rest)
    elif mode == SWEEP:
        if rest:
            raise SystemExit(f"{SWEEP} takes no names, got {', '.join(rest)}")
        rows, failed = _sweep.run(args)
    else:
        rows = _rows(args)
    if args.json:
        found = {"environment": environment(), "bench": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(failed)


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.record and (args.flush or OWN in args.names):
        raise SystemExit(f"--record takes the named rows as they are, without --flush and '{OWN}'")
    device = torch.device(args.device)
    protocol = Protocol(args.compile, args.flush)
    rows = measure_all(
        _cases(args, device),
        device,
        protocol=protocol,
        seed=fresh_seed() if args.seed is None else args.seed,
        deadline=Deadline(args.time_limit),
    )
    screen = console()
    for row in rows:
        if row["name"] not in ROWS:
            screen.print(peers_table(row))
    screen.print(speed_table(line for row in rows for line in lines_of(row)))
    print(f"{protocol}. Packages not installed: {', '.join(not_installed()) or 'none'}.")
    if args.plot:
        _lengths.draw([row for row in rows if row["name"].startswith(OWN)], device, args.plot)
    if args.record:
        merge_rows(args.record, "speed", rows)
    return rows


def _cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    known = ROWS | NAMED
    unknown = [name for name in args.names if name != OWN and name not in known]
    if unknown:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. Known: {OWN}, {', '.join(known)}")
    if (args.plot or args.lengths) and OWN not in args.names:
        raise SystemExit(f"--lengths is for '{OWN}', --plot for it and '{SWEEP}'")
    if not args.names:
        return rows_for(device)
    cases: list[Case] = []
    for name in args.names:
        if name == OWN:
            cases += _lengths.cases(case_from(args), args.lengths, series=args.plot is not None)
        else:
            cases.append(known[name])
    return cases


def _render(args: argparse.Namespace) -> int:
    record = json.loads(args.render.read_text(encoding="utf-8"))
    found = sections(record)
    if args.plot:
        _sweep.draw(record, args.plot)
    if args.into:
        write_between_markers(args.into, found)
    elif not args.plot:
        print("\n\n".join(found.values()))
    return 0
