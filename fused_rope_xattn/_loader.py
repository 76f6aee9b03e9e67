"""Loads the compiled kernels, if there are any, and says what was loaded or why nothing was.

A missing or broken binary never breaks the package: everything then runs in plain PyTorch, and
:func:`why_unavailable` gives the reason together with what to do about it.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from typing import Any

import torch

from . import cpu_block_ops, cpu_ops, cpu_token_ops, ops

OLDEST_TORCH = (2, 10)  # the stable ABI that the binary is built for
OLDEST_CAPABILITY = (8, 0)

_REINSTALL = "pip install --no-cache-dir --force-reinstall fused-rope-xattn"


def _torch_version() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])


def _load() -> Exception | None:
    """Import ``_C``, whose kernels join the schemas of ops.py; the error if that failed."""
    if _torch_version() < OLDEST_TORCH:
        return ImportError(f"the kernels need torch >= 2.10, this is torch {torch.__version__}")
    try:
        importlib.import_module("._C", __package__)
    except ImportError as error:
        return error
    return None


cpu_ops.register()
cpu_block_ops.register()
cpu_token_ops.register()
_load_error = _load()


def load_error() -> Exception | None:
    """The exception that kept the binary from loading, as it was raised."""
    return _load_error


def is_available(device: torch.device | int | None = None) -> bool:
    """Whether the compiled kernels can run on that CUDA device (default: the current one)."""
    return why_unavailable(device) is None


def why_unavailable(device: torch.device | int | None = None) -> str | None:
    """What keeps the kernels from that CUDA device, and what to do; None if they can run."""
    index = device.index if isinstance(device, torch.device) else device
    if index is None and _binary_problem() is None:
        index = torch.cuda.current_device()
    return _device_problem(index)


def build_info() -> dict[str, Any]:
    """What the binary was built from and for; without a binary, a dict that says so.

    Keys: ``binary`` (bool); then ``reason``, or ``cuda`` ("12.9", None without CUDA kernels),
    ``archs`` (as in TORCH_CUDA_ARCH_LIST), ``torch_target`` ("2.10") and ``kernel_hash``.
    """
    if _load_error is not None:
        return {"binary": False, "reason": _binary_problem()}
    info = json.loads(torch.ops.fused_rope_xattn.build_info())
    cuda, target = info["cuda"], info["torch_target"]  # 1000 * major + 10 * minor; major, minor
    return {
        "binary": True,
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "archs": info["archs"].split(";") if info["archs"] else [],
        "torch_target": f"{target >> 8}.{target & 0xFF}",
        "kernel_hash": info["kernel_hash"],
    }


@functools.cache
def _binary_problem() -> str | None:
    """What is wrong before any particular device is looked at."""
    if isinstance(_load_error, ModuleNotFoundError) and _load_error.name == f"{__package__}._C":
        return (
            "This is an install without compiled kernels: it was built where no CUDA compiler was"
            f" found. Install the wheel ({_REINSTALL}), or nvcc and build from source again."
        )
    if _load_error is not None:
        return f"The compiled kernels did not load ({_load_error}). To reinstall: {_REINSTALL}"
    if not ops.has_cuda_kernels():
        return (
            "The binary was built without nvcc and holds no CUDA kernels."
            f" Install the wheel ({_REINSTALL}), or nvcc and build from source again."
        )
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA."
            " Install a CUDA build of torch: https://pytorch.org/get-started/locally/"
        )
    if not torch.cuda.is_available():
        return "torch sees no CUDA device. Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
    return None


@functools.cache
def _device_problem(index: int | None) -> str | None:
    problem = _binary_problem()
    if problem is not None:
        return problem
    capability = torch.cuda.get_device_capability(index)
    built_for = build_info()["archs"]
    if capability < OLDEST_CAPABILITY or not any(_runs_on(a, capability) for a in built_for):
        return (
            f"{torch.cuda.get_device_name(index)} has compute capability"
            f" {capability[0]}.{capability[1]}; the kernels were built for {', '.join(built_for)}."
            " Capability 8.0 or newer is needed; for one that is missing, build from source with"
            f' TORCH_CUDA_ARCH_LIST="{capability[0]}.{capability[1]}".'
        )
    return None


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for ``arch``, written as in TORCH_CUDA_ARCH_LIST, runs on a device."""
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
    if match is None:
        raise ValueError(f"build_info() names an architecture that is not known: {arch!r}")
    major, minor, specific, ptx = int(match[1]), int(match[2]), match[3], match[4]
    if specific == "a":
        return capability == (major, minor)
    same_major = capability[0] == major and capability[1] >= minor
    return same_major or (ptx is not None and capability >= (major, minor))
