"""Measurements as tables: for a terminal, and in Markdown for the README."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..verify.bench import Line, error_share, lines_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHORT = {"forward": "fwd", "forward+backward": "fwd+bwd"}
BEGIN, END = "<!-- verification:begin -->", "<!-- verification:end -->"


def console() -> Console:
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=120)  # a file has room


def speed_table(lines: Iterable[Line]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="Microseconds a call",
        caption="wall: as the host sees it, eager = default SDPA; error: share of the allowance",
        box=SIMPLE_HEAD,
    )
    for heading in ("problem", "pass"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ours", "best peer"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("which", no_wrap=True)
    for heading in ("ratio", "wall ours", "wall eager", "ratio", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        colour = "green" if (line.speed_up or 0) >= 1 else "red"
        accurate = "green" if line.error_share <= 1 else "red"
        table.add_row(
            line.name,
            SHORT[line.direction],
            _us(line.ours),
            _us(line.best),
            line.best_peer or "-",
            f"[{colour}]{_ratio(line.speed_up)}[/]",
            _us(line.ours_wall),
            _us(line.eager_wall),
            _ratio(line.wall_speed_up),
            f"[{accurate}]{line.error_share:.2f}[/]",
        )
    return table


def markdown(record: dict[str, Any]) -> str:
    """The README's section, from a verification file."""
    facts = record["environment"]
    tests = record["tests"]
    ran = (
        f"{tests['passed']} tests passed, {tests['failed']} failed, {tests['skipped']} skipped"
        if tests
        else "tests were not run"
    )
    head = (
        f"Measured on {record['device']}, driver {facts['driver']}, torch {facts['torch']},"
        f" {record['date'][:10]}, kernel sources `{record['kernel_source']}`; {ran}."
    )
    parts = [head, _speed_markdown(record["bench"]), _accuracy_markdown(record["accuracy"])]
    return "\n\n".join(parts)


def write_between_markers(path: Path, section: str) -> None:
    """Replace what a Markdown file has between BEGIN and END."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{path} must have one line {BEGIN} and one line {END}")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{section}\n{END}{after}", encoding="utf-8")


def _speed_markdown(rows: list[dict[str, Any]]) -> str:
    out = [
        "| problem | pass | ours, µs | best peer, µs | which | ratio | wall, µs | eager wall, µs |",
        "|---|---|--:|--:|---|--:|--:|--:|",
    ]
    for line in (line for row in rows for line in lines_of(row)):
        cells = (
            line.name,
            SHORT[line.direction],
            _us(line.ours),
            _us(line.best),
            line.best_peer or "-",
            _ratio(line.speed_up),
            _us(line.ours_wall),
            _us(line.eager_wall),
        )
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def _accuracy_markdown(checks: list[dict[str, Any]]) -> str:
    """The worst tensor of each dtype and path."""
    worst: dict[tuple[str, str], tuple[float, str, int]] = {}
    for check in checks:
        key, share = (check["dtype"], check["path"]), error_share(check["errors"])
        before, where, count = worst.get(key, (-math.inf, "", 0))
        worst[key] = (*max((share, check["case"]), (before, where)), count + 1)
    out = [
        "| dtype | path | problems | largest share of the allowed error | in |",
        "|---|---|--:|--:|---|",
    ]
    for (dtype, path), (share, where, count) in worst.items():
        out.append(f"| {dtype} | {path} | {count} | {share:.2f} | {where} |")
    return "\n".join(out)


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
