"""Measurements as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..verify.bench import Line, error_share
from ..verify.sweep import directions, points
from ._screen import ratio, us

if TYPE_CHECKING:
    from rich.table import Table

SHORT = {"forward": "fwd", "forward+backward": "fwd+bwd"}


def empty_table(title: str, left: Iterable[str], right: Iterable[str], caption: str = "") -> Table:
    """Columns of words, then columns of numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, caption=caption or None, box=SIMPLE_HEAD)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def speed_table(lines: Iterable[Line]) -> Table:
    table = empty_table(
        "Microseconds a call",
        ("problem", "pass", "best peer"),
        ("ours", "peer", "ratio", "wall ours", "wall eager", "ratio", "error"),
        "wall: as the host sees it, eager = default SDPA; error: share of the allowance",
    )
    for line in lines:
        colour = "green" if (line.speed_up or 0) >= 1 else "red"
        accurate = "green" if line.error_share <= 1 else "red"
        table.add_row(
            line.name,
            SHORT[line.direction],
            line.best_peer or "-",
            us(line.ours),
            us(line.best),
            f"[{colour}]{ratio(line.speed_up)}[/]",
            us(line.ours_wall),
            us(line.eager_wall),
            ratio(line.wall_speed_up),
            f"[{accurate}]{line.error_share:.2f}[/]",
        )
    return table


def peers_table(row: dict[str, Any]) -> Table:
    """Everything that ran on one problem, not just the best."""
    table = empty_table(
        f"{row['name']}: every contender, microseconds a call",
        ("pass", "contender"),
        ("median", "quartiles", "over ours", "wall"),
    )
    table.add_column("by", overflow="fold")
    for direction, timings in row["passes"].items():
        ours = next(iter(timings.values()))["us"]
        for name, t in timings.items():
            if "error" in t:
                table.add_row(SHORT[direction], name, "-", "", "", "", t["error"])
                continue
            spread = f"{us(t['low_us'])} to {us(t['high_us'])}"
            times = us(t["us"]), spread, ratio(t["us"] / ours), us(t["wall_us"])
            by = t["method"] + (", L2 flushed" if t["flushed"] else "")
            table.add_row(SHORT[direction], name, *times, by)
    return table


def accuracy_table(checks: list[dict[str, Any]]) -> Table:
    table = empty_table(
        "Accuracy against fp64, forward and gradients",
        ("dtype", "path", "problems", "passed", "largest share of the allowed error"),
        (),
    )
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for check in checks:
        groups.setdefault((check["dtype"], check["path"]), []).append(check)
    for (dtype, path), group in groups.items():
        passed = sum(all(e["ok"] for e in check["errors"]) for check in group)
        worst = max(group, key=lambda check: error_share(check["errors"]))
        share = error_share(worst["errors"])
        colour = "green" if passed == len(group) else "red"
        where = f"{share:.2f} in {worst['case']}"
        table.add_row(dtype, path, str(len(group)), f"[{colour}]{passed}[/]", where)
    return table


def swap_table(rows: list[dict[str, Any]]) -> Table:
    table = empty_table(
        "Blocks of models before and after the swap",
        ("block", "variant"),
        SWAP_NUMBERS,
        "microseconds a call, MiB on top of weights and inputs, error: norm over that of fp64",
    )
    for cells in swap_cells(rows):
        table.add_row(*cells)
    return table


SWAP_NUMBERS = ("forward", "", "peak", "error", "training step", "", "peak", "gradients")


def swap_cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each variant of each block that ran."""
    lines = []
    for row in rows:
        variants = {n: v for n, v in row.get("variants", {}).items() if "why" not in v}
        for name, found in variants.items():
            cells = [row["name"], name]
            for part, error in (("forward", "y"), ("training", "gradients")):
                base = variants.get("original", {}).get(part)
                cells += [
                    us(found[part]["us"]),
                    ratio(base["us"] / found[part]["us"] if base else None),
                    mib(found[part]["peak_mib"]),
                    f"{found['error'][error]:.1e}",
                ]
            lines.append(cells)
    return lines


def swap_gaps(rows: list[dict[str, Any]]) -> list[str]:
    """What did not run, a line for each reason."""
    gaps: dict[str, list[str]] = {}
    for row in rows:
        if "why" in row:
            gaps.setdefault(row["why"], []).append(row["name"])
        for name, found in row.get("variants", {}).items():
            if "why" in found:
                gaps.setdefault(found["why"], []).append(f"{row['name']} ({name})")
    return [f"{why}: {', '.join(names)}" for why, names in gaps.items()]


SWEEP_WORDS = ("dtype", "pass", "path")
SWEEP_NUMBERS = ("B", "T", "dim", "D", "fused", "split", "best peer", "ratio", "to the faster path")


def sweep_table(rows: list[dict[str, Any]]) -> Table:
    table = empty_table(
        "Every path, microseconds a call",
        SWEEP_WORDS,
        SWEEP_NUMBERS,
        "path: the planner's; peers: eager SDPA in CUDA graphs; the last column: its path over"
        " the faster one",
    )
    for cells in sweep_cells(rows):
        table.add_row(*cells)
    return table


def sweep_cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each problem and pass, by dtype."""
    dtypes = list(dict.fromkeys(row["case"]["dtype"] for row in rows))
    found = [p for direction in directions(rows) for p in points(rows, direction)]
    return [
        [
            p.case["dtype"],
            SHORT[p.direction],
            p.chosen,
            *(str(p.case[size]) for size in ("B", "Tq", "Dq", "D")),
            us(p.paths.get("fused")),
            us(p.paths.get("split")),
            us(None if math.isnan(p.peer) else p.peer),
            ratio(None if math.isnan(p.ratio) else p.ratio),
            f"{p.loss:.2f}",
        ]
        for p in sorted(found, key=lambda p: dtypes.index(p.case["dtype"]))
    ]


def mib(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"
