"""A plugin of pytest that writes down each outcome as it falls, and can stop in time.

``pytest -p fused_rope_xattn.verify.outcomes --outcomes FILE [--stop-after SECONDS]`` leaves one
JSON object a line, so that a process which dies still leaves what it got through.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reading what was written needs no pytest
    import pytest

KINDS = ("passed", "failed", "skipped", "xfailed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outcomes")
    group.addoption("--outcomes", type=Path, help="file to write every outcome to")
    group.addoption("--stop-after", type=float, help="seconds after which no test starts")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--outcomes"):
        writer = Writer(config.getoption("--outcomes"), config.getoption("--stop-after"))
        config.pluginmanager.register(writer)


class Writer:
    """Appends to a file whatever pytest reports."""

    def __init__(self, file: Path, stop_after: float | None) -> None:
        self.file, self.stop_after = file, stop_after
        self.started = time.perf_counter()
        self.spent = 0.0
        self.session: pytest.Session | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session = session
        self._write({"collected": dict(Counter(file_of(item.nodeid) for item in session.items))})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.spent += report.duration
        if report.when == "call" or not report.passed:
            line = {"test": report.nodeid, "outcome": report.outcome, "seconds": self.spent}
            self.spent = 0.0
            if hasattr(report, "wasxfail"):
                line["outcome"] = "xfailed" if report.skipped else "failed"
            elif report.skipped:
                line["reason"] = _skip_reason(report)
            self._write(line)

    def pytest_runtest_logfinish(self) -> None:
        late = self.stop_after is not None and time.perf_counter() - self.started > self.stop_after
        if late and self.session is not None:
            self.session.shouldstop = "the time was up"

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def summary(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """(one row of counts for each test file that was finished, the files that were not)."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    collected: dict[str, int] = {}
    rows: dict[str, dict[str, Any]] = {}
    done: Counter[str] = Counter()
    seen: dict[str, str] = {}
    for line in lines:
        if "collected" in line:
            collected = line["collected"]
            continue
        name, test, outcome = file_of(line["test"]), line["test"], line["outcome"]
        row = rows.setdefault(name, _empty(name))
        row["seconds"] += line["seconds"]
        if test in seen:  # it passed or failed, then its clean-up failed
            if seen[test] == "failed":
                continue
            row[seen[test]] -= 1
        else:
            done[name] += 1
        seen[test] = outcome
        row[outcome] += 1
        if outcome == "failed":
            row["failures"].append(test)
        if "reason" in line:
            row["skip_reasons"][line["reason"]] = row["skip_reasons"].get(line["reason"], 0) + 1
    unfinished = sorted(name for name, count in collected.items() if done[name] < count)
    finished = [row for name, row in rows.items() if name not in unfinished]
    return [row | {"seconds": round(row["seconds"], 1)} for row in finished], unfinished


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of all files together, and why tests were skipped."""
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row["skip_reasons"])
    counts = {kind: sum(row[kind] for row in rows) for kind in KINDS}
    seconds = round(sum(row["seconds"] for row in rows), 1)
    return {**counts, "skip_reasons": dict(reasons), "seconds": seconds}


def _empty(name: str) -> dict[str, Any]:
    return {
        "name": name,
        **dict.fromkeys(KINDS, 0),
        "seconds": 0.0,
        "skip_reasons": {},
        "failures": [],
    }


def _skip_reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)
