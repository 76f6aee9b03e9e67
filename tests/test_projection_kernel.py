"""The grouped projections' Hopper kernel, whole, on the host: against the definition.

The emulator poisons shared memory with NaN, lands copies and reads operands as late or as early as
the barriers allow, runs threads in a random order and forbids waiting that cannot end. Buffers have
NaN on both sides: what the kernel reads there shows in its result, what it writes there shows in
the margin.
"""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ext.build import load_extension
from formulas import plain_norm_rope, transposed_values
from fused_rope_xattn.config import NormSpec, RotationSpec
from fused_rope_xattn.rope import cos_sin
from fused_rope_xattn.verify.tf32 import round_to_tf32
from margins import Margins

DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # fp32 is multiplied in TF32
POSITION_TYPES = {torch.int32: 1, torch.int64: 2, torch.float32: 3, torch.float64: 4}
TILES = ("192x128", "128x128", "64x128", "64x64", "64x32")
SHARING_TILES = TILES[:4]  # not those of 32 columns
TF32_TILES = TILES[1:]
BASE = 100.0  # with 1 all pairs would turn alike, and a wrong one would not show


class Member(NamedTuple):
    batch: int = 2
    tokens: int = 5
    heads: int = 2
    head_dim: int = 64
    depth: int = 72
    spec: RotationSpec = RotationSpec()
    positions: torch.dtype | None = None
    table: tuple[int, int] | None = None  # batches and heads of cos and sin
    has_bias: bool = True
    removal: str | None = None  # "lengths" and "keep"; not None: written transposed as well

    def sizes(self) -> tuple[Any, ...]:
        """As ``ext/projection.cpp`` takes them."""
        rows, columns = self.batch * self.tokens, self.heads * self.head_dim
        rotary_dim, interleaved, axes, *_ = self.spec
        return rows, self.tokens, columns, self.depth, self.head_dim, rotary_dim, axes, interleaved


def neighbours(rotary_dim: int, axes: int = 1, full_width: bool = False) -> RotationSpec:
    return RotationSpec(rotary_dim, True, axes, full_width, BASE)


def halves(rotary_dim: int, axes: int = 1, full_width: bool = False) -> RotationSpec:
    return RotationSpec(rotary_dim, False, axes, full_width, BASE)


PLAIN = Member()
CASES: dict[str, tuple[Member, ...]] = {
    "nothing turns": (PLAIN, Member(has_bias=False, depth=8)),
    "neighbours": (Member(spec=neighbours(64)), PLAIN),
    "narrow heads": (Member(heads=5, head_dim=32, spec=neighbours(32)),),
    "narrowest heads": (Member(heads=3, head_dim=8, spec=neighbours(8), positions=torch.int64),),
    "wide heads": (Member(heads=1, head_dim=256, spec=neighbours(256), positions=torch.float32),),
    "one wide head, plain": (Member(heads=1, head_dim=776),),
    "part of a head": (Member(heads=3, head_dim=40, spec=neighbours(6)),),
    "three axes": (Member(head_dim=96, spec=neighbours(96, 3), positions=torch.float64),),
    "odd axes": (Member(head_dim=32, spec=neighbours(12, 2), positions=torch.int32),),
    "halves": (Member(spec=halves(64), positions=torch.int32), PLAIN),
    "narrow halves": (Member(heads=5, head_dim=16, spec=halves(16)),),
    "wide halves": (Member(heads=1, head_dim=256, spec=halves(256)),),
    "halves, not a power of two": (Member(heads=3, head_dim=96, spec=halves(96)),),
    "halves of a part": (Member(heads=3, head_dim=72, spec=halves(32)),),
    "halves on axes": (Member(spec=halves(64, 2), positions=torch.int64),),
    "table": (Member(spec=neighbours(64), table=(1, 1)),),
    "table a head": (Member(heads=3, head_dim=80, spec=halves(48), table=(1, 3)),),
    "full table": (Member(spec=neighbours(32, full_width=True), table=(2, 2)),),
    "full table, halves": (Member(spec=halves(32, full_width=True), table=(2, 1)),),
    "three members": (
        Member(1, 70, 2, 64, 200, neighbours(64)),
        Member(1, 3, 3, 32, 64, halves(32), torch.int32),
        Member(1, 130, 1, 64, 136),
    ),
    # Four heads that share no angles: each has a table, or dims that pass, beside its halves.
    "four heads, table a head": (Member(heads=4, spec=neighbours(64), table=(2, 4)),),
    "four heads, halves, table a head": (Member(heads=4, spec=halves(64), table=(1, 4)),),
    "four heads, halves of a part": (Member(heads=4, spec=halves(32), positions=torch.int64),),
}

