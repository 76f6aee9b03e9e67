"""NaN in removed tokens where it could come in by a back door: projected keys, biases, children."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calls import TK, B, tensors
from fused_rope_xattn import Norm, RoPE, cross_attention, project_kv
from fused_rope_xattn.arguments import Arguments
from fused_rope_xattn.prepare import prepare
from modules import build, data
from problems import Target, assert_bits, forward, gradients, small

NAN, INF = float("nan"), float("inf")
KEYS = 50


def removed(device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Which of 50 keys are removed, bool [2, 50], and the masks that do it."""
    keep = torch.ones(2, KEYS, dtype=torch.bool, device=device)
    keep[:, 3] = keep[1, 40:] = False
    lengths = torch.tensor([KEYS, 40], device=device)
    return ~keep, {"kv_lengths": lengths, "kv_keep_mask": keep}


# ---- keys and values that were projected before anybody knew of masks ----


def by_projection(
    target: Target, value: float, options: dict[str, Any], masks: dict[str, Tensor]
) -> dict[str, Tensor]:
    """project_kv and two calls that use it, with ``value`` in the tokens that both remove."""
    inputs = small(target.device, **options)
    gone, _ = removed(target.device)
    with torch.no_grad():
        for name in ("x_kv", "x_value"):
            if name in inputs.leaves:
                inputs.leaves[name].masked_fill_(gone[..., None], value)
    args, kwargs = inputs.call()
    names = ("b_k", "b_v", "x_value", "k_norm", "k_positions")
    made = {n: kwargs.pop(n) for n in names if n in kwargs}
    kept = {n: kwargs[n] for n in ("num_heads", "num_kv_heads", "rope") if n in kwargs}
    projected = project_kv(args[1], args[3], args[4], **made, **kept)
    ys = [
        cross_attention(x, projected, args[2], None, None, args[5], **kwargs, **masks)
        for x in (args[0], -args[0])
    ]
    leaves = inputs.leaves
    grads = torch.autograd.grad(sum(y.square().sum() for y in ys), list(leaves.values()))
    return dict(zip(leaves, grads)) | {"y": ys[0].detach(), "other": ys[1].detach()}


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k_norm": "layer_inner"},
        {"k_norm": "rms", "rope": "half", "Dv": 24},
        {"rope": "none"},
        {"rope": "table_batch_heads", "Hkv": 2},
    ],
    ids=["plain", "inner_norm", "x_value", "no_rope", "tables"],
)
def test_projected_tokens_that_all_calls_remove(
    target: Target, options: dict[str, Any], poison: float
) -> None:
    gone, masks = removed(target.device)
    results = [by_projection(target, value, options, masks) for value in (0.0, poison)]
    assert all(bool(t.isfinite().all()) for t in results[1].values())
    assert_bits(results[1], results[0])
    assert not bool(results[1]["x_kv"][gone].any())


def test_a_projected_nan_that_is_seen_is_seen(target: Target) -> None:
    inputs = small(target.device)
    args, kwargs = inputs.call()
    with torch.no_grad():
        args[1][0, 3] = NAN
    kwargs = {n: kwargs[n] for n in ("num_heads", "rope")}
    projected = project_kv(args[1], args[3], args[4], **kwargs)
    assert bool(projected.k[0, :, 3].isnan().all()) and bool(projected.v[0, :, 3].isnan().all())
    assert bool(projected.k[1].isfinite().all()) and bool(projected.k[0, :, 4:].isfinite().all())
    y = cross_attention(args[0], projected, args[2], None, None, args[5], **kwargs)
    assert bool(y[0].isnan().all()) and bool(y[1].isfinite().all())


@pytest.mark.parametrize("changed", [False, True])
def test_the_modules_projection(target: Target, changed: bool) -> None:
    """Also where k_proj and v_proj are called themselves."""
    results = []
    for value in (0.0, NAN):
        module = build(target.device, qk_norm="rms")
        if changed:
            module.k_proj, module.v_proj = (
                nn.Sequential(module.k_proj),
                nn.Sequential(module.v_proj),
            )
        x, kv = data(target.device)
        keep = torch.arange(29, device=target.device) < torch.tensor(
            [[29], [11]], device=target.device
        )
        kv = kv.masked_fill(~keep[..., None], value).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = module(x, module.project_kv(kv), kv_keep_mask=keep)
        y.square().sum().backward()
        grads = {n: p.grad for n, p in module.named_parameters()}
        results.append({"y": y.detach(), "kv": kv.grad, **grads})
    assert_bits(results[1], results[0])


def test_projection_without_gradients_stays_one_product(target: Target) -> None:
    """Isolation is for gradients: it costs inference nothing."""
    valid = {n: t.to(target.device) for n, t in tensors().items()}
    args = (valid["x_kv"], valid["w_k"], valid["w_v"])
    recorded = project_kv(*args, num_heads=4)
    with torch.no_grad():
        quiet = project_kv(*args, num_heads=4)
    assert torch.equal(quiet.k, recorded.k) and torch.equal(quiet.v, recorded.v)


# ---- a bias of -inf ----


