"""Versions, devices and paths, as plain text for a report of a problem."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
from typing import Any

import torch

import fused_rope_xattn

from ..verify.cases import BASELINE
from ._call import why_not

HELP = "print versions, GPUs and which paths can run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    facts = environment()
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


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


def as_text(facts: dict[str, Any]) -> str:
    binary = facts["binary"]
    lines = [
        ("fused_rope_xattn", facts["package"]),
        ("torch", f"{facts['torch']} (CUDA {facts['torch_cuda'] or 'none'})"),
        ("Python", f"{facts['python']} on {facts['platform']}"),
        ("driver", facts["driver"] or "none found by nvidia-smi"),
    ]
    lines += [
        (f"GPU {i}", "{name}, capability {capability}, {sms} SMs, {memory_gib} GiB".format(**g))
        for i, g in enumerate(facts["gpus"])
    ]
    if binary["binary"]:
        lines += [
            ("binary", f"CUDA {binary['cuda'] or 'none'}, for torch >= {binary['torch_target']}"),
            ("architectures", ", ".join(binary["archs"]) or "none"),
            ("kernel hash", binary["kernel_hash"]),
        ]
    lines.append(("kernels", facts["unavailable"] or "available"))
    lines += [
        (f"path {name}", "available" if reason is None else f"no: {reason}")
        for name, reason in facts["paths"].items()
    ]
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in lines)
