"""Installs the source tree in every way that users do, and tables what each gives.

    python .ci/install_matrix.py [--isolated-torch torch==2.13.0] [--only NAME ...]

Runs pip on a copy of the tree, with this Python and, where builds are not isolated, its torch.
Needs no GPU; the row with nvcc compiles one kernel file, since all of them take many minutes.
Prints a Markdown table, and fails if a row does not go as it must.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TREE = ("fused_rope_xattn", "kernels", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")
ONE_KERNEL = "norm_rope_forward.cu"
NO_NVCC = {"CUDA_HOME": "/nonexistent"}
NO_COMPILER = {**NO_NVCC, "CXX": "/nonexistent/c++"}
REQUIRE = {"FUSED_ROPE_XATTN_CUDA": "require"}
HEADER = (
    "| install | ends | wheel | says | wall time | largest process |",
    "|---|---|---|---|--:|--:|",
)


class Way(NamedTuple):
    """One way to install, and what it must come to."""

    name: str
    environment: dict[str, str]
    says: str  # a part of the one message
    succeeds: bool = True
    isolated: bool = False
    editable: bool = False
    folder: str = "source"
    one_kernel: bool = False


WAYS = (
    Way("nvcc, one kernel file", {}, "CUDA build, because", one_kernel=True),
    Way("no nvcc", NO_NVCC, "CPU-only build, because no folder with bin/nvcc"),
    Way("no compiler", NO_COMPILER, "pure Python build, because there is no C++ compiler"),
    Way("`require`, no nvcc", {**NO_NVCC, **REQUIRE}, "=require, but no folder", succeeds=False),
    Way(
        "`require`, no compiler", {**NO_COMPILER, **REQUIRE}, "=require, but there", succeeds=False
    ),
    Way("no nvcc, `-e`", NO_NVCC, "CPU-only build, because", editable=True),
    Way(
        "no nvcc, path with spaces", NO_NVCC, "CPU-only build, because", folder="a path with spaces"
    ),
    Way("isolated, without nvcc", NO_NVCC, "CPU-only build, because", isolated=True),
)


class Outcome(NamedTuple):
    returncode: int
    output: str
    seconds: float
    peak_bytes: int


def copy_tree(target: Path, one_kernel: bool) -> None:
    target.mkdir(parents=True)
    for name in (*TREE, "setup.py"):
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)
    if one_kernel:
        for path in (target / "kernels").glob("*.cu"):
            if path.name != ONE_KERNEL:
                path.unlink()


def run(command: list[str], environment: dict[str, str], log: Path) -> Outcome:
    """Runs it with none of the caller's build variables; memory is that of the largest process."""
    unset = ("CIBUILDWHEEL", "CUDA_HOME", "CUDA_PATH", "CXX", "PYTHONPATH", "FUSED_ROPE_XATTN_CUDA")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    start = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env={**inherited, **environment}, stdout=out, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    return Outcome(process.returncode, log.read_text(), seconds, usage.ru_maxrss * 1024)


def make_environment(folder: Path) -> Path:
    """A fresh environment that sees the packages of this one: pip, setuptools, torch above all."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def try_way(way: Way, scratch: Path, isolated_torch: str) -> tuple[str, list[str]]:
    """A row of the table, and what went otherwise than it must."""
    source = scratch / way.folder
    copy_tree(source, way.one_kernel)
    python = make_environment(scratch / "environment")
    command = [str(python), "-m", "pip", "install", "-v", "--no-deps", "--no-cache-dir"]
    environment = dict(way.environment)
    if way.isolated:
        constraints = scratch / "constraints.txt"
        constraints.write_text(isolated_torch + "\n")
        environment["PIP_CONSTRAINT"] = str(constraints)
    else:
        command.append("--no-build-isolation")
    command += ["-e", str(source)] if way.editable else [str(source)]
    outcome = run(command, environment, scratch / "log.txt")
    problems = []
    if (outcome.returncode == 0) != way.succeeds:
        problems.append(f"exit code {outcome.returncode}\n{outcome.output[-3000:]}")
    said = re.search(rf"fused_rope_xattn: (.*{re.escape(way.says)}.*)", outcome.output)
    if said is None:
        problems.append(f"never said {way.says!r}")
    if way.succeeds and not way.one_kernel:
        problems += check_installed(python, scratch)
    tag = re.search(r"filename=fused_rope_xattn-[^-]+-(\S+)\.whl size=(\d+)", outcome.output)
    wheel = f"`{tag[1]}`, {int(tag[2]) / 1024:,.0f} KiB" if tag else "-"
    message = said[1].replace("|", "\\|") if said else "?"
    ends = "installed" if outcome.returncode == 0 else "one line, exit 1"
    cells = (way.name, ends, wheel, message)
    costs = f"{outcome.seconds:.0f} s", f"{outcome.peak_bytes / 2**20:,.0f} MiB"
    return f"| {' | '.join((*cells, *costs))} |", [f"{way.name}: {p}" for p in problems]


def check_installed(python: Path, scratch: Path) -> list[str]:
    """A call from outside the source tree gives what ones give."""
    code = (
        "import torch, fused_rope_xattn as f\n"
        "w, x = torch.ones(8, 8), torch.ones(1, 2, 8)\n"
        "assert (f.cross_attention(x, x, w, w, w, w, num_heads=1) == 64).all()\n"
    )
    done = subprocess.run([python, "-c", code], cwd=scratch / "environment", capture_output=True)
    return [] if done.returncode == 0 else [f"does not work: {done.stderr.decode()[-1000:]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isolated-torch", default="torch>=2.10", metavar="REQUIREMENT")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="ways with these words in them")
    options = parser.parse_args()
    ways = [w for w in WAYS if not options.only or any(o in w.name for o in options.only)]
    rows, problems = list(HEADER), []
    for way in ways:
        with tempfile.TemporaryDirectory() as scratch:
            row, wrong = try_way(way, Path(scratch), options.isolated_torch)
        print(row, *wrong, sep="\n", flush=True)
        rows.append(row)
        problems += wrong
    print("\n".join(rows))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
