"""The gradient products' Hopper kernel, whole, on the host: against fp64.

As test_projection_kernel.py: shared memory starts as NaN, buffers have NaN on both sides, copies
and products happen as late or as early as the barriers allow.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from ext.build import load_extension
from margins import Margins

DTYPES = {torch.float16: 2, torch.bfloat16: 3}


class Sizes(NamedTuple):
    """One product: [rows, columns], and the depth of each term."""

    rows: int
    columns: int
    depths: tuple[int, ...]
    over_tokens: bool


def tokens(rows: int, columns: int, *depths: int) -> Sizes:
    return Sizes(rows, columns, depths, over_tokens=False)


def weight(rows: int, columns: int, *depths: int) -> Sizes:
    return Sizes(rows, columns, depths, over_tokens=True)


CASES: dict[str, tuple[Sizes, ...]] = {
    "one step": (tokens(64, 64, 64), weight(64, 64, 64)),
    "whole tiles": (tokens(128, 128, 128), weight(128, 128, 128)),
    "many steps": (tokens(128, 128, 512), weight(128, 128, 512)),
    "parts of tiles": (tokens(37, 136, 72), weight(8, 264, 131), weight(200, 8, 1)),
    "narrow": (tokens(1, 8, 8), weight(8, 8, 7)),
    "two terms": (tokens(70, 72, 136, 40), weight(72, 136, 65, 3)),
    "nothing to add": (weight(16, 24, 0), tokens(5, 8, 0, 0), weight(16, 24, 0, 9)),
    "no results": (tokens(0, 8, 8), weight(8, 0, 5), weight(8, 8, 5)),
    "shared depth": (weight(72, 40, 3200), tokens(70, 40, 64)),
    "shared by some": (weight(8, 136, 3137), weight(16, 24, 0, 3100), tokens(8, 8, 8)),
    "a block": (
        tokens(140, 72, 64),
        tokens(150, 40, 64, 64),
        weight(64, 72, 140),
        weight(64, 40, 150),
        weight(64, 40, 150),
        weight(72, 64, 140),
    ),
}


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "gradient_products_emulated", request.config, emulates_cuda=True, emulation="emulation_sm90"
    )


class Problem:
    """One product's tensors, in the middle of NaN."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        self.sizes = sizes
        self.margins = Margins()
        rows, columns, depths, over_tokens = sizes
        self.terms = []
        for depth in depths:
            left = torch.randn((depth, rows) if over_tokens else (rows, depth)).to(dtype)
            right = torch.randn(depth, columns).to(dtype)
            self.terms.append((self.margins.place(left), self.margins.place(right)))
        self.out = self.margins.place(torch.full((rows, columns), math.nan, dtype=dtype))

    def arguments(self) -> tuple[Any, ...]:
        rows, columns, depths, over_tokens = self.sizes
        terms = [
            (left.data_ptr(), right.data_ptr(), depth)
            for (left, right), depth in zip(self.terms, depths, strict=True)
        ]
        return self.out.data_ptr(), rows, columns, over_tokens, terms

    def check(self) -> None:
        want = torch.zeros(self.out.shape, dtype=torch.float64)
        for left, right in self.terms:
            want += (left.t() if self.sizes.over_tokens else left).double() @ right.double()
        assert not bool(self.out.isnan().any()), "an element was not written, or NaN was read"
        error = (self.out.double() - want).abs()
        half_ulp = torch.finfo(self.out.dtype).eps / 2
        assert bool((error <= 1.001 * half_ulp * want.abs() + 1e-4).all()), float(error.max())
        assert self.margins.are_untouched


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_definition(kernel: ModuleType, name: str, dtype: torch.dtype) -> None:
    for seed in range(2):
        problems = [Problem(sizes, dtype) for sizes in CASES[name]]
        kernel.multiply([p.arguments() for p in problems], DTYPES[dtype], 8, seed)
        for problem in problems:
            problem.check()


def arguments(sizes: Sizes, start: int = 0) -> tuple[Any, ...]:
    terms = [(start, 0, depth) for depth in sizes.depths]
    return 0, sizes.rows, sizes.columns, sizes.over_tokens, terms


def test_the_longest_blocks_come_first(kernel: ModuleType) -> None:
    products = tokens(300, 136, 64), weight(8, 8, 700), tokens(0, 8, 8), tokens(5, 8, 640, 72)
    order, blocks = kernel.plan([arguments(p) for p in products], 132)
    assert order == [(5, 12, 1, 0), (8, 11, 1, 1), (300, 1, 1, 2)]
    assert blocks == 2 + 3 * 2


def test_few_deep_tiles_are_shared(kernel: ModuleType) -> None:
    def splits(sizes: Sizes, num_sms: int = 132) -> int:
        ((_, steps, found, _),), blocks = kernel.plan([arguments(sizes)], num_sms)
        tiles = -(-sizes.rows // 128) * -(-sizes.columns // 128)
        assert blocks == tiles * found and found <= max(1, steps)
        return int(found)

    assert splits(weight(256, 64, 28736)) == 19  # 449 steps
    assert splits(weight(256, 256, 4096)) == 3
    assert splits(weight(256, 256, 48 * 64)) == 1
    assert splits(weight(768, 768, 65536)) == 1  # 36 tiles
    assert splits(weight(640, 768, 65536)) == 4  # 30 tiles
    assert splits(weight(128, 128, 10**6)) == 132
    assert splits(tokens(128, 128, 65536)) == 1
    # A shared product's blocks are short: others come before them.
    order, _ = kernel.plan([arguments(weight(128, 128, 4096)), arguments(tokens(8, 8, 2560))], 132)
    assert order == [(8, 40, 1, 0), (128, 64, 3, 1)]


def test_obstacles(kernel: ModuleType) -> None:
    bf16 = DTYPES[torch.bfloat16]
    assert kernel.obstacle([arguments(tokens(7, 8, 8)), arguments(weight(8, 8, 7))], bf16) == ""
    assert "bf16" in kernel.obstacle([arguments(tokens(8, 8, 8))], 0)
    for sizes in (tokens(8, 9, 8), tokens(8, 8, 9), weight(9, 8, 8), weight(8, 9, 8)):
        assert "multiples of 8" in kernel.obstacle([arguments(sizes)], bf16)
    assert "16 bytes" in kernel.obstacle([arguments(tokens(8, 8, 8), start=8)], bf16)
