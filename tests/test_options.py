"""Every value of every option beside every value of each other one, and the values apart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import (
    FusedRoPECrossAttention,
    Norm,
    ProjectedKV,
    RoPE,
    RotaryTable,
    cross_attention,
    project_kv,
)
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.cases import OPTIONS, Case, draw_inputs, option_grid
from pretence import kernels_everywhere
from problems import (
    SMALL,
    Target,
    assert_near,
    assert_tensor_near,
    forward,
    gradients,
    small,
    with_grad,
)

ALL = 300  # draws of the grid that hold nearly every pair of values
SHARES = 10


def values_of(case: Case) -> list[tuple[str, str]]:
    """What a case chose of each option that it says alone."""
    return [(n, str(getattr(case, n))) for n in sorted(OPTIONS) if hasattr(case, n)]


def test_the_grid_holds_every_pair() -> None:
    """But for what is impossible (finished keys have no norm) and a few in a thousand."""
    seen: set[Any] = set()
    for case in option_grid(ALL):
        seen |= set(combinations(values_of(case), 2))
    possible = 0
    for a, b in combinations([n for n, _ in values_of(SMALL)], 2):
        if {a, b} not in ({"projected", "k_norm"}, {"positions", "rope"}):
            possible += len({str(v) for v in OPTIONS[a]}) * len({str(v) for v in OPTIONS[b]})
    counted = [
        p
        for p in seen
        if {p[0][0], p[1][0]} not in ({"projected", "k_norm"}, {"positions", "rope"})
    ]
    assert len(counted) >= 0.995 * possible


@pytest.mark.parametrize("share", range(SHARES))
def test_every_pair_of_options_is_right(share: int) -> None:
    """In fp64, where nothing but a wrong formula shows."""
    for case in list(option_grid(ALL))[share::SHARES]:
        assert_accurate(case.at("fp64"))


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from kernels_everywhere(monkeypatch)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("share", range(SHARES))
def test_every_pair_of_options_by_the_kernels_way(share: int) -> None:
    """Saving, masks and adjoints around the operators, whose CPU versions stand for the GPU's."""
    for case in list(option_grid(ALL))[share::SHARES]:
        results = []
        for path in ("auto", "split", "composite"):
            inputs = with_grad(draw_inputs(case.at("fp32")))
            torch.manual_seed(4)
            results.append(gradients(inputs, path))
        for result in results[:2]:
            for name, want in results[2].items():
                torch.testing.assert_close(
                    result[name], want, rtol=1e-4, atol=1e-4, msg=f"{name} of {case}"
                )


# ---- the values apart: dtypes, ranks and sides that the grid does not draw ----


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.int8, torch.uint8, torch.bfloat16, torch.half]
)
def test_positions_of_small_dtypes(target: Target, dtype: torch.dtype) -> None:
    """Each as the numbers it holds."""
    inputs = small(target.device)
    q = torch.arange(60, 93, device=target.device).to(dtype)
    k = torch.arange(50, device=target.device).to(dtype)
    got = forward(inputs, target.path, q_positions=q, k_positions=k)
    want = forward(inputs, target.path, q_positions=q.double(), k_positions=k.double())
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_lengths_of_any_dtype(target: Target, dtype: torch.dtype) -> None:
    inputs = small(target.device, lse=True)
    lengths = torch.tensor([50, 17], device=target.device)
    want = gradients(inputs, target.path, kv_lengths=lengths.int())
    assert_near(gradients(inputs, target.path, kv_lengths=lengths.to(dtype)), want, 16)


def test_lengths_are_clamped(target: Target) -> None:
    """Beyond the keys is all of them, and below 0 is none; so for causal rows, too."""
    inputs = small(target.device, lse=True)
    for causal in (False, True):
        got, want = (
            gradients(
                inputs,
                target.path,
                kv_lengths=torch.tensor(lengths, device=target.device),
                is_causal=causal,
            )
            for lengths in ([2**31 + 7, -3], [50, 0])
        )
        assert_near(got, want, 16)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.half, torch.float64])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_biases_of_any_dtype(target: Target, dtype: str, bias_dtype: torch.dtype) -> None:
    """Used as the numbers they hold, with a gradient in their own dtype."""
    inputs = small(target.device, dtype=dtype)
    bias = torch.randn(4, 33, 50, device=target.device).bfloat16().float()
    results = []
    for kind in (bias_dtype, torch.float32):
        leaf = bias.to(kind).requires_grad_()
        y = forward(inputs, target.path, attn_bias=leaf)
        (grad,) = torch.autograd.grad(y, leaf, inputs.grads["y"])
        assert grad.dtype == kind and grad.shape == bias.shape
        results.append((y, grad.float()))
    exact = bias_dtype == torch.float64 or dtype == "fp32"
    assert_tensor_near(results[0][0], results[1][0], 8 if exact else 4)
    coarse = torch.finfo(bias_dtype if bias_dtype != torch.float64 else torch.float32).eps
    assert_tensor_near(results[0][1], results[1][1], 64, eps=coarse)


