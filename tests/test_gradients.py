"""Gradients against the fp64 reference, by finite differences, and for every subset asked for."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from fused_rope_xattn import RotaryTable, cross_attention, project_kv
from fused_rope_xattn.verify.accuracy import assert_accurate, run
from fused_rope_xattn.verify.cases import NAMED, ROWS, Case, draw_inputs, option_grid
from fused_rope_xattn.verify.reference import reference
from problems import (
    Target,
    assert_near,
    forward,
    gradients,
    paths_for,
    small,
    spread,
    yardstick,
)


@pytest.mark.parametrize("case, target", spread(NAMED.values(), exact=True))
def test_named_cases_meet_the_budget(case: Case, target: Target) -> None:
    assert_accurate(
        case, device=target.device, path=paths_for(case, target), yardstick=yardstick(target)
    )


@pytest.mark.parametrize("case, target", spread(option_grid(), exact=False))
def test_the_option_grid_meets_the_budget(case: Case, target: Target) -> None:
    assert_accurate(
        case, device=target.device, path=paths_for(case, target), yardstick=yardstick(target)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_published_rows_meet_the_budget(name: str) -> None:
    assert_accurate(ROWS[name], device="cuda", path="auto")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [c for i, c in enumerate(option_grid()) if i % 4 == 0], ids=lambda c: c.name
)
def test_fp64_on_a_gpu_is_exact(case: Case) -> None:
    assert_accurate(case.at("fp64"), device="cuda", path="auto")


GRADCHECK = {
    "plain": {},
    "norms": {"q_norm": "layer", "k_norm": "rms_inner", "rope": "partial_half"},
    "masks": {"mask": "rows", "lengths": "zero", "causal": True, "bias": "bhqk", "Hkv": 1},
    "axial": {"rope": "axial_half", "positions": "batch", "bias": "h11", "Dv": 5},
    "tables": {"rope": "table_full_half", "scale": 0.3, "Dout": 0},
    "cached": {"projected": True, "bias": "qk"},
}


@pytest.mark.parametrize("options", GRADCHECK.values(), ids=GRADCHECK.keys())
def test_gradcheck(options: dict[str, Any]) -> None:
    inputs = small("cpu", B=2, Tq=3, Tk=4, H=2, D=8, Dq=5, Dkv=6, dtype="fp64", **options)
    names = list(inputs.leaves)

    def block(*leaves: torch.Tensor) -> Any:
        args, kwargs = inputs.call(dict(zip(names, leaves)))
        return cross_attention(*args, **kwargs)

    assert torch.autograd.gradcheck(block, tuple(inputs.leaves.values()), fast_mode=True)


def test_gradcheck_with_dropout() -> None:
    inputs = small("cpu", B=1, Tq=3, Tk=9, H=2, D=8, Dq=5, Dkv=6, dtype="fp64", dropout_p=0.4)
    names = list(inputs.leaves)

    def block(*leaves: torch.Tensor) -> Any:
        torch.manual_seed(5)  # the same mask at every evaluation
        args, kwargs = inputs.call(dict(zip(names, leaves)))
        return cross_attention(*args, **kwargs)

    assert torch.autograd.gradcheck(block, tuple(inputs.leaves.values()), fast_mode=True)


def test_gradgradcheck() -> None:
    inputs = small("cpu", B=1, Tq=2, Tk=3, H=1, D=8, Dq=3, Dkv=3, dtype="fp64", q_norm="rms")
    names = list(inputs.leaves)

    def block(*leaves: torch.Tensor) -> Any:
        args, kwargs = inputs.call(dict(zip(names, leaves)))
        return cross_attention(*args, **kwargs)

    assert torch.autograd.gradgradcheck(block, tuple(inputs.leaves.values()), fast_mode=True)


def test_double_backward_is_the_composite_one(device: str) -> None:
    """A gradient penalty through the automatic path equals the one through composite."""
    penalties = []
    for path in ("auto", "composite"):
        inputs = small(device, D=16)
        x = inputs.leaves["x_query"]
        y = forward(inputs, path)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        dx.square().sum().backward()
        penalties.append({n: leaf.grad for n, leaf in inputs.leaves.items()})
    assert_near(*penalties, ulps=256)


def test_gradients_reach_cos_and_sin(device: str) -> None:
    """Tables may be trained; broadcast axes are summed over."""
    inputs = small(device, rope="none", dtype="fp64")
    sides = [
        torch.randn(2, shape, 16, dtype=torch.float64, device=device, requires_grad=True)
        for shape in (33, 50)
    ]

    def block(path: str) -> Any:
        rope = tuple(RotaryTable(t[0], t[1]) for t in sides)
        if path == "reference":
            args, kwargs = inputs.call()
            y = reference(*args, **{**kwargs, "rope": rope})
        else:
            y = forward(inputs, path, rope=rope)
        return torch.autograd.grad(y, sides, inputs.grads["y"])

    for got, want in zip(block("auto"), block("reference")):
        assert float((got - want).abs().max()) < 1e-10


def test_gradients_through_a_projected_kv(target: Target) -> None:
    """project_kv and cross_attention back to back are cross_attention."""
    for options in (
        {},
        {"k_norm": "rms", "rope": "half", "positions": "batch", "Hkv": 2},
        {"k_norm": "layer_inner", "Dv": 24, "rope": "table_heads"},
    ):
        inputs = small(target.device, **options)
        want = gradients(inputs, target.path)
        args, kwargs = inputs.call()
        kept = {
            n: kwargs[n]
            for n in (
                "num_heads",
                "num_kv_heads",
                "b_k",
                "b_v",
                "x_value",
                "rope",
                "k_positions",
                "k_norm",
            )
            if n in kwargs
        }
        projected = project_kv(args[1], args[3], args[4], **kept)
        assert projected.k.shape == (2, inputs.case.kv_heads, 50, 32) == projected.v.shape
        rest = {
            n: v
            for n, v in kwargs.items()
            if n not in ("b_k", "b_v", "x_value", "k_norm", "k_positions")
        }
        y = cross_attention(
            args[0], projected, args[2], None, None, args[5], **rest, path=target.path
        )
        leaves = inputs.leaves
        grads = torch.autograd.grad(y, list(leaves.values()), inputs.grads["y"])
        assert_near({"y": y} | dict(zip(leaves, grads)), want)


def test_a_projected_kv_serves_several_queries(target: Target) -> None:
    """Gradients of two uses of one projection add up."""
    inputs = small(target.device)
    args, kwargs = inputs.call()
    kv_names = {"b_k": kwargs.pop("b_k"), "b_v": kwargs.pop("b_v")}
    projected = project_kv(args[1], args[3], args[4], num_heads=4, **kv_names)
    ys = [
        cross_attention(x, projected, args[2], None, None, args[5], **kwargs, path=target.path)
        for x in (args[0], args[0][:, :7])
    ]
    sum(y.sum() for y in ys).backward()
    got = {n: leaf.grad for n, leaf in inputs.leaves.items()}
    whole = small(target.device)
    args, kwargs = whole.call()
    ys = [
        cross_attention(x, *args[1:], **kwargs, path=target.path) for x in (args[0], args[0][:, :7])
    ]
    sum(y.sum() for y in ys).backward()
    assert_near(got, {n: leaf.grad for n, leaf in whole.leaves.items()})


FROZEN = small("cpu", q_norm="layer", k_norm="rms", bias="h11", Dv=16).leaves


@pytest.mark.parametrize("wanted", [*FROZEN, "all", "inputs", "weights", "queries", "keys"])
def test_only_the_gradients_asked_for(target: Target, wanted: str) -> None:
    """Each leaf alone, and the usual frozen halves, give what they give among all the others."""
    groups = {
        "all": set(FROZEN),
        "inputs": {"x_query", "x_kv", "x_value"},
        "weights": {n for n in FROZEN if n[:2] in ("w_", "b_")},
        "queries": {"x_query", "w_q", "b_q", "q_norm_weight", "q_norm_bias"},
        "keys": {"x_kv", "w_k", "b_k", "k_norm_weight"},
    }
    chosen = groups.get(wanted, {wanted})
    options: dict[str, Any] = {"q_norm": "layer", "k_norm": "rms", "bias": "h11", "Dv": 16}
    whole = gradients(small(target.device, **options), target.path)
    inputs = small(target.device, **options)
    for name, leaf in inputs.leaves.items():
        leaf.requires_grad_(name in chosen)
    got = gradients(inputs, target.path)
    assert set(got) == {"y"} | chosen
    assert_near(got, {n: whole[n] for n in got}, ulps=8)


def test_nothing_frozen_gets_a_gradient(target: Target) -> None:
    inputs = small(target.device)
    for name in ("x_kv", "w_k", "w_v", "b_k", "b_v"):
        inputs.leaves[name].requires_grad_(False)
    forward(inputs, target.path).sum().backward()
    for name, leaf in inputs.leaves.items():
        assert (leaf.grad is not None) == leaf.requires_grad, name


def test_the_same_tensor_in_two_places_gets_both_gradients(target: Target) -> None:
    """Self-attention with tied weights: x is query, key and value."""
    case = Case("tied", 2, 20, 20, H=2, D=32, Dq=64, dtype="fp32")
    inputs = draw_inputs(case, target.device)
    x, w = inputs.leaves["x_query"], inputs.leaves["w_q"]
    apart = [t.clone().requires_grad_() for t in (x, x, x, w, w, w, w)]
    y = cross_attention(
        apart[0], apart[1], *apart[3:6], apart[6].T, num_heads=2, x_value=apart[2], path=target.path
    )
    y.backward(inputs.grads["y"])
    x.requires_grad_(), w.requires_grad_()
    tied = cross_attention(x, x, w, w, w, w.T, num_heads=2, path=target.path)
    tied.backward(inputs.grads["y"])
    assert_near(
        {"y": tied, "x": x.grad, "w": w.grad},
        {
            "y": y,
            "x": apart[0].grad + apart[1].grad + apart[2].grad,
            "w": apart[3].grad + apart[4].grad + apart[5].grad + apart[6].grad,
        },
    )


@pytest.mark.parametrize("kind", ["sum", "expanded", "transposed", "sliced", "broadcast_batch"])
def test_gradients_of_any_stride(target: Target, kind: str) -> None:
    """y.sum() hands back a stride-0 gradient; permuting consumers hand back a transposed one."""
    inputs = small(target.device, lse=True)
    y, lse = forward(inputs, target.path)
    shape = y.shape
    grad = {
        "sum": lambda: torch.ones((), device=y.device).expand(shape),
        "expanded": lambda: torch.randn(shape[-1], device=y.device).expand(shape),
        "transposed": lambda: torch.randn(shape[::-1], device=y.device).permute(2, 1, 0),
        "sliced": lambda: torch.randn(*shape[:2], 2 * shape[2], device=y.device)[..., ::2],
        "broadcast_batch": lambda: torch.randn(1, *shape[1:], device=y.device).expand(shape),
    }[kind]()
    dlse = torch.randn(lse.shape[::-1], device=y.device).permute(2, 1, 0)
    leaves = list(inputs.leaves.values())
    got = torch.autograd.grad((y, lse), leaves, (grad, dlse), retain_graph=True)
    want = torch.autograd.grad((y, lse), leaves, (grad.contiguous(), dlse.contiguous()))
    # torch itself sums a strided db_out in another order.
    assert_near(dict(zip(inputs.leaves, got)), dict(zip(inputs.leaves, want)), 8)


def test_lse_alone_has_a_gradient(target: Target) -> None:
    """d lse / d scores is the softmax; values, w_out and b_out take no part."""
    inputs = small(target.device, lse=True, dropout_p=0.3)
    leaves = inputs.leaves
    _, lse = forward(inputs, target.path)
    grads = torch.autograd.grad(lse, list(leaves.values()), inputs.grads["lse"], allow_unused=True)
    got = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, grads)}

    def block(*args: Any, **kwargs: Any) -> Any:
        y, lse = reference(*args, **kwargs)
        return y * 0.0, lse

    want = run(block, inputs, torch.float64)
    for name, grad in got.items():
        error = float((grad.double() - want[f"d{name}"]).abs().max())
        assert error <= 2e-5 * max(1.0, float(want[f"d{name}"].abs().max())), name
    for name in ("w_v", "b_v", "w_out", "b_out"):
        assert not bool(got[name].any()), name


def test_rows_without_keys_have_exactly_zero_gradients(target: Target) -> None:
    """Sample 1 loses all its keys: nothing of it moves, not even through lse."""
    lengths = torch.tensor([50, 0], device=target.device)
    inputs = small(target.device, lse=True, bias="b1qk", q_norm="rms", k_norm="rms")
    got = gradients(inputs, target.path, kv_lengths=lengths)
    for name in ("x_query", "x_kv", "attn_bias"):
        assert not bool(got[name][1].any()) and bool(got[name][0].any()), name
    assert all(bool(g.isfinite().all()) for n, g in got.items() if n != "lse")


def test_bias_gradient_where_it_removes_a_key(target: Target) -> None:
    inputs = small(target.device, bias="bhqk-inf")
    got = gradients(inputs, target.path)["attn_bias"]
    removed = inputs.leaves["attn_bias"] == -torch.inf
    assert not bool(got[removed].any()) and bool(got[~removed].all())


@pytest.mark.parametrize(
    "dims",
    [*combinations("bhqk", 2), ("b",), ("k",), ()],
    ids=lambda d: "".join(d) or "scalar",
)
def test_bias_gradient_is_summed_over_broadcast_axes(target: Target, dims: tuple[str, ...]) -> None:
    axes = "".join(d if d in dims else "1" for d in "bhqk")
    inputs = small(target.device, bias=axes)
    got = gradients(inputs, target.path)["attn_bias"]
    full = inputs.leaves["attn_bias"].detach().expand(2, 4, 33, 50).clone().requires_grad_()
    y = forward(inputs, target.path, attn_bias=full)
    (want,) = torch.autograd.grad(y, full, inputs.grads["y"])
    want = want.sum_to_size(got.shape)
    # A bias that no key axis distinguishes moves nothing: sums of cancelling terms stay small.
    assert float((got - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize(
    "options",
    [{}, {"projected": True}, {"bias": "bhqk", "mask": "full"}],
    ids=["plain", "cached", "masks"],
)
@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)], ids=["B", "Tq", "Tk"])
def test_empty_sizes_have_gradients(
    target: Target, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    batch, num_queries, num_keys = sizes
    inputs = small(target.device, B=batch, Tq=num_queries, Tk=num_keys, lse=True, **options)
    got = gradients(inputs, target.path)
    for name, leaf in inputs.leaves.items():
        assert got[name].shape == leaf.shape, name
        if name != "b_out" and name != "w_out":
            assert not bool(got[name].any()), name
    assert torch.equal(got["b_out"], inputs.grads["y"].sum((0, 1)))
