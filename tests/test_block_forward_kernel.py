"""The kernels of a small block's forward, whole, on the host: against the definition in fp64.

As test_token_attention_kernel.py: shared memory starts as NaN, buffers have NaN on both sides,
copies land as late or as early as they may, threads run in random orders. What the kernel before
writes is NaN for threads that have not waited for it.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from block_kernels import EPS, SCALE, Buffers, half, neighbours
from ext.build import load_extension
from formulas import plain_attention, plain_norm_rope
from fused_rope_xattn.config import NormSpec, RotationSpec
from fused_rope_xattn.ops import ScoreOptions
from problems import Sizes, assert_tensor_near

POSITION_TYPES = {None: 0, torch.int32: 1, torch.int64: 2, torch.float32: 3, torch.float64: 4}
TILES = "narrow", "low", "middle", "high"
# Bounds of a projection and of o, in units of the largest number times EPS.
PROJECTION_ULPS = {"bf16": 1, "fp16": 1, "fp32": 16, "tf32": 2}
OUTPUT_ULPS = {"bf16": 2, "fp16": 2, "fp32": 16, "tf32": 4}


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "block_forward_emulated",
        request.config,
        emulates_cuda=True,
        emulation=("emulation_sm90", "emulation_warp"),
    )


def passed(**tensors: Tensor | None) -> dict[str, tuple[int, list[int]]]:
    """By name: the address of a tensor and its strides, 0 where all share one entry."""
    return {
        name: (t.data_ptr(), [s if n > 1 else 0 for n, s in zip(t.shape, t.stride())])
        for name, t in tensors.items()
        if t is not None
    }


def extents(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Address and bytes from the first to the last element of each tensor."""
    last = [sum((n - 1) * s for n, s in zip(t.shape, t.stride())) for t in tensors]
    return [(t.data_ptr(), (n + 1) * t.itemsize) for t, n in zip(tensors, last)]


class Case(NamedTuple):
    """Of a projection."""

    batch: int
    tokens: int
    heads: int
    head_dim: int
    depth: int
    spec: RotationSpec = RotationSpec()
    positions: torch.dtype | None = None  # None with no table: 0..T-1
    table: tuple[int, int] | None = None  # batches and heads of cos and sin
    has_bias: bool = True


CASES = {
    "one row": Case(1, 1, 2, 16, 8, half(16), has_bias=False),
    "neighbours": Case(2, 3, 3, 32, 40, neighbours(32)),
    "halves": Case(1, 16, 2, 32, 40, half(32), torch.int64),
    "halves of wide heads": Case(1, 3, 1, 128, 40, half(128), torch.int32),
    "small heads": Case(1, 17, 3, 16, 40, half(16), torch.float64),
    "partial, neighbours": Case(2, 3, 2, 32, 128, neighbours(12), torch.float32, has_bias=False),
    "partial, halves": Case(2, 2, 1, 64, 40, half(36), torch.int64),
    "axes, neighbours": Case(1, 5, 1, 64, 40, neighbours(64, 2), torch.int64),
    "axes, halves": Case(1, 5, 1, 128, 128, half(96, 2), torch.float32, has_bias=False),
    "odd pairs an axis": Case(2, 5, 2, 32, 40, half(20, 2), torch.float64),
    "table": Case(2, 5, 2, 32, 40, half(32), table=(1, 1)),
    "table a head": Case(2, 3, 3, 16, 40, half(12), table=(2, 3)),
    "full table": Case(2, 3, 2, 32, 40, neighbours(32, full_width=True), table=(2, 1)),
    "full table, halves": Case(1, 5, 2, 64, 40, half(40, 2, full_width=True), table=(1, 2)),
    "eight columns": Case(1, 3, 1, 8, 40),
    "columns off sixteen": Case(2, 3, 1, 72, 136, has_bias=False),
    "deep": Case(1, 17, 1, 32, 1032, half(32)),
    "whole tiles": Case(2, 48, 1, 32, 256, half(32)),
}