# Whose tiles of 64 and of 128 columns have a part of each of four heads.
SHARING: dict[str, tuple[Member, ...]] = {
    "neighbours": (Member(heads=4, spec=neighbours(64)),),
    "neighbours on axes": (
        Member(heads=8, head_dim=32, spec=neighbours(32, 2), positions=torch.float32),
    ),
    "neighbours of wide heads": (
        Member(heads=4, head_dim=128, depth=8, spec=neighbours(128), positions=torch.float64),
    ),
    "neighbours of a part": (Member(heads=4, spec=neighbours(24, 2), positions=torch.int32),),
    "halves": (Member(heads=8, spec=halves(64), positions=torch.int32, has_bias=False),),
    "halves of narrow heads": (
        Member(heads=12, head_dim=32, spec=halves(32), positions=torch.float64),
    ),
    "halves on axes": (Member(heads=4, spec=halves(64, 2), positions=torch.int64),),
    # A part of 32 columns has all four halves of a head.
    "halves on axes of narrow heads": (
        Member(heads=4, head_dim=32, spec=halves(32, 2), positions=torch.float32),
    ),
    "halves on axes of wide heads": (
        Member(heads=4, head_dim=128, depth=8, spec=halves(128, 2), positions=torch.int32),
    ),
    "halves, not a power of two": (Member(heads=4, head_dim=96, depth=8, spec=halves(96)),),
    "table": (Member(heads=4, spec=neighbours(64), table=(2, 1)),),
    "table, halves": (Member(heads=12, head_dim=32, spec=halves(32), table=(1, 1)),),
    "full table": (Member(heads=4, spec=neighbours(64, full_width=True), table=(1, 1)),),
    "full table, halves": (Member(heads=4, spec=halves(64, 2, full_width=True), table=(2, 1)),),
}


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "projection_emulated", request.config, emulates_cuda=True, emulation="emulation_sm90"
    )


