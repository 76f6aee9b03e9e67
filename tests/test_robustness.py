"""A long-lived process: threads, streams, devices, memory that runs out, calls without end."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import cross_attention, prepare
from fused_rope_xattn.verify.cases import Case, draw_inputs
from problems import Target, assert_bits, assert_near, forward, gradients, small, with_grad

OPTIONS: list[dict[str, Any]] = [
    {"lse": True},
    {"q_norm": "rms", "bias": "1hqk", "Hkv": 2, "causal": True},
]


def test_two_threads(target: Target) -> None:
    """Each gets what one alone gets, forward and backward, in whatever order they take turns."""
    torch.use_deterministic_algorithms(True)
    problems = [small(target.device, seed=i, **options) for i, options in enumerate(OPTIONS)]
    want = [gradients(p, target.path) for p in problems]

    def work(i: int) -> list[dict[str, Tensor]]:
        if target.device == "cpu":
            return [gradients(problems[i], target.path) for _ in range(20)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [gradients(problems[i], target.path) for _ in range(50)]
        stream.synchronize()
        return results

    if target.device == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    for i in range(2):
        for result in found[i]:
            assert_near(result, want[i], 4)


def test_dropout_in_two_threads_draws_two_masks(target: Target) -> None:
    """One generator serves both; no draw is handed out twice."""
    inputs = small(target.device, dropout_p=0.5, B=1)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: forward(inputs, target.path).detach(), range(16)))
    assert len({y.double().sum().item() for y in results}) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["fused", "split"])
def test_both_devices_compute_the_same(path: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device: there is no second one to compare with")
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = small("cpu", lse=True)
        inputs.leaves = {n: t.detach().to(device) for n, t in inputs.leaves.items()}
        inputs.grads = {n: t.to(device) for n, t in inputs.grads.items()}
        result = gradients(with_grad(inputs), path)
        results.append({n: t.cpu() for n, t in result.items()})
    assert_near(results[1], results[0], 4)


# ---- two streams ----


def _graph_of(inputs: Any, path: str) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(inputs, path)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = gradients(inputs, path)
    return graph, static


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["fused", "split"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_thousand_replays_on_two_streams_at_once(path: str, dtype: str) -> None:
    """Two graphs that run beside each other share no workspace, counter or flag: every replay has
    the bits of one that ran alone."""
    torch.use_deterministic_algorithms(True)
    problems = [small("cuda", seed=s, B=3, Tq=65, Tk=130, lse=True, dtype=dtype) for s in (1, 2)]
    graphs = [_graph_of(p, path) for p in problems]
    want = []
    for graph, static in graphs:
        graph.replay()
        torch.cuda.synchronize()
        want.append({n: t.clone() for n, t in static.items()})
    streams = [torch.cuda.Stream() for _ in graphs]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(1000):
        for i, (graph, static) in enumerate(graphs):
            with torch.cuda.stream(streams[i]):
                graph.replay()
                for name, tensor in static.items():
                    wrong[i] += (tensor != want[i][name]).any()
    torch.cuda.synchronize()
    assert [int(w) for w in wrong] == [0, 0]


@pytest.mark.gpu
def test_a_thousand_calls_on_two_streams_at_once() -> None:
    """Without graphs: every call takes its memory anew, while the other stream's are running."""
    torch.use_deterministic_algorithms(True)
    problems = [small("cuda", seed=s, B=3, Tq=65, Tk=130, lse=True) for s in (1, 2)]
    want = [gradients(p, "fused") for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in problems]
    torch.cuda.synchronize()
    for _ in range(1000):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for name, tensor in gradients(problems[i], "fused").items():
                    wrong[i] += (tensor != want[i][name]).any()
    torch.cuda.synchronize()
    assert [int(w) for w in wrong] == [0, 0]


# ---- memory ----


def test_calls_leave_no_objects_behind(target: Target) -> None:
    inputs = small(target.device, dropout_p=0.1, q_norm="layer", bias="bhqk", lse=True)

    def objects(calls: int) -> int:
        for _ in range(calls):
            gradients(inputs, target.path)
        gc.collect()
        return len(gc.get_objects())

    objects(5)
    before = objects(1)
    assert objects(100) <= before + 20


def test_lengths_that_never_repeat_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What checks remember of a signature is bounded."""
    monkeypatch.setattr(prepare, "_MOST_CHECKED", 20)
    prepare._checked.clear()
    w = torch.randn(8, 8)
    for tokens in range(1, 60):
        cross_attention(torch.randn(1, tokens, 8), torch.randn(1, 3, 8), w, w, w, w, num_heads=1)
        assert len(prepare._checked) <= 20


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["fused", "split"])
def test_ten_thousand_calls_take_no_more_memory(path: str) -> None:
    options = {} if path == "fused" else {"dropout_p": 0.1, "q_norm": "layer"}
    inputs = small("cuda", lse=True, bias="bhqk", **options)

    def used(calls: int) -> tuple[int, int]:
        """Bytes of torch's tensors after more calls, and those in use on the whole device."""
        for _ in range(calls):
            gradients(inputs, path)
        gc.collect()  # else garbage of earlier tests may go, or be counted, at any time
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), total - free

    before, after = used(10), used(10_000)
    assert after[0] == before[0]
    # Neither outside of torch's allocator; other processes may take their share meanwhile.
    assert after[1] - before[1] <= 2**26, f"{(after[1] - before[1]) / 2**20:.0f} MiB more in use"


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["fused", "split"])
def test_running_out_of_memory_leaves_the_process_usable(path: str) -> None:
    inputs = small("cuda", lse=True)
    want = gradients(inputs, path)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    case = Case("large", 8, 8192, 512, H=8, D=64, Dq=512, dtype="fp32")
    large = with_grad(draw_inputs(case, "cuda"))
    # Room for the small problem, and for half of the large one's queries.
    allowed = torch.cuda.memory_reserved() + 2**26
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            gradients(large, path)
        assert_bits(gradients(inputs, path), want)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_bits(gradients(inputs, path), want)
