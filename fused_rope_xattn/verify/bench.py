"""Measures one problem: this package and its peers, forward and backward, time and accuracy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rope_xattn import cross_attention

from .accuracy import tf32, verdicts
from .case import Case, Inputs, draw_inputs
from .peers import Leaves, Peer, eager_block, peers_of
from .timing import call_time, wall_time

OURS = "fused_rope_xattn"
# Two honest implementations of one formula differ by rounding, not by more than this share.
SAME = 0.02

Block = Callable[[Leaves], Tensor]
Report = Callable[[str], None]


class Line(NamedTuple):
    """One line of a table: a problem and a pass. Times in microseconds a call, None if unknown."""

    name: str
    direction: str
    ours: float
    best_peer: str | None
    best: float | None
    ours_wall: float
    eager_wall: float | None  # default SDPA, not compiled
    error_share: float

    @property
    def speed_up(self) -> float | None:
        return self.best / self.ours if self.best else None

    @property
    def wall_speed_up(self) -> float | None:
        return self.eager_wall / self.ours_wall if self.eager_wall else None


def passes_of(case: Case) -> tuple[str, ...]:
    """Finished keys and values belong to decoding, where nothing is trained."""
    return ("forward",) if case.projected else ("forward", "forward+backward")


def steps_of(case: Case, compile: str) -> int:
    """How often ``measure`` reports."""
    eager = len(peers_of(case, compile=False))
    return 2 + eager + {"all": eager, "best": min(eager, 1), "none": 0}[compile]


def measure(
    case: Case, device: torch.device, *, compile: str, seed: int, report: Report
) -> dict[str, Any]:
    """Plain data about one problem; ``report`` is told what comes next.

    ``compile``: which eager blocks ``torch.compile`` gets too: all, the best of them, or none.
    """
    report(OURS)
    inputs = draw_inputs(case, device, seed)
    ours = _our_block(inputs)
    passes: dict[str, dict[str, Any]] = {}
    with tf32(case.dtype == "tf32"):
        for direction in passes_of(case):
            passes[direction] = {OURS: _timing(ours, inputs, direction, device)}
        context = (inputs, ours, device, report)
        _add_peers(passes, peers_of(case, compile=False), *context)
        _add_peers(passes, _compiled_peers(case, compile, passes), *context)
    report("accuracy")
    del inputs, ours, context
    return {"case": asdict(case), "passes": passes, "accuracy": accuracy(case, device, seed=seed)}


def _add_peers(
    passes: dict[str, dict[str, Any]],
    peers: list[Peer],
    inputs: Inputs,
    ours: Block,
    device: torch.device,
    report: Report,
) -> None:
    for peer in peers:
        report(peer.name)
        for direction, result in _peer_timings(peer, inputs, ours, device).items():
            passes[direction][peer.name] = result


def _compiled_peers(case: Case, compile: str, passes: dict[str, dict[str, Any]]) -> list[Peer]:
    compiled = [peer for peer in peers_of(case, compile=True) if peer.compiled]
    if compile == "all":
        return compiled
    forward = passes["forward"]
    timed = [p for p in compiled if "us" in forward[p._replace(compiled=False).name]]
    timed.sort(key=lambda p: forward[p._replace(compiled=False).name]["us"])
    return timed[:1] if compile == "best" else []


def accuracy(
    case: Case, device: torch.device, *, path: str = "auto", yardstick: str = "composite", seed: int
) -> list[dict[str, Any]]:
    """For each output and gradient its errors against fp64, beside what the rule allows."""
    found = verdicts(
        case, device=device, path=path, yardstick=yardstick, backward=not case.projected, seed=seed
    )
    return [
        {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in one._asdict().items()}
        for one in found
    ]


def error_share(errors: list[dict[str, Any]]) -> float:
    """The largest part of its allowance that any tensor uses; above 1 the rule is broken."""
    shares = [0.0]
    for one in errors:
        for kind in ("max", "mean"):
            error, budget = one[f"{kind}_error"], one[f"{kind}_budget"]
            if error and budget:
                shares.append(error / budget)
        if not one["ok"]:
            shares.append(math.inf if max(shares) <= 1 else max(shares))
    return max(shares)


def lines_of(row: dict[str, Any]) -> list[Line]:
    """What ``measure`` found, as lines of a table."""
    lines = []
    for direction, timings in row["passes"].items():
        peers = {name: t["us"] for name, t in timings.items() if name != OURS and "us" in t}
        best = min(peers, key=peers.__getitem__) if peers else None
        lines.append(
            Line(
                row["case"]["name"],
                direction,
                timings[OURS]["us"],
                best,
                None if best is None else peers[best],
                timings[OURS]["wall_us"],
                timings.get("eager default", {}).get("wall_us"),
                error_share(row["accuracy"]),
            )
        )
    return lines


def _our_block(inputs: Inputs) -> Block:
    def block(leaves: Leaves) -> Tensor:
        args, kwargs = inputs.call(leaves)
        returned = cross_attention(*args, **kwargs)
        y: Tensor = returned[0] if inputs.case.lse else returned
        return y

    return block


def _peer_timings(
    peer: Peer, inputs: Inputs, ours: Block, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Timings of each pass, or the reason why there are none."""
    results: dict[str, dict[str, Any]] = {}
    with warnings.catch_warnings(), peer.active():
        warnings.simplefilter("ignore")  # a backend that cannot run warns at length, then raises
        block = peer.prepare(eager_block(inputs))
        for direction in passes_of(inputs.case):
            try:
                _check_same(block, ours, inputs)
                results[direction] = _timing(block, inputs, direction, device)
            except RuntimeError as error:
                results[direction] = {"error": str(error).strip().split("\n", 1)[0]}
    return results


@torch.no_grad()
def _check_same(block: Block, ours: Block, inputs: Inputs) -> None:
    if inputs.case.dropout_p > 0:
        return  # another mask
    peer_y, our_y = block(inputs.leaves).float(), ours(inputs.leaves).float()
    difference = float((peer_y - our_y).norm() / our_y.norm())
    if not difference <= SAME:
        raise RuntimeError(f"computes something else: relative difference {difference:.3g}")


def _timing(block: Block, inputs: Inputs, direction: str, device: torch.device) -> dict[str, Any]:
    call = _forward(block, inputs) if direction == "forward" else _training(block, inputs)
    time = call_time(call, device)
    wall = time if time.method == "wall" else wall_time(call, device)
    return {**time._asdict(), "wall_us": wall.us}


def _forward(block: Block, inputs: Inputs) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return block(inputs.leaves)

    return call


def _training(block: Block, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """Forward, then the gradient of every leaf."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    grad = inputs.grads["y"]

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(block(leaves), list(leaves.values()), grad)

    return call
