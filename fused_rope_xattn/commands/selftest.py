"""Checks accuracy and speed on this machine, and can record the result in a file."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fused_rope_xattn

from ..verify.bench import OURS, accuracy, error_share, lines_of
from ..verify.cases import NAMED, ROWS
from ..verify.source_hash import source_hash
from ._call import why_not
from ._extras import need
from ._tables import console, speed_table
from .bench import fresh_seed, measure_all, progress, rows_for
from .info import environment

if TYPE_CHECKING:
    from rich.table import Table

HELP = "check accuracy and speed on this machine"

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
        "--record",
        type=Path,
        metavar="FILE",
        help="measure every row and write a verification file (a folder: named after the GPU)",
    )
    parser.add_argument(
        "--tests", type=Path, metavar="DIR", help="with --record: also run the GPU tests of DIR"
    )
    parser.add_argument(
        "--compile",
        choices=("all", "best", "none"),
        default="all",
        help="with --record: which eager blocks torch.compile gets too (each takes a while)",
    )


def run(args: argparse.Namespace) -> int:
    need("bench", "numpy", "rich")
    screen = console()
    device = torch.device(args.device)
    seed = fresh_seed() if args.seed is None else args.seed
    checks = check_accuracy(device, seed)
    screen.print(_accuracy_table(checks))
    failed = [c for c in checks if not all(e["ok"] for e in c["errors"])]
    for check in failed:
        _explain(check)

    cases = rows_for(device) if args.record else [ROWS[name] for name in QUICK_ROWS]
    compile = args.compile if args.record else "none"
    rows = measure_all(cases, device, compile=compile, seed=seed)
    screen.print(speed_table(line for row in rows for line in lines_of(row)))
    slow = _too_slow(rows) if device.type == "cuda" else []
    for complaint in slow:
        print(complaint)

    tests_failed = False
    if args.record:
        write_record(args.record, device, seed, checks, rows, tests=None)
        if args.tests:
            tests = run_tests(args.tests)
            tests_failed = bool(tests["failed"])
            write_record(args.record, device, seed, checks, rows, tests)
    return int(bool(failed or slow or tests_failed))


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


def run_tests(folder: Path) -> dict[str, Any]:
    """Run the tests marked ``gpu`` in a process of their own and count the outcomes."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        started = time.perf_counter()
        subprocess.run([*command, str(folder)], check=False)
        if not report.exists():
            raise SystemExit(f"pytest wrote no report for {folder}; its output is above")
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    broken = count["failures"] + count["errors"]
    return {
        "passed": count["tests"] - broken - count["skipped"],
        "failed": broken,
        "skipped": count["skipped"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def write_record(
    target: Path,
    device: torch.device,
    seed: int,
    checks: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    tests: dict[str, Any] | None,
) -> None:
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    if target.is_dir():
        target /= re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"
    record = {
        "device": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "kernel_source": kernel_source(),
        "environment": environment(),
        "seed": seed,
        "tests": tests,
        "accuracy": checks,
        "bench": rows,
    }
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"Recorded in {target}")


def kernel_source() -> str | None:
    """The hash of the kernel sources that the binary was built from; None without a binary.

    In a checkout it must be that of the sources beside the package, else the record would speak for
    code that did not run.
    """
    built = fused_rope_xattn.build_info().get("kernel_hash")
    folder = Path(fused_rope_xattn.__file__).parent.parent / "kernels"
    if built is not None and folder.is_dir() and source_hash(folder) != built:
        raise SystemExit(
            f"The binary was built from other kernel sources ({built}) than {folder}"
            f" ({source_hash(folder)}): build again, then record."
        )
    return built


def _accuracy_table(checks: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for check in checks:
        groups.setdefault((check["dtype"], check["path"]), []).append(check)
    table = Table(title="Accuracy against fp64, forward and gradients")
    for heading in ("dtype", "path", "problems", "passed", "largest share of the allowed error"):
        table.add_column(heading)
    for (dtype, path), group in groups.items():
        passed = sum(all(e["ok"] for e in check["errors"]) for check in group)
        worst = max(group, key=lambda check: error_share(check["errors"]))
        share = error_share(worst["errors"])
        colour = "green" if passed == len(group) else "red"
        table.add_row(
            dtype,
            path,
            str(len(group)),
            f"[{colour}]{passed}[/]",
            f"{share:.2f} in {worst['case']}",
        )
    return table


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
                    f"FAILED {row['case']['name']} {direction}: {ours:.1f} us, eager {eager:.1f} us"
                )
    return complaints
