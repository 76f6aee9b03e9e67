"""TF32 attention on Hopper's own instructions: when it runs, and that it is as right as TF32 is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import grouped, ops, plan, prepare
from fused_rope_xattn.ops import ScoreOptions
from fused_rope_xattn.planner import GPU
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.cases import Case

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


def planned(monkeypatch: pytest.MonkeyPatch, gpu: GPU, D: int, tokens: int) -> tuple[str, ...]:
    monkeypatch.setattr(prepare, "allows_tf32", lambda device: True)
    x = torch.empty(4, tokens, 128, device="meta")
    w = torch.empty(4 * D, 128, device="meta")
    return plan(x, x, w, w, w, None, num_heads=4, path="split", gpu=gpu).kernels


def test_the_plan_says_when_values_are_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, ampere = GPU("NVIDIA H200", (9, 0), 132), GPU("NVIDIA A100", (8, 0), 108)
    assert planned(monkeypatch, hopper, 64, 300)[-2:] == ("transpose_heads v", "attention_forward")
    assert "transpose_heads v" not in planned(monkeypatch, hopper, 136, 300)
    assert "transpose_heads v" not in planned(monkeypatch, hopper, 64, 100)
    assert "transpose_heads v" not in planned(monkeypatch, ampere, 64, 300)


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
