"""What this machine can build, for setup.py. Standard library only; no network, no GPU asked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple, NoReturn

SWITCH = "FUSED_ROPE_XATTN_CUDA"
DEFAULT_ARCHS = "8.0+PTX;9.0a"  # Ampere and Ada; Hopper; PTX as the last resort of newer GPUs
GB_PER_JOB = 4


class Build(NamedTuple):
    kind: str  # "CUDA", "CPU-only" (the extension without kernels) or "pure Python" (no extension)
    reason: str
    cuda_home: Path | None = None


def fail(message: str) -> NoReturn:
    sys.exit(f"fused_rope_xattn: {message}")


def choose_build() -> Build:
    """The best that the machine and FUSED_ROPE_XATTN_CUDA allow."""
    released = os.environ.get("CIBUILDWHEEL") == "1"  # a released wheel must never lack CUDA
    mode = os.environ.get(SWITCH) or ("require" if released else "auto")
    if mode not in ("auto", "require", "0"):
        fail(f"{SWITCH} must be auto, require or 0, got {mode!r}")
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    cuda_home = None if mode == "0" else find_cuda_home()
    if sys.platform != "linux":
        build = Build("pure Python", f"binaries are built on Linux only, this is {sys.platform}")
    elif sysconfig.get_config_var("Py_GIL_DISABLED"):
        build = Build("pure Python", "free-threaded CPython cannot load a limited-API extension")
    elif shutil.which(compiler) is None:
        build = Build("pure Python", f"there is no C++ compiler: {compiler!r} is not on PATH")
    elif mode == "0":
        build = Build("CPU-only", f"{SWITCH}=0")
    elif cuda_home is None:
        build = Build("CPU-only", "no folder with bin/nvcc and include/cuda_runtime.h was found")
    else:
        build = Build("CUDA", f"{cuda_home} is a CUDA toolkit", cuda_home)
    if mode == "require" and build.kind != "CUDA":
        fail(f"{SWITCH}=require, but {build.reason}")
    return build


def find_cuda_home() -> Path | None:
    """The CUDA toolkit's root. nvcc on PATH may be a wrapper, so a root must show its headers."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        candidates = [Path(named)]
    else:
        nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
        from_pip = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("cu[0-9]*"))
        candidates = [nvcc.parents[1], nvcc.resolve().parents[1], *from_pip]
        candidates.append(Path("/usr/local/cuda"))
    needed = ("bin/nvcc", "include/cuda_runtime.h")
    return next((c for c in candidates if all((c / name).is_file() for name in needed)), None)


def architectures() -> list[str]:
    """The GPUs to compile for, written as in TORCH_CUDA_ARCH_LIST, which wins over the default."""
    archs = re.split(r"[;, ]+", (os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS).strip())
    for arch in archs:
        if re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch) is None:
            fail(f"TORCH_CUDA_ARCH_LIST takes items like 8.0, 9.0a or 8.0+PTX, got {arch!r}")
    return archs


def gencode_flags(archs: list[str]) -> list[str]:
    """nvcc's flags: machine code for each architecture, and PTX where it says so."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        for code in ("sm", "compute") if arch.endswith("+PTX") else ("sm",):
            flags.append(f"-gencode=arch=compute_{number},code={code}_{number}")
    return flags


def default_jobs() -> int:
    """One compiler a core, as far as free memory feeds them."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    by_memory = int(available[1]) // (GB_PER_JOB * 2**20) if available else 1
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def describe(build: Build) -> str:
    """The one message of a build, boxed: what is built, why, and how to get the rest."""
    lines = [f"fused_rope_xattn: {build.kind} build, because {build.reason}"]
    if build.kind == "CUDA":
        lines.append(f"For {', '.join(architectures())}; {os.environ['MAX_JOBS']} jobs at a time")
    else:
        lines += [
            "Everything works through PyTorch, on GPUs too, but without the fused kernels. Those",
            "come with the released wheel (pip install fused-rope-xattn), or with a build that",
            "finds nvcc and g++: set CUDA_HOME and CXX, and pass --no-cache-dir to pip.",
        ]
    rule = "=" * max(map(len, lines))
    return "\n".join(["", rule, *lines, rule, ""])
