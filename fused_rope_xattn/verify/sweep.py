"""Times every path over a grid of sizes: is the planner's the fastest, and what do peers take?

Peers are the eager block with SDPA's default and, in 16-bit types, cuDNN, both as CUDA graphs.
``torch.compile`` takes seconds a problem and is left to the rows of ``bench``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .. import plan
from .accuracy import tf32
from .bench import call_of, first_line, our_block
from .case import Case, Inputs, draw_inputs
from .peers import Peer
from .timing import BRIEF, FULL, Deadline, Effort, call_time

# A choice counts as wrong when the other path is faster by more than this share.
TOLERANCE = 1.05

Report = Callable[[str], None]

# (B, T, dim, D): lines through a common point along each axis, then corners.
_COMMON = (4, 128, 256, 32)
_LINES = (
    *((4, t, 256, 32) for t in (16, 32, 64, 128, 256, 512, 1024)),
    *((b, 64, 256, 32) for b in (1, 2, 8, 16, 32, 64)),
    *((4, 128, dim, 64) for dim in (128, 256, 512, 768, 1024)),
    *((4, 128, 256, d) for d in (16, 128)),
)
_CORNERS = (
    (1, 16, 128, 16),
    (1, 1024, 1024, 64),
    (64, 16, 1024, 128),
    (16, 256, 512, 64),
    (64, 1024, 1024, 64),
)
_FEW = ((4, 16, 256, 32), _COMMON, (4, 1024, 256, 32), (64, 64, 256, 32), *_CORNERS[1:4])
_SMALL = ((1, 8, 16, 8), (2, 8, 32, 16))


def grid(small: bool = False) -> list[Case]:
    """The problems of a sweep; ``small``: two that a CPU gets through."""
    if small:
        return [_case("fp32", *sizes) for sizes in _SMALL]
    whole = (*_LINES, *_CORNERS)
    return [
        _case(dtype, *sizes)
        for dtype, points in (("fp32", whole), ("tf32", whole), ("bf16", whole), ("fp16", _FEW))
        for sizes in points
    ]


def _case(dtype: str, batch: int, tokens: int, dim: int, head_dim: int) -> Case:
    name = f"{dtype} B{batch} T{tokens} dim{dim} D{head_dim}"
    return Case(name, batch, tokens, tokens, H=dim // head_dim, D=head_dim, Dq=dim, dtype=dtype)


def sweep(
    cases: Sequence[Case],
    device: torch.device,
    *,
    passes: Sequence[str],
    seed: int,
    deadline: Deadline,
    report: Report,
) -> list[dict[str, Any]]:
    """A row of plain data for each problem that the time was enough for, pass after pass."""
    rows: dict[str, dict[str, Any]] = {}
    for direction in passes:
        for case in cases:
            report(f"{direction} {case.name}")
            if deadline.passed:
                continue
            with (
                deadline.until_interrupted(),
                tf32(case.dtype == "tf32"),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                inputs = draw_inputs(case, device, seed)
                row = {"name": case.name, "case": asdict(case), "seed": seed, "passes": {}}
                try:
                    found = _measure(inputs, direction, device)
                except RuntimeError as error:
                    found = {"failed": first_line(error)}
                rows.setdefault(case.name, row)["passes"][direction] = found
    return [row for row in rows.values() if row["passes"]]


def _choice(inputs: Inputs, direction: str) -> str:
    """The planner's path, which need not be the same with gradients and without."""
    for leaf in inputs.leaves.values():
        leaf.requires_grad_(direction != "forward")
    return plan(*inputs.args, **inputs.kwargs).path


def _measure(inputs: Inputs, direction: str, device: torch.device) -> dict[str, Any]:
    """Microseconds of each path that can run and of each peer; why others cannot."""
    chosen = _choice(inputs, direction)
    paths: dict[str, float] = {}
    peers: dict[str, float] = {}
    refused: dict[str, str] = {}

    def time_path(path: str, effort: Effort) -> None:
        call = call_of(our_block(inputs, path), inputs, direction)
        paths[path] = call_time(call, device, effort=effort).us

    for path in dict.fromkeys((chosen, "fused", "split")):
        try:
            plan(*inputs.args, **{**inputs.kwargs, "path": path})
        except ValueError as error:
            refused[path] = str(error).rpartition("cannot be taken: ")[2]
        else:
            time_path(path, BRIEF)
    if _wrong(chosen, paths):  # look again, longer
        for path in paths:
            time_path(path, FULL)
    for peer in _peers(inputs.case):
        with peer.active():
            try:
                call = call_of(peer.prepare(inputs), inputs, direction)
                peers[peer.name] = call_time(call, device, effort=BRIEF).us
            except RuntimeError as error:
                refused[peer.name] = first_line(error)
    return {"chosen": chosen, "paths": paths, "peers": peers, "refused": refused}


def _peers(case: Case) -> Iterator[Peer]:
    yield Peer("default", False)
    if case.storage.itemsize == 2:
        yield Peer("cudnn", False)


def _wrong(chosen: str, paths: dict[str, float]) -> bool:
    return paths[chosen] > TOLERANCE * min(paths.values())


class Point:
    """One problem and pass of a sweep, as its table and its figure need it."""

    def __init__(self, row: dict[str, Any], direction: str) -> None:
        found = row["passes"][direction]
        self.name, self.case, self.direction = row["name"], row["case"], direction
        self.chosen: str = found["chosen"]
        self.paths: dict[str, float] = found["paths"]
        self.peer: float = min(found["peers"].values(), default=math.nan)
        self.us: float = self.paths[self.chosen]
        self.wrong = _wrong(self.chosen, self.paths)

    @property
    def ratio(self) -> float:
        """The best peer's time over that of the chosen path."""
        return self.peer / self.us

    @property
    def loss(self) -> float:
        """The chosen path's time over that of the fastest."""
        return self.us / min(self.paths.values())


def points(rows: list[dict[str, Any]], direction: str) -> list[Point]:
    """Every problem that ran."""
    ran = (row for row in rows if "paths" in row["passes"].get(direction, {}))
    return [Point(row, direction) for row in ran]


def failures(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['name']} {direction}: {found['failed']}"
        for row in rows
        for direction, found in row["passes"].items()
        if "failed" in found
    ]


def directions(rows: list[dict[str, Any]]) -> list[str]:
    found = dict.fromkeys(direction for row in rows for direction in row["passes"])
    return list(found)


def summary(rows: list[dict[str, Any]]) -> str:
    """For each pass the worst ratio to a peer, and where the planner was wrong."""
    lines = []
    for direction in directions(rows):
        every = points(rows, direction)
        compared = [p for p in every if not math.isnan(p.ratio)]
        text = f"{direction}: {len(every)} problems"
        if compared:
            worst = min(compared, key=lambda p: p.ratio)
            text += f", worst ratio to the best peer {worst.ratio:.2f}x ({worst.name})"
        choices = [p for p in every if len(p.paths) > 1]
        wrong = sorted((p for p in choices if p.wrong), key=lambda p: -p.loss)
        text += f", the planner was wrong by more than {TOLERANCE - 1:.0%} in {len(wrong)} of"
        text += f" {len(choices)} choices"
        if wrong:
            named = "; ".join(f"{p.name} took {p.chosen}, {p.loss:.2f}x" for p in wrong)
            text += f" ({named})"
        lines.append(f"{text}.")
    return "\n".join(lines)
