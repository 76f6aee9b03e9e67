"""Laws that hold whatever the numbers are: symmetries, isolation, purity, repeatability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import RoPE, cross_attention
from fused_rope_xattn.verify.cases import Inputs
from problems import (
    Target,
    assert_bits,
    assert_near,
    assert_tensor_near,
    forward,
    gradients,
    small,
)

ROPES = {
    "interleaved": RoPE(),
    "half": RoPE(interleaved=False),
    "partial": RoPE(rotary_dim=12, base=100.0),
    "axial": RoPE(axes=2, base=100.0),
}


def _positions(inputs: Inputs, rope: RoPE, batched: bool = False) -> tuple[Tensor, Tensor]:
    case = inputs.case
    lead = [case.B] * batched
    tail = [rope.axes] * (rope.axes > 1)
    device = inputs.leaves["x_query"].device
    return tuple(
        torch.randint(-50, 200, [*lead, t, *tail], device=device) for t in (case.Tq, case.Tk)
    )


# ---- symmetries ----


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("shift", [1, -1000, 4096, 0.25])
def test_shifting_all_positions_changes_nothing(target: Target, rope: RoPE, shift: float) -> None:
    inputs = small(target.device, rope="none")
    q, k = _positions(inputs, rope)
    kwargs = {"rope": rope, "return_lse": True}
    y, lse = forward(inputs, target.path, q_positions=q, k_positions=k, **kwargs)
    moved, moved_lse = forward(
        inputs, target.path, q_positions=q + shift, k_positions=k + shift, **kwargs
    )
    # Each angle is rounded to fp32 after its reduction, so a shift costs a few ulp of 2 pi.
    assert_tensor_near(moved, y, 256)
    assert_tensor_near(moved_lse, lse, 256)


def test_shifting_one_side_changes_the_result(target: Target) -> None:
    inputs = small(target.device)
    k = torch.arange(50, device=target.device)
    y = forward(inputs, target.path, k_positions=k)
    assert float((forward(inputs, target.path, k_positions=k + 5) - y).abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_positions_of_any_dtype_mean_the_same(target: Target, dtype: torch.dtype) -> None:
    """300 and 301 differ whatever the activations are: bf16 could not tell them apart."""
    inputs = small(target.device, dtype="bf16")
    q = torch.arange(300, 333, device=target.device)
    k = torch.arange(-20, 30, device=target.device)
    y = forward(inputs, target.path, q_positions=q, k_positions=k)
    other = forward(inputs, target.path, q_positions=q.to(dtype), k_positions=k.to(dtype))
    assert torch.equal(y, other)


def test_positions_are_arithmetic_not_indices(target: Target) -> None:
    """-1, all negative, repeated, fractional and far beyond any length."""
    inputs = small(target.device)
    for q in (-1, -500, 10**7, 2**40):
        positions = torch.full((33,), q, device=target.device)
        assert bool(forward(inputs, target.path, q_positions=positions).isfinite().all())


def test_new_offset_of_the_same_length_is_not_cached(target: Target) -> None:
    inputs = small(target.device)
    first = forward(inputs, target.path)
    forward(inputs, target.path, q_positions=torch.arange(7, 40, device=target.device))
    assert torch.equal(first, forward(inputs, target.path))
    other = forward(inputs, target.path, rope=RoPE(base=50.0))
    assert not torch.equal(first, other)


def test_key_order_does_not_matter(target: Target) -> None:
    inputs = small(target.device, mask="rows", bias="bhqk", lse=True)
    k = torch.arange(50, device=target.device)
    want = gradients(inputs, target.path, k_positions=k)
    order = torch.randperm(50, device=target.device)
    other = small(target.device, mask="rows", bias="bhqk", lse=True)
    with torch.no_grad():
        other.leaves["x_kv"].copy_(inputs.leaves["x_kv"][:, order])
        other.leaves["attn_bias"].copy_(inputs.leaves["attn_bias"][..., order])
    other.fixed["kv_keep_mask"] = inputs.fixed["kv_keep_mask"][..., order]
    got = gradients(other, target.path, k_positions=k[order])
    want["x_kv"], want["attn_bias"] = want["x_kv"][:, order], want["attn_bias"][..., order]
    assert_near(got, want)


def test_query_order_does_not_matter(target: Target) -> None:
    inputs = small(target.device)
    q = torch.arange(33, device=target.device)
    order = torch.randperm(33, device=target.device)
    y = forward(inputs, target.path, q_positions=q)
    leaf = {**inputs.leaves, "x_query": inputs.leaves["x_query"][:, order]}
    args, kwargs = inputs.call(leaf)
    moved = cross_attention(*args, **kwargs, q_positions=q[order], path=target.path)
    assert_tensor_near(moved, y[:, order])


def test_head_order_does_not_matter(target: Target) -> None:
    """Rows of the projections and columns of w_out move together."""
    inputs = small(target.device)
    order = torch.tensor([2, 0, 3, 1], device=target.device)
    leaf = dict(inputs.leaves)
    for name in ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v"):
        leaf[name] = leaf[name].unflatten(0, (4, 32))[order].flatten(0, 1)
    leaf["w_out"] = leaf["w_out"].unflatten(1, (4, 32))[:, order].flatten(1, 2)
    args, kwargs = inputs.call(leaf)
    assert_tensor_near(
        cross_attention(*args, **kwargs, path=target.path), forward(inputs, target.path)
    )


def test_samples_do_not_touch_each_other(target: Target) -> None:
    options = {
        "B": 4,
        "lengths": "ragged",
        "mask": "full",
        "bias": "b1qk",
        "lse": True,
        "rope": "table_batch",
    }
    inputs = small(target.device, **options)
    whole = forward(inputs, target.path)
    args, kwargs = inputs.call()
    for b in range(4):
        part = slice(b, b + 1)
        cut = {
            **kwargs,
            "kv_lengths": kwargs["kv_lengths"][part],
            "kv_keep_mask": kwargs["kv_keep_mask"][part],
            "attn_bias": kwargs["attn_bias"][part],
            "rope": tuple(type(t)(t.cos[part], t.sin[part]) for t in kwargs["rope"]),
        }
        alone = cross_attention(args[0][part], args[1][part], *args[2:], **cut, path=target.path)
        for got, want in zip(alone, whole):
            assert_tensor_near(got, want[part])


def test_lengths_equal_a_shorter_call(target: Target) -> None:
    """A padded batch gives what each sample gives alone, with its own positions."""
    inputs = small(target.device, lse=True)
    lengths, k = torch.tensor([50, 21], device=target.device), _positions(inputs, RoPE(), True)[1]
    y, lse = forward(inputs, target.path, kv_lengths=lengths, k_positions=k)
    args, kwargs = inputs.call()
    short, short_lse = cross_attention(
        args[0][1:],
        args[1][1:, :21],
        *args[2:],
        **kwargs,
        k_positions=k[1:, :21],
        path=target.path,
    )
    assert_tensor_near(y[1:], short)
    assert_tensor_near(lse[1:], short_lse)


def test_left_padding_with_positions_equals_no_padding(target: Target) -> None:
    inputs = small(target.device)
    args, kwargs = inputs.call()
    pad = 13
    keep = torch.ones(2, 50, dtype=torch.bool, device=target.device)
    keep[1, :pad] = False
    k = torch.arange(50, device=target.device).repeat(2, 1)
    k[1] -= pad
    padded = forward(inputs, target.path, kv_keep_mask=keep, k_positions=k)
    alone = cross_attention(args[0][1:], args[1][1:, pad:], *args[2:], **kwargs, path=target.path)
    assert_tensor_near(padded[1:], alone)


# ---- masks say the same thing in every form ----


def test_lengths_masks_and_bias_agree(target: Target) -> None:
    lengths = torch.tensor([50, 20], device=target.device)
    keep = torch.arange(50, device=target.device) < lengths[:, None]
    bias = torch.zeros(2, 1, 1, 50, device=target.device).masked_fill(
        ~keep[:, None, None], -torch.inf
    )
    forms = [
        {"kv_lengths": lengths},
        {"kv_lengths": lengths.int()},
        {"kv_keep_mask": keep},
        {"kv_keep_mask": keep[:, None, None]},
        {"kv_keep_mask": keep[:, None, None].expand(2, 4, 33, 50)},
        {"attn_bias": bias},
        {"kv_lengths": lengths, "kv_keep_mask": keep, "attn_bias": bias},
    ]
    results = [gradients(small(target.device, lse=True), target.path, **form) for form in forms]
    for result in results[1:]:
        assert_near(result, results[0], 16)


def test_true_means_attend(target: Target) -> None:
    inputs = small(target.device, Dout=0, rope="none")
    keep = torch.zeros(2, 50, dtype=torch.bool, device=target.device)
    keep[:, 7] = True
    y = forward(inputs, target.path, kv_keep_mask=keep)
    leaf = inputs.leaves
    want = torch.nn.functional.linear(leaf["x_kv"][:, 7:8], leaf["w_v"], leaf["b_v"])
    assert_tensor_near(y, want.expand_as(y))


def test_causal_is_a_mask_aligned_to_each_length(target: Target) -> None:
    lengths = torch.tensor([50, 37], device=target.device)
    i = torch.arange(33, device=target.device)[:, None]
    j = torch.arange(50, device=target.device)
    keep = (j <= i + lengths[:, None, None] - 33) & (j < lengths[:, None, None])
    options = {"lse": True, "bias": "h11"}
    got = gradients(
        small(target.device, **options), target.path, is_causal=True, kv_lengths=lengths
    )
    want = gradients(small(target.device, **options), target.path, kv_keep_mask=keep[:, None])
    assert_near(got, want, 16)


REMOVALS = {
    "lengths": lambda keep: {"kv_lengths": torch.tensor([41, 30], device=keep.device)},
    "mask2": lambda keep: {"kv_keep_mask": keep},
    "mask4": lambda keep: {"kv_keep_mask": keep[:, None, None].expand(2, 4, 33, 50).clone()},
    "both": lambda keep: {
        "kv_keep_mask": keep,
        "kv_lengths": torch.tensor([45, 50], device=keep.device),
    },
}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_norm": "layer", "k_norm": "layer_inner"},
        {"Dv": 24, "dropout_p": 0.2},
        {"projected": True},
        {"rope": "none"},
        {"k_norm": "rms", "rope": "table_batch_heads"},
    ],
    ids=["plain", "norms", "x_value", "cached", "no_rope", "tables"],
)
def test_removed_tokens_reach_nothing(
    target: Target, poison: float, removal: str, options: dict[str, Any]
) -> None:
    """NaN where no query looks: same bits everywhere as with zeros there, weight gradients too."""
    keep = torch.arange(50, device=target.device) < torch.tensor([[41], [30]], device=target.device)
    masks = REMOVALS[removal](keep)
    if removal == "both":
        keep = keep & (
            torch.arange(50, device=target.device)
            < torch.tensor([[45], [50]], device=target.device)
        )
    results = []
    for value in (0.0, poison):
        inputs = small(target.device, lse=True, **options)
        with torch.no_grad():
            for name in ("x_kv", "x_value"):
                if name in inputs.leaves:
                    inputs.leaves[name].masked_fill_(~keep[..., None], value)
            if "k" in inputs.leaves:
                for name in ("k", "v"):
                    inputs.leaves[name].masked_fill_(~keep[:, None, :, None], value)
        torch.manual_seed(3)
        results.append(gradients(inputs, target.path, **masks))
    assert all(bool(g.isfinite().all()) for g in results[1].values())
    assert_bits(results[1], results[0])
    for name in ("x_kv", "x_value"):
        if name in results[1]:
            assert not bool(results[1][name][~keep].any()), name


def test_nan_that_is_seen_is_seen(target: Target) -> None:
    """Isolation is no filter: a NaN in a token that a query keeps shows in that query."""
    inputs = small(target.device)
    with torch.no_grad():
        inputs.leaves["x_kv"][0, 3] = float("nan")
    keep = torch.ones(2, 1, 33, 50, dtype=torch.bool, device=target.device)
    keep[0, :, 10:, 3] = False
    y = forward(inputs, target.path, kv_keep_mask=keep)
    assert bool(y[0, :10].isnan().all()) and bool(y[1].isfinite().all())
