"""What tells one installation from another, and which sources its kernels were built from."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import fused_rope_xattn

from .cases import BASELINE, Case, draw_inputs
from .source_hash import source_hash


def environment() -> dict[str, Any]:
    """Everything that tells one installation from another; plain data."""
    return {
        "package": fused_rope_xattn.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": driver(),
        "binary": fused_rope_xattn.build_info(),
        "unavailable": fused_rope_xattn.why_unavailable(),
        "gpus": [gpu(i) for i in range(torch.cuda.device_count())],
        "paths": paths(),
    }


def driver() -> str | None:
    """The NVIDIA driver's version; None without nvidia-smi or a driver behind it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split("\n", 1)[0].strip() or None if done.returncode == 0 else None


def gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def paths() -> dict[str, str | None]:
    """For each path why it cannot run the baseline in bf16 on this machine; None if it can."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = BASELINE.at("bf16")
    return {path: why_not(case, path, device) for path in ("fused", "split", "composite")}


def why_not(case: Case, path: str, device: torch.device) -> str | None:
    """Why a path cannot take a problem on a device; None if it can."""
    inputs = draw_inputs(case, device)
    try:
        fused_rope_xattn.plan(*inputs.args, **{**inputs.kwargs, "path": path})
    except ValueError as error:
        return str(error).rpartition("cannot be taken: ")[2]
    return None


def kernel_source() -> str | None:
    """The hash of the kernel sources that the binary was built from; None without a binary.

    In a checkout it must be that of the sources beside the package, else a record would speak for
    code that did not run.
    """
    built: str | None = fused_rope_xattn.build_info().get("kernel_hash")
    folder = Path(fused_rope_xattn.__file__).parent.parent / "kernels"
    if built is not None and folder.is_dir() and source_hash(folder) != built:
        raise SystemExit(
            f"The binary was built from other kernel sources ({built}) than {folder}"
            f" ({source_hash(folder)}): build again, then record."
        )
    return built
