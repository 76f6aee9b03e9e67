"""The record of what was measured on one kind of device: a JSON file, written section by section.

Sections may come from several runs. They stand side by side only as long as all of them were
measured with the same kernels and the same torch: the first section from others starts anew.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from .environment import environment, kernel_source

SECTIONS = ("accuracy", "speed", "tests", "swap", "sweep", "fuzz")


def merge_section(directory: Path, name: str, value: object) -> Path:
    """Put ``value``, plain data, into the record of this machine's device; says where that is.

    Numbers that are not finite, which JSON lacks, become null.

    ``directory`` is made if need be. The section gets today's date and replaces its predecessor.
    Other sections stay if kernel sources and torch version are still those they were measured with,
    and are dropped otherwise.
    """
    if name not in SECTIONS:
        raise ValueError(f"name: expected one of {', '.join(SECTIONS)}, got {name!r}")
    directory.mkdir(parents=True, exist_ok=True)
    path = record_path(directory)
    head = {
        "device": device_name(),
        "kernel_source": kernel_source(),
        "environment": environment(),
    }
    old = _read(path)
    sections = {s: old[s] for s in SECTIONS if s in old} if _same_source(old, head) else {}
    dropped = [s for s in SECTIONS if s in old and s not in sections and s != name]
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    sections[name] = {"date": now, "result": _finite(value)}
    _write(path, head | {s: sections[s] for s in SECTIONS if s in sections})
    print(f"Recorded: {name} in {path}")
    if dropped:
        print(f"Dropped from it, measured with other kernels or torch: {', '.join(dropped)}")
    return path


def merge_rows(directory: Path, name: str, rows: list[dict[str, Any]], **more: object) -> Path:
    """As :func:`merge_section`, for a section that is measured piece by piece.

    Its result is ``{"rows": rows, **more}``, where each row is known by its "name": a new row
    replaces the one of that name, and the others stay in their order.
    """
    before = read_section(directory, name)
    kept = {row["name"]: row for row in before["rows"]} if before else {}
    merged = list((kept | {row["name"]: row for row in rows}).values())
    return merge_section(directory, name, {"rows": merged, **more})


def read_section(directory: Path, name: str) -> Any:
    """The result of a section which a merge would keep, else None."""
    record = _read(record_path(directory))
    head = {"kernel_source": kernel_source(), "environment": {"torch": torch.__version__}}
    return record[name]["result"] if name in record and _same_source(record, head) else None


def record_path(directory: Path) -> Path:
    return directory / (re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-") + ".json")


def device_name() -> str:
    """The current GPU, or CPU where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _same_source(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return bool(
        old
        and old["kernel_source"] == new["kernel_source"]
        and old["environment"]["torch"] == new["environment"]["torch"]
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _write(path: Path, record: dict[str, Any]) -> None:
    """All or nothing: a run that is cut short leaves the former record."""
    scratch = path.with_suffix(".json.part")
    scratch.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