@pytest.mark.parametrize("shape", [(), (50,), (1,), (33, 1), (33, 50), (4, 1, 1), (1, 33, 50)])
def test_biases_of_any_rank(target: Target, shape: tuple[int, ...]) -> None:
    inputs = small(target.device, lse=True)
    bias = torch.randn(shape, device=target.device)
    got = forward(inputs, target.path, attn_bias=bias)
    want = forward(inputs, target.path, attn_bias=bias.expand(2, 4, 33, 50).clone())
    for a, b in zip(got, want):
        assert_tensor_near(a, b, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.float64])
def test_tables_of_any_dtype(target: Target, dtype: torch.dtype) -> None:
    inputs = small(target.device, rope="table")
    tables = inputs.fixed["rope"]
    got, want = (
        forward(
            inputs,
            target.path,
            rope=tuple(
                RotaryTable(t.cos.to(dtype).to(kind), t.sin.to(dtype).to(kind)) for t in tables
            ),
        )
        for kind in (dtype, torch.float32)
    )
    assert_tensor_near(got, want, 4)


def test_a_table_of_no_pairs_rotates_nothing(target: Target) -> None:
    inputs = small(target.device)
    empty = (torch.ones(33, 0, device=target.device),) * 2
    got = forward(inputs, target.path, rope=(RotaryTable(*empty), None))
    assert torch.equal(got, forward(inputs, target.path, rope=None))
    assert torch.equal(got, forward(inputs, target.path, rope=RoPE(rotary_dim=0)))


