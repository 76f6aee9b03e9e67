"""What a call returns, against the fp64 reference and in the corners where the answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused_rope_xattn import RoPE, cross_attention
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.cases import BASELINE, NAMED, ROWS, Case, draw_inputs, option_grid
from problems import Target, assert_tensor_near, forward, paths_for, small, spread, yardstick


@pytest.mark.parametrize("case, target", spread([*NAMED.values(), *option_grid()], exact=False))
def test_outputs_meet_the_budget(case: Case, target: Target) -> None:
    assert_accurate(
        case,
        device=target.device,
        path=paths_for(case, target),
        yardstick=yardstick(target),
        backward=False,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_published_rows_meet_the_budget(name: str) -> None:
    assert_accurate(ROWS[name], device="cuda", path="auto", backward=False)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_results_have_the_right_dtype_and_layout(target: Target, dtype: str) -> None:
    inputs = small(target.device, dtype=dtype, lse=True)
    y, lse = forward(inputs, target.path)
    assert y.shape == (2, 33, 48) and y.dtype == inputs.case.storage and y.is_contiguous()
    assert lse.shape == (2, 4, 33) and lse.dtype == torch.float32
    assert y.device.type == lse.device.type == target.device


def test_return_lse_decides_what_comes_back(target: Target) -> None:
    inputs = small(target.device)
    assert isinstance(forward(inputs, target.path), torch.Tensor)
    pair = forward(inputs, target.path, return_lse=True)
    assert isinstance(pair, tuple) and len(pair) == 2


def test_defaults_are_the_documented_ones(target: Target) -> None:
    """Interleaved RoPE of base 10000 over the whole head at 0..T-1, scale D ** -0.5."""
    inputs = draw_inputs(replace(BASELINE, B=2), target.device)
    leaf = inputs.leaves
    args = [leaf[n] for n in ("x_query", "x_kv", "w_q", "w_k", "w_v", "w_out")]
    got = cross_attention(*args, num_heads=8, path=target.path)
    want = cross_attention(
        *args,
        num_heads=8,
        num_kv_heads=8,
        path=target.path,
        scale=32**-0.5,
        rope=RoPE(base=10000.0, rotary_dim=32, interleaved=True, axes=1),
        q_positions=torch.arange(64, device=target.device),
        k_positions=torch.arange(128, device=target.device),
    )
    assert_tensor_near(got, want, 8)


def test_zero_scale_is_a_scale(target: Target) -> None:
    """Uniform attention: the mean of the values."""
    inputs = small(target.device, rope="none", Dout=0, lse=True)
    y, lse = forward(inputs, target.path, scale=0.0)
    leaf = inputs.leaves
    want = F.linear(leaf["x_kv"], leaf["w_v"], leaf["b_v"]).mean(1, keepdim=True)
    assert_tensor_near(y, want.expand_as(y))
    assert_tensor_near(lse, torch.full_like(lse, 50.0).log())


def test_one_key_returns_its_value(target: Target) -> None:
    inputs = small(target.device, Tk=1, Dout=0, lse=True)
    y, lse = forward(inputs, target.path)
    leaf = inputs.leaves
    assert_tensor_near(y, F.linear(leaf["x_kv"], leaf["w_v"], leaf["b_v"]).expand_as(y))
    assert bool(lse.isfinite().all())


# Each removes every key of sample 1 and none of sample 0.
def _emptied(kind: str, device: str) -> dict[str, Any]:
    if kind == "lengths":
        return {"kv_lengths": torch.tensor([50, 0], device=device)}
    keep = torch.tensor([True, False], device=device)[:, None]
    if kind == "mask2":
        return {"kv_keep_mask": keep.expand(2, 50)}
    if kind == "mask4":
        return {"kv_keep_mask": keep[..., None, None].expand(2, 1, 33, 50)}
    return {"attn_bias": torch.where(keep, 0.0, -torch.inf)[..., None, None].expand(2, 4, 33, 50)}


@pytest.mark.parametrize("kind", ["lengths", "mask2", "mask4", "bias"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_rows_without_keys_are_zero(target: Target, kind: str, dropout_p: float) -> None:
    inputs = small(target.device)
    options = _emptied(kind, target.device) | {"dropout_p": dropout_p}
    y, lse = forward(inputs, target.path, return_lse=True, **options)
    assert torch.equal(y[1], inputs.leaves["b_out"].expand_as(y[1]))
    assert bool((lse[1] == -torch.inf).all()) and bool(lse[0].isfinite().all())
    assert bool(y[0].isfinite().all()) and not torch.equal(y[0], y[1])


def test_causal_rows_before_the_first_key_are_zero(target: Target) -> None:
    """Tq > Tk, bottom-right: the first Tq - length queries see nothing."""
    inputs = small(target.device, Tq=40, Tk=25, Dout=0)
    lengths = torch.tensor([25, 10], device=target.device)
    y, lse = forward(inputs, target.path, is_causal=True, kv_lengths=lengths, return_lse=True)
    for sample, length in enumerate((25, 10)):
        first = 40 - length
        assert bool((y[sample, :first] == 0).all())
        assert bool((lse[sample, :, :first] == -torch.inf).all())
        assert bool((y[sample, first:] != 0).any(dim=-1).all())
        assert bool(lse[sample, :, first:].isfinite().all())


def test_last_causal_query_sees_all_keys(target: Target) -> None:
    inputs = small(target.device, Tq=9, Tk=50)
    y = forward(inputs, target.path, is_causal=True)
    want = forward(inputs, target.path)
    assert_tensor_near(y[:, -1], want[:, -1])
    assert float((y[:, -2] - want[:, -2]).abs().max()) > 1e-4


EMPTY = {"no batch": (0, 5, 7), "no queries": (2, 0, 7), "no keys": (2, 5, 0), "nothing": (0, 0, 0)}


@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_norm": "rms", "k_norm": "layer_inner", "causal": True, "lengths": "ragged"},
        {"mask": "full", "bias": "bhqk", "dropout_p": 0.5},
        {"projected": True},
        {"rope": "table"},
    ],
    ids=["plain", "norms", "masks", "cached", "tables"],
)
def test_empty_sizes_work(
    target: Target, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    batch, num_queries, num_keys = sizes
    inputs = small(target.device, B=batch, Tq=num_queries, Tk=num_keys, lse=True, **options)
    y, lse = forward(inputs, target.path)
    assert y.shape == (batch, num_queries, 48) and lse.shape == (batch, 4, num_queries)
    if not num_keys:
        assert torch.equal(y, inputs.leaves["b_out"].expand_as(y))
        assert bool((lse == -torch.inf).all())


def test_no_grad_and_grad_give_the_same_bits(target: Target) -> None:
    inputs = small(target.device, lse=True, q_norm="rms")
    with torch.no_grad():
        quiet = forward(inputs, target.path)
    with torch.inference_mode():
        quieter = forward(inputs, target.path)
    recorded = forward(inputs, target.path)
    assert recorded[0].requires_grad and not quiet[0].requires_grad
    for a, b, c in zip(quiet, quieter, recorded):
        assert torch.equal(a, c) and torch.equal(b, c)


def test_lse_is_the_log_of_the_sum_of_exponentials(target: Target) -> None:
    """With scale, bias and masks in, and dropout out."""
    inputs = small(target.device, lse=True, bias="b1qk", mask="rows", lengths="ragged")
    _, plain = forward(inputs, target.path)
    _, dropped = forward(inputs, target.path, dropout_p=0.7)
    if target.path == "auto":  # dropout takes another kernel, which adds in another order
        assert_tensor_near(dropped, plain)
    else:
        assert torch.equal(plain, dropped)
    bias = inputs.leaves["attn_bias"]
    _, shifted = forward(inputs, target.path, attn_bias=bias + 3.0)
    assert_tensor_near(shifted, plain + 3.0)
