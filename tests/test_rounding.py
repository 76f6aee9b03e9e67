"""q and k are rounded to the storage type once, after norm and rotation, on every path."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_rope_xattn import composite, cross_attention, split
from fused_rope_xattn.config import NORM_LAYER, NORM_RMS, NormSpec, RotationSpec
from fused_rope_xattn.products import WideProduct, wide_linear
from fused_rope_xattn.rope import Rotation
from fused_rope_xattn.split import Projection
from fused_rope_xattn.verify.accuracy import run
from fused_rope_xattn.verify.cases import NAMED, draw_inputs
from fused_rope_xattn.verify.eager import eager_composite
from problems import assert_bits, assert_tensor_near

HALVES = (torch.bfloat16, torch.float16)
TURN, LAYER, RMS = (
    RotationSpec(16, base=100.0),
    NormSpec(NORM_LAYER, True, 1e-5),
    NormSpec(NORM_RMS),
)
KINDS = {
    "rotation": (NormSpec(), TURN),
    "norm": (LAYER, RotationSpec()),
    "both": (RMS._replace(eps=1e-6), TURN._replace(interleaved=False)),
}


def projection(kind: str, dtype: torch.dtype) -> Projection:
    norm, rotation = KINDS[kind]
    return Projection(
        torch.randn(3, 21, 40).to(dtype),
        (torch.randn(64, 40) / 40**0.5).to(dtype),
        torch.randn(64).to(dtype),
        norm_weight=torch.randn(64) if norm.inner else None,
        num_heads=4,
        norm=norm,
        rotation=rotation,
    )


def by_composite(p: Projection) -> Tensor:
    norm = (p.norm, p.norm_weight, p.norm_bias)
    return composite.project_heads(
        p.x, p.weight, p.bias, p.num_heads, norm, Rotation(p.rotation, p.positions, p.cos, p.sin)
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rounding_is_half_an_ulp(kind: str, dtype: torch.dtype) -> None:
    """Two of them would be off by more somewhere."""
    p = projection(kind, dtype)
    wide = Projection(*(x.double() if isinstance(x, Tensor) else x for x in p))
    exact = by_composite(wide)
    for got in (by_composite(p), split.project_forward(p)):
        assert got.dtype == dtype
        _, exponent = torch.frexp(exact)
        half_ulp = torch.finfo(dtype).eps * 2.0 ** (exponent.double() - 1) / 2
        # fp32 sums of numbers near 1 decide ties and small results otherwise now and then.
        slack = 64 * torch.finfo(torch.float32).eps
        assert bool(((got.double() - exact).abs() <= half_ulp + slack).all())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_round_alike(kind: str, dtype: torch.dtype) -> None:
    p = projection(kind, dtype)
    assert torch.equal(by_composite(p), split.project_forward(p))


def test_values_and_bare_projections_stay_products_of_the_dtype() -> None:
    p = projection("rotation", torch.bfloat16)._replace(rotation=RotationSpec())
    want = F.linear(p.x, p.weight, p.bias).unflatten(-1, (4, 16))
    assert torch.equal(by_composite(p), want)


# ---- the product itself ----


def test_the_wide_product_has_derivatives_of_every_order() -> None:
    rows, weight = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (4, 3))
    assert torch.autograd.gradcheck(WideProduct.apply, (rows, weight))
    assert torch.autograd.gradgradcheck(WideProduct.apply, (rows, weight))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_the_wide_product_computes_what_is_wanted(wanted: tuple[bool, bool]) -> None:
    rows, weight = torch.randn(4, 5).bfloat16(), torch.randn(3, 5).bfloat16()
    rows.requires_grad_(wanted[0]), weight.requires_grad_(wanted[1])
    z = WideProduct.apply(rows, weight)
    assert z.dtype == torch.float32
    z.sum().backward()
    assert tuple(t.grad is not None for t in (rows, weight)) == wanted
    grad = rows.grad if wanted[0] else weight.grad
    assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", HALVES)
def test_wide_linear_is_differentiable_by_every_means(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(2, 3, 8, device=device).to(dtype)
    w, b = (torch.randn(*s, device=device).to(dtype) for s in ((6, 8), (6,)))
    want = x.float() @ w.float().t() + b.float()
    assert_tensor_near(wide_linear(x, w, b), want, 8)

    def loss(w: Tensor) -> Tensor:
        return wide_linear(x, w, b).square().sum()

    leaf = w.clone().requires_grad_()
    (plain,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (twice,) = torch.autograd.grad(plain.float().square().sum(), leaf)
    assert plain.dtype == twice.dtype == dtype and bool(twice.any())
    assert_tensor_near(torch.func.grad(loss)(w), plain, 4)
    tangent = torch.randn_like(w)
    _, turned = torch.func.jvp(lambda w: wide_linear(x, w, b), (w,), (tangent,))
    assert_tensor_near(turned, x.float() @ tangent.float().t(), 8)
    mapped = torch.func.vmap(lambda x: wide_linear(x[None], w, b)[0])(x)
    assert_tensor_near(mapped, want, 8)


# ---- the yardstick of accuracy, which rounds as its users do ----


def test_the_yardstick_is_a_block_of_linears() -> None:
    inputs = draw_inputs(replace(NAMED["audio_video"], dtype="bf16", rope="none"))
    leaf = inputs.leaves
    config = {"num_heads": 4, "rope": None, "path": "composite"}
    eye = torch.eye(128, dtype=torch.bfloat16)

    def normed(name: str) -> Tensor:
        tokens = leaf["x_query" if name == "q" else "x_kv"]
        x = F.linear(tokens, leaf[f"w_{name}"], leaf[f"b_{name}"]).float()
        weight = leaf[f"{name}_norm_weight"].float()
        return F.rms_norm(x, (128,), weight, 1e-6).bfloat16()

    v = F.linear(leaf["x_kv"], leaf["w_v"], leaf["b_v"])
    o = cross_attention(normed("q"), normed("k"), eye, eye, eye, None, x_value=v, **config)
    want = F.linear(o, leaf["w_out"], leaf["b_out"])
    assert_tensor_near(run(eager_composite, inputs, backward=False)["y"], want, 2)


@pytest.mark.parametrize("name", ["wide_out", "grouped", "dropout", "cached", "no_out"])
def test_the_yardstick_is_the_composite_path_but_for_roundings(name: str) -> None:
    """In fp32 nothing is rounded in between, so both are one and the same computation."""
    case = replace(NAMED[name], lengths="none", mask="none")
    by_path: Any = partial(cross_attention, path="composite")
    fp32, bf16 = (draw_inputs(case.at(dtype)) for dtype in ("fp32", "bf16"))
    assert_bits(run(eager_composite, fp32), run(by_path, fp32))
    ruler, ours = run(eager_composite, bf16), run(by_path, bf16)
    truth = run(by_path, bf16, torch.float64)
    errors = [float((r["y"].double() - truth["y"]).abs().mean()) for r in (ours, ruler)]
    assert errors[0] < errors[1]
