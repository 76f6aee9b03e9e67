"""The sum of parts of the Hopper backward and its way through the rotation, whole, on the host:
against fp64.

As test_key_pieces_kernel.py: shared memory starts as NaN, buffers have NaN on both sides, threads
run in random orders.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ext.build import load_extension
from formulas import plain_turned_back
from fused_rope_xattn.config import RotationSpec
from margins import Margins
from problems import Sizes

SCALE, KEEP_SCALE = 0.2, 1.25
KEYS, STRIP = 128, 16  # keys a block, rows a warp
KINDS = "implicit", "int32", "int64", "float32", "float64"  # as PositionType counts
TABLES = "table", "table_heads", "table_batch", "table_full", "table_full_heads"


def padded_dim(sizes: Sizes) -> int:
    return next(d for d in (32, 64, 128, 256) if d >= sizes.D)


class Side(NamedTuple):
    spec: RotationSpec
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None]  # positions, cos, sin


class Case(NamedTuple):
    sizes: Sizes
    spec: RotationSpec = RotationSpec()
    kind: str = "implicit"
    splits: int = 1
    cut: tuple[int, int] = (0, 1)  # first block, pieces
    dtype: torch.dtype = torch.bfloat16


HALF, PAIRS = RotationSpec(64, False, base=100.0), RotationSpec(64, base=100.0)

CASES: dict[str, Case] = {
    "unrotated": Case(Sizes(1, 33, 1, 3, 1, 64), splits=3),
    "half": Case(Sizes(2, 37, 1, 4, 1, 64), HALF, "int64"),
    "interleaved": Case(Sizes(2, 37, 1, 4, 1, 64), PAIRS, "int32", splits=2),
    "one head": Case(Sizes(3, 35, 1, 1, 1, 64), HALF, "float32"),
    "two heads": Case(Sizes(2, 70, 1, 2, 1, 64), PAIRS, "float64", splits=2),
    "three heads": Case(Sizes(3, 19, 1, 3, 1, 64), HALF, "int64"),
    "five heads": Case(Sizes(2, 50, 1, 5, 1, 64), HALF, "int64"),
    "twelve heads": Case(Sizes(2, 33, 1, 12, 1, 64), PAIRS, "int32"),
    "partial": Case(Sizes(1, 33, 1, 4, 1, 64), RotationSpec(42, False, base=50.0), "int64"),
    "few pairs": Case(Sizes(2, 33, 1, 4, 1, 64), RotationSpec(6, base=50.0), "float32"),
    "two axes": Case(Sizes(2, 33, 1, 2, 1, 64), RotationSpec(40, False, 2, base=50.0), "float64"),
    "three axes": Case(Sizes(2, 33, 1, 8, 1, 96), RotationSpec(96, True, 3, base=50.0), "int64"),
    "uneven axes": Case(Sizes(1, 33, 1, 3, 1, 64), RotationSpec(54, False, 3, base=9.0), "int32"),
    "padded": Case(Sizes(1, 33, 1, 5, 1, 40), RotationSpec(40, False, base=50.0), "float32"),
    "narrow": Case(Sizes(1, 100, 1, 3, 1, 32), RotationSpec(32, base=50.0), "int64"),
    "wide": Case(Sizes(1, 33, 1, 5, 1, 128), RotationSpec(128, False, base=1e4), "int64", 4),
    "widest": Case(Sizes(1, 17, 1, 2, 1, 200), RotationSpec(192, False, base=1e4), "int64", 3),
    "fp16": Case(Sizes(1, 33, 1, 4, 1, 64), HALF, "int64", dtype=torch.float16),
    "two rounds": Case(Sizes(1, 250, 1, 8, 1, 64), HALF, "int64"),
    "two rounds, tables": Case(Sizes(2, 130, 1, 8, 1, 32), RotationSpec(32), "table_full"),
    "single row": Case(Sizes(1, 1, 1, 12, 1, 64), HALF, "int64"),
    "keys": Case(Sizes(1, 33, 140, 3, 1, 64), HALF, "int64", cut=(0, 3)),
    "some keys": Case(Sizes(2, 33, 200, 4, 2, 64), PAIRS, "float32", 2, (5, 6)),
    "padded keys": Case(Sizes(2, 1, 17, 2, 2, 40), RotationSpec(24, False), "int32", 1, (1, 2)),
    "wide keys": Case(Sizes(1, 1, 129, 1, 1, 128), RotationSpec(96, True, 3), "float64", 1, (0, 2)),
    "unrotated keys": Case(Sizes(1, 40, 100, 1, 1, 32), cut=(0, 5)),
    **{
        f"{kind} {name}": Case(Sizes(2, 35, 100, 6, 3, 64), spec, kind, 1, (1, 2))
        for kind in TABLES
        for name, spec in (("half", RotationSpec(48, False)), ("interleaved", RotationSpec(64)))
    },
}


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "sum_parts_emulated",
        request.config,
        emulates_cuda=True,
        emulation=("emulation_sm90", "emulation_warp"),
    )


def draw_side(case: Case, tokens: int, heads: int) -> Side:
    spec, batch = case.spec, case.sizes.B
    if case.kind.startswith("table"):
        spec = spec._replace(full_width="full" in case.kind)
        width = spec.rotary_dim if spec.full_width else spec.rotary_dim // 2
        shape = (
            batch if case.kind == "table_batch" else 1,
            heads if "heads" in case.kind else 1,
            tokens,
            width,
        )
        return Side(spec, (None, torch.randn(shape), torch.randn(shape)))
    if case.kind == "implicit":
        return Side(spec, (None, None, None))
    positions = 2000 * torch.randn(batch, tokens, spec.axes, dtype=torch.float64)
    return Side(spec, (positions.to(getattr(torch, case.kind)), None, None))


def described(side: Side, kind: str) -> dict[str, Any]:
    """RotationParams, for the extension."""
    positions, cos, sin = side.tensors
    fields: dict[str, Any] = side.spec._asdict()
    fields |= {"position_type": 0, "position_batch_stride": 0, "table_strides": [0, 0, 0]}
    if positions is not None:
        fields["positions"] = positions.data_ptr()
        fields["position_type"] = KINDS.index(kind)
        fields["position_batch_stride"] = positions.stride(0)
    if cos is not None and sin is not None:
        fields |= {"cos": cos.data_ptr(), "sin": sin.data_ptr()}
        fields["table_strides"] = [
            stride if size > 1 else 0 for stride, size in zip(cos.stride()[:3], cos.shape)
        ]
    return fields


def as_fragments(x: Tensor) -> Tensor:
    """[..., rows, D] as warps hold 16 rows of it: a lane has two dims of two rows eight apart."""
    *outer, rows, width = x.shape
    x = x.view(*outer, rows // STRIP, 2, 8, width // 8, 4, 2)
    n = len(outer)
    order = [*range(n + 1), *(n + 1 + i for i in (2, 1, 3, 0, 4))]
    return x.permute(order).reshape(*outer, -1)


def padded_parts(x: Tensor, rows: int, width: int) -> Tensor:
    """[..., T, D] to whole blocks of rows; what is added is never used."""
    *outer, T, D = x.shape
    whole = torch.full((*outer, -(-T // rows) * rows, width), float("nan"))
    whole[..., :T, :D] = x
    return whole


def key_fragments(parts: Tensor, first_block: int, width: int) -> Tensor:
    """[pieces, 2, B, Hkv, Tk, D] to a piece of 128 keys after the other, from first_block on."""
    blocks = padded_parts(parts, KEYS, width).unflatten(-2, (-1, KEYS))
    blocks = blocks.permute(2, 3, 4, 0, 1, 5, 6).flatten(0, 2)[first_block:]
    return as_fragments(blocks).flatten()


def assert_rounded(got: Tensor, want: Tensor, gain: float, name: str) -> None:
    """Rounded once; ``gain`` of the rotation, of what fp32 takes from sums and angles."""
    rows = want.norm(dim=-1, keepdim=True)
    bound = torch.finfo(got.dtype).eps / 2 * want.abs() + 2e-6 * gain * (rows + 1)
    error = (got.double() - want).abs()
    assert bool((error <= bound).all()), f"{name}: {float((error - bound).max()):.3e} too far"


def gain_of(side: Side) -> float:
    _, cos, sin = side.tensors
    return 1.0 if cos is None or sin is None else float(cos.abs().max() + sin.abs().max())


class Problem(NamedTuple):
    given: dict[str, Tensor]
    want: dict[str, Tensor]
    sides: tuple[Side, Side]


def draw(case: Case) -> Problem:
    s = case.sizes
    sides = draw_side(case, s.Tq, s.H), draw_side(case, s.Tk, s.Hkv)
    dq = torch.randn(case.splits, s.B, s.H, s.Tq, s.D)
    given = {"dq_parts": as_fragments(padded_parts(dq, 64, padded_dim(s))).flatten()}
    want = {"dq": turned_back(SCALE * dq.double().sum(0), sides[0])}
    first, pieces = case.cut
    if pieces > 1:
        parts = torch.randn(pieces, 2, s.B, s.Hkv, s.Tk, s.D)
        dk, dv = parts.double().sum(0)
        given["dkv_parts"] = key_fragments(parts, first, padded_dim(s))
        want |= {"dk": turned_back(SCALE * dk, sides[1]), "dv": KEEP_SCALE * dv.transpose(1, 2)}
    return Problem(given, want, sides)


def turned_back(grad: Tensor, side: Side) -> Tensor:  # [B, H, T, D] -> [B, T, H, D]
    return plain_turned_back(grad.transpose(1, 2), side.spec, side.tensors)


def run(
    kernel: ModuleType, case: Case, problem: Problem, seed: int, turns_only: bool
) -> dict[str, Tensor]:
    s, margins = case.sizes, Margins()
    shapes = {"dq": (s.B, s.Tq, s.H, s.D)} | dict.fromkeys(("dk", "dv"), (s.B, s.Tk, s.Hkv, s.D))
    results = {
        name: margins.place(torch.full(shape, float("nan"), dtype=case.dtype))
        for name, shape in shapes.items()
    }
    held = {name: margins.place(t) for name, t in problem.given.items()} | results
    addresses = {name: t.data_ptr() for name, t in held.items()}
    addresses["seed"] = addresses["dq"]  # that there is one makes dropout
    rotations = (described(side, case.kind) for side in problem.sides)
    is_bfloat16 = case.dtype == torch.bfloat16
    kernel.run(
        list(s), addresses, case.splits, case.cut, is_bfloat16, *rotations, SCALE, KEEP_SCALE,
        turns_only, seed,
    )  # fmt: skip
    assert margins.are_untouched
    return results


def cut_rows(case: Case) -> Tensor:
    """[B, Hkv, Tk]: which keys are of blocks that were cut."""
    s = case.sizes
    tiles = -(-s.Tk // KEYS)
    blocks = torch.arange(s.B * s.Hkv * tiles).view(s.B, s.Hkv, tiles)
    return blocks.repeat_interleave(KEYS, -1)[..., : s.Tk] >= case.cut[0]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums(kernel: ModuleType, case: Case, seed: int) -> None:
    torch.manual_seed(seed)
    problem = draw(case)
    got = run(kernel, case, problem, seed, turns_only=False)
    gains = dict(zip(("dq", "dk", "dv"), (*map(gain_of, problem.sides), 1.0)))
    is_cut = cut_rows(case).transpose(1, 2)
    for name, want in problem.want.items():
        written = torch.ones(want.shape[:3], dtype=torch.bool) if name == "dq" else is_cut
        assert bool(got[name][~written].isnan().all()), f"{name}: more is written than was cut"
        assert_rounded(got[name][written], want[written], gains[name], name)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES.values() if c.spec.rotary_dim > 0 and c.dtype == torch.bfloat16],
    ids=[n for n, c in CASES.items() if c.spec.rotary_dim > 0 and c.dtype == torch.bfloat16],
)
def test_turned_back_from_accumulators(kernel: ModuleType, case: Case) -> None:
    """The same bits as through the sum of one part."""
    torch.manual_seed(3)
    case = case._replace(splits=1, cut=(0, 1))
    problem = draw(case)
    got = run(kernel, case, problem, 3, turns_only=True)["dq"]
    assert_rounded(got, problem.want["dq"], gain_of(problem.sides[0]), "dq")
    assert torch.equal(got, run(kernel, case, problem, 4, turns_only=False)["dq"])
