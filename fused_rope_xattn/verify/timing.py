"""Time of one call: medians of CUDA-graph replays, and the wall time that a caller sees.

A graph that holds a single kernel costs about 4 us of its own on an H200, so that short calls are
only seen right with many of them in one graph: the replay's time over their number. Each call then
finds in the L2 cache what the one before it left there. With ``flush`` something larger than the
cache is written ahead of every call, and the time of the same graph without the calls taken off.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

CALLS = 20  # calls a graph, or a sample of wall time
LONG_CALLS = 5  # the same, for calls of LONG_US or more
LONG_US = 1000.0

MIN_SAMPLES, MAX_SAMPLES = 11, 201

Call = Callable[[], Any]


class Effort(NamedTuple):
    """Seconds spent on one timing."""

    warm_up: float  # brings the clocks up
    sampling: float


FULL, BRIEF = Effort(0.1, 0.3), Effort(0.02, 0.06)


class Deadline:
    """Until when a command may start something new; without a limit, for ever."""

    def __init__(self, limit_s: float | None) -> None:
        self.end = math.inf if limit_s is None else time.perf_counter() + limit_s

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.perf_counter()

    @property
    def passed(self) -> bool:
        return self.left <= 0

    @contextlib.contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Ctrl-C within breaks that off, and nothing further starts: what is finished is kept."""
        try:
            yield
        except KeyboardInterrupt:
            self.end = -math.inf


class Timing(NamedTuple):
    """Microseconds a call."""

    us: float  # median of the samples
    low_us: float  # their first quartile
    high_us: float  # and their third
    samples: int
    calls: int  # in each sample
    method: str  # "graph" (replays) | "events" (eager calls, GPU clock) | "wall" (host clock)
    flushed: bool = False  # whether a call finds nothing in the L2 cache


def call_time(
    call: Call, device: torch.device, *, effort: Effort = FULL, flush: bool = False
) -> Timing:
    """Time the device spends on ``call``; on a CPU the wall time, where nothing is flushed.

    ``call`` must always do the same work on the same tensors. What cannot be captured in a graph is
    timed by events around eager calls instead, which ``method`` then says.
    """
    if device.type != "cuda":
        return wall_time(call, device, effort=effort)
    with torch.cuda.device(device):
        calls = _calls_a_sample(call, device)
        if not flush:
            return _device_time(call, calls, device, effort)
        clear = _flusher(device)

        def flushed_call() -> None:
            clear()
            call()

        both = _device_time(flushed_call, calls, device, effort)
        alone = _device_time(clear, calls, device, effort).us
        low, middle, high = (max(0.0, us - alone) for us in (both.low_us, both.us, both.high_us))
        return both._replace(us=middle, low_us=low, high_us=high, flushed=True)


def wall_time(call: Call, device: torch.device, *, effort: Effort = FULL) -> Timing:
    """Wall time a call, of eager calls in a row with one synchronisation at their end."""
    calls = _calls_a_sample(call, device)
    samples = _samples(_repeated(call, calls), device, _host_clock, effort)
    return _summary(samples, calls, "wall")


def _device_time(call: Call, calls: int, device: torch.device, effort: Effort) -> Timing:
    replay = _captured(call, calls)
    method = "events" if replay is None else "graph"
    replay = replay or _repeated(call, calls)
    return _summary(_samples(replay, device, _event_clock, effort), calls, method)


def _flusher(device: torch.device) -> Call:
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    scratch = torch.empty(2 * cache, dtype=torch.uint8, device=device)
    return scratch.zero_


def _calls_a_sample(call: Call, device: torch.device) -> int:
    """Warm up, which is when things compile and load, then look how long a call takes."""
    for _ in range(3):
        call()
    once = min(_host_clock(call, device) for _ in range(3))
    return LONG_CALLS if once >= LONG_US else CALLS


def _repeated(call: Call, calls: int) -> Call:
    def repeat() -> None:
        for _ in range(calls):
            call()

    return repeat


def _captured(call: Call, calls: int) -> Call | None:
    """Replays one graph of ``calls`` calls; None if they cannot be captured."""
    # Autograd and the libraries initialise per stream, so the warm-up happens where capture will.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _samples(
    work: Call,
    device: torch.device,
    clock: Callable[[Call, torch.device], float],
    effort: Effort,
) -> list[float]:
    """Microseconds of ``work``, again and again for about as long as ``effort`` says."""
    started = time.perf_counter()
    while time.perf_counter() - started < effort.warm_up:
        clock(work, device)
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < MIN_SAMPLES or (
        len(samples) < MAX_SAMPLES and time.perf_counter() - started < effort.sampling
    ):
        samples.append(clock(work, device))
    return samples


def _event_clock(work: Call, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1e3


def _host_clock(work: Call, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6


def _summary(samples: list[float], calls: int, method: str) -> Timing:
    low, median, high = (q / calls for q in statistics.quantiles(samples, n=4))
    return Timing(median, low, high, len(samples), calls, method)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