class Projection:
    """A case's tensors, and what a kernel makes of them."""

    def __init__(self, case: Case, dtype: str) -> None:
        self.case, self.dtype, self.buffers = case, dtype, Buffers(dtype)
        b, t, h, d, depth, spec = case[:6]
        self.x = self.buffers.drawn(b, t, depth)
        self.weight = self.buffers.drawn(h * d, depth, scale=depth**-0.5)
        self.bias = self.buffers.drawn(h * d) if case.has_bias else None
        self.positions = self.cos = self.sin = None
        if case.positions is not None:
            drawn = torch.randint(-4000, 4000, (b, t, spec.axes)).double()
            self.positions = (drawn + 0.25).to(case.positions)
        if case.table is not None:
            shape = *case.table, t, spec.rotary_dim // (1 if spec.full_width else 2)
            self.cos, self.sin = (self.buffers.place(torch.randn(shape)) for _ in range(2))
        self.out = self.buffers.blank(b, t, h * d)

    def params(self, kernel: ModuleType) -> object:
        b, t, h, d, depth, spec = self.case[:6]
        names = "x", "weight", "bias", "out", "positions", "cos", "sin"
        return kernel.Projection(
            [b * t, h * d, depth, d.bit_length() - 1, t],
            [
                *(int(n) for n in (spec.rotary_dim, spec.axes, spec.interleaved, spec.full_width)),
                POSITION_TYPES[self.case.positions],
            ],
            math.log2(spec.base),
            passed(**{name: getattr(self, name) for name in names}),
        )

    def check(self) -> None:
        x, weight = self.x.double(), self.weight.double()
        bias = None if self.bias is None else self.bias.double()
        tables = (None if t is None else t.double() for t in (self.cos, self.sin))
        want = plain_norm_rope(
            *(x @ weight.T, self.case.heads, bias, NormSpec(), None, None),
            *(self.case.spec, (self.positions, *tables)),
        )
        got, eps = self.out.view(want.shape).double(), EPS[self.dtype]
        assert_tensor_near(got, want, PROJECTION_ULPS[self.dtype], "out", eps)
        assert self.buffers.are_untouched


def project(kernel: ModuleType, projections: list[Projection], tile: str, follows: bool) -> None:
    """All of them in one launch. ``follows``: x is what the kernel before makes, else anything."""
    widest = max(p.case.head_dim for p in projections)
    head_columns = next(n for n in (32, 64, 128) if n >= widest)
    low, middle, high = kernel.tile_rows(head_columns)
    rows = dict(zip(TILES, (low, low, middle, high)))
    columns = kernel.narrow_columns if tile == "narrow" else head_columns
    shape = [rows[tile], columns, head_columns]
    x, weights = extents([p.x for p in projections]), extents([p.weight for p in projections])
    members = [p.params(kernel) for p in projections]
    unfinished = x if follows else x + weights
    seed = TILES.index(tile)  # of the order in which threads run
    dtype = projections[0].dtype
    kernel.project(dtype, members, shape, follows, x + weights, unfinished, seed)
    for projection in projections:
        projection.check()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", CASES)
def test_projection(kernel: ModuleType, name: str, tile: str) -> None:
    project(kernel, [Projection(CASES[name], "bf16")], tile, follows=tile in ("narrow", "high"))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "tf32"])
@pytest.mark.parametrize("name", ["odd pairs an axis", "columns off sixteen", "deep"])
def test_projection_types(kernel: ModuleType, name: str, dtype: str, tile: str) -> None:
    project(kernel, [Projection(CASES[name], dtype)], tile, follows=tile in ("low", "middle"))


@pytest.mark.parametrize("tile", TILES)
def test_projections_of_one_launch(kernel: ModuleType, tile: str) -> None:
    names = "partial, halves", "eight columns", "columns off sixteen"
    group = [Projection(CASES[name], "bf16") for name in names]
    project(kernel, group, tile, follows=False)


