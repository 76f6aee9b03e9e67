"""The Hopper backward for keys and the sum of its parts, whole, on the host, with blocks cut along
their queries: against autograd in fp64.

As test_gradient_products_kernel.py: shared memory starts as NaN, buffers have NaN on both sides,
copies, additions and products happen as late or as early as the barriers allow.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ext.build import load_extension
from formulas import plain_norm_rope
from fused_rope_xattn import dropout
from fused_rope_xattn.config import NormSpec, RotationSpec
from margins import Margins
from problems import Sizes, assert_tensor_near

SCALE, BASE = 0.2, 1024.0  # as attention_backward_emulated.cpp says
KEYS = 128  # a block's


class Options(NamedTuple):
    rotary_dim: int = 0
    causal: bool = False
    dropout_p: float = 0.0
    lengths: tuple[int, ...] = ()
    removes_keys: bool = False
    needs_dq: bool = True


CASES: dict[str, tuple[Sizes, tuple[int, int], Options]] = {
    # sizes, cut (first block, pieces), options
    "uncut": (Sizes(1, 130, 200, 2, 2, 64), (0, 1), Options()),
    "all are cut": (Sizes(1, 200, 130, 1, 1, 64), (0, 2), Options(rotary_dim=64)),
    "the last ones": (Sizes(1, 200, 200, 2, 2, 64), (3, 4), Options(rotary_dim=32)),
    "more pieces than tiles": (Sizes(1, 70, 100, 2, 2, 64), (1, 3), Options()),
    "shared keys": (Sizes(1, 130, 130, 4, 2, 64), (1, 2), Options(rotary_dim=64)),
    "wide": (Sizes(1, 130, 100, 2, 2, 128), (1, 2), Options(rotary_dim=128)),
    "padded": (Sizes(1, 130, 140, 1, 1, 72), (1, 2), Options()),
    "causal": (Sizes(1, 260, 260, 1, 1, 64), (0, 3), Options(causal=True, rotary_dim=64)),
    "lengths": (Sizes(2, 130, 260, 1, 1, 64), (2, 2), Options(lengths=(150, 100), rotary_dim=64)),
    "no keys": (Sizes(2, 70, 40, 1, 1, 64), (0, 2), Options(lengths=(0, 17))),
    "removed keys": (Sizes(1, 130, 140, 1, 1, 64), (1, 2), Options(removes_keys=True)),
    "dropout": (Sizes(1, 130, 140, 2, 1, 64), (0, 2), Options(dropout_p=0.3)),
    "dropout, wide": (Sizes(1, 130, 70, 1, 1, 128), (0, 2), Options(dropout_p=0.3)),
    "without dq": (Sizes(1, 200, 140, 1, 1, 64), (1, 3), Options(needs_dq=False, rotary_dim=64)),
    "widest": (Sizes(1, 130, 70, 1, 1, 200), (0, 2), Options(needs_dq=False, rotary_dim=96)),
    "without dq, wide": (Sizes(1, 130, 70, 1, 1, 128), (0, 2), Options(needs_dq=False)),
}


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "attention_backward_emulated",
        request.config,
        emulates_cuda=True,
        emulation=("emulation_sm90", "emulation_warp"),
    )


def turned(x: Tensor, rotary_dim: int) -> Tensor:
    if rotary_dim == 0:
        return x
    flat = x.reshape(*x.shape[:2], -1)
    tensors = (None, None, None)
    spec = RotationSpec(rotary_dim, False, base=BASE)
    return plain_norm_rope(flat, x.shape[2], None, NormSpec(), None, None, spec, tensors).view_as(x)


class Expected(NamedTuple):
    """In fp64."""

    rotated: tuple[Tensor, Tensor]  # q and k as the kernel takes them
    lse: Tensor
    delta: Tensor
    grads: dict[str, Tensor]


def expected(
    s: Sizes, o: Options, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, keep: Tensor, seed: Tensor
) -> Expected:
    """Of q and k before they are rotated."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    # What the kernel takes is rounded; gradients pass by that.
    straight = []
    for leaf in leaves[:2]:
        exact = turned(leaf, o.rotary_dim)
        straight.append(exact + (exact.bfloat16().double() - exact).detach())
    heads = [t.transpose(1, 2) for t in (*straight, leaves[2])]
    q64, k64, v64 = (t.repeat_interleave(s.H // t.shape[1], 1) for t in heads)
    scores = SCALE * q64 @ k64.mT
    scores = scores.masked_fill(~keep[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
    if o.dropout_p > 0:
        kept = dropout.keep_mask(seed, o.dropout_p, s.B, s.H, s.Tq, s.Tk)
        weights = weights * kept / (1 - o.dropout_p)
    y = weights @ v64
    dy = dout.double().transpose(1, 2)
    grads = torch.autograd.grad(y, leaves, dy)
    delta = (y * dy).sum(-1)
    q_rotated, k_rotated = (t.detach().bfloat16().contiguous() for t in straight)
    return Expected(
        (q_rotated, k_rotated), lse.detach(), delta.detach(), dict(zip(("dq", "dk", "dv"), grads))
    )


def fragments(tokens: int, rows: int, D: int) -> int:
    padded = next(d for d in (64, 128, 256) if d >= D)
    return -(-tokens // rows) * rows * padded


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("s", "cut", "o"), CASES.values(), ids=CASES)
def test_gradients(
    kernel: ModuleType, s: Sizes, cut: tuple[int, int], o: Options, seed: int
) -> None:
    torch.manual_seed(seed)
    q, dout = (torch.randn(s.B, s.Tq, s.H, s.D).bfloat16() for _ in range(2))
    k, v = (torch.randn(s.B, s.Tk, s.Hkv, s.D).bfloat16() for _ in range(2))
    dropout_seed = torch.tensor([seed * 12345678901])
    lengths = torch.tensor(o.lengths or [s.Tk] * s.B, dtype=torch.int32)
    exists = torch.arange(s.Tk) < lengths[:, None]
    if o.removes_keys:
        exists &= torch.rand(s.B, s.Tk) < 0.7
    keep = exists[:, None].expand(s.B, s.Tq, s.Tk)
    if o.causal:
        rows, columns = torch.arange(s.Tq)[:, None], torch.arange(s.Tk)
        keep = keep & (columns <= rows + lengths[:, None, None] - s.Tq)
    want = expected(s, o, q, k, v, dout, keep, dropout_seed)

    blocks = s.B * s.Hkv * -(-s.Tk // KEYS)
    pieces = (blocks - cut[0]) * cut[1]
    margins = Margins()
    given = {
        "q": want.rotated[0],
        "k": want.rotated[1],
        "v": v,
        "dout": dout,
        "lse": want.lse.float().contiguous(),
        "delta": want.delta.float().contiguous(),
        "kv_lengths": lengths,
        "seed": dropout_seed,
    }
    if o.removes_keys:
        given["key_keep"] = exists.contiguous()
    if o.needs_dq:
        given["dq_parts"] = torch.zeros(s.B * s.H * fragments(s.Tq, 64, s.D))
    results = {
        name: torch.full_like(t, float("nan")) for name, t in (("dq", q), ("dk", k), ("dv", v))
    }
    if cut[1] > 1:
        given["dkv_parts"] = torch.full((pieces * 2 * fragments(KEYS, 128, s.D),), float("nan"))
    held = {
        name: margins.place(t) if t.is_floating_point() else t
        for name, t in {**given, **results}.items()
    }
    addresses = {name: t.data_ptr() for name, t in held.items()}
    kernel.run(list(s), addresses, cut, o.rotary_dim, o.causal, o.dropout_p, seed)
    assert margins.are_untouched
    for name in ("dq", "dk", "dv") if o.needs_dq else ("dk", "dv"):
        assert_tensor_near(held[name], want.grads[name], 4.0, name, torch.finfo(torch.bfloat16).eps)
