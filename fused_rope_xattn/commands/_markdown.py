"""A verification file as sections of Markdown, and their places in a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..verify.bench import error_share, lines_of
from ..verify.outcomes import totals
from ..verify.sweep import summary
from ._screen import ratio, us
from ._tables import SHORT, SWEEP_NUMBERS, SWEEP_WORDS, swap_cells, swap_gaps, sweep_cells

Record = dict[str, Any]


def markers(name: str) -> tuple[str, str]:
    """The lines between which a page has a section."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def sections(record: Record) -> dict[str, str]:
    """What a record can say, by the names of its markers."""
    found = {}
    if "speed" in record:
        found["speed"] = f"{_head(record, 'speed')}.\n\n{_speed(record['speed']['result']['rows'])}"
    if any(name in record for name in ("accuracy", "tests")):
        found["verification"] = verification(record)
    if "swap" in record:
        found["swap"] = f"{_head(record, 'swap')}.\n\n{_swap(record['swap']['result']['rows'])}"
    if "sweep" in record:
        rows = record["sweep"]["result"]["rows"]
        lines = "\n".join(f"- {line}" for line in summary(rows).splitlines())
        found["sweep"] = f"{_head(record, 'sweep')}.\n\n{lines}\n\n{_sweep(rows)}"
    return found


def write_between_markers(path: Path, found: dict[str, str]) -> None:
    """Replace what a page has between the markers of each section; it must have some."""
    text = path.read_text(encoding="utf-8")
    written = False
    for name, section in found.items():
        begin, end = markers(name)
        if begin not in text and end not in text:
            continue
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise SystemExit(f"{path} must have one line {begin} and, below it, one line {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{section}\n{end}{rest.split(end)[1]}"
        written = True
    if not written:
        wanted = ", ".join(markers(name)[0] for name in found) or "any section to write"
        raise SystemExit(f"{path} has none of {wanted}")
    path.write_text(text, encoding="utf-8")


def verification(record: Record) -> str:
    """Accuracy and the outcome of the tests, with random problems if there were some."""
    parts = [f"{_head(record, 'accuracy', 'tests')}; {_tests(record)}."]
    if "fuzz" in record:
        parts[0] += f" {_fuzz(record['fuzz']['result'])}"
    if "accuracy" in record:
        parts.append(_accuracy(record["accuracy"]["result"]["checks"]))
    return "\n\n".join(parts)


def table(headings: tuple[str, ...], align: str, lines: list[list[str]]) -> str:
    """``align``: for each column l(eft), for words, or r(ight), for numbers."""
    rule = "|".join({"l": "---", "r": "--:"}[letter] for letter in align)
    rows = [f"| {' | '.join(cells)} |" for cells in (list(headings), *lines)]
    return "\n".join([rows[0], f"|{rule}|", *rows[1:]])


def _head(record: Record, *names: str) -> str:
    facts = record["environment"]
    dates = sorted({record[name]["date"][:10] for name in names if name in record})
    return (
        f"Measured on {record['device']}, driver {facts['driver']}, torch {facts['torch']},"
        f" {' and '.join(dates)}, kernel sources `{record['kernel_source']}`"
    )


def _tests(record: Record) -> str:
    if "tests" not in record:
        return "tests were not run"
    result = record["tests"]["result"]
    counts = totals(result["rows"])
    text = f"{counts['passed']} tests passed, {counts['failed']} failed"
    if counts["xfailed"]:
        text += f", {counts['xfailed']} failed as expected"
    if counts["skipped"]:
        reasons = "; ".join(f"{n}: {reason}" for reason, n in counts["skip_reasons"].items())
        text += f", {counts['skipped']} skipped ({reasons})"
    text += f" in {counts['seconds']:.0f} s"
    if result["unfinished"]:
        text += f"; not finished: {', '.join(result['unfinished'])}"
    return text


def _fuzz(result: dict[str, Any]) -> str:
    passed = result["problems"] - result["failed"]
    return (
        f"Of {result['problems']:,} random problems over all options (`fuzz --seed"
        f" {result['seed']}`), {passed:,} passed against fp64."
    )


def _speed(rows: list[dict[str, Any]]) -> str:
    headings = (
        "problem", "pass", "ours, µs", "best peer, µs", "which", "ratio", "wall, µs",
        "eager wall, µs",
    )  # fmt: skip
    lines = [
        [
            line.name,
            SHORT[line.direction],
            us(line.ours),
            us(line.best),
            line.best_peer or "-",
            ratio(line.speed_up),
            us(line.ours_wall),
            us(line.eager_wall),
        ]
        for row in rows
        for line in lines_of(row)
    ]
    return table(headings, "llrrlrrr", lines)


def _accuracy(checks: list[dict[str, Any]]) -> str:
    """The worst tensor of each dtype and path."""
    worst: dict[tuple[str, str], tuple[float, str, int]] = {}
    for check in checks:
        key, share = (check["dtype"], check["path"]), error_share(check["errors"])
        before, where, count = worst.get(key, (-math.inf, "", 0))
        worst[key] = (*max((share, check["case"]), (before, where)), count + 1)
    headings = ("dtype", "path", "problems", "largest share of the allowed error", "in")
    lines = [
        [dtype, path, str(count), f"{share:.2f}", where]
        for (dtype, path), (share, where, count) in worst.items()
    ]
    return table(headings, "llrrl", lines)


def _swap(rows: list[dict[str, Any]]) -> str:
    headings = (
        "block", "variant", "forward, µs", "", "peak, MiB", "error", "training step, µs", "",
        "peak, MiB", "error of gradients",
    )  # fmt: skip
    return table(headings, "llrrrrrrrr", swap_cells(rows)) + "".join(
        f"\n\nNot measured, {gap}." for gap in swap_gaps(rows)
    )


def _sweep(rows: list[dict[str, Any]]) -> str:
    headings = (*SWEEP_WORDS, *SWEEP_NUMBERS)
    return table(headings, "lll" + "r" * len(SWEEP_NUMBERS), sweep_cells(rows))