def test_identity_rows_leave_tokens_unrotated(target: Target) -> None:
    """cos 1 and sin 0: excluded keys, padding and unrotated heads."""
    inputs = small(target.device, rope="table_heads", Dout=0)
    q_table, k_table = inputs.fixed["rope"]
    for table in (q_table, k_table):
        table.cos[2], table.sin[2] = 1.0, 0.0
    y = forward(inputs, target.path).unflatten(-1, (4, 32))
    plain = forward(inputs, target.path, rope=None).unflatten(-1, (4, 32))
    assert_tensor_near(y[:, :, 2], plain[:, :, 2], 16)
    assert float((y[:, :, 1] - plain[:, :, 1]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("eps", [1e-12, 0.5])
def test_eps_is_used(target: Target, kind: Any, eps: float) -> None:
    inputs = small(target.device)
    wide = small(target.device, dtype="fp64")
    got = forward(inputs, target.path, q_norm=Norm(kind, eps=eps))
    want = forward(wide, "composite", q_norm=Norm(kind, eps=eps))
    other = forward(wide, "composite", q_norm=Norm(kind, eps=0.1))
    assert float((got.double() - other).abs().max()) > 1e-3
    for name, leaf in wide.leaves.items():
        leaf.data.copy_(inputs.leaves[name])
    want = forward(wide, "composite", q_norm=Norm(kind, eps=eps))
    assert float((got.double() - want).abs().max()) < 1e-4


def test_both_parts_of_a_rope_pair_go_where_they_belong(target: Target) -> None:
    """project_kv takes the second, a call on its result the first."""
    inputs = small(target.device)
    pair = (RoPE(50.0), RoPE(interleaved=False, rotary_dim=16))
    args, kwargs = inputs.call()
    biases = {n: kwargs.pop(n) for n in ("b_k", "b_v")}
    kwargs["rope"] = pair
    want = cross_attention(*args, **kwargs, **biases, path=target.path)
    projected = project_kv(args[1], args[3], args[4], num_heads=4, rope=pair, **biases)
    alone = project_kv(args[1], args[3], args[4], num_heads=4, rope=pair[1], **biases)
    assert torch.equal(projected.k, alone.k) and torch.equal(projected.v, alone.v)
    got = cross_attention(args[0], projected, args[2], None, None, args[5], **kwargs)
    assert_tensor_near(got, want, 16)


def test_masks_on_projected_keys(target: Target) -> None:
    """Lengths, mask, bias and causality of a call that knows its keys already."""
    options: dict[str, Any] = {
        "lengths": "ragged",
        "mask": "full",
        "bias": "b1qk-inf",
        "causal": True,
        "lse": True,
    }
    inputs = small(target.device, **options)
    args, kwargs = inputs.call()
    want = cross_attention(*args, **kwargs, path=target.path)
    biases = {n: kwargs.pop(n) for n in ("b_k", "b_v")}
    kv = project_kv(args[1], args[3], args[4], num_heads=4, **biases)
    assert isinstance(kv, ProjectedKV)
    got = cross_attention(args[0], kv, args[2], None, None, args[5], **kwargs, path=target.path)
    for a, b in zip(got, want):
        assert_tensor_near(a, b, 16)


# ---- the module's options ----

MODULE: dict[str, tuple[Any, ...]] = {
    "kv_dim": (None, 24),
    "value_dim": (None, 40),
    "inner_dim": (None, 64),
    "out_dim": (None, 48),
    "num_kv_heads": (None, 2, 1),
    "bias": (False, True),
    "out_bias": (None, False, True),
    "rope": ("default", None, RoPE(axes=2), (RoPE(9.0), None), (None, RoPE(interleaved=False))),
    "rope_base": (10000.0, 33.0),
    "qk_norm": (None, "rms", "layer"),
    "qk_norm_over": ("head", "inner"),
    "scale": (None, 0.0, -0.4),
}


def by_function(module: Any, o: dict[str, Any], x: Tensor, kv: Tensor, **call: Any) -> Any:
    """What the options mean, written with the function."""
    rope = RoPE(o["rope_base"]) if o["rope"] == "default" else o["rope"]
    children = [getattr(module, f"{n}_proj") for n in ("q", "k", "v", "out")]
    names = ("b_q", "b_k", "b_v", "b_out")
    norms = {}
    for side in ("q_norm", "k_norm"):
        child = getattr(module, side)
        if child is not None:
            bias = getattr(child, "bias", None)
            norms[side] = Norm(o["qk_norm"], child.weight, bias, 1e-6, o["qk_norm_over"])
    return cross_attention(
        x,
        kv,
        *[c.weight for c in children],
        num_heads=4,
        num_kv_heads=o["num_kv_heads"],
        rope=rope,
        scale=o["scale"],
        **{n: c.bias for n, c in zip(names, children)},
        **norms,
        **call,
    )


@pytest.mark.parametrize("seed", range(24))
def test_module_options_mean_what_they_say(target: Target, seed: int) -> None:
    chooser = random.Random(seed)
    o = {n: chooser.choice(values) for n, values in MODULE.items()}
    torch.manual_seed(seed)
    module = FusedRoPECrossAttention(32, 4, **o, device=target.device)
    for child in module.children():
        for parameter in child.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    kv_dim = o["kv_dim"] or 32
    x, kv = (torch.randn(2, t, d, device=target.device) for t, d in ((9, 32), (11, kv_dim)))
    call: dict[str, Any] = {}
    if o["value_dim"] or chooser.random() < 0.3:
        call["x_value"] = torch.randn(2, 11, o["value_dim"] or kv_dim, device=target.device)
    if o["rope"] == RoPE(axes=2) or chooser.random() < 0.3:
        axes = (2,) if o["rope"] == RoPE(axes=2) else ()
        call["q_positions"] = torch.randint(-9, 9, (9, *axes), device=target.device)
        call["k_positions"] = torch.randint(-9, 9, (2, 11, *axes), device=target.device)
    got = module(x, kv, return_lse=True, **call)
    want = by_function(module, o, x, kv, return_lse=True, **call)
    assert got[0].shape == (2, 9, o["out_dim"] or 32)
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    has_bias = {n: getattr(module, f"{n}_proj").bias is not None for n in ("q", "k", "v", "out")}
    out_bias = o["bias"] if o["out_bias"] is None else o["out_bias"]
    assert has_bias == {"q": o["bias"], "k": o["bias"], "v": o["bias"], "out": out_bias}
    projected = module.project_kv(
        kv, **{n: v for n, v in call.items() if n in ("x_value", "k_positions")}
    )
    again = module(x, projected, **{n: v for n, v in call.items() if n == "q_positions"})
    assert_tensor_near(again, got[0], 64)


def test_tables_go_to_the_modules_forward(target: Target) -> None:
    module = FusedRoPECrossAttention(32, 4, device=target.device)
    x, kv = (torch.randn(2, t, 32, device=target.device) for t in (9, 11))
    angles = [torch.randn(t, 4, device=target.device) for t in (9, 11)]
    tables = tuple(RotaryTable(a.cos(), a.sin()) for a in angles)
    o = {"rope": tables, "num_kv_heads": None, "scale": None}
    assert torch.equal(module(x, kv, rope=tables), by_function(module, o, x, kv))
    projected = module.project_kv(kv, rope=tables)
    assert_tensor_near(module(x, projected, rope=(tables[0], None)), module(x, kv, rope=tables), 16)
    assert torch.equal(module(x, kv, rope=None), by_function(module, {**o, "rope": None}, x, kv))


def test_numbers_of_the_module_may_be_changed(target: Target) -> None:
    module = FusedRoPECrossAttention(32, 4, device=target.device).train()
    x, kv = (torch.randn(2, t, 32, device=target.device) for t in (9, 11))
    plain = module(x, kv)
    module.scale = 0.0
    assert module.scale == 0.0 and not torch.equal(module(x, kv), plain)
    module.scale = None
    assert module.scale is None and torch.equal(module(x, kv), plain)
    module.dropout = 0.4
    assert module.dropout == 0.4 and not torch.equal(module(x, kv), plain)
    module.dropout = 0.0
    module.rope = RoPE(7.0)
    assert torch.equal(module(x, kv), module(x, kv, rope=RoPE(7.0)))
