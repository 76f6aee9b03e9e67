"""Tries one wheel, unchanged, under several Pythons and torches, each pair in a fresh environment.

    python .ci/try_wheel.py dist/*.whl python3.10:torch==2.10.* python3.13:torch [--folder DIR]

Needs the Pythons and pip's index; no GPU. Prints a row of a Markdown table for each pair and fails
if one of them did.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Where an ABI shows: loading, registration, fake kernels, compilation, values and gradients.
TESTS = ("test_loader.py", "test_ops.py", "test_forward.py", "test_module.py", "test_training.py")
TOOLS = ("hypothesis", "numpy", "pytest", "setuptools")  # torch.compile imports setuptools
HEADER = (
    "| Python | torch | its CUDA | binary | tests | environment | tests took |",
    "|---|---|---|---|---|--:|--:|",
)
# The installed package, seen from outside the checkout.
FACTS = """
import json, platform, torch, fused_rope_xattn as f
info = f.build_info()
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "binary": info["binary"], "where": f.__file__, "reason": info.get("reason")}))
"""


class Pair(NamedTuple):
    """A Python to make the environment with, and what pip is asked to install as torch."""

    python: str
    torch: str


def parse_pair(text: str) -> Pair:
    python, _, torch = text.partition(":")
    return Pair(python, torch or "torch")


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    # One thread: what counts here is that it works. No GPU, so that a row means the same anywhere.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if check and result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result


def try_pair(wheel: Path, pair: Pair, folder: Path, pip_options: list[str]) -> tuple[str, bool]:
    """A row of the table, and whether everything passed."""
    start = time.monotonic()
    run(pair.python, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    install: tuple[str | Path, ...] = (python, "-m", "pip", "install", "-q", *pip_options)
    run(*install, pair.torch, *TOOLS, cwd=folder)
    run(*install, "--no-deps", wheel, cwd=folder)
    installed = time.monotonic()
    facts = json.loads(run(python, "-c", FACTS, cwd=folder).stdout)
    if not Path(facts["where"]).is_relative_to(folder):
        sys.exit(f"{facts['where']} was imported, not the wheel")
    info = run(python, "-m", "fused_rope_xattn", "info", cwd=folder)
    print(info.stdout)
    tests = [ROOT / "tests" / name for name in TESTS]
    result = run(
        *(python, "-m", "pytest", "-q", "-m", "not gpu and not slow", "-p", "no:cacheprovider"),
        *tests,
        cwd=folder,
        check=False,
    )
    finished = time.monotonic()
    last = result.stdout.strip().splitlines()[-1]
    counts = re.sub(r"=+|in [\d.]+s.*", "", last).strip()
    passed = result.returncode == 0 and bool(facts["binary"])
    if not passed:
        print(result.stdout + result.stderr + str(facts["reason"]))
    cells = (
        *(facts["python"], facts["torch"], facts["cuda"] or "none"),
        "loads" if facts["binary"] else "does not load",
        counts,
        f"{installed - start:.0f} s",
        f"{finished - installed:.0f} s",
    )
    return f"| {' | '.join(cells)} |", passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pairs", nargs="+", type=parse_pair, metavar="PYTHON:TORCH")
    parser.add_argument("--folder", type=Path, help="where environments are made and kept")
    parser.add_argument("--pip", default="", help="options for pip, such as --pre or an index")
    options = parser.parse_args()
    rows, every = list(HEADER), True
    with tempfile.TemporaryDirectory() as scratch:
        parent = (options.folder or Path(scratch)).resolve()
        parent.mkdir(parents=True, exist_ok=True)
        for number, pair in enumerate(options.pairs):
            folder = parent / f"pair-{number}"
            row, passed = try_pair(options.wheel.resolve(), pair, folder, options.pip.split())
            print(row, flush=True)
            rows.append(row)
            every = every and passed
    print("\n".join(rows))
    sys.exit(0 if every else 1)


if __name__ == "__main__":
    main()
