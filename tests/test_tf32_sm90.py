"""TF32 attention on Hopper's own instructions: when it runs, and that it is as right as TF32 is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from formulas import transposed_values
from fused_rope_xattn import Norm, ProjectedKV, cross_attention, grouped, ops, plan, prepare
from fused_rope_xattn.ops import ScoreOptions
from fused_rope_xattn.planner import GPU
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.accuracy import tf32 as tf32_set_to
from fused_rope_xattn.verify.cases import Case
from pretence import Operators, kernels_everywhere

SIDES = (True, True, False)  # need_dq, need_dkv, need_dbias


def on_hopper() -> None:
    if torch.cuda.get_device_capability() != grouped.CAPABILITY:
        pytest.skip("the kernels are Hopper's")


def options(D: int, **fields: Any) -> ScoreOptions:
    plain = ScoreOptions(None, None, None, None, None, D**-0.5, False, 0.0, True)
    return plain._replace(**fields)


def problem(D: int = 64, B: int = 4, Tq: int = 200, Tk: int = 333, H: int = 4) -> list[Tensor]:
    """q, k, v, dout: large enough for the kernels from 64 dims on."""
    return [torch.randn(B, tokens, H, D, device="cuda") for tokens in (Tq, Tk, Tk, Tq)]


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scores: ScoreOptions, *, deterministic: bool
) -> tuple[Tensor, ...]:
    o, lse = ops.attention_forward(q, k, v, scores)
    dq, dkv, dbias = SIDES
    return ops.attention_backward(
        *(dout, None, q, k, v, o, lse, scores),
        need_dq=dq,
        need_dkv=dkv,
        need_dbias=dbias,
        deterministic=deterministic,
    )


# ------------------------------------------------------------------------------------- the choice


H200, A100 = GPU("NVIDIA H200", (9, 0), 132), GPU("NVIDIA A100", (8, 0), 108)


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prepare, "allows_tf32", lambda device: True)
    prepare._checked.clear()
    yield
    prepare._checked.clear()


@pytest.fixture
def on_h200(tf32: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors take the way of a Hopper's, to the operators' CPU kernels."""
    monkeypatch.setattr(grouped, "is_taken", lambda p: grouped.obstacle(p) is None)
    monkeypatch.setattr(grouped, "takes_output", lambda p: grouped.output_obstacle(p) is None)
    yield from kernels_everywhere(monkeypatch)


