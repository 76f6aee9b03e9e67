"""What a call may not do: depend on strides, write to its inputs, or answer twice differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import cross_attention
from problems import (
    Target,
    assert_bits,
    assert_near,
    assert_tensor_near,
    forward,
    gradients,
    small,
    with_grad,
)

# ---- memory layout and purity ----


def _restrided(x: Tensor, kind: str) -> Tensor:
    """The same values behind other strides."""
    if kind == "transposed":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if kind == "sliced":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"))
        wide[..., 1 : 1 + 2 * x.shape[-1] : 2] = x
        return wide[..., 1 : 1 + 2 * x.shape[-1] : 2]
    offset = x.new_full((x.numel() + 1,), float("nan"))  # rows off any 16-byte boundary
    offset[1:] = x.flatten()
    return offset[1:].view(x.shape)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["transposed", "sliced", "misaligned"])
@pytest.mark.parametrize(
    "options",
    [
        {"bias": "bhqk", "mask": "full", "q_norm": "layer", "lengths": "ragged"},
        {"projected": True, "bias": "h11"},
        {"rope": "table_batch_heads", "H": 1, "D": 128, "Dv": 20},
    ],
    ids=["masks", "cached", "tables"],
)
def test_inputs_of_any_stride(
    target: Target, dtype: str, kind: str, options: dict[str, Any]
) -> None:
    inputs = small(target.device, dtype=dtype, lse=True, **options)
    want = gradients(inputs, target.path)
    twin = small(target.device, dtype=dtype, lse=True, **options)
    twin.leaves = {n: _restrided(t.detach(), kind) for n, t in twin.leaves.items()}
    for name in ("kv_keep_mask",):
        if name in twin.fixed:
            twin.fixed[name] = twin.fixed[name].transpose(2, 3).contiguous().transpose(2, 3)
    if options.get("rope", "").startswith("table"):
        twin.fixed["rope"] = tuple(
            type(t)(_restrided(t.cos, kind), _restrided(t.sin, kind), interleaved=t.interleaved)
            for t in twin.fixed["rope"]
        )
    # A copy of an operand may pick another GEMM, so bits are too much to ask.
    assert_near(gradients(with_grad(twin), target.path), want, 16)


def test_expanded_inputs(target: Target) -> None:
    """One memory for all samples, one mask for all heads, without a copy of their own."""
    inputs = small(target.device, mask="full", bias="11qk")
    leaf = {**inputs.leaves}
    leaf["x_kv"] = leaf["x_kv"].detach()[:1].expand(2, -1, -1)
    leaf["attn_bias"] = leaf["attn_bias"].detach().expand(2, 4, -1, -1)
    mask = inputs.fixed["kv_keep_mask"][:, :1].expand(-1, 4, -1, -1)
    k = torch.arange(50, device=target.device).expand(2, 50)
    results = []
    for solid in (lambda t: t, lambda t: t.contiguous()):
        args, kwargs = inputs.call({n: solid(t) for n, t in leaf.items()})
        kwargs |= {"kv_keep_mask": solid(mask), "k_positions": solid(k)}
        results.append(cross_attention(*args, **kwargs, path=target.path))
    assert_tensor_near(results[0], results[1], 16)


def test_gradient_of_an_expanded_input_is_summed(target: Target) -> None:
    inputs = small(target.device)
    one = inputs.leaves["x_kv"].detach()[:1].clone().requires_grad_()
    args, kwargs = inputs.call({**inputs.leaves, "x_kv": one.expand(2, -1, -1)})
    y = cross_attention(*args, **kwargs, path=target.path)
    (got,) = torch.autograd.grad(y, one, inputs.grads["y"])
    twice = one.detach().repeat(2, 1, 1).requires_grad_()
    args, kwargs = inputs.call({**inputs.leaves, "x_kv": twice})
    y = cross_attention(*args, **kwargs, path=target.path)
    (want,) = torch.autograd.grad(y, twice, inputs.grads["y"])
    assert_tensor_near(got, want.sum(0, keepdim=True))


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "bhqk", "mask": "full", "lengths": "ragged", "positions": "batch", "causal": True},
        {"projected": True, "q_norm": "layer"},
        {"rope": "table_full", "k_norm": "rms_inner", "dropout_p": 0.3, "Dv": 24},
    ],
    ids=["masks", "cached", "tables"],
)
def test_inputs_are_never_written(target: Target, options: dict[str, Any]) -> None:
    inputs = small(target.device, lse=True, **options)
    watched = [*inputs.leaves.values(), *inputs.grads.values()]
    if options.get("rope") == "table_full":
        watched += [t for side in inputs.fixed["rope"] for t in (side.cos, side.sin)]
    watched += [t for t in inputs.fixed.values() if isinstance(t, Tensor)]
    before = [(t._version, t.detach().clone()) for t in watched]
    gradients(inputs, target.path)
    for tensor, (version, copy) in zip(watched, before):
        assert tensor._version == version and torch.equal(tensor.detach(), copy)


def test_results_alias_nothing(target: Target) -> None:
    """Writing to a result in place leaves inputs and the other result alone."""
    inputs = small(target.device, lse=True, Dout=0)
    with torch.no_grad():
        y, lse = forward(inputs, target.path)
        again = forward(inputs, target.path)
        y.fill_(7.0)
        lse.fill_(7.0)
        third = forward(inputs, target.path)
    assert torch.equal(again[0], third[0]) and torch.equal(again[1], third[1])


def test_in_place_after_the_call_is_noticed(target: Target) -> None:
    """Saved tensors are versioned: a stale gradient is an error, never a wrong number."""
    inputs = small(target.device)
    y = forward(inputs, target.path)
    with torch.no_grad():
        inputs.leaves["x_query"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- repeatability ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_p": 0.3, "bias": "h11", "Hkv": 2},
        {"q_norm": "layer", "k_norm": "rms"},
    ],
    ids=["plain", "dropout", "norms"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_call_gives_the_same_bits(
    target: Target, options: dict[str, Any], dtype: str
) -> None:
    torch.use_deterministic_algorithms(True)
    results = []
    for _ in range(3):
        inputs = small(target.device, B=3, Tq=150, Tk=260, lse=True, dtype=dtype, **options)
        torch.manual_seed(9)
        results.append(gradients(inputs, target.path))
    assert_bits(results[1], results[0])
    assert_bits(results[2], results[0])


def test_forward_is_deterministic_without_being_asked(target: Target) -> None:
    inputs = small(target.device, B=3, Tq=150, Tk=260, lse=True)
    first = forward(inputs, target.path)
    for _ in range(3):
        for got, want in zip(forward(inputs, target.path), first):
            assert torch.equal(got, want)
