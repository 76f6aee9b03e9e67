"""The Hopper backward for 256 dims by windows of score gradients: the plan on any machine, the
gradients on a Hopper."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from random import Random
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

Shares = tuple[int, int, int]  # tiles of a block, tiles from a block to the next, of a piece
Cut = tuple[int, Shares]  # blocks that are whole, shares of the others
Plan = tuple[int, Cut, Cut]  # blocks of a window, how they are cut, and the last window's

NONE: Plan = (0, (0, (0, 0, 0)), (0, (0, 0, 0)))


def whole(blocks: int) -> Cut:
    return blocks, (1, 1, 1)


def planned(kernel: ModuleType, s: Sizes, num_sms: int) -> Plan:
    plan: Plan = kernel.plan_windows(s, num_sms)
    return plan


def cut_of(plan: Plan, s: Sizes, end: int) -> Cut:
    """That of the window which ends with that block."""
    return plan[1] if end < all_blocks(s) else plan[2]


def waves_and_rest(s: Sizes, plan: Plan) -> Iterator[tuple[int, Cut]]:
    """Blocks of a window, and its cut."""
    blocks, cut, last_cut = plan
    yield blocks, cut
    yield (all_blocks(s) - 1) % blocks + 1, last_cut


PLANS: dict[str, tuple[Sizes, Plan]] = {
    # 93 blocks, of which each multiprocessor has 46 tiles
    "sam2": (SAM2, (132, whole(132), (0, (64, 64, 46)))),
    "waves that find room": (
        Sizes(1, 2048, 4 * 132 * KEYS, 1, 1, D),
        (264, whole(264), whole(264)),
    ),
    # 13 pieces each of the ten blocks beyond a wave
    "a few blocks more": (Sizes(2, 4096, 9000, 1, 1, D), (132, whole(132), (0, (64, 65, 5)))),
    "a last wave that nearly fills the GPU": (
        Sizes(2, 2048, 2048, 8, 8, D),
        (132, whole(132), whole(124)),
    ),
    # A window of twelve blocks costs more than it saves.
    "a few short blocks more": (Sizes(2, 768, 768, 12, 12, D), NONE),
    "few queries": (Sizes(8, 77, 4096, 8, 8, D), NONE),
    "no queries": (Sizes(1, 0, 28736, 1, 1, D), NONE),
    # What a wave of blocks has would not find room.
    "shared keys": (
        Sizes(1, 768, 18432, 8, 1, D),
        (72, (0, (12, 12, 7)), (0, (12, 12, 7))),
    ),
    "many queries": (
        Sizes(1, 16384, 28736, 1, 1, D),
        (38, (0, (256, 256, 74)), (0, (256, 256, 68))),
    ),
    "nearly a wave": (Sizes(1, 5000, 28736, 1, 1, D), (113, whole(113), whole(112))),
    # Blocks for dk are not cut: six of them would leave most of the GPU idle.
    "too many queries": (Sizes(1, 100_000, 28736, 1, 1, D), NONE),
    "no block finds room": (Sizes(1, 1_000_000, 28736, 1, 1, D), NONE),
    "a wave": (Sizes(1, 4096, 132 * KEYS, 1, 1, D), NONE),
    "few keys": (Sizes(1, 4096, 77, 8, 8, D), NONE),
    "nothing": (Sizes(0, 768, 768, 12, 12, D), NONE),
}


@pytest.mark.parametrize(("sizes", "plan"), PLANS.values(), ids=PLANS)
def test_what_windows_there_are(kernel: ModuleType, sizes: Sizes, plan: Plan) -> None:
    assert planned(kernel, sizes, H200_SMS) == plan


def test_windows_are_limited(kernel: ModuleType) -> None:
    """Never all gradients at once, and never many bytes, whatever the problem."""
    assert kernel.most_window_bytes == MOST_BYTES
    count = 0
    for s, num_sms in itertools.product(MANY_SIZES, SMS):
        plan = planned(kernel, s, num_sms)
        blocks = plan[0]
        if blocks == 0:
            assert plan == NONE
            continue
        count += 1
        assert 0 < blocks < all_blocks(s)
        block_bytes = kernel.window_block_bytes(s)
        assert block_bytes == s.H // s.Hkv * -(-s.Tq // TILE) * TILE * KEYS * 2
        assert blocks * block_bytes <= MOST_BYTES
        if num_sms * block_bytes <= MOST_BYTES:
            assert blocks % num_sms == 0
        for n, (kept, _) in waves_and_rest(s, plan):
            assert kept == n or kept == n // num_sms * num_sms
    assert count > 1000


def test_parts_of_a_window_find_room(kernel: ModuleType) -> None:
    """Those of dv of the blocks that are cut, in the window that has most of them."""
    for s, num_sms in itertools.product(MANY_SIZES, SMS):
        plan = planned(kernel, s, num_sms)
        if plan[0] == 0:
            continue
        parts = [
            kernel.parts_of_block(shares, n - kept - 1)[1]
            for n, (kept, shares) in waves_and_rest(s, plan)
            if n > kept
        ]
        assert kernel.window_part_floats(s, plan) == max(parts, default=0) * KEYS * D
        assert max(parts, default=0) <= kernel.most_pieces


# ------------------------------------------------------------------------------------- the pieces


def drawn_shares(kernel: ModuleType) -> Iterator[tuple[int, Shares, int]]:
    """Blocks, shares and multiprocessors as a plan might have them, and others."""
    random = Random(1)
    for _ in range(1500):
        num_sms = random.choice(SMS)
        blocks = random.randrange(1, min(num_sms, kernel.most_cut_blocks) + 1)
        tiles = random.choice((1, 2, 12, 63, 64, random.randrange(1, 2000)))
        if random.random() < 0.5:
            yield blocks, kernel.equal_shares(tiles, random.randrange(1, tiles + 1)), num_sms
        else:
            yield blocks, kernel.even_shares(tiles, blocks, num_sms), num_sms


def pieces_of(kernel: ModuleType, shares: Shares, block: int) -> list[tuple[int, int]]:
    begin, end = kernel.parts_of_block(shares, block)
    return [kernel.tiles_of_piece(shares, block, piece) for piece in range(end - begin)]


def test_every_tile_of_a_block_is_in_one_piece(kernel: ModuleType) -> None:
    for blocks, shares, _ in drawn_shares(kernel):
        tiles, _, share = shares
        for block in range(blocks):
            pieces = pieces_of(kernel, shares, block)
            assert [t for piece in pieces for t in range(*piece)] == list(range(tiles))
            assert all(0 < end - begin <= share for begin, end in pieces)


def test_every_piece_has_a_part(kernel: ModuleType) -> None:
    """In the blocks' order, and no part is of two pieces."""
    for blocks, shares, _ in drawn_shares(kernel):
        ends = 0
        for block in range(blocks):
            begin, end = kernel.parts_of_block(shares, block)
            assert ends <= begin < end
            ends = end


