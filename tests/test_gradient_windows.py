"""The Hopper backward for 256 dims by windows of score gradients: the plan on any machine, the
gradients on a Hopper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from backward_calls import backward, on_hopper, solved
from ext.build import load_extension
from fused_rope_xattn.config import RotationSpec
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.cases import Case
from problems import Sizes

H200_SMS = 132
SMS = (1, 16, 78, 114, H200_SMS, 144)
KEYS, TILE, QUERIES, D = 128, 64, 128, 256  # a block's keys, a tile's, a block's queries for dq
MOST_BYTES = 160 * 2**20

SAM2 = Sizes(1, 4096, 28736, 1, 1, D)
HEADS = ((1, 1), (2, 2), (12, 12), (8, 2), (16, 1), (40, 8))
MANY_SIZES = [
    Sizes(B, Tq, Tk, H, Hkv, D)
    for B, Tq, Tk, (H, Hkv) in itertools.product(
        (1, 2, 9), (1, 64, 770, 4096, 100_000), (1, 77, 1536, 28736, 100_000), HEADS
    )
]


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension("helpers", request.config)


def head_blocks(s: Sizes) -> int:
    return -(-s.Tk // KEYS)


def all_blocks(s: Sizes) -> int:
    return s.B * s.Hkv * head_blocks(s)


def windows_of(s: Sizes, blocks: int) -> Iterator[tuple[int, int]]:
    """As attention_bwd_window_d256_sm90.cu walks over them."""
    for first in range(0, all_blocks(s), blocks):
        yield first, min(first + blocks, all_blocks(s))


# --------------------------------------------------------------------------------------- the plan

PLANS = {
    "sam2": (SAM2, (132, 0, 1)),
    "waves that find room": (Sizes(1, 2048, 4 * 132 * KEYS, 1, 1, D), (264, 0, 1)),
    "a few blocks more": (Sizes(2, 4096, 9000, 1, 1, D), (132, 132, 13)),
    # A window of twelve blocks costs more than it saves.
    "a few short blocks more": (Sizes(2, 768, 768, 12, 12, D), (0, 0, 1)),
    "few queries": (Sizes(8, 77, 4096, 8, 8, D), (0, 0, 1)),
    "no queries": (Sizes(1, 0, 28736, 1, 1, D), (0, 0, 1)),
    # What a wave of blocks has would not find room.
    "shared keys": (Sizes(1, 768, 18432, 8, 1, D), (66, 0, 2)),
    "many queries": (Sizes(1, 100_000, 28736, 1, 1, D), (6, 0, 22)),
    "no block finds room": (Sizes(1, 1_000_000, 28736, 1, 1, D), (0, 0, 1)),
    "a wave": (Sizes(1, 4096, 132 * KEYS, 1, 1, D), (0, 0, 1)),
    "few keys": (Sizes(1, 4096, 77, 8, 8, D), (0, 0, 1)),
    "nothing": (Sizes(0, 768, 768, 12, 12, D), (0, 0, 1)),
}


@pytest.mark.parametrize(("sizes", "plan"), PLANS.values(), ids=PLANS)
def test_what_windows_there_are(
    kernel: ModuleType, sizes: Sizes, plan: tuple[int, int, int]
) -> None:
    assert kernel.plan_windows(sizes, H200_SMS) == plan


def test_windows_are_limited(kernel: ModuleType) -> None:
    """Never all gradients at once, and never many bytes, whatever the problem."""
    assert kernel.most_window_bytes == MOST_BYTES
    planned = 0
    for s, num_sms in itertools.product(MANY_SIZES, SMS):
        blocks, first_cut, pieces = kernel.plan_windows(s, num_sms)
        if blocks == 0:
            assert pieces == 1
            continue
        planned += 1
        assert 0 < blocks < all_blocks(s)
        block_bytes = kernel.window_block_bytes(s)
        assert block_bytes == s.H // s.Hkv * -(-s.Tq // TILE) * TILE * KEYS * 2
        assert blocks * block_bytes <= MOST_BYTES
        assert pieces >= 1 and 0 <= first_cut <= all_blocks(s)
        if pieces == 1:
            assert blocks % num_sms == 0
        elif first_cut > 0:
            assert blocks % num_sms == first_cut % num_sms == 0
    assert planned > 1000


def test_parts_of_a_window_find_room(kernel: ModuleType) -> None:
    """Those of dv of the blocks that are cut, in the window that has most of them."""
    for s, num_sms in itertools.product(MANY_SIZES, SMS):
        plan = blocks, first_cut, pieces = kernel.plan_windows(s, num_sms)
        if blocks == 0 or all_blocks(s) // blocks > 1000:
            continue
        cut = (end - max(first, first_cut) for first, end in windows_of(s, blocks))
        most = max(0, *cut) * pieces if pieces > 1 else 0
        assert kernel.window_part_floats(s, plan) == most * KEYS * D
        assert most * KEYS * D <= 2**24


def test_pieces_of_all_windows_are_the_grid(kernel: ModuleType) -> None:
    """Each window's blocks in the grid start where the last one's end."""
    for first_cut, pieces, blocks in itertools.product((0, 3, 6, 10), (1, 2, 5), (1, 3, 4)):
        grid = []
        for first in range(0, 10, blocks):
            indices = [
                kernel.grid_index(first_cut, pieces, block)
                for block in (first, min(first + blocks, 10))
            ]
            of_window = [kernel.key_block_of(first_cut, pieces, i) for i in range(*indices)]
            assert {block for block, _ in of_window} == set(range(first, min(first + blocks, 10)))
            grid += of_window
        want = [(b, i) for b in range(10) for i in range(pieces if b >= first_cut else 1)]
        assert grid == want


SHAPES = [
    (Sizes(B, Tq, Tk, H, Hkv, D), blocks)
    for B, Tq, Tk, (H, Hkv), blocks in itertools.product(
        (1, 2), (1, 64, 129, 500), (1, 128, 200, 700), ((1, 1), (3, 3), (4, 2)), (1, 2, 3, 5, 8)
    )
    if B * Hkv * -(-Tk // KEYS) > blocks
]


def test_every_tile_of_keys_is_in_one_window(kernel: ModuleType) -> None:
    for s, blocks in SHAPES:
        for keys in {0, 1, TILE, TILE + 1, s.Tk // 2, s.Tk}:
            if keys > s.Tk:
                continue
            seen: dict[int, list[int]] = {head: [] for head in range(s.B * s.Hkv)}
            for first, end in windows_of(s, blocks):
                shape = kernel.shape_of_window(s, first, end, 1)
                heads = range(shape[0], shape[0] + shape[1])
                for head, tiles in seen.items():
                    begin, stop = kernel.window_tiles(first, end, head, s.Tk, keys)
                    own = range(begin, stop)
                    assert not own or head in heads
                    # Their blocks are the window's.
                    assert all(first <= head * head_blocks(s) + t // 2 < end for t in own)
                    tiles += own
            for tiles in seen.values():
                assert tiles == list(range(-(-keys // TILE)))


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_window_has_its_blocks_and_heads(kernel: ModuleType, cluster: int) -> None:
    """Blocks for dk as locate_window_item counts them: each one exists in one place of the grid."""
    for s, blocks in SHAPES:
        for first, end in windows_of(s, blocks):
            shape = kernel.shape_of_window(s, first, end, cluster)
            first_head, heads, of_head, head_clusters, first_cluster, clusters, queries = shape
            assert of_head == head_blocks(s)
            got = []
            for index in range(first_cluster, first_cluster + clusters):
                head = index // head_clusters
                for rank in range(cluster):
                    within = index % head_clusters * cluster + rank
                    block = head * of_head + within
                    if within < of_head and first <= block < end:
                        got.append(block)
            assert got == list(range(first, end))
            assert clusters <= blocks + heads
            assert range(first_head, first_head + heads) == range(
                first // of_head, (end - 1) // of_head + 1
            )
            assert (queries - 1) * cluster * QUERIES < s.Tq <= queries * cluster * QUERIES


def test_clusters_have_few_blocks_without_a_neighbour(kernel: ModuleType) -> None:
    assert kernel.cluster_of_window(SAM2) == 2
    assert kernel.cluster_of_window(SAM2._replace(Tk=128)) == 1
    assert kernel.cluster_of_window(SAM2._replace(Tq=3 * 128)) == 1
    assert kernel.cluster_of_window(SAM2._replace(Tq=9 * 128, Tk=9 * 128)) == 2


def test_splits_are_limited(kernel: ModuleType) -> None:
    for s, num_sms in itertools.product(MANY_SIZES, SMS):
        blocks, _, _ = kernel.plan_windows(s, num_sms)
        if blocks > 0:
            assert 1 <= kernel.dq_splits_of_windows(s, blocks, num_sms) <= 16
    assert kernel.dq_splits_of_windows(SAM2, 132, H200_SMS) > 1


# ---------------------------------------------------------------------------------- the gradients

# More blocks of keys than a window has, and queries enough, with at most as many multiprocessors as
# an H200.
CASES = [
    Case("plain", 2, 1536, 768, H=12, D=256, Dq=96, dtype="bf16"),
    Case("fp16", 2, 1536, 768, H=12, D=256, Dq=96, dtype="fp16", lse=True),
    Case("one_head", 1, 2000, 17100, H=1, D=256, Dq=96, dtype="bf16", lse=True),
    Case("padded", 2, 1500, 700, H=12, D=136, Dq=96, dtype="bf16"),
    Case("odd_blocks", 2, 1500, 550, H=14, D=200, Dq=96, dtype="bf16", rope="half"),
    Case("grouped", 2, 768, 768, H=24, Hkv=12, D=256, Dq=96, dtype="bf16"),
    Case("lengths", 2, 1536, 768, H=12, D=256, Dq=96, dtype="bf16", lengths="ragged"),
    Case("no_keys", 2, 1500, 768, H=12, D=256, Dq=96, dtype="fp16", lengths="zero"),
    Case("dropout", 2, 1536, 768, H=12, D=256, Dq=96, dtype="bf16", dropout_p=0.2, lse=True),
    # Gradients of a wave of blocks would not find room.
    Case("shared", 2, 768, 8600, H=8, Hkv=1, D=256, Dq=96, dtype="bf16", lengths="ragged"),
]


def planned(kernel: ModuleType, case: Case, num_sms: int) -> tuple[int, int, int]:
    blocks, first_cut, pieces = kernel.plan_windows(
        Sizes(case.B, case.Tq, case.Tk, case.H, case.kv_heads, D), num_sms
    )
    return blocks, first_cut, pieces


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cases_have_windows(kernel: ModuleType, case: Case) -> None:
    for num_sms in SMS:
        if num_sms <= H200_SMS:
            assert planned(kernel, case, num_sms)[0] > 0


def test_a_case_of_each_kind(kernel: ModuleType) -> None:
    """Cut or not, with neighbours or without."""
    plans = [planned(kernel, case, H200_SMS) for case in CASES]
    assert {(first > 0, pieces > 1) for _, first, pieces in plans} >= {(True, True), (False, True)}
    sizes = [Sizes(c.B, c.Tq, c.Tk, c.H, c.kv_heads, D) for c in CASES]
    assert {kernel.cluster_of_window(s) for s in sizes} == {1, 2}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_accurate_as_any(case: Case) -> None:
    on_hopper()
    assert_accurate(case, device="cuda", path="split")


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "H", "Hkv"), [(256, 12, 12), (200, 24, 12)])
def test_the_same_bits_every_time(D: int, H: int, Hkv: int) -> None:
    on_hopper()
    q, dout = (torch.randn(2, 1536, H, D, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 768, Hkv, D, device="cuda").bfloat16() for _ in range(2))
    p, spec = solved(q, k, v, dout, None, 0.1), RotationSpec(64)
    first = backward(p, spec)
    for deterministic in (False, False, False, True, True):
        again = backward(p, spec, deterministic=deterministic)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again))


@pytest.mark.gpu
def test_workspaces_hold_what_was_written(kernel: ModuleType) -> None:
    """They come from memory that nobody cleared: of blocks without keys no gradients are there."""
    on_hopper()
    s = Sizes(2, 1536, 768, 12, 12, D)
    q, dout = (torch.randn(2, s.Tq, 12, D, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(2, s.Tk, 12, D, device="cuda").bfloat16() for _ in range(2))
    lengths = torch.tensor([300, 5], device="cuda", dtype=torch.int32)
    p = solved(q, k, v, dout, lengths, 0.0)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = kernel.plan_windows(s, num_sms)
    assert plan[0] > 0
    splits = kernel.dq_splits_of_windows(s, plan[0], num_sms)
    floats = [
        plan[0] * kernel.window_block_bytes(s) // 4,
        splits * s.B * s.H * s.Tq * D,
        kernel.window_part_floats(s, plan),
    ]
    for _ in range(3):
        dirt = [torch.full((max(n, 1),), math.nan, device="cuda") for n in floats]
        del dirt  # the allocator hands it out again
        dq, dk, dv, _ = backward(p)
        assert all(bool(grad.isfinite().all()) for grad in (dq, dk, dv))
        for grad in (dk, dv):
            assert not bool(grad[0, 300:].any()) and not bool(grad[1, 5:].any())
