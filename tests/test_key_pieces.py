"""The Hopper backward's blocks of keys, cut where their last wave would leave most of the GPU idle:
the plan on any machine, the gradients on a Hopper."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from torch import Tensor

from backward_calls import backward, on_hopper, solved
from ext.build import load_extension
from fused_rope_xattn.config import RotationSpec
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.cases import Case
from problems import Sizes, assert_tensor_near

H200_SMS = 132


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension("helpers", request.config)


# --------------------------------------------------------------------------------------- the plan

MAST3R = Sizes(2, 768, 768, 12, 12, 64)
PLANS = {
    "mast3r": (MAST3R, (132, 6)),
    "mast3r d32": (MAST3R._replace(D=32), (132, 6)),
    "mast3r d128": (MAST3R._replace(D=128), (132, 6)),
    "one block too many": (Sizes(1, 4096, 133 * 128, 1, 1, 128), (132, 22)),
    "shared keys": (Sizes(2, 768, 768, 24, 12, 64), (132, 6)),
    # Fewer blocks than multiprocessors are a last wave, too.
    "keys of a text": (Sizes(2, 4096, 77, 10, 10, 64), (0, 6)),
    "whole waves": (Sizes(2, 768, 768, 11, 11, 64), (0, 1)),
    "a last wave that fills the GPU": (Sizes(1, 4096, 28736, 1, 1, 256), (0, 1)),
    "more than half a wave": (MAST3R._replace(B=1), (0, 1)),
    "many waves": (Sizes(4, 4096, 4096, 16, 16, 128), (0, 1)),
    "one tile of queries": (Sizes(1, 64, 128, 1, 1, 64), (0, 1)),
    "hardly any work": (Sizes(1, 100, 100, 2, 2, 64), (0, 1)),
    "nothing": (Sizes(0, 768, 768, 12, 12, 64), (0, 1)),
}


@pytest.mark.parametrize(("sizes", "cut"), PLANS.values(), ids=PLANS)
def test_what_is_cut(kernel: ModuleType, sizes: Sizes, cut: tuple[int, int]) -> None:
    assert kernel.cut_last_wave(sizes, False, H200_SMS) == cut
    # Causal blocks differ in length.
    assert kernel.cut_last_wave(sizes, True, H200_SMS) == (0, 1)


def test_pieces_fill_the_gpu_and_no_more(kernel: ModuleType) -> None:
    """Within a few waves; parts do not take all memory."""
    for B, Tk, Tq, D in itertools.product(
        (1, 2, 3, 8), (77, 768, 5000), (77, 768, 5000), (32, 128)
    ):
        sizes = Sizes(B, Tq, Tk, 12, 12, D)
        first, pieces = cut = kernel.cut_last_wave(sizes, False, H200_SMS)
        blocks = kernel.key_blocks(sizes, 0, 1)
        if pieces == 1:
            assert kernel.key_blocks(sizes, *cut) == blocks
            assert kernel.dkv_part_floats(sizes, *cut) == 0
            continue
        last_wave = blocks - first
        assert first % H200_SMS == 0 and 0 < last_wave < H200_SMS
        assert kernel.key_blocks(sizes, *cut) == first + last_wave * pieces
        assert last_wave * pieces <= 4 * H200_SMS
        assert kernel.dkv_part_floats(sizes, *cut) == last_wave * pieces * 2 * 128 * D


def test_parts_are_limited(kernel: ModuleType) -> None:
    """Many queries, large groups and wide heads would gain by hundreds of MiB of parts."""
    for queries, blocks in (4096, 82), (16384, 90), (131072, 103):
        sizes = Sizes(1, queries, 128 * blocks, 8, 1, 256)
        cut = kernel.cut_last_wave(sizes, False, H200_SMS)
        assert kernel.dkv_part_floats(sizes, *cut) <= 2**24


def test_every_piece_of_every_block_is_in_the_grid_once(kernel: ModuleType) -> None:
    got = [kernel.key_block_of(132, 6, index) for index in range(132 + 12 * 6)]
    whole = [(block, 0) for block in range(132)]
    assert got == whole + list(itertools.product(range(132, 144), range(6)))
    assert [kernel.key_block_of(0, 1, index) for index in (0, 5)] == [(0, 0), (5, 0)]


def test_pieces_are_equal_parts(kernel: ModuleType) -> None:
    int_max = 2**31 - 1
    for begin, length, count in itertools.product((0, 3), (0, 1, 5, 12, 13), (1, 2, 5, 12, 20)):
        parts = [kernel.part_of_range(begin, begin + length, i, count) for i in range(count)]
        assert [i for part in parts for i in range(*part)] == list(range(begin, begin + length))
        lengths = [end - start for start, end in parts]
        assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 0
    # A block that sees no query: begin may lie beyond end.
    assert kernel.part_of_range(7, 4, 1, 3) == (7, 7)
    assert kernel.part_of_range(0, int_max, 31, 32)[1] == int_max


# ---------------------------------------------------------------------------------- the gradients

# What each is for, with so many multiprocessors as an H200 has.
CUT_CASES = [
    Case("mast3r", 2, 768, 768, H=12, D=64, Dq=96, dtype="bf16"),
    Case("fp16", 2, 768, 768, H=12, D=64, Dq=96, dtype="fp16", lse=True),
    Case("narrow", 2, 768, 768, H=12, D=32, Dq=96, dtype="bf16"),
    Case("wide", 2, 768, 768, H=12, D=128, Dq=96, dtype="bf16"),
    Case("widest", 2, 1536, 768, H=12, D=256, Dq=96, dtype="bf16"),
    Case("padded", 2, 750, 700, H=12, D=72, Dq=96, dtype="bf16", lse=True),
    Case("grouped", 2, 768, 768, H=24, Hkv=12, D=64, Dq=96, dtype="bf16"),
    Case("lengths", 2, 768, 768, H=12, D=64, Dq=96, dtype="bf16", lengths="ragged"),
    Case("no_keys", 2, 768, 768, H=12, D=128, Dq=96, dtype="fp16", lengths="zero", mask="keys"),
    Case("masks", 2, 768, 768, H=12, D=64, Dq=96, dtype="bf16", mask="rows", bias="1hqk-inf"),
    Case("dropout", 2, 768, 768, H=12, D=64, Dq=96, dtype="bf16", dropout_p=0.2, lse=True),
    Case("dropout_wide", 2, 768, 768, H=12, D=128, Dq=96, dtype="bf16", dropout_p=0.1),
    Case("few_keys", 2, 1000, 77, H=10, D=64, Dq=96, dtype="bf16"),
]
CAUSAL = Case("causal", 2, 768, 768, H=12, D=64, Dq=96, dtype="bf16", causal=True)


def cut_of(kernel: ModuleType, case: Case, num_sms: int) -> tuple[int, int]:
    padded = next(d for d in (32, 64, 128, 256) if d >= case.D)
    sizes = Sizes(case.B, case.Tq, case.Tk, case.H, case.Hkv or case.H, padded)
    first, pieces = kernel.cut_last_wave(sizes, case.causal, num_sms)
    return first, pieces


@pytest.mark.parametrize("case", CUT_CASES, ids=[case.name for case in CUT_CASES])
def test_the_cases_are_cut(kernel: ModuleType, case: Case) -> None:
    assert cut_of(kernel, case, H200_SMS)[1] > 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CUT_CASES, CAUSAL], ids=lambda case: case.name)
def test_as_accurate_as_any(case: Case) -> None:
    on_hopper()
    assert_accurate(case, device="cuda", path="split")


TURNS = {
    "none": None,
    "interleaved": RotationSpec(32),
    "half": RotationSpec(32, False),
}
KINDS = {  # D, H, Hkv, Tk, dropout_p
    "plain": (64, 12, 12, 768, 0.0),
    "narrow": (32, 12, 12, 768, 0.0),
    "wide": (128, 12, 12, 768, 0.0),
    "widest": (256, 12, 12, 768, 0.0),
    "grouped": (64, 24, 12, 768, 0.0),
    "odd": (72, 12, 12, 700, 0.0),
    "dropout": (64, 12, 12, 768, 0.2),
    "dropout_wide": (128, 12, 12, 768, 0.2),
    "few_keys": (64, 12, 12, 77, 0.0),
}
TQ = 768
MORE = 64  # times the batch


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("spec", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize(("D", "H", "Hkv", "Tk", "dropout_p"), KINDS.values(), ids=KINDS)
def test_as_if_uncut(
    D: int, H: int, Hkv: int, Tk: int, dropout_p: float, spec: RotationSpec | None, ragged: bool
) -> None:
    """Beside so many more of a batch that a last wave does not matter, nothing is cut: the same
    problems with the same dropout, whose sums over queries have another order."""
    on_hopper()
    torch.manual_seed(0)
    B = 2

    def draw(T: int, heads: int) -> Tensor:
        return torch.randn(B, T, heads, D, device="cuda", dtype=torch.bfloat16)

    def beside_more(t: Tensor) -> Tensor:
        return t.repeat(MORE, *[1] * (t.dim() - 1))

    q, k, v, dout = draw(TQ, H), draw(Tk, Hkv), draw(Tk, Hkv), draw(TQ, H)
    lengths = torch.tensor([Tk, Tk // 3], device="cuda", dtype=torch.int32) if ragged else None
    few = solved(q, k, v, dout, lengths, dropout_p)
    many_lengths = None if lengths is None else beside_more(lengths)
    q, k, v, dout = (beside_more(t) for t in (q, k, v, dout))
    many = solved(q, k, v, dout, many_lengths, dropout_p)
    for deterministic, need_dq in ((False, True), (True, True), (False, False)):
        got = backward(few, spec, deterministic=deterministic, need_dq=need_dq)
        want = backward(many, spec, deterministic=deterministic, need_dq=need_dq)
        for name, a, b in zip(("dq", "dk", "dv"), got, want):
            if a.numel():
                assert_tensor_near(a, b[:B], 2.0, f"{name}, {deterministic=}, {need_dq=}")


@pytest.mark.gpu
@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_sums_of_pieces_have_the_same_bits_every_time(D: int) -> None:
    on_hopper()
    q, k, v, dout = (torch.randn(2, TQ, 12, D, device="cuda").bfloat16() for _ in range(4))
    p, spec = solved(q, k, v, dout, None, 0.0), RotationSpec(D)
    for deterministic in (False, True):
        first = backward(p, spec, deterministic=deterministic)
        for _ in range(5):
            again = backward(p, spec, deterministic=deterministic)
            for i in range(3) if deterministic else (1, 2):
                assert torch.equal(first[i], again[i])


@pytest.mark.gpu
def test_workspaces_hold_what_is_added_up(kernel: ModuleType) -> None:
    """Parts come from memory that nobody cleared: a piece without queries must write its zeros."""
    on_hopper()
    q, dout = (torch.randn(2, TQ, 12, 64, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(2, TQ, 12, 64, device="cuda").bfloat16() for _ in range(2))
    # The second of the batch has the blocks that are cut, most of them without a key.
    p = solved(q, k, v, dout, torch.tensor([TQ, 5], device="cuda", dtype=torch.int32), 0.0)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    cut = kernel.cut_last_wave(MAST3R, False, num_sms)
    floats = kernel.dkv_part_floats(MAST3R, *cut)
    for _ in range(3):
        dirt = [torch.full((max(floats, 1),), float("nan"), device="cuda") for _ in range(4)]
        del dirt  # the allocator hands it out again
        _, dk, dv, _ = backward(p)
        assert bool(dk.isfinite().all()) and bool(dv.isfinite().all())
        assert not bool(dk[1, 5:].any()) and not bool(dv[1, 5:].any())


def test_kinds_are_cut_unless_beside_more(kernel: ModuleType) -> None:
    for D, H, Hkv, Tk, _ in KINDS.values():
        padded = next(d for d in (32, 64, 128, 256) if d >= D)
        sizes = Sizes(2, TQ, Tk, H, Hkv, padded)
        assert kernel.cut_last_wave(sizes, False, H200_SMS)[1] > 1
        many = sizes._replace(B=2 * MORE)
        assert kernel.cut_last_wave(many, False, H200_SMS) == (0, 1)
