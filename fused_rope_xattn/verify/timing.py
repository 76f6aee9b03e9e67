"""Time of one call: medians of CUDA-graph replays, and the wall time that a caller sees.

A graph that holds a single kernel costs about 4 us of its own on an H200, so that short calls are
only seen right with many of them in one graph: the replay's time over their number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

CALLS = 20  # calls a graph, or a sample of wall time
LONG_CALLS = 5  # the same, for calls of LONG_US or more
LONG_US = 1000.0

WARM_UP_S = 0.1  # brings the clocks up
SAMPLING_S = 0.3
MIN_SAMPLES, MAX_SAMPLES = 11, 201

Call = Callable[[], Any]


class Timing(NamedTuple):
    """Microseconds a call."""

    us: float  # median of the samples
    low_us: float  # their first quartile
    high_us: float  # and their third
    samples: int
    calls: int  # in each sample
    method: str  # "graph" (replays) | "events" (eager calls, GPU clock) | "wall" (host clock)


def call_time(call: Call, device: torch.device) -> Timing:
    """Time the device spends on ``call``; on a CPU the wall time.

    ``call`` must always do the same work on the same tensors. What cannot be captured in a graph is
    timed by events around eager calls instead, which ``method`` then says.
    """
    if device.type != "cuda":
        return wall_time(call, device)
    with torch.cuda.device(device):
        calls = _calls_a_sample(call, device)
        replay = _captured(call, calls)
        method = "events" if replay is None else "graph"
        replay = replay or _repeated(call, calls)
        return _summary(_samples(replay, device, _event_clock), calls, method)


def wall_time(call: Call, device: torch.device) -> Timing:
    """Wall time a call, of eager calls in a row with one synchronisation at their end."""
    calls = _calls_a_sample(call, device)
    return _summary(_samples(_repeated(call, calls), device, _host_clock), calls, "wall")


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
    work: Call, device: torch.device, clock: Callable[[Call, torch.device], float]
) -> list[float]:
    """Microseconds of ``work``, again and again for about SAMPLING_S."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_S:
        clock(work, device)
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < MIN_SAMPLES or (
        len(samples) < MAX_SAMPLES and time.perf_counter() - started < SAMPLING_S
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
