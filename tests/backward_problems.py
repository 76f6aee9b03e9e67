"""Problems of the Hopper backward on the host emulator: what its kernels take, and the gradients
by autograd in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

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
    dtype: torch.dtype = torch.bfloat16


class Problem(NamedTuple):
    given: dict[str, Tensor]  # what the kernels take; keys that do not exist are NaN
    want: dict[str, Tensor]  # gradients, in fp64


def turned(x: Tensor, rotary_dim: int) -> Tensor:
    if rotary_dim == 0:
        return x
    flat = x.reshape(*x.shape[:2], -1)
    tensors = (None, None, None)
    spec = RotationSpec(rotary_dim, False, base=BASE)
    return plain_norm_rope(flat, x.shape[2], None, NormSpec(), None, None, spec, tensors).view_as(x)


def padded_dim(s: Sizes) -> int:
    return next(d for d in (64, 128, 256) if d >= s.D)


def dq_part_floats(s: Sizes) -> int:
    return s.B * s.H * -(-s.Tq // 64) * 64 * padded_dim(s)


def draw(s: Sizes, o: Options, seed: int) -> Problem:
    torch.manual_seed(seed)
    q, dout = (torch.randn(s.B, s.Tq, s.H, s.D).to(o.dtype) for _ in range(2))
    k, v = (torch.randn(s.B, s.Tk, s.Hkv, s.D).to(o.dtype) for _ in range(2))
    dropout_seed = torch.tensor([seed * 12345678901])
    lengths = torch.tensor(o.lengths or [s.Tk] * s.B, dtype=torch.int32)
    exists = torch.arange(s.Tk) < lengths[:, None]
    if o.removes_keys:
        exists &= torch.rand(s.B, s.Tk) < 0.7
    keep = exists[:, None].expand(s.B, s.Tq, s.Tk)
    if o.causal:
        rows, columns = torch.arange(s.Tq)[:, None], torch.arange(s.Tk)
        keep = keep & (columns <= rows + lengths[:, None, None] - s.Tq)

    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    # What the kernels take is rounded; gradients pass by that.
    straight = []
    for leaf in leaves[:2]:
        exact = turned(leaf, o.rotary_dim)
        straight.append(exact + (exact.to(o.dtype).double() - exact).detach())
    heads = [t.transpose(1, 2) for t in (*straight, leaves[2])]
    q64, k64, v64 = (t.repeat_interleave(s.H // t.shape[1], 1) for t in heads)
    scores = SCALE * q64 @ k64.mT
    scores = scores.masked_fill(~keep[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
    if o.dropout_p > 0:
        kept = dropout.keep_mask(dropout_seed, o.dropout_p, s.B, s.H, s.Tq, s.Tk)
        weights = weights * kept / (1 - o.dropout_p)
    y = weights @ v64
    dy = dout.double().transpose(1, 2)
    want = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(y, leaves, dy)))

    q, k = (t.detach().to(o.dtype).contiguous() for t in straight)
    absent = ~exists[:, :, None, None]
    given = {
        "q": q,
        "k": k.masked_fill(absent, math.nan),
        "v": v.masked_fill(absent, math.nan),
        "dout": dout,
        "lse": lse.detach().float().contiguous(),
        "delta": (y * dy).sum(-1).detach().float().contiguous(),
        "kv_lengths": lengths,
        "seed": dropout_seed,
    }
    if o.removes_keys:
        given["key_keep"] = exists.contiguous()
    return Problem(given, want)


def assert_gradients(
    s: Sizes,
    problem: Problem,
    workspaces: dict[str, Tensor],
    run: Callable[[list[int], dict[str, int]], None],  # sizes, addresses
    wanted: tuple[str, ...] = ("dq", "dk", "dv"),
) -> None:
    """With everything that is computed in the middle of NaN, and results NaN before."""
    given = problem.given
    like = {"dq": "q", "dk": "k", "dv": "v"}
    results = {name: torch.full_like(given[of], math.nan) for name, of in like.items()}
    margins = Margins()
    held = {
        name: margins.place(t) if t.is_floating_point() else t
        for name, t in {**given, **workspaces, **results}.items()
    }
    run(list(s), {name: t.data_ptr() for name, t in held.items()})
    assert margins.are_untouched
    eps = torch.finfo(given["q"].dtype).eps
    for name in wanted:
        assert_tensor_near(held[name], problem.want[name], 4.0, name, eps)
