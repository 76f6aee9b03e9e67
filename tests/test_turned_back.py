"""The attention backward through the rotation of q and k: on a CPU and in the Hopper kernels."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from formulas import plain_turned_back
from fused_rope_xattn import ops
from fused_rope_xattn.config import RotationSpec
from fused_rope_xattn.ops import UNTURNED, ScoreOptions, Turning, TurningTensors
from problems import assert_tensor_near

B, H, HKV = 2, 4, 2
KINDS = "implicit", "int32", "int64", "float32", "float64", "table", "table_heads", "table_full"


class Attention(NamedTuple):
    """A problem whose forward is done."""

    tensors: tuple[Tensor, ...]  # dout, dlse, q, k, v, o, lse
    options: ScoreOptions
    o_rest: Tensor | None


def attention(
    D: int, Tq: int, Tk: int, dtype: torch.dtype, device: str, dropout_p: float = 0.0
) -> Attention:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    q, k, v = draw(B, Tq, H, D), draw(B, Tk, HKV, D), draw(B, Tk, HKV, D)
    seed = torch.randint(2**60, (1,), device=device)
    options = ScoreOptions(None, None, None, None, seed, D**-0.5, False, dropout_p, False)
    o_rest = None
    if dtype in (torch.float16, torch.bfloat16):
        o, lse, o_rest = ops.attention_forward_with_rest(q, k, v, options)
    else:
        o, lse = ops.attention_forward(q, k, v, options)
    dlse = torch.randn_like(lse)
    return Attention((torch.randn_like(o), dlse, q, k, v, o, lse), options, o_rest)


def turning(kind: str, spec: RotationSpec, T: int, heads: int, device: str) -> Turning:
    """One side's rotation by angles of that kind."""
    if kind.startswith("table"):
        full_width = kind == "table_full"
        width = spec.rotary_dim if full_width else spec.rotary_dim // 2
        shape = (B, heads if kind == "table_heads" else 1, T, width)
        cos, sin = torch.randn(2, *shape, device=device)
        return Turning(TurningTensors(None, cos, sin), spec._replace(full_width=full_width))
    if kind == "implicit":
        return Turning(TurningTensors(), spec._replace(axes=1))
    positions = 2000 * torch.randn(B, T, spec.axes, device=device, dtype=torch.float64)
    dtype: torch.dtype = getattr(torch, kind)
    return Turning(TurningTensors(positions.to(dtype)), spec)


def backward(a: Attention, q: Turning = UNTURNED, k: Turning = UNTURNED, **needs: bool) -> Any:
    wanted = {"need_dq": True, "need_dkv": True, "need_dbias": False} | needs
    return ops.attention_backward(
        *a.tensors, a.options, **wanted, o_rest=a.o_rest, q_turning=q, k_turning=k
    )


def before_rotation(grad: Tensor, side: Turning) -> Tensor:
    return plain_turned_back(grad, side.spec, side.tensors)