def is_within_limits(kernel: ModuleType, shares: Shares, blocks: int) -> bool:
    parts = [kernel.parts_of_block(shares, block) for block in range(blocks)]
    return bool(
        parts[-1][1] <= kernel.most_pieces
        and max(end - begin for begin, end in parts) <= kernel.most_pieces_of_block
    )


def test_the_longest_pieces_start_first(kernel: ModuleType) -> None:
    """And all of them do, once."""
    count = 0
    for blocks, shares, _ in drawn_shares(kernel):
        if not is_within_limits(kernel, shares, blocks):
            continue
        count += 1
        order = kernel.order_pieces(shares, blocks)
        pieces = {
            (block, i): end - begin
            for block in range(blocks)
            for i, (begin, end) in enumerate(pieces_of(kernel, shares, block))
        }
        assert sorted(order) == sorted(pieces)
        lengths = [pieces[piece] for piece in order]
        assert lengths == sorted(lengths, reverse=True)
    assert count > 500


def end_of(lengths: list[float], num_sms: int) -> float:
    """As the hardware hands out blocks in order."""
    ends = [0.0] * num_sms
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def test_multiprocessors_end_together(kernel: ModuleType) -> None:
    """After a share, and a start for each of its two pieces."""
    start = 3.5 / 2.4
    for blocks, shares, num_sms in drawn_shares(kernel):
        if not is_within_limits(kernel, shares, blocks):
            continue
        order = kernel.order_pieces(shares, blocks)
        is_even = shares == kernel.even_shares(shares[0], blocks, num_sms)
        if not is_even and len(order) > num_sms:
            continue
        lengths = [
            start + end - begin for begin, end in (kernel.tiles_of_piece(shares, *p) for p in order)
        ]
        starts = 2 if is_even else 1
        assert end_of(lengths, num_sms) <= starts * start + shares[2] + 1e-6


