"""A small block's backward, whole, on the host: against autograd through the definition in fp64.

The binding of ``torch.ops.fused_rope_xattn.block_backward`` plans its launches as on a GPU; the
kernels then run as in test_block_forward_kernel.py, one launch after the other. Whatever the
operator allocates is NaN for threads that have not waited for the kernel before; so is, at the
first launch, every argument.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from block_kernels import EPS, SCALE, Buffers, half, neighbours
from ext.build import load_extension
from formulas import plain_attention, plain_norm_rope
from fused_rope_xattn.block_ops import BlockNeeds
from fused_rope_xattn.config import NormSpec, RotationSpec
from fused_rope_xattn.ops import ScoreOptions
from problems import Sizes, assert_tensor_near

# Bounds in units of a gradient's largest number times EPS. Most of the error is that of dout, dq,
# dk and dv, which are rounded on the way.
ULPS = {"bf16": 2, "fp16": 2, "fp32": 16, "tf32": 4}

# Gradients of one side and what else they take.
SIDES = (
    "x_query w_q b_q q_positions q_cos q_sin",
    "x_kv x_value w_k w_v b_k b_v k_positions k_cos k_sin",
)


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "block_backward_emulated",
        request.config,
        emulates_cuda=True,
        emulation=("emulation_sm90", "emulation_warp", "emulation_torch"),
    )


class Turn(NamedTuple):
    """How one side rotates."""

    spec: RotationSpec = RotationSpec()
    positions: torch.dtype | None = None  # None with no table: 0..T-1
    has_table: bool = False  # cos and sin


class Case(NamedTuple):
    sizes: Sizes
    turn: Turn = Turn()
    k_turn: Turn | None = None  # None: as the queries
    x_width: int = 24
    kv_width: int = 40
    value_width: int = 0  # 0: values come from x_kv
    out_width: int = 56  # 0: the merged heads are the result
    lengths: tuple[int, ...] = ()
    removes_keys: bool = False
    causal: bool = False
    biased: bool = False  # the scores; some are removed too
    has_dlse: bool = True
    is_projected: bool = False  # keys and values are arguments


class Problem:
    """A case's tensors as the operator takes them, and the gradients that it should give."""

    def __init__(self, case: Case, dtype: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case, self.dtype, self.buffers = case, dtype, Buffers(dtype)
        self.specs = {"q": case.turn.spec, "k": (case.k_turn or case.turn).spec}
        b, tq, tk, h, hkv, d = case.sizes
        lengths = torch.tensor(case.lengths, dtype=torch.int32) if case.lengths else None
        key_keep = torch.rand(b, tk) > 0.3 if case.removes_keys else None
        bias = keep_mask = None
        if case.biased:
            bias = self.buffers.drawn(1, h, tq, tk)
            keep_mask = torch.rand(b, 1, tq, tk) > 0.2
        self.options = ScoreOptions(
            bias, keep_mask, key_keep, lengths, None, SCALE, case.causal, 0.0, dtype == "tf32"
        )
        self.removed = torch.zeros(b, tk, dtype=torch.bool) if key_keep is None else ~key_keep
        if lengths is not None:
            self.removed |= torch.arange(tk) >= lengths[:, None]
        self.tables = self._tables("q", case.turn, tq, h)
        self.tables |= self._tables("k", case.k_turn or case.turn, tk, hkv)
        self.inputs = self._inputs()
        self.dy = self.buffers.drawn(b, tq, case.out_width or h * d)
        self.dlse = self.buffers.place(torch.randn(b, h, tq)) if case.has_dlse else None
        self._solve()

    def _tables(self, side: str, turn: Turn, tokens: int, heads: int) -> dict[str, Tensor]:
        batch, spec = self.case.sizes.B, turn.spec
        if turn.positions is not None:
            drawn = torch.randint(-4000, 4000, (batch, tokens, spec.axes)).double() + 0.25
            return {f"{side}_positions": drawn.to(turn.positions)}
        if not turn.has_table:
            return {}
        # Queries share one over batch and heads, keys do not.
        shape = *((1, 1) if side == "q" else (batch, heads)), tokens
        width = spec.rotary_dim // (1 if spec.full_width else 2)
        return {
            f"{side}_{n}": self.buffers.place(torch.randn(*shape, width)) for n in ("cos", "sin")
        }

    def _inputs(self) -> dict[str, Tensor]:
        """What has a gradient; tokens that are removed are NaN."""
        c, drawn = self.case, self.buffers.drawn
        b, tq, tk, h, hkv, d = c.sizes
        inputs = {
            "x_query": drawn(b, tq, c.x_width),
            "w_q": drawn(h * d, c.x_width, scale=c.x_width**-0.5),
            "b_q": drawn(h * d),
        }
        if c.is_projected:
            inputs |= {name: drawn(b, tk, hkv, d) for name in ("x_kv", "x_value")}
        else:
            widths = {"x_kv": c.kv_width} | ({"x_value": c.value_width} if c.value_width else {})
            inputs |= {name: drawn(b, tk, width) for name, width in widths.items()}
            for name, width in ("k", c.kv_width), ("v", c.value_width or c.kv_width):
                inputs[f"w_{name}"] = drawn(hkv * d, width, scale=width**-0.5)
                inputs[f"b_{name}"] = drawn(hkv * d)
        if c.out_width:
            inputs["w_out"] = drawn(c.out_width, h * d, scale=(h * d) ** -0.5)
            inputs["b_out"] = drawn(c.out_width)
        for name in inputs.keys() & {"x_kv", "x_value"}:
            inputs[name][self.removed] = math.nan
        return inputs

    def _solve(self) -> None:
        """The forward as it is rounded, and gradients that pass by the rounding."""
        c, storage = self.case, self.buffers.dtype
        b, _, tk, h, hkv, d = c.sizes
        x = {n: t.double().nan_to_num().requires_grad_() for n, t in self.inputs.items()}

        def rounded(t: Tensor) -> Tensor:
            return t + (t.detach().to(storage).double() - t.detach())

        def heads(x_name: str, side: str, count: int) -> Tensor:
            z, bias = x[x_name] @ x[f"w_{side}"].T, x[f"b_{side}"]
            found = (self.tables.get(f"{side}_{n}") for n in ("positions", "cos", "sin"))
            tables = tuple(None if t is None else t.double() for t in found)
            spec = self.specs.get(side, RotationSpec())
            return rounded(plain_norm_rope(z, count, bias, NormSpec(), None, None, spec, tables))

        q = heads("x_query", "q", h)
        if c.is_projected:
            k, v = x["x_kv"], x["x_value"]
        else:
            k, v = heads("x_kv", "k", hkv), heads("x_value" if c.value_width else "x_kv", "v", hkv)
        o, lse = plain_attention(q, k, v, self.options)
        o = rounded(o)
        y = o.flatten(2)
        if c.out_width:
            y = y @ x["w_out"].T + x["b_out"]
        pairs = [(y, self.dy), (lse, self.dlse)]
        outputs, grads = zip(*((t, g.double()) for t, g in pairs if g is not None))
        found = torch.autograd.grad(outputs, [*x.values()], grads, materialize_grads=True)
        self.want = dict(zip(x, found))
        if self.specs["k"].rotary_dim == 0:
            self.want.pop("b_k", None)  # a sum in which next to nothing is left

        self.q, self.o = (self.buffers.place(t.detach().to(storage)) for t in (q, o))
        self.lse = self.buffers.place(lse.detach().float())
        # In one buffer, with a token behind the last.
        keys = self.buffers.blank(b, tk + 1, hkv, 2 * d)
        keys[:, :tk] = torch.cat([k, v], -1).detach()
        keys[:, :tk][self.removed] = math.nan
        self.k, self.v = keys[:, :tk, :, :d], keys[:, :tk, :, d:]

    def run(
        self, kernel: ModuleType, names: Collection[str], seed: int, num_sms: int
    ) -> dict[str, Tensor]:
        """The wanted gradients."""
        given = self.inputs | self.tables
        for side in SIDES:  # without what no wanted gradient depends on
            if not set(names) & set(side.split()):
                given = {n: t for n, t in given.items() if n not in side.split()}
        o, needs = self.options, [name in names for name in BlockNeeds._fields]
        kernel.prepare(seed, num_sms, lambda shape, dtype: self.buffers.blank(*shape, dtype=dtype))
        results = kernel.block_backward(
            *(self.dy, self.dlse),
            *map(given.get, ("x_query", "x_kv", "x_value", "w_q", "w_k", "w_v", "w_out")),
            *(self.q, self.k, self.v, self.o, self.lse),
            *(given.get(f"{s}_{n}") for s in "qk" for n in ("positions", "cos", "sin")),
            *(o.attn_bias, o.keep_mask, o.key_keep, o.kv_lengths),
            *(v for s in self.specs.values() for v in (*s[:3], s.base, s.full_width)),
            *(o.scale, o.is_causal, o.tf32),
            *needs,
        )
        assert self.buffers.are_untouched
        assert all(need or not got.numel() for need, got in zip(needs, results, strict=True))
        return {n: got for n, got in zip(BlockNeeds._fields, results) if n in names}

    def check(
        self,
        kernel: ModuleType,
        *wanted: str,
        seed: int = 0,
        num_sms: int = 2,
        unit: float = 1.0,
    ) -> None:
        """That these gradients come out, all by default, in units of what they should be."""
        got = self.run(kernel, wanted or tuple(self.want), seed, num_sms)
        for name, gradient in got.items():
            ulps, eps = ULPS[self.dtype], EPS[self.dtype]
            assert_tensor_near(gradient.double() / unit, self.want[name], ulps, name, eps)


CASES = {
    "one query, one key": Case(Sizes(2, 1, 1, 2, 2, 16), Turn(neighbours(16))),
    "one key, no dlse": Case(Sizes(1, 3, 1, 1, 1, 32), Turn(half(32)), has_dlse=False),
    "neighbours": Case(Sizes(2, 3, 16, 3, 3, 32), Turn(neighbours(32))),
    "halves": Case(Sizes(1, 17, 16, 2, 2, 64), Turn(half(64), torch.int64)),
    "halves of wide heads": Case(Sizes(1, 3, 150, 1, 1, 128), Turn(half(128), torch.int32)),
    "small heads, one side halves": Case(
        Sizes(1, 17, 130, 2, 1, 16),
        Turn(neighbours(12), torch.float32),
        Turn(half(8), torch.float64),
    ),
    "partial, halves": Case(Sizes(2, 3, 16, 2, 1, 64), Turn(half(36))),
    "axes, neighbours": Case(Sizes(1, 3, 17, 1, 1, 64), Turn(neighbours(64, 2), torch.int64)),
    "axes, halves": Case(Sizes(1, 17, 16, 1, 1, 128), Turn(half(96, 2), torch.float32)),
    "odd pairs an axis": Case(Sizes(2, 3, 16, 2, 2, 32), Turn(half(20, 2), torch.float64)),
    "table": Case(Sizes(2, 3, 16, 4, 2, 32), Turn(half(32), has_table=True)),
    "full table": Case(
        Sizes(2, 3, 16, 2, 2, 16), Turn(neighbours(16, full_width=True), has_table=True)
    ),
    "full table, halves": Case(
        Sizes(2, 17, 16, 2, 1, 64), Turn(half(40, 2, full_width=True), has_table=True)
    ),
    "keys alone rotate": Case(Sizes(1, 3, 17, 1, 1, 32), Turn(), Turn(half(32)), has_dlse=False),
    "nothing rotates": Case(Sizes(1, 3, 17, 1, 1, 16), has_dlse=False),
    "groups, two passes": Case(Sizes(2, 17, 150, 6, 2, 32), Turn(half(32))),
    "causal, a length of 0": Case(
        Sizes(2, 17, 150, 2, 1, 32), Turn(neighbours(32)), lengths=(0, 150), causal=True
    ),
    "more queries than keys": Case(Sizes(2, 17, 16, 2, 2, 128), lengths=(16, 5), causal=True),
    "removed keys": Case(
        Sizes(2, 17, 150, 2, 1, 64), lengths=(130, 37), removes_keys=True, value_width=16
    ),
    "bias and mask": Case(
        Sizes(2, 17, 40, 2, 1, 32), Turn(half(32)), lengths=(40, 30), causal=True, biased=True
    ),
    "values of their own": Case(Sizes(2, 3, 16, 1, 1, 32), value_width=72, x_width=8),
    "no output projection": Case(Sizes(2, 3, 130, 2, 2, 64), Turn(half(64)), out_width=0),
    "finished keys": Case(
        Sizes(2, 17, 20, 4, 2, 32), Turn(half(32)), is_projected=True, lengths=(20, 7)
    ),
    "no keys": Case(Sizes(2, 3, 0, 2, 1, 32), has_dlse=False),
    "wide": Case(Sizes(1, 3, 16, 1, 1, 64), x_width=264, kv_width=136, out_width=520),
    "whole tiles": Case(Sizes(2, 16, 32, 1, 1, 32), x_width=32, kv_width=64, out_width=256),
    "many tokens": Case(Sizes(4, 3, 130, 1, 1, 32), removes_keys=True),
    "many heads": Case(Sizes(1, 3, 16, 16, 8, 64), Turn(neighbours(64)), kv_width=8),
}


# A tile of queries has two groups of warps where no multiprocessor has more than one tile.
@pytest.mark.parametrize("num_sms", [1, 64])
@pytest.mark.parametrize("name", CASES)
def test_backward(kernel: ModuleType, name: str, num_sms: int) -> None:
    Problem(CASES[name], "bf16").check(kernel, num_sms=num_sms)


TYPE_CASES = (
    "one query, one key",
    "small heads, one side halves",
    "full table, halves",
    "groups, two passes",
    "removed keys",
    "bias and mask",
    "finished keys",
    "wide",
    "many tokens",
    "many heads",
)


@pytest.mark.parametrize("num_sms", [1, 64])
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "tf32"])
@pytest.mark.parametrize("name", TYPE_CASES)
def test_types(kernel: ModuleType, name: str, dtype: str, num_sms: int) -> None:
    Problem(CASES[name], dtype).check(kernel, num_sms=num_sms)


