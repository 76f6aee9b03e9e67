"""Dropout bits of a warp, as the Hopper kernels draw them, against the mask of every weight."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from ext.build import load_extension


@pytest.fixture(scope="module")
def helpers(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension("helpers", request.config)


@pytest.mark.parametrize("threshold", [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xE666, 0xFFFF, 0x10000])
def test_flags_of_every_draw(helpers: ModuleType, threshold: int) -> None:
    draws = np.arange(1 << 16, dtype=np.uint32)
    other = draws[::-1]
    flags = helpers.dropped_flags(draws | other << 16, np.uint32(threshold))
    expected = (draws >= threshold).astype(np.uint32) | (other >= threshold).astype(np.uint32) << 16
    assert np.array_equal(flags, expected)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("threshold", [0, 0x4000, 0xE666, 0x10000])
@pytest.mark.parametrize(
    ("seed", "batch_head"), [(0, 0), (2**64 - 5, 3), (0x0123456789ABCDEF, 7 * 2**32 + 11)]
)
def test_bits_match_mask(
    helpers: ModuleType, is_transposed: bool, threshold: int, seed: int, batch_head: int
) -> None:
    draw = helpers.warp_dropout_bits_transposed if is_transposed else helpers.warp_dropout_bits
    for row_block, column_block in ((0, 0), (5, 12), (2**27 - 1, 2**26)):
        words = np.array(draw(seed, batch_head, threshold, row_block, column_block), np.uint32)
        lane, pair, odd = np.ogrid[:32, :16, :2]
        dropped = words[:, None, None] >> (pair + 16 * odd).astype(np.uint32) & 1
        row = 16 * row_block + lane // 4 + 8 * (pair % 2) + 0 * odd
        column = 64 * (column_block // 4) + 8 * (pair // 2) + 2 * (lane % 4) + odd
        query, key = (column, row) if is_transposed else (row, column)
        keep = helpers.dropout_keep(
            np.uint64(seed),
            np.uint64(batch_head),
            query.astype(np.uint32),
            key.astype(np.uint32),
            np.uint32(threshold),
        )
        assert np.array_equal(dropped.astype(bool), ~keep.astype(bool))
