"""What rounding took from the attention's output is kept for the backward, and is worth keeping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import ops, planner, prepare
from fused_rope_xattn.ops import ScoreOptions
from problems import gradients, small

HALVES = [torch.bfloat16, torch.float16]
PLAIN = ScoreOptions(None, None, None, None, None, 1 / 8, False, 0.0, False)


def problem(dtype: torch.dtype, device: str, keys: int = 300, D: int = 64) -> list[Tensor]:
    """q, k, v, dout. k and v have a part common to all tokens, as a bias or a norm gives them."""
    common = torch.randn(2, 1, 1, 4, D, device=device)
    q, k, v, dout = (torch.randn(2, tokens, 4, D, device=device) for tokens in (70, keys, keys, 70))
    return [x.to(dtype) for x in (q, k + common[0], v + common[1], dout)]


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("dtype", HALVES)
def test_opcheck(dtype: torch.dtype) -> None:
    q, k, v, dout = problem(dtype, "cpu", keys=9)
    forward = torch.ops.fused_rope_xattn.attention_forward_with_rest.default
    torch.library.opcheck(forward, (q, k, v, *PLAIN))
    o, lse, o_rest = ops.attention_forward_with_rest(q, k, v, PLAIN)
    backward = torch.ops.fused_rope_xattn.attention_backward.default
    wanted = (True, True, False, True)  # need_dq, need_dkv, need_dbias, deterministic
    torch.library.opcheck(backward, (dout, None, q, k, v, o, lse, *PLAIN, *wanted, o_rest))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("keys, D", [(1, 64), (300, 32), (300, 64), (300, 128), (3000, 256)])
def test_both_parts_are_the_output(dtype: torch.dtype, device: str, keys: int, D: int) -> None:
    q, k, v, _ = problem(dtype, device, keys, D)
    o, lse, o_rest = ops.attention_forward_with_rest(q, k, v, PLAIN)
    plain_o, plain_lse = ops.attention_forward(q, k, v, PLAIN)
    assert torch.equal(o, plain_o) and torch.equal(lse, plain_lse)
    half_ulp = torch.finfo(dtype).eps / 2 * o.float().abs().clamp(min=torch.finfo(dtype).tiny)
    assert bool((o_rest.float().abs() <= half_ulp * 1.01).all())
    assert o_rest.count_nonzero() > 0 or keys == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", HALVES)
def test_dq_is_better_for_it(dtype: torch.dtype, device: str) -> None:
    """By more than half where keys and values have much in common and are many."""
    q, k, v, dout = problem(dtype, device, keys=2000)
    o, lse, o_rest = ops.attention_forward_with_rest(q, k, v, PLAIN)
    exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(-1, -2) * PLAIN.scale
    out = torch.softmax(scores, -1) @ exact[2]
    (want,) = torch.autograd.grad(out, exact[0], dout.double().transpose(1, 2))

    def error(rest: Tensor | None) -> float:
        dq, *_ = ops.attention_backward(
            dout,
            None,
            q,
            k,
            v,
            o,
            lse,
            PLAIN,
            need_dq=True,
            need_dkv=False,
            need_dbias=False,
            o_rest=rest,
        )
        found = float((dq.double().transpose(1, 2) - want).abs().mean())
        assert math.isfinite(found)
        return found

    assert error(o_rest) < error(None) / 2


@pytest.mark.parametrize(
    "keys, norm, bias, kept",
    [
        (9, "rms", True, False),
        (9, "rms", False, True),
        (9, "none", True, True),
        (1100, "rms", True, True),
    ],
)
def test_a_bias_behind_a_norm_takes_exact_sums(
    keys: int, norm: str, bias: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows can be summed again, what the output keeps of its rounding is not relied upon."""
    given: list[Tensor | None] = []
    own = ops.attention_backward

    def attention_backward(*args: Any, **options: Any) -> Any:
        given.append(options["o_rest"])
        return own(*args, **options)

    monkeypatch.setattr(planner, "_device_obstacle", lambda device, gpu: None)
    monkeypatch.setattr(ops, "attention_backward", attention_backward)
    prepare._checked.clear()
    gradients(small("cpu", Tk=keys, dtype="bf16", k_norm=norm, biases="k" if bias else ""), "split")
    prepare._checked.clear()
    assert [rest is not None for rest in given] == [kept]