def test_windows_are_cut_where_that_gains(kernel: ModuleType) -> None:
    """As much as the model knows, beside the whole waves of the window."""
    cut = 0
    for s, num_sms in itertools.product(MANY_SIZES, SMS):
        if s.Tq > 20_000:
            continue
        for blocks in (1, num_sms // 2 + 1, num_sms - 1, num_sms, num_sms + 2):
            kept, shares = kernel.cut_window(s, blocks, num_sms)
            if kept == blocks:
                continue
            cut += 1
            assert kept == blocks // num_sms * num_sms
            uncut = 3.5 + 2.4 * shares[0] * s.H // s.Hkv
            assert kernel.cut_time(s, shares, blocks - kept, num_sms) < 0.9 * uncut
            assert is_within_limits(kernel, shares, blocks - kept)
    assert cut > 1000


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
        blocks = planned(kernel, s, num_sms)[0]
        if blocks > 0:
            assert 1 <= kernel.dq_splits_of_windows(s, blocks, num_sms) <= 16
    assert kernel.dq_splits_of_windows(SAM2, 132, H200_SMS) > 1


def test_every_tile_of_keys_is_in_one_split(kernel: ModuleType) -> None:
    for begin, length, splits, first in itertools.product(
        (0, 3), (0, 1, 5, 12, 190), (1, 2, 4), (0, 1, 4, 12, 200)
    ):
        if splits == 1 and first > 0:
            continue
        parts = [
            kernel.split_of_tiles(begin, begin + length, i, splits, first) for i in range(splits)
        ]
        assert [t for part in parts for t in range(*part)] == list(range(begin, begin + length))
        if first > 0:
            assert parts[0] == (begin, begin + min(first, length))
    # A head without keys: begin may lie beyond end.
    assert all(b >= e for b, e in (kernel.split_of_tiles(7, 4, i, 3, 2) for i in range(3)))


def test_a_longer_split_fills_what_dk_leaves(kernel: ModuleType) -> None:
    """By as much as was thought, when the hardware hands out blocks in order."""
    first, time, equal_time = kernel.plan_splits(SAM2, 132, 225, 4, H200_SMS)
    assert (first, time, equal_time) == (100, 109, 127)
    longer = 0
    for s, num_sms in itertools.product(MANY_SIZES, SMS):
        if planned(kernel, s, num_sms)[0] == 0 or s.Tq > 5000:
            continue
        for blocks, splits in itertools.product((1, 5, num_sms // 2, num_sms - 33), (2, 4, 7)):
            if not 0 < blocks <= all_blocks(s):
                continue
            first, time, equal_time = kernel.plan_splits(s, 0, blocks, splits, num_sms)
            assert time <= equal_time
            if first == 0:
                continue
            longer += 1
            group, tiles = s.H // s.Hkv, blocks * 2
            of_split = group * -(-s.Tq // QUERIES)
            times: list[float] = [8 + group * -(-s.Tq // TILE)] * blocks
            for split in range(splits):
                begin, end = kernel.split_of_tiles(0, tiles, split, splits, first)
                times += [8 + end - begin] * of_split
            assert end_of(times, num_sms) <= time + 1e-6
    assert longer > 20


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
    # Many blocks beyond a wave
    Case("even", 1, 2000, 28000, H=1, D=256, Dq=96, dtype="bf16", lse=True),
    Case("even_lengths", 2, 1536, 1400, H=10, D=256, Dq=96, dtype="bf16", lengths="ragged"),
]


def sizes_of(case: Case) -> Sizes:
    return Sizes(case.B, case.Tq, case.Tk, case.H, case.kv_heads, D)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cases_have_windows(kernel: ModuleType, case: Case) -> None:
    for num_sms in SMS:
        if num_sms <= H200_SMS:
            assert planned(kernel, sizes_of(case), num_sms)[0] > 0


def test_a_case_of_each_kind(kernel: ModuleType) -> None:
    """Whole blocks, shares of a block's own or not, in windows of a wave or less; with neighbours
    or without."""
    kinds = set()
    for s in map(sizes_of, CASES):
        plan = planned(kernel, s, H200_SMS)
        for n, (kept, (_, stride, share)) in waves_and_rest(s, plan):
            kinds.add("whole" if n == kept else "equal" if stride % share == 0 else "even")
        kinds.add("wave" if plan[0] % H200_SMS == 0 else "less")
        kinds.add(f"clusters of {kernel.cluster_of_window(s)}")
    assert kinds == {"whole", "equal", "even", "wave", "less", "clusters of 1", "clusters of 2"}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_accurate_as_any(case: Case) -> None:
    on_hopper()
    assert_accurate(case, device="cuda", path="split")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("D", "H", "Hkv", "Tk"), [(256, 12, 12, 768), (200, 24, 12, 768), (256, 10, 10, 1400)]
)
def test_the_same_bits_every_time(D: int, H: int, Hkv: int, Tk: int) -> None:
    on_hopper()
    q, dout = (torch.randn(2, 1536, H, D, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(2, Tk, Hkv, D, device="cuda").bfloat16() for _ in range(2))
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
    plan = planned(kernel, s, num_sms)
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
