"""Versions, devices and paths, as plain text for a report of a problem."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..verify.environment import environment

HELP = "print versions, GPUs and which paths can run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    facts = environment()
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


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