SPECS = {
    "interleaved": RotationSpec(16),
    "half": RotationSpec(16, False),
    "partial": RotationSpec(6, base=50.0),
    "axial_half": RotationSpec(12, False, axes=2, base=100.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_cpu(spec: RotationSpec, kind: str) -> None:
    a = attention(16, 6, 7, torch.float64, "cpu")
    sides = turning(kind, spec, 6, H, "cpu"), turning(kind, spec, 7, HKV, "cpu")
    dq, dk, dv, _ = backward(a)
    got = backward(a, *sides)
    assert_tensor_near(got[0], before_rotation(dq, sides[0]), name="dq")
    assert_tensor_near(got[1], before_rotation(dk, sides[1]), name="dk")
    assert torch.equal(got[2], dv)


def test_one_side_alone() -> None:
    a, spec = attention(16, 6, 7, torch.float64, "cpu"), SPECS["half"]
    side = turning("int64", spec, 6, H, "cpu")
    assert torch.equal(backward(a, side)[1], backward(a)[1])
    assert torch.equal(
        backward(a, UNTURNED, turning("table", spec, 7, HKV, "cpu"))[0], backward(a)[0]
    )
    dq, dk, dv, _ = backward(a, side, side, need_dkv=False)
    assert torch.equal(dq, backward(a, side)[0]) and dk.shape == dv.shape == (0,)


def test_opcheck() -> None:
    a, spec = attention(16, 6, 7, torch.float32, "cpu"), SPECS["axial_half"]
    q, k = turning("float64", spec, 6, H, "cpu"), turning("table", spec, 7, HKV, "cpu")
    rotations = (
        r for side in (q, k) for r in (*side.spec[:3], side.spec.base, side.spec.full_width)
    )
    args = (*a.tensors, *a.options, True, True, False, True, None, *q.tensors, *k.tensors)
    operator = torch.ops.fused_rope_xattn.attention_backward.default
    torch.library.opcheck(operator, (*args, *rotations))


GPU_SPECS = {
    "interleaved": (64, RotationSpec(64)),
    "half": (128, RotationSpec(128, False)),
    "wide": (256, RotationSpec(256)),
    "narrow": (32, RotationSpec(32, False)),
    "partial": (128, RotationSpec(42, base=50.0)),
    "axial": (96, RotationSpec(96, axes=3, base=100.0)),
    "odd_halves": (72, RotationSpec(60, False, axes=2)),
    "small_base": (40, RotationSpec(40, base=0.5)),
}


def assert_turned(plain: Any, got: Any, sides: tuple[Turning, Turning], label: str) -> None:
    """Rounded once: half an ulp of each element away from turning what the kernels leave unturned,
    which has half an ulp of its own in two elements."""
    assert torch.equal(got[2], plain[2])
    for name, x, y, side in zip(("dq", "dk"), plain, got, sides):
        want = before_rotation(x, side)
        tensors = side.tensors
        gain = (
            1.0 if tensors.cos is None else float(tensors.cos.abs().max() + tensors.sin.abs().max())
        )
        rows = x.double().norm(dim=-1, keepdim=True)
        bound = torch.finfo(x.dtype).eps * (want.abs() + 2 * gain * rows) / 2 + 1e-6
        worst = ((y.double() - want).abs() - bound).max()
        assert bool(worst <= 0), f"{name} {label}: {float(worst):.3e} beyond its bound"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D, spec", GPU_SPECS.values(), ids=GPU_SPECS)
def test_kernels_turn_as_a_kernel_of_its_own_would(D: int, spec: RotationSpec, kind: str) -> None:
    for (Tq, Tk), dtype, p in zip(
        [(1, 300), (130, 129), (70, 1000)],
        itertools.cycle([torch.bfloat16, torch.float16]),
        [0.0, 0.3, 0.0],
    ):
        a = attention(D, Tq, Tk, dtype, "cuda", p)
        sides = turning(kind, spec, Tq, H, "cuda"), turning(kind, spec, Tk, HKV, "cuda")
        assert_turned(backward(a), backward(a, *sides), sides, f"{dtype} {Tq}x{Tk}")


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("D, spec", GPU_SPECS.values(), ids=GPU_SPECS)
def test_both_sides_turn_behind_the_attention(D: int, spec: RotationSpec, tf32: bool) -> None:
    """Where a kernel of its own does it, in one launch: each kind of angles beside each other."""
    Tq, Tk = 700, 390  # enough for Hopper's TF32 kernels
    a = attention(D, Tq, Tk, torch.float32, "cuda")
    a = a._replace(options=a.options._replace(tf32=tf32))
    plain = backward(a)
    for q_kind, k_kind in itertools.product(
        ("implicit", "int64", "table_heads", "table_full"), KINDS
    ):
        sides = turning(q_kind, spec, Tq, H, "cuda"), turning(k_kind, spec, Tk, HKV, "cuda")
        assert_turned(plain, backward(a, *sides), sides, f"{q_kind} beside {k_kind}")
