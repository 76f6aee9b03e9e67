"""The kernels' torch-free helpers, compiled for the host: Philox, masks, angles, pairs, units."""

from __future__ import annotations

import decimal
import itertools
import math
import random
from decimal import Decimal
from types import ModuleType

import numpy as np
import pytest
import torch

from ext.build import load_extension
from fused_rope_xattn import dropout, rope
from fused_rope_xattn.config import RotationSpec

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628621")
INT_MAX = 2**31 - 1


@pytest.fixture(scope="module")
def helpers(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension("helpers", request.config)


# Known answers of Random123 (Salmon et al.): counter, key, result.
PHILOX_KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_KNOWN_ANSWERS)
def test_philox_known_answers(
    helpers: ModuleType, counter: list[int], key: list[int], words: list[int]
) -> None:
    assert helpers.philox(counter, key) == words


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
def test_dropout_matches_composite(helpers: ModuleType, seed: int, dropout_p: float) -> None:
    batch, heads, queries, keys = 2, 3, 19, 45
    expected = dropout.keep_mask(torch.tensor([seed]), dropout_p, batch, heads, queries, keys)
    head, query, key = np.ogrid[: batch * heads, :queries, :keys]
    unsigned = np.uint64(seed % 2**64)
    keep = helpers.dropout_keep(
        unsigned,
        head.astype(np.uint64),
        query.astype(np.uint32),
        key.astype(np.uint32),
        np.uint32(dropout.threshold(dropout_p)),
    )
    assert np.array_equal(keep.reshape(expected.shape), expected.numpy())


def test_dropout_counter_holds_large_indices(helpers: ModuleType) -> None:
    seed, head, query, key = 2**63 + 5, 7 * 2**32 + 3, 2**32 - 9, 2**31 + 77
    counter = [key >> 4, query >> 4, head & 0xFFFFFFFF]
    counter.append((key >> 1 & 3) | (query & 7) << 2 | head >> 32 << 5)
    expected = helpers.philox(counter, [seed & 0xFFFFFFFF, seed >> 32])
    assert helpers.dropout_words(seed, head, query, key) == expected


SIZES = [(1, 1), (1, 7), (7, 1), (5, 12), (12, 5), (9, 9), (0, 4), (4, 0)]


