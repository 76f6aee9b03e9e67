"""The Hopper backward for keys and the sum of its parts, whole, on the host, with blocks cut along
their queries: against autograd in fp64.

As test_gradient_products_kernel.py: shared memory starts as NaN, buffers have NaN on both sides,
copies, additions and products happen as late or as early as the barriers allow.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from backward_problems import (
    KEYS,
    Options,
    assert_gradients,
    dq_part_floats,
    draw,
    padded_dim,
)
from ext.build import load_extension
from problems import Sizes

CASES: dict[str, tuple[Sizes, tuple[int, int], Options]] = {
    # sizes, cut (first block, pieces), options
    "uncut": (Sizes(1, 130, 200, 2, 2, 64), (0, 1), Options()),
    "all are cut": (Sizes(1, 200, 130, 1, 1, 64), (0, 2), Options(rotary_dim=64)),
    "the last ones": (Sizes(1, 200, 200, 2, 2, 64), (3, 4), Options(rotary_dim=32)),
    "more pieces than tiles": (Sizes(1, 70, 100, 2, 2, 64), (1, 3), Options()),
    "shared keys": (Sizes(1, 130, 130, 4, 2, 64), (1, 2), Options(rotary_dim=64)),
    "wide": (Sizes(1, 130, 100, 2, 2, 128), (1, 2), Options(rotary_dim=128)),
    "padded": (Sizes(1, 130, 140, 1, 1, 72), (1, 2), Options()),
    "causal": (Sizes(1, 260, 260, 1, 1, 64), (0, 3), Options(causal=True, rotary_dim=64)),
    "lengths": (Sizes(2, 130, 260, 1, 1, 64), (2, 2), Options(lengths=(150, 100), rotary_dim=64)),
    "no keys": (Sizes(2, 70, 40, 1, 1, 64), (0, 2), Options(lengths=(0, 17))),
    "removed keys": (Sizes(1, 130, 140, 1, 1, 64), (1, 2), Options(removes_keys=True)),
    "dropout": (Sizes(1, 130, 140, 2, 1, 64), (0, 2), Options(dropout_p=0.3)),
    "dropout, wide": (Sizes(1, 130, 70, 1, 1, 128), (0, 2), Options(dropout_p=0.3)),
    "without dq": (Sizes(1, 200, 140, 1, 1, 64), (1, 3), Options(needs_dq=False, rotary_dim=64)),
    "widest": (Sizes(1, 130, 70, 1, 1, 200), (0, 2), Options(needs_dq=False, rotary_dim=96)),
    "without dq, wide": (Sizes(1, 130, 70, 1, 1, 128), (0, 2), Options(needs_dq=False)),
}


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "attention_backward_emulated",
        request.config,
        emulates_cuda=True,
        emulation=("emulation_sm90", "emulation_warp"),
    )


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("s", "cut", "o"), CASES.values(), ids=CASES)
def test_gradients(
    kernel: ModuleType, s: Sizes, cut: tuple[int, int], o: Options, seed: int
) -> None:
    workspaces = {}
    if o.needs_dq:
        workspaces["dq_parts"] = torch.zeros(dq_part_floats(s))
    if cut[1] > 1:
        pieces = (s.B * s.Hkv * -(-s.Tk // KEYS) - cut[0]) * cut[1]
        workspaces["dkv_parts"] = torch.full((pieces * 2 * KEYS * padded_dim(s),), math.nan)

    def run(sizes: list[int], addresses: dict[str, int]) -> None:
        kernel.run(sizes, addresses, cut, o.rotary_dim, o.causal, o.dropout_p, seed)

    wanted = ("dq", "dk", "dv") if o.needs_dq else ("dk", "dv")
    assert_gradients(s, draw(s, o, seed), workspaces, run, wanted)
