"""The Hopper backward for 256 dims by windows of score gradients, whole, on the host: against
autograd in fp64.

As test_key_pieces_kernel.py: shared memory and workspaces start as NaN, buffers have NaN on both
sides, copies and products happen as late or as early as the barriers allow.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from backward_problems import KEYS, Options, assert_gradients, dq_part_floats, draw
from ext.build import load_extension
from problems import Sizes


class Windows(NamedTuple):
    blocks: int  # of keys, in each
    splits: int = 1  # of dq
    cut: tuple[int, int, int] | None = None  # blocks that are whole, stride, share
    first_split: int = 0  # tiles of the first of a query's blocks for dq


HALF = Options(dtype=torch.float16)
CASES: dict[str, tuple[Sizes, Windows, Options]] = {
    "a block each": (Sizes(1, 130, 300, 1, 1, 256), Windows(1), Options()),
    "a window too long": (Sizes(1, 64, 130, 1, 1, 256), Windows(3), Options()),
    "across heads": (Sizes(1, 70, 200, 3, 3, 200), Windows(3, splits=2), Options()),
    "across a batch": (Sizes(2, 65, 200, 2, 1, 256), Windows(3), Options(rotary_dim=64)),
    # More tiles than there are stages
    "many queries": (Sizes(1, 330, 130, 1, 1, 256), Windows(1), Options()),
    "many keys": (Sizes(1, 64, 700, 1, 1, 256), Windows(4), Options()),
    "many heads": (Sizes(1, 70, 130, 5, 1, 256), Windows(1, splits=2), Options(rotary_dim=256)),
    "grouped": (Sizes(1, 65, 200, 4, 2, 136), Windows(3), Options(rotary_dim=96)),
    "lengths": (Sizes(2, 70, 260, 1, 1, 256), Windows(2, splits=2), Options(lengths=(150, 0))),
    "no later keys": (Sizes(1, 64, 400, 1, 1, 256), Windows(1), Options(lengths=(70,))),
    "no first keys": (
        Sizes(2, 64, 200, 1, 1, 256),
        Windows(1, splits=3),
        Options(lengths=(0, 129), rotary_dim=32),
    ),
    "one query": (Sizes(1, 1, 200, 2, 1, 256), Windows(1), Options(lengths=(190,))),
    "dropout": (Sizes(1, 130, 140, 2, 1, 256), Windows(1, splits=2), Options(dropout_p=0.3)),
    "rotated": (Sizes(1, 200, 260, 1, 1, 200), Windows(2, splits=3), Options(rotary_dim=192)),
    "more splits than tiles": (Sizes(1, 64, 140, 1, 1, 136), Windows(1, splits=5), Options()),
    "a longer split": (Sizes(1, 130, 600, 1, 1, 256), Windows(3, 3, None, 4), Options()),
    "a longer split, lengths": (
        Sizes(2, 70, 520, 2, 1, 256),
        Windows(4, 2, None, 3),
        Options(lengths=(330, 130), rotary_dim=64),
    ),
    "nothing for other splits": (Sizes(1, 64, 260, 4, 2, 136), Windows(2, 3, None, 9), Options()),
    # Shares of a block's own
    "cut": (Sizes(1, 200, 260, 1, 1, 256), Windows(2, 1, (0, 4, 2)), Options(rotary_dim=64)),
    "cut within a window": (Sizes(1, 130, 600, 1, 1, 256), Windows(2, 2, (1, 3, 1)), Options()),
    "some tiles each": (Sizes(1, 300, 300, 1, 1, 256), Windows(2, 1, (0, 6, 2)), Options()),
    "cut, lengths, dropout": (
        Sizes(2, 130, 200, 2, 1, 256),
        Windows(3, 2, (0, 4, 2)),
        Options(lengths=(200, 60), dropout_p=0.2, rotary_dim=128),
    ),
    # Shares that end a block and begin the next
    "even": (Sizes(1, 300, 300, 1, 1, 256), Windows(2, 2, (0, 5, 3)), Options(rotary_dim=64)),
    "even, one window": (Sizes(1, 190, 600, 1, 1, 256), Windows(5, 1, (0, 3, 2)), Options()),
    "even behind whole ones": (Sizes(1, 190, 900, 1, 1, 200), Windows(4, 2, (1, 3, 2)), Options()),
    "even, lengths": (
        Sizes(2, 300, 260, 1, 1, 256),
        Windows(5, 2, (0, 5, 3)),
        Options(lengths=(0, 130), rotary_dim=64),
    ),
    "even, grouped": (
        Sizes(1, 190, 260, 4, 2, 256),
        Windows(5, 1, (0, 3, 2)),
        Options(lengths=(140,), rotary_dim=96),
    ),
    "even, dropout": (
        Sizes(2, 200, 130, 2, 1, 136),
        Windows(3, 2, (0, 4, 3)),
        Options(dropout_p=0.2, rotary_dim=128),
    ),
    "fp16": (Sizes(1, 130, 200, 1, 1, 256), Windows(1), HALF._replace(rotary_dim=64)),
    "fp16, dropout": (
        Sizes(1, 190, 200, 2, 1, 256),
        Windows(1, cut=(0, 3, 2)),
        HALF._replace(dropout_p=0.3),
    ),
}


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "attention_backward_emulated",
        request.config,
        emulates_cuda=True,
        emulation=("emulation_sm90", "emulation_warp"),
    )


@pytest.mark.parametrize(("s", "windows", "o"), CASES.values(), ids=CASES)
def test_gradients(kernel: ModuleType, s: Sizes, windows: Windows, o: Options) -> None:
    blocks, splits, cut, first_split = windows
    last_blocks = (s.B * s.Hkv * -(-s.Tk // KEYS) - 1) % blocks + 1
    whole, stride, share = cut or (blocks, 1, 1)
    plan = blocks, min(whole, blocks), min(whole, last_blocks), stride, share, first_split
    words = kernel.window_bytes(s, blocks) // 2
    workspaces = {
        "dq_parts": torch.full((splits * dq_part_floats(s),), math.nan),
        "gradients": torch.full((words,), math.nan, dtype=o.dtype),
    }
    if cut is not None:
        workspaces["dkv_parts"] = torch.full((kernel.part_floats(s, plan),), math.nan)
    seed = 1

    def run(sizes: list[int], addresses: dict[str, int]) -> None:
        is_half = o.dtype == torch.float16
        turns = o.rotary_dim, o.dropout_p
        kernel.run_windows(sizes, addresses, plan, splits, *turns, is_half, seed)

    assert_gradients(s, draw(s, o, seed), workspaces, run)
