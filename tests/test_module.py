"""The module: its state, what it computes, and its life cycle."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fused_rope_xattn import FusedRoPECrossAttention, Norm, RoPE
from modules import PROJECTIONS, build, data, functional, grads_of
from problems import Target, assert_near, assert_tensor_near

# ---- state ----


def test_the_state_dict_is_the_baseline_one() -> None:
    module = FusedRoPECrossAttention(256, 8)
    assert {n: tuple(t.shape) for n, t in module.state_dict().items()} == {
        f"{n}.weight": (256, 256) for n in PROJECTIONS
    }
    assert not list(module.buffers())


@pytest.mark.parametrize(
    "options, extra",
    [
        ({"bias": True}, [f"{n}.bias" for n in PROJECTIONS]),
        ({"out_bias": True}, ["out_proj.bias"]),
        ({"bias": True, "out_bias": False}, [f"{n}.bias" for n in PROJECTIONS[:3]]),
        ({"qk_norm": "rms"}, ["q_norm.weight", "k_norm.weight"]),
        ({"rope": None}, []),
        ({"rope": RoPE(axes=2)}, []),
    ],
    ids=["bias", "out_bias", "no_out_bias", "qk_norm", "no_rope", "axial"],
)
def test_state_dict_keys_of_options(options: dict[str, Any], extra: list[str]) -> None:
    keys = set(FusedRoPECrossAttention(64, 4, **options).state_dict())
    assert keys == {f"{n}.weight" for n in PROJECTIONS} | set(extra)


def test_children_are_plain_linears() -> None:
    module = build(kv_dim=40, value_dim=24, inner_dim=128, out_dim=56, num_kv_heads=2, bias=True)
    shapes = {n: tuple(getattr(module, n).weight.shape) for n in PROJECTIONS}
    assert all(type(getattr(module, n)) is nn.Linear for n in PROJECTIONS)
    assert shapes == {
        "q_proj": (128, 64),
        "k_proj": (64, 40),
        "v_proj": (64, 24),
        "out_proj": (56, 128),
    }


@pytest.mark.parametrize("over, width", [("head", 16), ("inner", 64)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_have_the_width_of_what_they_norm(kind: str, over: str, width: int) -> None:
    module = build(qk_norm=kind, qk_norm_over=over)
    assert module.q_norm.weight.shape == (width,) == module.k_norm.weight.shape


def test_initialisation_is_that_of_linear() -> None:
    torch.manual_seed(0)
    module = FusedRoPECrossAttention(256, 8)
    for name in PROJECTIONS:
        weight = getattr(module, name).weight
        assert float(weight.abs().max()) <= 256**-0.5 and 0.03 < float(weight.std()) < 0.04


# ---- what forward computes ----


def test_forward_is_the_function(target: Target) -> None:
    module = build(target.device, bias=True, kv_dim=40, out_dim=48)
    x, kv = data(target.device, kv_dim=40)
    options = {
        "q_positions": torch.arange(3, 20, device=target.device),
        "k_positions": torch.randint(-9, 9, (2, 29), device=target.device),
        "kv_lengths": torch.tensor([29, 5], device=target.device),
        "kv_keep_mask": torch.rand(2, 1, 17, 29, device=target.device) < 0.8,
        "attn_bias": torch.randn(4, 1, 29, device=target.device),
        "is_causal": True,
        "return_lse": True,
    }
    for got, want in zip(module(x, kv, **options), functional(module, x, kv, **options)):
        assert torch.equal(got, want)


def test_norms_and_grouped_heads_are_the_function(target: Target) -> None:
    module = build(target.device, qk_norm="rms", num_kv_heads=2, rope=RoPE(interleaved=False))
    with torch.no_grad():
        module.q_norm.weight.normal_()
        module.k_norm.weight.normal_()
    x, kv = data(target.device)
    want = functional(
        module,
        x,
        kv,
        num_kv_heads=2,
        rope=RoPE(interleaved=False),
        q_norm=Norm("rms", module.q_norm.weight, eps=module.q_norm.eps),
        k_norm=Norm("rms", module.k_norm.weight, eps=module.k_norm.eps),
    )
    assert_tensor_near(module(x, kv), want, 8)


def test_x_value(target: Target) -> None:
    module = build(target.device, value_dim=24)
    x, kv = data(target.device)
    value = torch.randn(2, 29, 24, device=target.device)
    assert torch.equal(module(x, kv, x_value=value), functional(module, x, kv, x_value=value))


def test_rope_none_rotates_nothing(target: Target) -> None:
    x, kv = data(target.device)
    module = build(target.device, rope=None)
    moved = module(x, kv, q_positions=None)
    assert torch.equal(moved, functional(module, x, kv, rope=None))
    assert not torch.equal(moved, build(target.device)(x, kv))


def test_rope_base(target: Target) -> None:
    x, kv = data(target.device)
    module = build(target.device, rope_base=77.0)
    assert torch.equal(module(x, kv), functional(module, x, kv, rope=RoPE(77.0)))
    assert torch.equal(module(x, kv), build(target.device, rope=RoPE(77.0))(x, kv))


@pytest.mark.parametrize("scale", [0.0, 0.5, None])
def test_scale_is_used_as_given(target: Target, scale: float | None) -> None:
    x, kv = data(target.device)
    module = build(target.device, scale=scale)
    assert torch.equal(module(x, kv), functional(module, x, kv, scale=scale))


def test_dropout_is_for_training_only(target: Target) -> None:
    x, kv = data(target.device)
    module = build(target.device, dropout=0.5)
    plain = functional(module, x, kv)
    assert torch.equal(module.eval()(x, kv), plain)
    assert not torch.equal(module.train()(x, kv), plain)
    torch.manual_seed(4)
    trained = module(x, kv)
    torch.manual_seed(4)
    assert torch.equal(trained, functional(module, x, kv, dropout_p=0.5))


def test_project_kv_is_accepted_by_forward(target: Target) -> None:
    module = build(target.device, bias=True, qk_norm="layer", num_kv_heads=2)
    x, kv = data(target.device)
    k = torch.randint(0, 99, (2, 29), device=target.device)
    projected = module.project_kv(kv, k_positions=k)
    assert projected.k.shape == (2, 2, 29, 16) == projected.v.shape
    got, want = module(x, projected), module(x, kv, k_positions=k)
    assert_tensor_near(got, want, 16)
    assert_near(grads_of(module, got), grads_of(module, want))


# ---- life cycle ----


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copier", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("used", [False, True])
def test_copies_compute_the_same(target: Target, copier: Callable[[Any], Any], used: bool) -> None:
    module = build(target.device, bias=True, qk_norm="rms", rope=RoPE(rotary_dim=8))
    x, kv = data(target.device)
    if used:
        module(x, kv).sum().backward()
    twin = copier(module)
    assert torch.equal(twin(x, kv), module(x, kv))
    with torch.no_grad():
        twin.q_proj.weight.zero_()
    assert bool(module.q_proj.weight.any())


def test_meta_init_and_load_change_nothing(target: Target) -> None:
    """No table is stored, so none can be left as garbage."""
    module = build(target.device, bias=True, qk_norm="layer")
    x, kv = data(target.device)
    empty = FusedRoPECrossAttention(64, 4, bias=True, qk_norm="layer", device="meta")
    assert all(p.is_meta for p in empty.parameters())
    with torch.device("meta"):
        assert FusedRoPECrossAttention(64, 4).q_proj.weight.is_meta
    late = empty.to_empty(device=target.device)
    late.load_state_dict(module.state_dict())
    assert torch.equal(late(x, kv), module(x, kv))
    again = FusedRoPECrossAttention(64, 4, bias=True, qk_norm="layer", device="meta")
    again.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(again(x, kv), module(x, kv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["to", "method", "constructor"])
def test_casts_leave_angles_alone(target: Target, dtype: torch.dtype, how: str) -> None:
    """Positions 256 and 257 are one number in bf16."""
    module = build(target.device)
    low = copy.deepcopy(module)
    if how == "to":
        low.to(dtype)
    elif how == "method":
        low = low.bfloat16() if dtype == torch.bfloat16 else low.half()
    else:
        low = FusedRoPECrossAttention(64, 4, device=target.device, dtype=dtype)
        low.load_state_dict(module.state_dict())
    x, kv = data(target.device)
    q = torch.arange(256, 273, device=target.device)
    k = torch.arange(4096, 4125, device=target.device)
    got = low(x.to(dtype), kv.to(dtype), q_positions=q, k_positions=k)
    want = module(x, kv, q_positions=q, k_positions=k)
    assert got.dtype == dtype
    error = float((got.float() - want).abs().max())
    assert error < 8 * torch.finfo(dtype).eps * float(want.abs().max())


def test_double_is_served_by_composite(target: Target) -> None:
    module = build(target.device)
    x, kv = data(target.device)
    want = module(x, kv)
    got = module.double()(x.double(), kv.double())
    assert got.dtype == torch.float64
    assert_tensor_near(got.float(), want)


def test_rope_is_shared_without_entering_the_state() -> None:
    rope = RoPE(100.0)
    blocks = nn.ModuleList(FusedRoPECrossAttention(64, 4, rope=rope) for _ in range(2))
    assert len(blocks.state_dict()) == 8
    assert copy.deepcopy(blocks)[1].rope == rope == blocks[0].rope


def test_repr_shows_what_it_is() -> None:
    text = repr(build(dropout=0.25, rope=RoPE(123.0)))
    assert "q_proj" in text and "123" in text and "0.25" in text
