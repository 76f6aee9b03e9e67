"""How a small block is cut in tiles: host arithmetic, tested without a GPU."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.build import load_extension

LARGEST = 2**31 - 1
NARROW = 16  # columns of the narrowest tile


@pytest.fixture(scope="module")
def helpers(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension("helpers", request.config)


@given(dividend=st.integers(0, LARGEST), divisor=st.integers(1, LARGEST))
def test_quotient(helpers: ModuleType, dividend: int, divisor: int) -> None:
    assert helpers.quotient(dividend, divisor) == dividend // divisor


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 64, 641, 2**16 - 1, 2**16, 2**30 + 1, LARGEST])
def test_quotient_at_multiples(helpers: ModuleType, divisor: int) -> None:
    for factor in (0, 1, 2, LARGEST // divisor - 1, LARGEST // divisor):
        for dividend in (factor * divisor - 1, factor * divisor, factor * divisor + divisor - 1):
            if 0 <= dividend <= LARGEST:
                assert helpers.quotient(dividend, divisor) == dividend // divisor


@pytest.mark.parametrize("head_columns", [32, 64, 128])
@pytest.mark.parametrize("is_fp32", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [[(256, 256), (512, 256), (512, 256)], [(1, 8)], [(16, 128)], [(16384, 1024)], [(7, 72)] * 3],
)
def test_tiles_cover_every_projection(
    helpers: ModuleType, sizes: list[tuple[int, int]], is_fp32: bool, head_columns: int
) -> None:
    tile_rows, tile_columns, tiles = helpers.plan_projections(sizes, head_columns, 132, is_fp32)
    assert tile_rows % 16 == 0
    assert tile_columns in (NARROW, head_columns)
    assert tiles == [
        math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns) for rows, columns in sizes
    ]


def test_small_problems_get_small_tiles(helpers: ModuleType) -> None:
    small, _, _ = helpers.plan_projections([(64, 256)], 32, 132, False)
    large, _, _ = helpers.plan_projections([(65536, 256)], 32, 132, False)
    assert small < large


def test_few_rows_get_narrow_tiles(helpers: ModuleType) -> None:
    """Where tiles as wide as a head would leave more than half of the GPU idle."""
    rows, columns, (tiles,) = helpers.plan_projections([(8, 1024)], 64, 132, False)
    assert (rows, columns, tiles) == (16, NARROW, 64)
    assert helpers.plan_projections([(8, 1024)], 64, 32, False)[:2] == (16, NARROW)
    assert helpers.plan_projections([(8, 1024)], 64, 31, False)[:2] == (16, 64)
    # 66 tiles of 16 rows and a head's columns are half of 132, 67 are more.
    assert helpers.plan_projections([(33 * 16, 128)], 64, 132, False)[1] == NARROW
    assert helpers.plan_projections([(67 * 16, 64)], 64, 132, False)[1] == 64
