"""Grouped projections on a Hopper, as the host plans them: angles, columns and tiles."""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ext.build import load_extension

TWO_32 = 2.0**32
# Of a cosine, over all 2^29 turns up to an eighth; that of a sine is 9.2e-8.
LARGEST_ERROR = 1.2322e-7
TILES = 5


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension("projection", request.config)


# ---------------------------------------------------------------------------------------- angles


def turns_apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance on the circle, in units of 2^-32 turns."""
    difference: np.ndarray = np.mod(a - b, TWO_32)
    return np.minimum(difference, TWO_32 - difference)  # type: ignore[no-any-return]


def exact_turns(positions: list[Any], frequency: float) -> np.ndarray:
    """Position * frequency / (2 pi) modulo 1 in units of 2^-32, by exact rational arithmetic."""
    from fractions import Fraction

    # 200 bits of 1 / (2 pi), by Machin's formula.
    def arctan_inverse(n: int, scale: int) -> int:
        total, term, k = 0, scale // n, 0
        while term:
            total += (-1) ** k * (term // (2 * k + 1))
            term //= n * n
            k += 1
        return total

    scale = 1 << 240
    pi = Fraction(4 * (4 * arctan_inverse(5, scale) - arctan_inverse(239, scale)), scale)
    a_position = Fraction(frequency) / (2 * pi)
    return np.array([float(Fraction(p) * a_position % 1 * 2**32) for p in positions])


@pytest.mark.parametrize("frequency", [1.0, 0.5, 1e-2, 1.2345e-4, 7.5e-7, 3.0, 123.456])
def test_fractions_of_a_turn_are_exact(kernel: ModuleType, frequency: float) -> None:
    """fp64 rounds the frequency; nothing else loses more than the last bit of 32."""
    far = [2**31 - 1, -(2**31), 2**40 + 12345, -(2**40)]
    positions = [0, 1, -1, 7, 1000, -1000, 65535, 2**24 + 1, *far]
    got = kernel.fraction_of_turn(np.array(positions, dtype=np.int64), frequency)
    error = turns_apart(got.astype(np.float64), exact_turns(positions, frequency))
    # 2^-64 turns a position at worst, besides truncation
    assert np.all(error <= 1.001 + np.abs(np.array(positions, dtype=np.float64)) * 2.0**-31)


@pytest.mark.parametrize("frequency", [1.0, 1e-2, 1.2345e-4])
def test_fractional_positions(kernel: ModuleType, frequency: float) -> None:
    positions = [0.0, 0.5, -0.5, 1e-3, -1e-3, 3.25, -1234.0625, 1e6 + 0.1, -(2.0**31) - 0.75]
    got = kernel.fraction_of_turn_at(np.array(positions), frequency)
    error = turns_apart(got.astype(np.float64), exact_turns(positions, frequency))
    # Three numbers are cut off: the position, and both products.
    assert np.all(error <= 3.01 + np.abs(np.array(positions)) * 2.0**-31)
    whole = kernel.fraction_of_turn_at(np.array([5.0, -3.0]), frequency)
    assert np.array_equal(whole, kernel.fraction_of_turn(np.array([5, -3]), frequency))


def test_positions_beyond_reason_do_no_harm(kernel: ModuleType) -> None:
    for position in (1e300, -1e300, math.inf, -math.inf, math.nan):
        kernel.fraction_of_turn_at(position, 0.1)


def test_cosine_and_sine_of_a_turn(kernel: ModuleType) -> None:
    eighths = np.arange(8, dtype=np.int64)[:, None] * 2**29 + np.arange(-300, 300)
    turns = np.concatenate([eighths.ravel() % 2**32, np.random.randint(0, 2**32, 200_000)])
    turns = turns.astype(np.uint32)
    angle = turns.astype(np.float64) * (2 * math.pi / TWO_32)
    for name, exact in (("cos_of_turn", np.cos(angle)), ("sin_of_turn", np.sin(angle))):
        assert np.abs(getattr(kernel, name)(turns) - exact).max() <= LARGEST_ERROR
    assert kernel.cos_of_turn(0) == 1.0 and kernel.sin_of_turn(0) == 0.0


# --------------------------------------------------------------------------------------- columns

HEADS = [
    # head_dim, rotary_dim, axes, interleaved
    *((d, d, 1, True) for d in (8, 16, 24, 64, 128, 256)),
    *((d, d, 1, False) for d in (16, 32, 64, 96, 128, 256)),
    (64, 32, 1, False),
    (40, 32, 1, False),  # eight dims pass
    (72, 16, 1, False),
    (128, 96, 3, False),
    (64, 64, 2, False),
    (48, 6, 1, True),
    (40, 0, 1, True),
    (40, 0, 1, False),
    (32, 12, 2, True),
]


def sizes(
    head: tuple[int, int, int, bool], heads: int = 3, rows: int = 10, depth: int = 64
) -> tuple[Any, ...]:
    head_dim, rotary_dim, axes, interleaved = head
    return rows, rows, heads * head_dim, depth, head_dim, rotary_dim, axes, interleaved


@pytest.mark.parametrize("head", HEADS)
def test_chunks_hold_every_column_once(
    kernel: ModuleType, head: tuple[int, int, int, bool]
) -> None:
    member = sizes(head)
    columns = member[2]
    units = kernel.num_units(member)
    starts = [kernel.chunk_column(member, c) for c in range(2 * units)]
    assert sorted(s for s in starts if s < columns) == list(range(0, columns, 8))
    # Beyond the end, as in the last tile: nothing.
    assert all(kernel.chunk_column(member, c) >= columns for c in range(2 * units, 2 * units + 20))


@pytest.mark.parametrize("head", HEADS)
def test_a_lane_holds_both_members_of_its_pairs(
    kernel: ModuleType, head: tuple[int, int, int, bool]
) -> None:
    head_dim, rotary_dim, axes, interleaved = head
    member = sizes(head)
    width = rotary_dim // axes
    turning = set()
    for unit, t in itertools.product(range(kernel.num_units(member)), range(4)):
        (a, head_0, pair_0), (b, head_1, pair_1) = kernel.unit_of_lane(member, unit, t)
        is_gathered = rotary_dim > 0 and not interleaved
        held = [(a, b), (a + 1, b + 1)] if is_gathered else [(a, a + 1), (b, b + 1)]
        for (first, second), of_head, pair in zip(
            held, (head_0, head_1), (pair_0, pair_1), strict=True
        ):
            if pair < 0:
                continue
            axis, j = divmod(pair, width // 2)
            start = of_head * head_dim
            dims = (2 * pair, 2 * pair + 1)
            if not interleaved:
                dims = (axis * width + j, axis * width + j + width // 2)
            assert (first - start, second - start) == dims
            turning |= {first, second}
    want = {h * head_dim + d for h in range(3) for d in range(rotary_dim)}
    assert turning == want


SHARING_HEADS = 4
# Parts of 16 columns of each head, in tiles of 64, and of 32, in tiles of 128, divide these.
DIVIDED_BY_32 = [
    *(
        (d, d, axes, interleaved)
        for d in (32, 64, 128, 256)
        for axes in (1, 2)
        for interleaved in (True, False)
    ),
    (96, 96, 1, False),
    (96, 96, 3, True),
    (96, 96, 3, False),
    (64, 32, 1, True),  # neighbours are not gathered, whatever passes
    (32, 12, 2, True),
]
DIVIDED_BY_16 = [
    (16, 16, 1, True),
    (16, 16, 2, True),
    (16, 16, 1, False),
    (48, 48, 1, True),
    (80, 80, 1, False),
    (48, 48, 3, False),
    (96, 96, 2, False),  # 3 units a half, which parts of two do not divide
]
SHARING = [*itertools.product(DIVIDED_BY_32, (64, 128)), *((head, 64) for head in DIVIDED_BY_16)]


@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("head, columns", SHARING)
def test_sharing_only_permutes_chunks(
    kernel: ModuleType, head: tuple[int, int, int, bool], columns: int, heads: int
) -> None:
    member = sizes(head, heads)
    assert kernel.shares_angles(member, columns, -1)
    assert kernel.shares_angles(member, columns, 0)  # a table that all heads have in common
    chunks = 2 * kernel.num_units(member)
    assert chunks % (columns // 8) == 0  # no chunk of the last tile is missing
    shared = [kernel.shared_chunk(member, columns // 8, c) for c in range(chunks)]
    assert sorted(shared) == list(range(chunks))


@pytest.mark.parametrize("head, columns", SHARING)
def test_the_parts_of_a_shared_tile_turn_alike(
    kernel: ModuleType, head: tuple[int, int, int, bool], columns: int
) -> None:
    head_dim = head[0]
    member = sizes(head, 2 * SHARING_HEADS)
    tile, part = columns // 8, columns // 8 // SHARING_HEADS
    for start in range(0, 2 * kernel.num_units(member), tile):
        chunks = [kernel.shared_chunk(member, tile, start + c) for c in range(tile)]
        parts = [chunks[i : i + part] for i in range(0, tile, part)]
        # A copy of the weights a head: its chunks lie side by side, from a whole part on.
        assert all(p == list(range(p[0], p[0] + part)) and p[0] % part == 0 for p in parts)
        first_head = kernel.chunk_column(member, chunks[0]) // head_dim
        assert first_head % SHARING_HEADS == 0
        for i, (c, first) in enumerate((c, first) for p in parts for c, first in zip(p, parts[0])):
            column, first_column = (kernel.chunk_column(member, chunk) for chunk in (c, first))
            assert first_column // head_dim == first_head
            assert column - first_column == i // part * head_dim
        # What the epilogue finds for the first part serves them all.
        for p, unit, t in itertools.product(parts, range(part // 2), range(4)):
            lanes = kernel.unit_of_lane(member, p[0] // 2 + unit, t)
            first_lanes = kernel.unit_of_lane(member, parts[0][0] // 2 + unit, t)
            assert [pair for *_, pair in lanes] == [pair for *_, pair in first_lanes]
            for (_, of_head, _), (_, of_first, _) in zip(lanes, first_lanes):
                assert of_head - of_first == parts.index(p)


NEIGHBOURS, HALVES = (64, 64, 1, True), (64, 64, 1, False)
UNSHARED: dict[str, tuple[tuple[int, int, int, bool], int, int, int]] = {
    # head, heads, columns of a tile, heads' stride in tables
    "no rotation": ((64, 0, 1, True), 4, 128, -1),
    "no rotation of halves": ((64, 0, 1, False), 4, 64, -1),
    "table a head": (NEIGHBOURS, 4, 128, 320),
    "table a head, halves": (HALVES, 4, 64, 320),
    **{f"{heads} heads": (NEIGHBOURS, heads, 128, -1) for heads in (1, 2, 3, 5, 6)},
    **{f"{heads} heads of halves": (HALVES, heads, 64, -1) for heads in (1, 2, 3, 5, 6)},
    "heads narrower than a part": ((16, 16, 1, True), 4, 128, -1),
    "heads narrower than any part": ((8, 8, 1, True), 4, 64, -1),
    "heads of 1.5 parts": ((48, 48, 1, True), 4, 128, -1),
    "heads of 2.5 parts, halves": ((80, 80, 1, False), 4, 128, -1),
    "heads of 2.5 of the least parts": ((40, 40, 1, True), 4, 64, -1),
    # Copies that gather find the dims that pass in the place of halves.
    "halves of a part of the head": ((64, 32, 1, False), 4, 128, -1),
    "halves of a part of the head, narrow tile": ((64, 32, 1, False), 4, 64, -1),
    "halves on axes of a part of the head": ((128, 96, 3, False), 4, 128, -1),
    "halves of 1.5 parts": ((96, 96, 2, False), 4, 128, -1),
    "tiles of 32 columns": (NEIGHBOURS, 4, 32, -1),
    "tiles of 32 columns, halves": (HALVES, 4, 32, -1),
}


@pytest.mark.parametrize("name", UNSHARED)
def test_what_shares_no_angles(kernel: ModuleType, name: str) -> None:
    head, heads, columns, table_head_stride = UNSHARED[name]
    assert not kernel.shares_angles(sizes(head, heads), columns, table_head_stride)


# ----------------------------------------------------------------------------------------- tiles

MAST3R = [sizes((64, 64, 1, True), 12, 1536, 768)] * 3
LARGE = [sizes((128, 128, 1, True), 16, 16384, 2048)] * 3
DECODE = [
    sizes((64, 64, 1, True), 16, 8, 1024),
    *[sizes((64, 64, 1, True), 16, 12000, 1024)] * 2,
]
SAM2 = [
    sizes((256, 256, 1, True), 1, 4096, 256),
    *[sizes((256, 256, 1, True), 1, 28736, 64)] * 2,
]


@pytest.mark.parametrize("tile", range(TILES))
@pytest.mark.parametrize("members", [MAST3R, DECODE, SAM2, [sizes((40, 32, 1, False), 5, 1000)]])
def test_tiles_cover_each_result_once(
    kernel: ModuleType, members: list[tuple[Any, ...]], tile: int
) -> None:
    rows, columns, _ = kernel.tiles()[tile]
    ordered = sorted(members, key=lambda m: -m[3])
    want = [
        (i, row, column)
        for i, m in enumerate(ordered)
        for row in range(-(-m[0] // rows))
        for column in range(-(-16 * kernel.num_units(m) // columns))
    ]
    assert sorted(kernel.tiles_in_order(members, 132, tile)) == want


@pytest.mark.parametrize("tile", range(TILES))
def test_the_plan_knows_which_members_share(kernel: ModuleType, tile: int) -> None:
    members = [
        sizes(NEIGHBOURS, 12, depth=128),
        sizes(HALVES, 3, depth=72),
        sizes(HALVES, 4, depth=64),
    ]
    _, columns, _ = kernel.tiles()[tile]
    want = [columns >= 64, False, columns >= 64]
    assert kernel.members_that_share(members, 132, tile) == want


def test_which_tile_is_chosen(kernel: ModuleType) -> None:
    def chosen(members: list[tuple[Any, ...]], tables: bool = False) -> tuple[int, int]:
        rows, columns, _ = kernel.tiles()[kernel.choose_tile(members, 132, tables)]
        return rows, columns

    assert chosen(LARGE) == (192, 128)
    assert chosen(LARGE, tables=True) == (192, 128)
    assert chosen(MAST3R) == (128, 128)
    # Measured: 91 us, 97 with 128 rows. Without v 49.5 to 50.1, 52.2 to 52.8 with 128 rows.
    assert chosen(DECODE) == (192, 128)
    assert chosen(DECODE[:2]) == (192, 128)
    # Measured: 8.5 us, 11.0 with 64 x 128 and 14.3 with 64 x 64.
    assert chosen(MAST3R[:1]) == (128, 128)
    # Measured: 14.5 us, 17.3 with 64 rows, 21.3 with 192.
    assert chosen([sizes((64, 64, 1, True), 16, 1024, 1024)] * 3) == (128, 128)
    # Values of one wide head, as the output is. Measured: 3.3 us, 4.1 with 128 rows.
    assert chosen([sizes((256, 0, 1, True), 1, 4096, 256)]) == (64, 128)
    # Measured: 661 us, 699 with 128 rows.
    assert chosen([sizes((64, 64, 1, True), 32, 16384, 2048)] * 3) == (192, 128)
    assert chosen(DECODE[:1]) == (64, 32)  # few results: as many multiprocessors as possible


def test_far_too_many_tiles_take_the_largest(kernel: ModuleType) -> None:
    huge = [sizes((128, 128, 1, True), 16, 2**31 - 1, 64)]
    assert kernel.tiles()[kernel.choose_tile(huge, 132, False)][0] >= 128


def test_obstacles(kernel: ModuleType) -> None:
    def obstacle(head: tuple[int, int, int, bool], **options: Any) -> str:
        depth, dtype = options.get("depth", 64), options.get("dtype", 3)
        kind, base, x = (options.get(n, 0) for n in ("positions", "log2_base", "x"))
        return str(kernel.obstacle(sizes(head, depth=depth), dtype, kind, base, x))

    for head in HEADS:
        assert obstacle(head) == ""
    assert "bf16, fp16 and TF32" in obstacle(HEADS[0], dtype=0)
    assert "multiples of 8" in obstacle(HEADS[0], depth=60)
    assert "multiples of 8" in obstacle((44, 0, 1, True))
    assert obstacle((264, 0, 1, True)) == ""
    assert "at most 256" in obstacle((264, 264, 1, True))
    assert "16 bytes" in obstacle(HEADS[0], x=8)
    assert "halves" in obstacle((24, 24, 1, False))
    assert "axes" in obstacle((64, 64, 4, True))
    assert obstacle(HEADS[0], positions=1, log2_base=-1.0) == ""
    assert "fractional" in obstacle(HEADS[0], positions=3, log2_base=-1.0)