@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_pairs_of_warps_share_wide_chunks(kernel: ModuleType, dtype: str) -> None:
    case = Case(Sizes(1, 17, 150, 2, 1, 128), Turn(half(128)), lengths=(130,))
    Problem(case, dtype).check(kernel)


@pytest.mark.parametrize("name", ["halves", "removed keys", "bias and mask"])
def test_other_orders_of_threads(kernel: ModuleType, name: str) -> None:
    problem = Problem(CASES[name], "bf16", seed=1)
    for seed in range(1, 4):
        for num_sms in (1, 64):
            problem.check(kernel, seed=seed, num_sms=num_sms)


SUBSETS = Case(Sizes(2, 3, 17, 2, 1, 32), Turn(half(32), torch.int64), lengths=(17, 9))
WANTED = *BlockNeeds._fields, "x_query w_q b_q", "x_kv w_k b_k w_v b_v", "w_k b_v w_out"


@pytest.mark.parametrize("num_sms", [1, 64])
@pytest.mark.parametrize("wanted", WANTED)
def test_some_gradients(kernel: ModuleType, wanted: str, num_sms: int) -> None:
    for value_width in (0, 24):
        problem, names = Problem(SUBSETS._replace(value_width=value_width), "bf16"), wanted.split()
        if problem.want.keys() >= {*names}:
            problem.check(kernel, *names, num_sms=num_sms)


def test_large_dout_has_a_launch_of_its_own(kernel: ModuleType) -> None:
    case = Case(Sizes(1, 17, 1, 16, 16, 128), x_width=8, out_width=1928)  # beyond 2^26 products
    Problem(case, "bf16").check(kernel, "x_query", "w_q", "b_q")


def test_a_row_with_one_key_gives_dlse(kernel: ModuleType) -> None:
    """Nothing that rounding left of the weights' gradients shows beside a small dlse."""
    unit = 2.0**-24
    problem = Problem(Case(Sizes(2, 3, 1, 2, 1, 32), Turn(half(32))), "fp32")
    assert problem.dlse is not None
    problem.dlse *= unit
    for num_sms in (1, 64):
        problem.check(kernel, "x_query", "w_q", "b_q", "w_k", "b_k", num_sms=num_sms, unit=unit)
