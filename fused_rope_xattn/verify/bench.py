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
from .peers import Leaves, Peer, peers_of
from .timing import CALLS, LONG_CALLS, call_time, wall_time

OURS = "fused_rope_xattn"
# Two honest implementations of one formula differ by rounding, not by more than this share.
SAME = 0.02


class Protocol(NamedTuple):
    """How times are taken."""

    compile: str = "all"  # which eager blocks torch.compile gets too: all, the best of them, none
    flush: bool = False  # the L2 cache ahead of every call

    def __str__(self) -> str:
        cache = "flushed ahead of every call" if self.flush else "as the call before left it"
        return (
            f"Medians of replays of CUDA graphs with {CALLS} calls each, {LONG_CALLS} of long ones"
            f" (on a CPU: of calls in a row); random inputs; L2 cache {cache}; torch.compile:"
            f" {self.compile}"
        )


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


def steps_of(case: Case, protocol: Protocol) -> int:
    """How often ``measure`` reports."""
    eager, every = (len(peers_of(case, compile=c)) for c in (False, True))
    compiled = every - eager
    return 2 + eager + {"all": compiled, "best": min(compiled, 1), "none": 0}[protocol.compile]


def measure(
    case: Case, device: torch.device, *, protocol: Protocol, seed: int, report: Report
) -> dict[str, Any]:
    """Plain data about one problem; ``report`` is told what comes next."""
    report(OURS)
    bench = _Bench(draw_inputs(case, device, seed), device, protocol)
    passes: dict[str, dict[str, Any]] = {}
    with tf32(case.dtype == "tf32"):
        for direction in passes_of(case):
            passes[direction] = {OURS: bench.timing(bench.ours, direction)}
        _add_peers(passes, peers_of(case, compile=False), bench, report)
        _add_peers(passes, _compiled_peers(case, protocol.compile, passes), bench, report)
    report("accuracy")
    del bench
    return {
        "name": case.name,
        "case": asdict(case),
        "seed": seed,
        "passes": passes,
        "accuracy": accuracy(case, device, seed=seed),
    }


def _add_peers(
    passes: dict[str, dict[str, Any]], peers: list[Peer], bench: _Bench, report: Report
) -> None:
    for peer in peers:
        report(peer.name)
        for direction, result in bench.peer_timings(peer).items():
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
                row["name"],
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


def our_block(inputs: Inputs, path: str = "auto") -> Block:
    def block(leaves: Leaves) -> Tensor:
        args, kwargs = inputs.call(leaves)
        returned = cross_attention(*args, **kwargs, path=path)
        y: Tensor = returned[0] if inputs.case.lse else returned
        return y

    return block


class _Bench:
    """The inputs of one problem, and how blocks are timed on them."""

    def __init__(self, inputs: Inputs, device: torch.device, protocol: Protocol) -> None:
        self.inputs, self.device, self.protocol = inputs, device, protocol
        self.ours = our_block(inputs)

    def timing(self, block: Block, direction: str) -> dict[str, Any]:
        call = call_of(block, self.inputs, direction)
        time = call_time(call, self.device, flush=self.protocol.flush)
        wall = time if time.method == "wall" else wall_time(call, self.device)
        return {**time._asdict(), "wall_us": wall.us}

    def peer_timings(self, peer: Peer) -> dict[str, dict[str, Any]]:
        """Timings of each pass, or the reason why there are none."""
        directions = passes_of(self.inputs.case)
        results: dict[str, dict[str, Any]] = {}
        with warnings.catch_warnings(), peer.active():
            # A backend that cannot run warns at length, then raises; others raise what they like.
            warnings.simplefilter("ignore")
            try:
                block = peer.prepare(self.inputs)
            except Exception as error:
                return {direction: {"error": first_line(error)} for direction in directions}
            for direction in directions:
                try:
                    self._check_same(block)
                    results[direction] = self.timing(block, direction)
                except Exception as error:
                    results[direction] = {"error": first_line(error)}
        return results

    @torch.no_grad()
    def _check_same(self, block: Block) -> None:
        if self.inputs.case.dropout_p > 0:
            return  # another mask
        peer_y, our_y = (b(self.inputs.leaves).float() for b in (block, self.ours))
        difference = float((peer_y - our_y).norm() / our_y.norm())
        if not difference <= SAME:
            raise RuntimeError(f"computes something else: relative difference {difference:.3g}")


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200] or type(error).__name__


def call_of(block: Block, inputs: Inputs, direction: str) -> Callable[[], Any]:
    """A pass of ``passes_of`` as a call without arguments."""
    return _forward(block, inputs) if direction == "forward" else _training(block, inputs)


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
