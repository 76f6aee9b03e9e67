"""What the pages take from a verification record: nothing in them is typed in by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fused_rope_xattn.commands._markdown import sections
from fused_rope_xattn.verify.bench import error_share

FOLDER = Path(__file__).resolve().parents[1] / "verification"
# The record of the kernels as they are, and before it those of earlier ones, which serve for what
# has not been measured again.
RECORDS = (*sorted(FOLDER.glob("nvidia-h200-*.json")), FOLDER / "nvidia-h200.json")
DTYPES = ("fp32", "tf32", "bf16", "fp16")
KERNEL_PATHS = ("split", "fused")


def read(section: str) -> Any:
    """The latest result of a section."""
    found: Any = None
    for path in RECORDS:
        found = _load(path).get(section, found)
    return found["result"]


def speed() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read("speed")["rows"]
    return rows


def tables() -> str:
    """Every section but the sweep, whose length wants a page of its own."""
    return "\n\n".join(text for name, text in _sections().items() if name != "sweep")


def sweep() -> str:
    return _sections()["sweep"]


def errors_by_tensor() -> str:
    """For each output and gradient the largest share of its allowance, over all problems."""
    worst: dict[str, dict[str, float]] = {}
    for check in read("accuracy")["checks"]:
        if check["path"] in KERNEL_PATHS:
            for error in check["errors"]:
                row = worst.setdefault(error["tensor"], {})
                share = error_share([error])
                row[check["dtype"]] = max(share, row.get(check["dtype"], 0.0))
    lines = [f"| tensor | {' | '.join(DTYPES)} |", f"|---|{'--:|' * len(DTYPES)}"]
    for name in sorted(worst, key=_outputs_first):
        cells = (f"{worst[name][d]:.2f}" if d in worst[name] else "-" for d in DTYPES)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def problems() -> str:
    """The sizes behind the names in the table of times."""
    columns = ("B", "Tq", "Tk", "H", "D", "Dq", "Dkv")
    lines = [f"| problem | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for row in speed():
        case = row["case"]
        case = {**case, "Dkv": "cached" if case["projected"] else case["Dkv"] or case["Dq"]}
        lines.append(f"| {case['name']} | {' | '.join(str(case[c]) for c in columns)} |")
    return "\n".join(lines)


def _sections() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in RECORDS:
        found |= sections(_load(path))
    return found


def _load(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _outputs_first(name: str) -> tuple[int, str]:
    return (0 if name in ("y", "lse") else 1, name)


def replace_markers(text: str, makers: Iterable[tuple[str, Any]]) -> str:
    """Put what each maker returns in the place of its ``<!-- record: name -->``."""
    for name, make in makers:
        marker = f"<!-- record: {name} -->"
        if marker in text:
            text = text.replace(marker, make())
    return text
