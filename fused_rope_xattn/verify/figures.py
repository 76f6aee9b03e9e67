"""Measurements as figures. matplotlib is imported where one is drawn, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench import OURS
from .case import Case
from .roofline import multiplications
from .sweep import Point, directions, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATH_COLOURS = {"fused": "#1b7837", "split": "#2166ac", "composite": "#777777"}
PEER_COLOURS = ("#d6604d", "#b2abd2", "#f4a582", "#8073ac", "#e08214", "#666666", "#c51b7d")


def draw_sweep(rows: list[dict[str, Any]], target: Path, title: str) -> None:
    _save(sweep_figure(rows, title), target)


def sweep_figure(rows: list[dict[str, Any]], title: str) -> Figure:
    """Ratio to the best peer against problem size: a column a dtype, a line a pass.

    Filled: the path that the planner chose. Hollow: the one it left. Ringed: a choice that was
    wrong. Shaded: the sizes at which the planner chooses either.
    """
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row["case"]["dtype"] for row in rows))
    passes = directions(rows)
    figure = Figure(figsize=(3.4 * len(dtypes) + 0.6, 3.0 * len(passes) + 0.7))
    panels = figure.subplots(len(passes), len(dtypes), squeeze=False, sharex=True, sharey=True)
    for line, direction in zip(panels, passes, strict=True):
        line[0].set_ylabel(f"{direction}\nbest eager SDPA / ours")
        for panel, dtype in zip(line, dtypes, strict=True):
            mine = [p for p in points(rows, direction) if p.case["dtype"] == dtype]
            _sweep_panel(panel, mine)
            panel.set_title(dtype)
    for panel in panels[-1]:
        panel.set_xlabel("multiplications of a forward")
    handles, labels = _legend_of(panels)
    figure.suptitle(title, y=1.0)
    where: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.96)}
    figure.legend(handles, labels, ncols=len(labels), frameon=False, fontsize=8, **where)
    return figure


def _sweep_panel(panel: Any, mine: list[Point]) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.grid(alpha=0.25)
    sizes = {p.name: multiplications(Case(**p.case)) for p in mine}
    band = _switch([(sizes[p.name], p.chosen) for p in mine])
    if band:
        panel.axvspan(*band, color="#fee391", alpha=0.5, label="the planner switches")
    for p in mine:
        for path, us in p.paths.items():
            colour, chosen = PATH_COLOURS[path], path == p.chosen
            panel.plot(
                sizes[p.name],
                p.peer / us,
                marker="o",
                linestyle="",
                markersize=5 if chosen else 4,
                markeredgecolor=colour,
                markerfacecolor=colour if chosen else "none",
                label=f"{path}, {'chosen' if chosen else 'not chosen'}",
            )
        if p.wrong:
            ring = {"markersize": 11, "markeredgecolor": "#b2182b", "markerfacecolor": "none"}
            panel.plot(
                sizes[p.name], p.ratio, marker="o", linestyle="", label="slower by > 5 %", **ring
            )


def _switch(choices: list[tuple[float, str]]) -> tuple[float, float] | None:
    """From the smallest problem that is split to the largest that is fused, or the gap between."""
    fused = [size for size, path in choices if path == "fused"]
    split = [size for size, path in choices if path == "split"]
    if not fused or not split:
        return None
    low, high = sorted((min(split), max(fused)))
    return low, high


def draw_lengths(
    rows: Sequence[dict[str, Any]], floors: dict[str, list[float]], target: Path, title: str
) -> None:
    """Time against the number of queries on log axes, a panel a pass, over the roofline.

    ``floors``: for each pass microseconds of every row.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(floors), 4.4))
    panels = figure.subplots(1, len(floors), squeeze=False)[0]
    lengths = [row["case"]["Tq"] for row in rows]
    for panel, (direction, floor) in zip(panels, floors.items(), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.minorticks_off()
        panel.set_title(direction)
        panel.set_xlabel("queries (keys in proportion)")
        panel.set_ylabel("µs a call")
        panel.grid(alpha=0.25)
        for name, style in _styles(rows, direction).items():
            times = [row["passes"][direction].get(name, {}).get("us") for row in rows]
            known = [(x, y) for x, y in zip(lengths, times, strict=True) if y is not None]
            if known:
                panel.plot(*zip(*known, strict=True), label=name, marker="o", **style)
        panel.plot(lengths, floor, color="black", linestyle="--", linewidth=1, label="roofline")
        panel.legend(fontsize=7)
    figure.suptitle(title)
    _save(figure, target)


def _styles(rows: Sequence[dict[str, Any]], direction: str) -> dict[str, dict[str, Any]]:
    """A colour for each backend, dotted where it is compiled; ours is thick."""
    names = dict.fromkeys(name for row in rows for name in row["passes"][direction])
    backends = list(dict.fromkeys(name.split()[-1] for name in names if name != OURS))
    colours = {b: PEER_COLOURS[i % len(PEER_COLOURS)] for i, b in enumerate(backends)}
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        ours = name == OURS
        styles[name] = {
            "color": PATH_COLOURS["fused"] if ours else colours[name.split()[-1]],
            "linewidth": 2.2 if ours else 1.0,
            "markersize": 4 if ours else 3,
            "linestyle": ":" if name.startswith("compile") else "-",
        }
    return styles


def _legend_of(panels: Any) -> tuple[list[Any], list[str]]:
    """One entry for each label that any panel has."""
    found: dict[str, Any] = {}
    for panel in panels.flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _save(figure: Figure, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150, bbox_inches="tight")