@pytest.fixture(scope="module")
def plans(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension("projection", request.config)


class Problem:
    """One member's tensors, in the middle of NaN, and the arguments that the kernel takes."""

    def __init__(self, m: Member, dtype: torch.dtype) -> None:
        self.member = m
        self.margins = Margins()
        inner = m.heads * m.head_dim
        self.x = self.margins.place(torch.randn(m.batch, m.tokens, m.depth).to(dtype))
        self.weight = self.margins.place((torch.randn(inner, m.depth) * m.depth**-0.5).to(dtype))
        self.bias = self.margins.place(torch.randn(inner).to(dtype)) if m.has_bias else None
        self.out = self.margins.place(
            torch.full((m.batch, m.tokens, m.heads, m.head_dim), math.nan, dtype=dtype)
        )
        self.positions = self.cos = self.sin = None
        if m.positions is not None:
            values = torch.randint(-4000, 4000, (m.batch, m.tokens, m.spec.axes)).double()
            values += 0.25 if m.positions.is_floating_point else 0.0
            self.positions = values.to(m.positions)
        if m.table is not None:
            width = m.spec.rotary_dim if m.spec.full_width else m.spec.rotary_dim // 2
            self.cos = self.margins.place(torch.randn(*m.table, m.tokens, width))
            self.sin = self.margins.place(torch.randn(*m.table, m.tokens, width))
        self.transposed = self.lengths = self.keep = None
        self.exists = torch.ones(m.batch, m.tokens, dtype=torch.bool)
        if m.removal is not None:
            self._transpose(m.removal)

    def _transpose(self, removal: str) -> None:
        m = self.member
        self.transposed = self.margins.place(
            torch.full((m.batch, m.heads, m.head_dim, (m.tokens + 7) // 8 * 8), math.nan)
        )
        if "lengths" in removal:
            # One longer than the sequence, one negative: as the whole one, and none of it
            lengths = torch.randint(0, m.tokens + 1, (m.batch,), dtype=torch.int32)
            lengths[0], lengths[-1] = m.tokens + 3, -1
            self.lengths = lengths
            self.exists &= torch.arange(m.tokens) < lengths[:, None]
        if "keep" in removal:
            self.keep = torch.rand(m.batch, m.tokens) < 0.6
            self.exists &= self.keep
        self.x[~self.exists] = math.nan

    def fields(self) -> dict[str, Any]:
        m, spec = self.member, self.member.spec
        fields: dict[str, Any] = {
            "rows": m.batch * m.tokens,
            "tokens": m.tokens,
            "columns": m.heads * m.head_dim,
            "depth": m.depth,
            "head_dim": m.head_dim,
            "rotary_dim": spec.rotary_dim,
            "axes": spec.axes,
            "interleaved": spec.interleaved,
            "full_width": spec.full_width,
            "log2_base": math.log2(spec.base),
        }
        names = "x", "weight", "bias", "out", "positions", "cos", "sin"
        for name in (*names, "transposed", "lengths", "keep"):
            tensor = getattr(self, name)
            if tensor is not None:
                fields[name] = tensor.data_ptr()
        if self.positions is not None:
            fields["position_type"] = POSITION_TYPES[self.positions.dtype]
            fields["position_batch_stride"] = self.positions.stride(0)
        if self.cos is not None:
            for i, axis in enumerate(("batch", "head", "token")):
                stride = 0 if self.cos.shape[i] == 1 else self.cos.stride(i)
                fields[f"table_{axis}_stride"] = stride
        return fields

    def check(self) -> None:
        m = self.member
        z = round_to_tf32(self.x).double() @ round_to_tf32(self.weight).double().t()
        bias = None if self.bias is None else self.bias.double()
        tensors: tuple[Tensor | None, ...] = (None, None, None)
        if m.spec.rotary_dim and self.cos is not None and self.sin is not None:
            tensors = None, self.cos.double(), self.sin.double()
        elif m.spec.rotary_dim:
            tables = cos_sin(m.spec, self.positions, m.tokens, z.device, torch.float64)
            tensors = None, *tables
        want = plain_norm_rope(z, m.heads, bias, NormSpec(), None, None, m.spec, tensors)
        out, want = self.out[self.exists], want[self.exists]
        assert not bool(out.isnan().any()), "an element was not written, or NaN was read"
        error = (out.double() - want).abs()
        half_ulp = torch.finfo(out.dtype).eps / 2
        assert bool((error <= 1.001 * half_ulp * want.abs() + 1e-5).all()), float(error.max())
        if self.transposed is not None:
            assert bool(self.out[~self.exists].isnan().all()), "v itself is as projected"
            assert torch.equal(self.transposed, transposed_values(self.out, self.exists))
        assert self.margins.are_untouched


def assert_right(
    kernel: ModuleType,
    members: tuple[Member, ...],
    tile: int,
    dtype: torch.dtype = torch.bfloat16,
    num_sms: int = 2,
    seed: int = 0,
) -> None:
    problems = [Problem(m, dtype) for m in members]
    kernel.project([p.fields() for p in problems], DTYPES[dtype], tile, num_sms, seed)
    for problem in problems:
        problem.check()


@pytest.mark.parametrize("tile", range(len(TILES)), ids=TILES)
@pytest.mark.parametrize("name", CASES)
def test_matches_definition(kernel: ModuleType, name: str, tile: int) -> None:
    dtype = torch.float16 if tile % 2 else torch.bfloat16
    assert_right(kernel, CASES[name], tile, dtype, seed=tile)


@pytest.mark.parametrize("tile", range(len(SHARING_TILES)), ids=SHARING_TILES)
@pytest.mark.parametrize("name", SHARING)
def test_heads_that_share_angles(kernel: ModuleType, name: str, tile: int) -> None:
    dtype = torch.bfloat16 if tile % 2 else torch.float16
    assert_right(kernel, SHARING[name], tile, dtype, num_sms=1, seed=tile)


@pytest.mark.parametrize("tile", range(len(TILES)), ids=TILES)
@pytest.mark.parametrize("spec", [neighbours(64), halves(64), neighbours(24), halves(32)])
@pytest.mark.parametrize("heads", [3, 4])
def test_tiles_whose_positions_count(
    kernel: ModuleType, heads: int, spec: RotationSpec, tile: int
) -> None:
    """Whole tiles within a sequence, whose second rows are turned on from the first, and others."""
    member = Member(tokens=430, heads=heads, depth=8, spec=spec)
    assert_right(kernel, (member,), tile, torch.bfloat16, num_sms=1, seed=tile)


def test_these_heads_share_angles(plans: ModuleType) -> None:
    """Else the test above would pass without what it is there for."""
    for members, tile in itertools.product(SHARING.values(), TILES):
        columns = int(tile.split("x")[1])
        for m in members:
            shares = plans.shares_angles(m.sizes(), columns, 0 if m.table else -1)
            assert shares == (tile in SHARING_TILES), (m, tile)


@pytest.mark.parametrize("tile", range(len(TILES)), ids=TILES)
def test_one_block_has_members_that_share_and_others(kernel: ModuleType, tile: int) -> None:
    """Facts are written anew for every tile, and kinds of members follow each other."""
    members = (
        Member(1, 70, 4, 64, 72, neighbours(64), torch.int32),
        Member(2, 40, 3, 64, 72, halves(32), torch.float32),
        Member(1, 200, 8, 32, 8, halves(32), table=(1, 1)),
    )
    assert_right(kernel, members, tile, num_sms=1, seed=tile)


@pytest.mark.parametrize("tile", range(len(TILES)), ids=TILES)
def test_one_block_goes_through_all_tiles(kernel: ModuleType, tile: int) -> None:
    """The ring wraps at every phase, and its end lies within tiles of both consumers."""
    members = (
        Member(1, 200, 2, 64, 328, neighbours(64)),
        Member(1, 70, 3, 48, 136, halves(32), torch.int64),
        Member(1, 90, 2, 64, 8),
    )
    for seed in range(2):
        assert_right(kernel, members, tile, num_sms=1, seed=seed)


@pytest.mark.parametrize("tile", range(len(TILES)), ids=TILES)
def test_tiles_longer_than_the_ring(kernel: ModuleType, tile: int) -> None:
    """A consumer must not take a stage for its own that is the other one's, a lap earlier."""
    member = Member(1, 2 * int(TILES[tile].split("x")[0]), 1, 64, 1480, neighbours(64))
    for seed in range(3):
        assert_right(kernel, (member, member._replace(tokens=3)), tile, num_sms=1, seed=seed)


def test_nothing_to_do(kernel: ModuleType) -> None:
    assert_right(kernel, (Member(batch=0), Member(spec=neighbours(64))), 3)
    assert_right(kernel, (Member(batch=0),), -1)


# ------------------------------------------------------------------------------------------- TF32


@pytest.mark.parametrize("tile", range(1, len(TILES)), ids=TF32_TILES)
@pytest.mark.parametrize("name", ["neighbours", "halves", "full table", "three members"])
def test_fp32_matches_definition(kernel: ModuleType, name: str, tile: int) -> None:
    assert_right(kernel, CASES[name], tile, torch.float32, seed=tile)


@pytest.mark.parametrize("tile", range(1, len(SHARING_TILES)), ids=SHARING_TILES[1:])
@pytest.mark.parametrize("name", ["neighbours on axes", "halves", "table, halves"])
def test_fp32_heads_that_share_angles(kernel: ModuleType, name: str, tile: int) -> None:
    assert_right(kernel, SHARING[name], tile, torch.float32, num_sms=1, seed=tile)


VALUES = Member(removal="")
TRANSPOSED: dict[str, tuple[Member, ...]] = {
    "odd tokens": (VALUES,),
    "no bias": (VALUES._replace(has_bias=False),),
    "whole eights": (VALUES._replace(tokens=24),),
    "one token": (VALUES._replace(batch=67, tokens=1, depth=8),),
    "many sequences in a tile": (VALUES._replace(batch=11, tokens=13),),
    "sequences longer than a tile": (VALUES._replace(tokens=203),),
    "narrowest heads": (VALUES._replace(heads=3, head_dim=8),),
    "narrow heads": (VALUES._replace(heads=5, head_dim=32),),
    "heads of no power of two": (VALUES._replace(heads=3, head_dim=72, tokens=9),),
    "wide heads": (VALUES._replace(heads=3, head_dim=128, tokens=9),),
    "lengths": (VALUES._replace(batch=5, tokens=29, removal="lengths"),),
    "keep": (VALUES._replace(batch=3, tokens=21, removal="keep"),),
    "lengths and keep": (VALUES._replace(batch=3, tokens=70, removal="lengths keep"),),
    # Values of a width of their own, hence with tiles before or after the keys'; fewer key heads.
    "behind queries and keys": (
        Member(1, 70, 4, 64, 72, neighbours(64)),
        Member(3, 45, 2, 64, 72, halves(64), torch.int32),
        Member(3, 45, 2, 64, 40, removal="keep"),
    ),
    "deepest": (
        Member(1, 70, 4, 32, 72, neighbours(32)),
        Member(2, 45, 2, 32, 72, neighbours(32)),
        Member(2, 45, 2, 32, 136, removal="lengths"),
    ),
}


@pytest.mark.parametrize("tile", range(1, len(TILES)), ids=TF32_TILES)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_values_are_written_transposed_as_well(kernel: ModuleType, name: str, tile: int) -> None:
    assert_right(kernel, TRANSPOSED[name], tile, torch.float32, num_sms=1 + tile % 2, seed=tile)


def test_no_values_to_transpose(kernel: ModuleType) -> None:
    assert_right(kernel, (VALUES._replace(batch=0), Member(spec=neighbours(64))), 3, torch.float32)
    assert_right(kernel, (VALUES._replace(tokens=0),), -1, torch.float32)


@pytest.mark.parametrize(
    "member, dtype",
    [(VALUES, torch.bfloat16), (VALUES._replace(spec=neighbours(64)), torch.float32)],
)
def test_nothing_else_is_transposed(kernel: ModuleType, member: Member, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="unrotated"):
        assert_right(kernel, (member,), 3, dtype)