def key_bias(gone: Tensor, form: str) -> Tensor:
    """-inf at removed keys; all forms have neither an axis of heads nor one of queries."""
    bias = torch.zeros(gone.shape, device=gone.device).masked_fill(gone, -INF)
    if form in ("b11k", "expanded"):
        bias = bias[:, None, None]
        return bias.expand(2, 4, 33, KEYS) if form == "expanded" else bias
    return {"k": bias[0], "1k": bias[:1], "11k": bias[:1, None]}[form]


@pytest.mark.parametrize("form", ["b11k", "expanded", "k", "1k", "11k"])
@pytest.mark.parametrize("options", [{}, {"k_norm": "layer"}, {"projected": True}])
def test_a_bias_of_keys_removes_like_a_mask(
    target: Target, form: str, options: dict[str, Any]
) -> None:
    """What stands in a key that such a bias removes reaches nothing."""
    gone, _ = removed(target.device)
    if form not in ("b11k", "expanded"):
        gone = gone[:1].expand(2, KEYS)
    results = []
    for value in (0.0, NAN):
        inputs = small(target.device, lse=True, **options)
        with torch.no_grad():
            if "x_kv" in inputs.leaves:
                inputs.leaves["x_kv"].masked_fill_(gone[..., None], value)
            else:
                for name in ("k", "v"):
                    inputs.leaves[name].masked_fill_(gone[:, None, :, None], value)
        results.append(gradients(inputs, target.path, attn_bias=key_bias(gone, form)))
    assert all(bool(t.isfinite().all()) for t in results[1].values())
    assert_bits(results[1], results[0])


@pytest.mark.parametrize("axes", ["bhqk", "b1qk", "h11"])
def test_a_bias_of_pairs_removes_keys_from_the_softmax(target: Target, axes: str) -> None:
    """Finite tokens that it removes for every query move nothing, whatever its shape."""
    gone, _ = removed(target.device)
    bias = key_bias(gone, "b11k").expand(2, 4, 33, KEYS).clone()
    if axes == "b1qk":
        bias = bias[:, :1].clone()
    elif axes == "h11":
        bias = torch.full((4, 1, 1), -INF, device=target.device)
        bias[1:] = 0.0
    results = []
    for value in (0.0, 3.0):
        inputs = small(target.device, lse=True)
        if axes != "h11":
            with torch.no_grad():
                inputs.leaves["x_kv"].masked_fill_(gone[..., None], value)
        results.append(gradients(inputs, target.path, attn_bias=bias))
    y, lse = results[1]["y"], results[1]["lse"]
    assert torch.equal(y, results[0]["y"]) and torch.equal(lse, results[0]["lse"])
    if axes == "h11":
        assert bool((lse[:, 0] == -INF).all()) and bool(lse[:, 1:].isfinite().all())
    else:
        assert not bool(results[1]["x_kv"][gone].any())


# ---- expanded masks are what they were expanded from ----


def prepared_masks(**options: Any) -> tuple[Tensor | None, Tensor | None]:
    valid = tensors()
    names = ("x_query", "x_kv", "w_q", "w_k", "w_v", "w_out")
    a = Arguments(**{n: valid[n] for n in names}, num_heads=4, rope=RoPE(), **options)
    t = prepare(a).tensors
    return t.keep_mask, t.key_keep


def test_an_expanded_mask_is_a_mask_of_keys() -> None:
    keep = torch.rand(B, TK) < 0.5
    for mask in (keep, keep[:, None, None], keep[:, None, None].expand(B, 4, 5, TK)):
        full, keys = prepared_masks(kv_keep_mask=mask)
        assert full is None and keys is not None and torch.equal(keys, keep)
    full, keys = prepared_masks(kv_keep_mask=keep[:, None, None].expand(B, 4, 5, TK).clone())
    assert full is not None and keys is not None and torch.equal(keys, keep)


def test_expanded_masks_and_biases_compute_the_same(target: Target) -> None:
    gone, _ = removed(target.device)
    keep = (~gone)[:, None, None].expand(2, 4, 33, KEYS)
    bias = key_bias(gone, "expanded")
    inputs = small(target.device)
    for option, tensor in (("kv_keep_mask", keep), ("attn_bias", bias)):
        got = forward(inputs, target.path, **{option: tensor})
        want = forward(inputs, target.path, **{option: tensor.clone()})
        assert float((got - want).abs().max()) < 1e-5


def test_norms_see_no_removed_token(target: Target) -> None:
    """A norm with weights of its own turns NaN into NaN gradients, if it is let."""
    gone, masks = removed(target.device)
    inputs = small(target.device, k_norm="layer")
    weight = inputs.leaves["k_norm_weight"]
    with torch.no_grad():
        inputs.leaves["x_kv"].masked_fill_(gone[..., None], NAN)
    norm = Norm("layer", weight, inputs.leaves["k_norm_bias"])
    y = forward(inputs, target.path, k_norm=norm, **masks)
    (grad,) = torch.autograd.grad(y.square().sum(), weight)
    assert bool(grad.isfinite().all()) and bool(grad.any())