def visible(queries: int, key_count: int, is_causal: bool) -> np.ndarray:
    i, j = np.ogrid[:queries, :key_count]
    seen: np.ndarray = (j <= i + key_count - queries) | np.full((queries, key_count), not is_causal)
    return seen


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "key_count"), SIZES)
def test_mask_against_brute_force(
    helpers: ModuleType, queries: int, key_count: int, is_causal: bool
) -> None:
    seen = visible(queries, key_count, is_causal)
    for i in range(queries):
        assert helpers.keys_visible(i, queries, key_count, is_causal) == seen[i].sum()
    for j in range(key_count + 3):
        rows = np.flatnonzero(seen[:, j]).tolist() if j < key_count else []
        first = rows[0] if rows else queries
        assert helpers.first_query_seeing(j, queries, key_count, is_causal) == first


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "key_count"), SIZES)
@pytest.mark.parametrize(("tile_q", "tile_k"), [(4, 4), (3, 5), (16, 2)])
def test_tiles_against_brute_force(
    helpers: ModuleType, queries: int, key_count: int, tile_q: int, tile_k: int, is_causal: bool
) -> None:
    seen = visible(queries, key_count, is_causal)
    q_starts, k_starts = range(0, queries, tile_q), range(0, key_count, tile_k)
    for q in q_starts:
        rows = seen[q : q + tile_q]
        touched = [k // tile_k for k in k_starts if rows[:, k : k + tile_k].any()]
        begin, end = helpers.key_tiles_of_queries(q, tile_q, tile_k, queries, key_count, is_causal)
        assert list(range(begin, end)) == touched
        whole = [rows[:, k : k + tile_k].all() and k + tile_k <= key_count for k in k_starts]
        count = helpers.unmasked_key_tiles(q, tile_k, queries, key_count, is_causal)
        assert count == len(list(itertools.takewhile(bool, whole)))
    for k in k_starts:
        touched = [q // tile_q for q in q_starts if seen[q : q + tile_q, k : k + tile_k].any()]
        begin, end = helpers.query_tiles_of_keys(k, tile_q, queries, key_count, is_causal)
        assert list(range(begin, end)) == touched
    begin, end = helpers.query_tiles_of_keys(key_count, tile_q, queries, key_count, is_causal)
    assert begin >= end


def test_mask_at_the_ends_of_int32(helpers: ModuleType) -> None:
    numbers = [0, 1, 2, 2**30, INT_MAX - 1, INT_MAX]
    for queries, key_count in itertools.product(numbers, numbers):
        for query in {q for q in (0, queries // 2, queries - 1) if 0 <= q < queries}:
            expected = max(0, min(key_count, query + key_count - queries + 1))
            assert helpers.keys_visible(query, queries, key_count, True) == expected
        for key in {k for k in (0, key_count // 2, key_count - 1) if 0 <= k < key_count}:
            expected = max(0, key - key_count + queries)
            assert helpers.first_query_seeing(key, queries, key_count, True) == expected


def test_key_count_clamps(helpers: ModuleType) -> None:
    lengths = [-3, 0, 5, 8, 100]
    assert [helpers.key_count(lengths, b, 8) for b in range(5)] == [0, 0, 5, 8, 8]
    assert helpers.key_count([], 3, 8) == 8


def test_offsets_are_64_bit(helpers: ModuleType) -> None:
    assert helpers.heads_offset(70000, 5, 3, 2**33, 2**20, 7) == 70000 * 2**33 + 5 * 2**20 + 21


def true_turns(position: Decimal, pair: int, width: int, base: float) -> Decimal:
    """The angle in turns, to 40 digits, in [-0.5, 0.5]."""
    turns = position * Decimal(base) ** (Decimal(-2 * pair) / width) / (2 * PI)
    return turns - turns.to_integral_value()


@pytest.mark.parametrize("base", [10000.0, 1e6, 1.5])
@pytest.mark.parametrize(
    "position", [0.0, 1.0, -1.0, 0.3, 12345.0, -7e5, 2.0**24, -(2.0**24), 1e9 + 0.5, 2.0**40]
)
def test_turns_of_huge_and_negative_positions(
    helpers: ModuleType, base: float, position: float
) -> None:
    for width, pair in [(64, 0), (64, 1), (64, 31), (6, 2), (256, 100)]:
        ours = helpers.turns_of(position, pair, width, math.log2(base))
        assert abs(ours) <= 0.5
        with decimal.localcontext() as context:
            context.prec = 60
            error = abs(Decimal(float(ours)) - true_turns(Decimal(position), pair, width, base))
            error = min(error, 1 - error)
            turns = float(abs(Decimal(position)) * Decimal(base) ** (Decimal(-2 * pair) / width))
        # Pair 0 has frequency 1: nothing is rounded but the result, however large the position.
        assert error <= (1e-16 if pair == 0 else 1e-16 + 4e-16 * turns)


def test_cos_sin_keeps_what_fp32_angles_lose(helpers: ModuleType) -> None:
    rng = random.Random(0)
    turns = [rng.uniform(-0.5, 0.5) for _ in range(2000)]
    turns += [0.0, 0.5, -0.5, 0.25, -0.25, 1e-9, -1e-30]
    for t in turns:
        cos, sin = helpers.cos_sin(t)
        assert abs(cos - math.cos(2 * math.pi * t)) <= 6.5e-8
        assert abs(sin - math.sin(2 * math.pi * t)) <= 6.5e-8
    assert helpers.cos_sin(0.0) == (1.0, 0.0)


def test_angles_match_composite(helpers: ModuleType) -> None:
    spec = RotationSpec(48, True, 3, False, 100.0)
    positions = torch.randint(-5000, 5000, (1, 4, 3))
    cos, sin = rope.cos_sin(spec, positions, 4, torch.device("cpu"), torch.float32)
    for token, pair in itertools.product(range(4), range(24)):
        position = positions[0, token, pair // 8].item()
        turns = helpers.turns_of(float(position), pair % 8, 16, math.log2(100.0))
        expected = (cos[0, 0, token, pair].item(), sin[0, 0, token, pair].item())
        assert helpers.cos_sin(turns) == pytest.approx(expected, abs=1.5e-7)


PAIRINGS = [(8, 1), (64, 1), (24, 1), (12, 3), (126, 3), (32, 2)]


@pytest.mark.parametrize(("rotary_dim", "axes"), PAIRINGS)
def test_pair_dims(helpers: ModuleType, rotary_dim: int, axes: int) -> None:
    width = rotary_dim // axes
    for axis, j in itertools.product(range(axes), range(width // 2)):
        pair = axis * (width // 2) + j
        assert helpers.pair_dims(pair, rotary_dim, axes, True) == (2 * pair, 2 * pair + 1)
        first = axis * width + j
        assert helpers.pair_dims(pair, rotary_dim, axes, False) == (first, first + width // 2)


def test_rotations_and_their_adjoints(helpers: ModuleType) -> None:
    rng = random.Random(1)
    for _ in range(50):
        x, y = ([rng.gauss(0, 1) for _ in range(2)] for _ in range(2))
        cosines = [rng.gauss(0, 1) for _ in range(2)]
        sines = [rng.gauss(0, 1) for _ in range(2)]
        full = [cosines[0], sines[0], cosines[1], sines[1]]
        for angles in ([cosines[0], sines[0]], full):
            turned, back = helpers.rotate(*x, *angles), helpers.rotate_back(*y, *angles)
            inner = [a * b for a, b in zip(turned + tuple(x), tuple(y) + back, strict=True)]
            assert inner[0] + inner[1] == pytest.approx(inner[2] + inner[3], abs=1e-5)
        same = [cosines[0], sines[0]] * 2
        assert helpers.rotate(*x, *same) == helpers.rotate(*x, cosines[0], sines[0])
    quarter = helpers.rotate(1.0, 2.0, 0.0, 1.0)
    assert quarter == (-2.0, 1.0)
    assert helpers.rotate_back(*quarter, 0.0, 1.0) == (1.0, 2.0)


HEADS = [(8, 8, 1), (64, 64, 1), (64, 32, 2), (88, 48, 3), (72, 0, 1), (40, 6, 1), (7, 4, 1)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "axes"), HEADS)
def test_units_hold_whole_pairs(
    helpers: ModuleType, head_dim: int, rotary_dim: int, axes: int, interleaved: bool
) -> None:
    """norm_rope's units cover every dim once, and never part the members of a pair."""
    wide = head_dim % 8 == 0 and (interleaved or rotary_dim // axes % 8 == 0)
    layouts = [(1, helpers.unit_places_scalar, -(-head_dim // 2))]
    layouts += [(4, helpers.unit_places_wide, head_dim // 8)] if wide else []
    for size, unit_places, num_units in layouts:
        dims: list[int] = []
        for *starts, pair_0, pair_1 in unit_places(
            num_units, head_dim, rotary_dim, axes, interleaved
        ):
            within = size > 1 and interleaved
            for i, (start, pair) in enumerate(zip(starts, (pair_0, pair_1), strict=True)):
                vector = [d for d in range(start, start + size) if d < head_dim]
                dims += vector
                for offset, dim in enumerate(vector):
                    number = pair + (offset // 2 if within else offset)
                    assert (2 * number < rotary_dim) == (dim < rotary_dim)
                    if dim < rotary_dim:
                        member = offset % 2 if within else i
                        expected = helpers.pair_dims(number, rotary_dim, axes, interleaved)
                        assert dim == expected[member]
        assert sorted(dims) == list(range(head_dim))