def call(
    D: int = 64, tokens: int = 300, width: int = 128, device: str = "meta", **options: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, x_value = (torch.randn(4, tokens, w, device=device) for w in (128, width))
    w, w_v = (torch.randn(4 * D, depth, device=device) / 12 for depth in (128, width))
    return (x, x, w, w, w_v, None), {"num_heads": 4, "path": "split", "x_value": x_value, **options}


def planned(gpu: GPU, **fields: Any) -> tuple[str, ...]:
    args, options = call(**fields)
    return plan(*args, **options, gpu=gpu).kernels


@pytest.mark.usefixtures("tf32")
def test_the_plan_says_when_values_are_transposed() -> None:
    """By a launch of its own where the one of projections does not make them."""
    alone = "transpose_heads v", "attention_forward"
    assert planned(H200) == ("project_group q k v", "attention_forward")
    assert planned(H200, rope=None) == ("gemm q", "gemm k", "gemm v", *alone)
    assert planned(H200, width=132) == ("project_group q k", "gemm v", *alone)
    normed = planned(H200, k_norm=Norm("rms"))
    assert normed == ("project_group q v", "gemm k", "norm_rope k", "attention_forward")
    (x, _, w, *_), options = call(x_value=None)
    kv = ProjectedKV(*(torch.empty(4, 4, 300, 64, device="meta") for _ in "kv"))
    cached = plan(x, kv, w, None, None, None, **options, gpu=H200).kernels
    assert cached == ("project_group q", *alone)
    for gpu, fields in [(H200, {"D": 136}), (H200, {"tokens": 100}), (A100, {})]:
        assert "transpose_heads v" not in planned(gpu, **fields)


def with_output(
    Dout: int = 128, dtype: torch.dtype = torch.float32, device: str = "meta", **fields: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (*tensors, _), options = call(device=device, **fields)
    x, x_kv, w_q, w_k, w_v = (x.to(dtype) for x in tensors)
    w_out = torch.randn(Dout, w_q.shape[0], device=device, dtype=dtype) / 16
    options["x_value"] = options["x_value"].to(dtype)
    return (x, x_kv, w_q, w_k, w_v, w_out), options


@pytest.mark.usefixtures("tf32")
def test_the_plan_says_which_kernel_projects_the_output() -> None:
    def last(gpu: GPU = H200, **fields: Any) -> str:
        args, options = with_output(**fields)
        return plan(*args, **options, gpu=gpu).kernels[-1]

    assert last() == last(rope=None) == last(k_norm=Norm("rms")) == "project_group out"
    assert last(tokens=128) == "project_group out"
    assert last(tokens=127) == "gemm out"  # four times as many rows, which are few
    assert last(tokens=8192, Dout=512) == "project_group out"
    assert last(tokens=8193, Dout=512) == "gemm out"  # fills the GPU by itself
    assert last(Dout=132) == "gemm out"  # no multiple of 8
    assert last(dtype=torch.bfloat16) == last(gpu=A100) == "gemm out"


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize("tokens", [300, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_output_is_projected_as_the_plan_says(has_bias: bool, tokens: int) -> None:
    args, options = with_output(device="cpu", tokens=tokens)
    if has_bias:
        options["b_out"] = torch.randn(128)
    kernels = plan(*args, **options, gpu=H200).kernels
    groups = [kernel for kernel in kernels if kernel.startswith("project_group")]
    with Operators() as launches:
        y = cross_attention(*args, **options)
    assert launches.names.count("project_group") == len(groups) == (2 if tokens == 300 else 1)
    torch.testing.assert_close(y, cross_attention(*args, **options | {"path": "composite"}))


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize("tokens", [300, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_output_may_be_written_to(has_bias: bool, tokens: int) -> None:
    """As any result of an operation, whichever kernel made it."""
    args, options = with_output(device="cpu", tokens=tokens)
    options["b_out"] = torch.randn(128) if has_bias else None
    args[-1].requires_grad_()
    y = cross_attention(*args, **options)
    y += 1
    torch.relu_(y).sum().backward()
    assert args[-1].grad is not None
    with torch.no_grad():
        y = cross_attention(*args, **options)
    y += args[-1].sum()  # outside
    y.sum().backward()


@pytest.mark.usefixtures("on_h200")
def test_an_exported_program_leaves_the_output_to_torch() -> None:
    """It must not depend on how its lengths compare to the kernel's limits."""

    class Block(torch.nn.Module):
        def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
            y: Tensor = cross_attention(x, x, *weights, num_heads=4, path="split")
            return y

    tensors = torch.randn(4, 300, 128), *(torch.randn(256, 128) / 12 for _ in "qkv")
    tensors = *tensors, torch.randn(128, 256) / 16
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = {"x": {1: tokens}, "weights": (None,) * 4}
    program = torch.export.export(Block(), tensors, dynamic_shapes=shapes)
    names = [str(node.target) for node in program.graph.nodes]
    assert sum("project_group" in name for name in names) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [300, 100])
def test_a_hopper_projects_the_output_as_the_plan_says(tokens: int) -> None:
    on_hopper()
    args, options = with_output(device="cuda", tokens=tokens)
    with tf32_set_to(True), Operators() as launches, torch.no_grad():
        kernels = plan(*args, **options).kernels
        cross_attention(*args, **options)
    groups = [kernel for kernel in kernels if kernel.startswith("project_group")]
    assert launches.names.count("project_group") == len(groups) == (2 if tokens == 300 else 1)


class Attention(TorchDispatchMode):
    """Values, transposed or None, and the keys that exist, of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor | None, ScoreOptions]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket.__name__ == "attention_forward":
            transposed = args[12] if len(args) > 12 else None
            self.seen.append((args[2], transposed, ScoreOptions(*args[3:12])))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_lengths": [300, 7, 0, 299]},
        {"kv_keep_mask": "keys"},
        {"width": 72, "k_norm": Norm("rms")},
        {"rope": None},
        {"width": 132},
        {"D": 136},
        {"tokens": 100},
    ],
    ids=str,
)
def test_the_call_does_what_the_plan_says(fields: dict[str, Any], trains: bool) -> None:
    args, options = call(device="cpu", **fields)
    if "kv_lengths" in options:
        options["kv_lengths"] = torch.tensor(options["kv_lengths"])
    if "kv_keep_mask" in options:
        options["kv_keep_mask"] = torch.rand(4, 300) < 0.6
    kernels = plan(*args, **options, gpu=H200).kernels
    args[4].requires_grad_(trains)
    with Attention() as attention, torch.set_grad_enabled(trains):
        cross_attention(*args, **options)
    ((v, transposed, scores),) = attention.seen
    reads = not {"D", "tokens"} & fields.keys()
    assert (transposed is not None) == (reads and "transpose_heads v" not in kernels)
    if transposed is not None:
        exists = torch.ones(v.shape[:2], dtype=torch.bool)
        if scores.key_keep is not None:
            exists &= scores.key_keep
        if scores.kv_lengths is not None:
            exists &= torch.arange(v.shape[1]) < scores.kv_lengths[:, None]
        assert torch.equal(transposed, transposed_values(v, exists))


@pytest.mark.usefixtures("on_h200")
def test_transposed_values_compile_with_any_lengths() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(cross_attention, dynamic=True, fullgraph=True, backend=backend)
    for tokens in (300, 301, 309):
        args, options = call(tokens=tokens, device="cpu")
        args[4].requires_grad_()
        torch.testing.assert_close(compiled(*args, **options), cross_attention(*args, **options))
    assert len(graphs) == 1


@pytest.mark.gpu
def test_transposed_values_are_read_where_they_are_given() -> None:
    """As those that the attention makes itself; and these alone, not the values as well."""
    on_hopper()
    q, k, v, _ = problem()
    lengths = torch.tensor([333, 100, 0, 97], dtype=torch.int32, device="cuda")
    scores = options(64, kv_lengths=lengths)
    exists = torch.arange(333, device="cuda") < lengths[:, None]
    transposed = transposed_values(v, exists)
    want = ops.attention_forward(q, k, v, scores)
    for values in (v, torch.full_like(v, math.nan)):
        got = ops.attention_forward(q, k, values, scores, transposed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("fields", [{}, {"rope": None}, {"tokens": 333}], ids=str)
def test_launches_are_those_of_the_plan(fields: dict[str, Any]) -> None:
    on_hopper()
    args, call_options = call(device="cuda", **fields)
    with torch.no_grad():
        cross_attention(*args, **call_options)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            cross_attention(*args, **call_options)
            torch.cuda.synchronize()
    launched = [e.key for e in profiler.key_averages() if "transpose_heads" in e.key]
    steps = plan(*args, **call_options).kernels
    assert len(launched) == ("transpose_heads v" in steps) == (fields == {"rope": None})


@pytest.mark.gpu
@pytest.mark.parametrize("D, is_taken", [(64, True), (128, True), (136, False)])
def test_which_kernel_runs(D: int, is_taken: bool) -> None:
    """The two round values and add up in different orders: the same bits mean the same kernel."""
    on_hopper()
    q, k, v, _ = problem(D)
    o, _ = ops.attention_forward(q, k, v, options(D))
    portable = torch.ops.fused_rope_xattn.attention_forward_portable
    assert torch.equal(o, portable(q, k, v, *options(D))[0]) is not is_taken


# ------------------------------------------------------------------------------------- the result

CASES = [
    Case("plain", 4, 256, 384, H=4, D=64, Dq=96, dtype="tf32"),
    Case("odd", 4, 197, 333, H=4, D=64, Dq=96, dtype="tf32", lse=True, biases="qkvo"),
    Case("narrow", 8, 197, 333, H=4, D=32, Dq=96, dtype="tf32", lse=True),
    Case("wide", 2, 197, 333, H=4, D=128, Dq=96, dtype="tf32", lse=True),
    Case("padded", 4, 197, 333, H=4, D=72, Dq=96, dtype="tf32", lse=True),
    Case("grouped", 2, 200, 300, H=8, Hkv=2, D=64, Dq=96, dtype="tf32", lse=True),
    Case("causal", 4, 250, 333, H=4, D=64, Dq=96, dtype="tf32", causal=True, lengths="ragged"),
    Case("masks", 4, 250, 333, H=4, D=64, Dq=96, dtype="tf32", mask="rows", bias="1hqk-inf"),
    Case("keys", 4, 250, 333, H=4, D=128, Dq=96, dtype="tf32", mask="keys", lengths="zero"),
    Case("dropout", 4, 250, 333, H=4, D=64, Dq=96, dtype="tf32", dropout_p=0.2, lse=True),
    Case("dropout_narrow", 8, 250, 333, H=4, D=32, Dq=96, dtype="tf32", dropout_p=0.1, mask="full"),
    Case("cached", 4, 256, 320, H=4, D=64, Dq=96, dtype="tf32", projected=True),
    Case("long", 1, 192, 6000, H=2, D=64, Dq=96, dtype="tf32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_as_accurate_as_tf32_is(case: Case) -> None:
    on_hopper()
    assert_accurate(case, device="cuda", path="split")


@pytest.mark.gpu
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_the_same_bits_every_time(D: int, dropout_p: float) -> None:
    on_hopper()
    q, k, v, dout = problem(D, B=8)
    seed = torch.tensor([7], device="cuda")
    scores = options(D, dropout_p=dropout_p, seed=seed)
    want = backward(q, k, v, dout, scores, deterministic=True)
    for deterministic in (True, False):
        got = backward(q, k, v, dout, scores, deterministic=deterministic)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("removal", ["lengths", "key_keep"])
def test_removed_keys_are_never_read(removal: str) -> None:
    on_hopper()
    q, k, v, dout = problem()
    exists = torch.rand(4, 333, device="cuda") < 0.6
    scores = options(64, key_keep=exists)
    if removal == "lengths":
        lengths = torch.tensor([333, 100, 0, 97], dtype=torch.int32, device="cuda")
        exists = torch.arange(333, device="cuda") < lengths[:, None]
        scores = options(64, kv_lengths=lengths)
    want = backward(q, k, v, dout, scores, deterministic=True)
    k[~exists] = math.nan
    v[~exists] = math.inf
    for a, b in zip(backward(q, k, v, dout, scores, deterministic=True), want, strict=True):
        assert torch.equal(a, b) and bool(a.isfinite().all())
    assert not want[1][~exists].any() and not want[2][~exists].any()


@pytest.mark.gpu
def test_one_side_alone_is_the_same() -> None:
    on_hopper()
    q, k, v, dout = problem()
    scores = options(64)
    dq, dk, dv, _ = backward(q, k, v, dout, scores, deterministic=False)
    o, lse = ops.attention_forward(q, k, v, scores)
    every = (dout, None, q, k, v, o, lse, scores)
    only_q = ops.attention_backward(*every, need_dq=True, need_dkv=False, need_dbias=False)
    only_kv = ops.attention_backward(*every, need_dq=False, need_dkv=True, need_dbias=False)
    assert torch.equal(only_q[0], dq)
    assert torch.equal(only_kv[1], dk) and torch.equal(only_kv[2], dv)


@pytest.mark.gpu
def test_replays_of_a_graph_see_new_values() -> None:
    """The passes before the products overlap with them, and are waited for."""
    on_hopper()
    q, k, v, dout = problem()
    scores = options(64)
    backward(q, k, v, dout, scores, deterministic=True)  # modules are loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = ops.attention_forward(q, k, v, scores)
        grads = backward(q, k, v, dout, scores, deterministic=True)
    for _ in range(3):
        for x in (q, k, v, dout):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(o, ops.attention_forward(q, k, v, scores)[0])
        for a, b in zip(grads, backward(q, k, v, dout, scores, deterministic=True), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
def test_replays_behind_a_projection_see_new_tokens() -> None:
    """The attention follows the projection itself, which lets it start at once: nothing is read
    before that is complete."""
    on_hopper()
    args, call_options = call(device="cuda")
    with torch.no_grad():
        cross_attention(*args, **call_options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cross_attention(*args, **call_options)
        for _ in range(5):
            for x in (args[0], call_options["x_value"]):
                x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, cross_attention(*args, **call_options))