class Attention:
    """Tensors of one problem: keys and values in one buffer, with a token behind the last."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: str,
        lengths: list[int] | None = None,
        masked: bool = False,
        causal: bool = False,
        biased: bool = False,
    ) -> None:
        self.sizes, self.dtype, self.buffers = sizes, dtype, Buffers(dtype)
        b, tq, tk, h, hkv, d = sizes
        self.q = self.buffers.drawn(b, tq, h, d)
        keys = self.buffers.drawn(b, tk + 1, hkv, 2 * d)
        keys[:, tk] = math.nan
        self.k, self.v = keys[:, :tk, :, :d], keys[:, :tk, :, d:]
        self.o = self.buffers.blank(b, tq, h, d)
        self.lse = self.buffers.blank(b, h, tq, dtype=torch.float32)
        key_keep = torch.rand(b, tk) > 0.3 if masked else None
        kv_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        if key_keep is not None:
            keys[:, :tk][~key_keep] = math.nan
        if kv_lengths is not None:
            keys[:, :tk][torch.arange(tk) >= kv_lengths[:, None]] = math.nan
        bias = keep_mask = None
        if biased:
            bias = self.buffers.place(torch.randn(1, h, tq, tk))
            keep_mask = torch.rand(b, 1, tq, tk) > 0.2
        self.options = ScoreOptions(
            bias, keep_mask, key_keep, kv_lengths, None, SCALE, causal, 0.0, False
        )

    def check(self, kernel: ModuleType, finished_keys: bool, num_sms: int = 0) -> None:
        """``num_sms``: of a GPU whose blocks can share a tile's keys; 0: of another."""
        o = self.options
        tensors = passed(
            **{n: getattr(self, n) for n in ("q", "k", "v", "o", "lse")},
            attn_bias=o.attn_bias,
            keep_mask=o.keep_mask,
            key_keep=o.key_keep,
            kv_lengths=o.kv_lengths,
        )
        copied = extents([self.q, self.k, self.v])
        unfinished = copied[:1] if finished_keys else copied
        options = SCALE, o.is_causal, finished_keys, copied, unfinished
        seed = self.sizes.Tk  # of the order in which threads run
        kernel.attend(self.dtype, list(self.sizes), tensors, *options, seed, num_sms)
        q, k, v = (t.double() for t in (self.q, self.k, self.v))
        want, want_lse = plain_attention(q, k, v, o)
        eps = EPS[self.dtype]
        assert_tensor_near(self.o.double(), want, OUTPUT_ULPS[self.dtype], "o", eps)
        lse_eps = eps if self.dtype == "tf32" else EPS["fp32"]
        assert_tensor_near(self.lse.double(), want_lse, 16, "lse", lse_eps)
        assert self.buffers.are_untouched


PROBLEMS = {
    "one key": Sizes(2, 1, 1, 2, 2, 16),
    "short chunk": Sizes(1, 3, 15, 2, 1, 32),
    "one chunk": Sizes(1, 16, 16, 1, 1, 64),
    "two tiles": Sizes(1, 17, 17, 2, 2, 128),
    "groups": Sizes(2, 3, 150, 6, 2, 64),
    "one buffer a warp": Sizes(1, 1, 300, 1, 1, 128),
    "ring of three": Sizes(1, 3, 700, 1, 1, 64),
    "ring of four": Sizes(1, 1, 700, 1, 1, 32),
}


@pytest.mark.parametrize("finished_keys", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_attention(kernel: ModuleType, name: str, finished_keys: bool) -> None:
    Attention(PROBLEMS[name], "bf16").check(kernel, finished_keys)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "tf32"])
@pytest.mark.parametrize("name", ["one key", "groups", "ring of four"])
def test_attention_types(kernel: ModuleType, name: str, dtype: str) -> None:
    Attention(PROBLEMS[name], dtype).check(kernel, finished_keys=dtype == "tf32")


@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_pairs_of_warps_share_wide_chunks(kernel: ModuleType, dtype: str) -> None:
    Attention(Sizes(1, 17, 150, 2, 1, 128), dtype).check(kernel, finished_keys=False)


@pytest.mark.parametrize("finished_keys", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, [0, 300], [37, 16]])
@pytest.mark.parametrize("masked", [False, True])
def test_removed_keys_are_not_read(
    kernel: ModuleType, masked: bool, lengths: list[int] | None, causal: bool, finished_keys: bool
) -> None:
    problem = Attention(Sizes(2, 17, 300, 1, 1, 32), "bf16", lengths, masked, causal)
    problem.check(kernel, finished_keys)


@pytest.mark.parametrize("causal", [False, True])
def test_bias_and_mask(kernel: ModuleType, causal: bool) -> None:
    problem = Attention(Sizes(2, 17, 40, 2, 1, 64), "bf16", [40, 30], True, causal, biased=True)
    problem.check(kernel, finished_keys=False)


@pytest.mark.parametrize("finished_keys", [False, True])
@pytest.mark.parametrize("keys, num_sms", [(520, 2), (1030, 4), (2048, 16)])
def test_blocks_share_keys(
    kernel: ModuleType, keys: int, num_sms: int, finished_keys: bool
) -> None:
    problem = Attention(Sizes(1, 3, keys, 2, 2, 32), "bf16", masked=True)
    problem.check(kernel, finished_keys, num_sms)


def test_blocks_without_keys(kernel: ModuleType) -> None:
    problem = Attention(Sizes(2, 16, 600, 1, 1, 64), "fp16", [100, 0], causal=True)
    problem.check(kernel, finished_keys=True, num_sms=4)
