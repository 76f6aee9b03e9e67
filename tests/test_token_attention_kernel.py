"""The kernels of attention over tokens, whole, on the host: against the operators' CPU kernels in
fp64.

As test_gradient_products_kernel.py: shared memory starts as NaN, buffers have NaN on both sides,
copies land as late or as early as they may. The instructions of a warp are in emulation_warp.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ext.build import load_extension
from fused_rope_xattn import cpu_token_ops
from fused_rope_xattn.config import RotationSpec
from margins import Margins
from problems import assert_tensor_near

SCALE = 0.2
UNTURNED = RotationSpec()


class Sizes(NamedTuple):
    B: int
    Tq: int
    Tk: int
    H: int
    Hkv: int
    D: int
    Dv: int
    splits: int


CASES = {
    "one head a warp": Sizes(1, 1, 40, 8, 8, 64, 1024, 1),
    "two heads a warp": Sizes(1, 1, 37, 16, 16, 64, 1000, 2),
    "queries": Sizes(2, 3, 52, 4, 4, 64, 136, 2),
    "groups": Sizes(2, 2, 70, 6, 3, 128, 200, 3),
    "one key head": Sizes(1, 1, 33, 16, 1, 32, 264, 1),
    "small heads": Sizes(1, 1, 20, 10, 10, 32, 8, 1),
    "all heads of 128": Sizes(1, 1, 37, 8, 8, 128, 1024, 1),
    "all heads of 32": Sizes(1, 1, 35, 16, 16, 32, 1000, 1),
    "parts without keys": Sizes(1, 1, 17, 4, 4, 64, 72, 2),
    "many rows": Sizes(20, 1, 16, 2, 2, 64, 64, 1),
    "long": Sizes(1, 1, 130, 2, 1, 64, 64, 1),
}


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "token_attention_emulated",
        request.config,
        emulates_cuda=True,
        emulation=("emulation_sm90", "emulation_warp"),
    )


class Problem:
    """Tensors in the middle of NaN, and what the kernels make of them."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
        masked: bool = False,
        causal: bool = False,
        rotation: RotationSpec = UNTURNED,
        has_table: bool = False,
        keeps_all: bool = False,
    ) -> None:
        self.sizes, self.dtype, self.causal = sizes, dtype, causal
        self.margins = Margins()
        self.rotation = rotation
        b, tq, tk, h, hkv, d, dv, _ = sizes
        self.q, self.k = self.drawn(b, tq, h, d), self.drawn(b, tk, hkv, d)
        self.x, self.w_v = self.drawn(b, tk, dv), self.drawn(hkv * d, dv, scale=dv**-0.5)
        self.b_v, self.du = self.drawn(hkv * d), self.drawn(h, b, tq, dv)
        self.dlse = self.margins.place(torch.randn(b, h, tq))
        self.key_keep = self.kv_lengths = None
        self.positions = self.cos = self.sin = None
        if has_table:
            shape = b, 1, tk, rotation.rotary_dim // 2
            self.cos, self.sin = (self.margins.place(torch.randn(shape)) for _ in range(2))
        elif rotation.rotary_dim:
            self.positions = torch.randint(-5000, 5000, (b, tk, rotation.axes))
        if masked:
            keep = torch.rand(b, tk) > (-1.0 if keeps_all else 0.2)
            self.key_keep = None if keeps_all else keep
            self.kv_lengths = torch.randint(0, tk + 1, (b,), dtype=torch.int32)
            self.kv_lengths[0] = max(0, tk - 5)
            removed = ~keep | (torch.arange(tk) >= self.kv_lengths[:, None])
            self.k[removed] = math.nan
            self.x[removed] = math.nan

    def drawn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.margins.place((torch.randn(shape) * scale).to(self.dtype))

    def blank(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.margins.place(torch.full(shape, math.nan, dtype=dtype or self.dtype))

    def run(self, kernel: ModuleType, forward: bool, seed: int, **tensors: Tensor | None) -> None:
        given = {name: t.data_ptr() for name, t in tensors.items() if t is not None}
        is_bf16 = self.dtype == torch.bfloat16
        rotation = [self.rotation.rotary_dim, self.rotation.axes, int(self.rotation.interleaved)]
        kernel.run(forward, is_bf16, list(self.sizes), given, rotation, SCALE, self.causal, seed)

    @property
    def inputs(self) -> dict[str, Any]:
        options = {"key_keep": self.key_keep, "kv_lengths": self.kv_lengths}
        return {"q": self.q, "k": self.k, "x": self.x, **options}

    def forward(self, kernel: ModuleType, seed: int) -> dict[str, Tensor]:
        b, tq, _, h, _, d, dv, splits = self.sizes
        wide = {"dtype": torch.float32}
        out = {
            "o": self.blank(b, tq, h, d),
            "lse": self.blank(b, h, tq, **wide),
            "u": self.blank(h, b, tq, dv),
            "u_rest": self.blank(h, b, tq, dv),
        }
        parts = {
            "part_u": self.blank(splits, b, h * tq, dv, **wide),
            "part_rows": self.blank(splits, b, h * tq, 2, **wide),
        }
        self.run(kernel, True, seed, **self.inputs, w_v=self.w_v, b_v=self.b_v, **out, **parts)
        return out

    def backward(self, kernel: ModuleType, seed: int, made: dict[str, Tensor]) -> dict[str, Tensor]:
        b, tq, tk, h, hkv, d, dv, splits = self.sizes
        out = {
            "dq": self.blank(b, tq, h, d),
            "dk": self.blank(b, tk, hkv, d),
            "dx": self.blank(b, tk, dv),
        }
        parts = self.blank(splits, b, h * tq, d, dtype=torch.float32)
        turning = {"k_positions": self.positions, "k_cos": self.cos, "k_sin": self.sin}
        left = {"du": self.du, "dlse": self.dlse, **{n: made[n] for n in ("u", "u_rest", "lse")}}
        self.run(kernel, False, seed, **self.inputs, **left, **turning, **out, part_dq=parts)
        return out

    def check(self, kernel: ModuleType, seed: int) -> None:
        q, k, x, w_v, b_v, du = (
            t.double() for t in (self.q, self.k, self.x, self.w_v, self.b_v, self.du)
        )
        options = self.key_keep, self.kv_lengths, SCALE, self.causal
        o, lse, u, rest = cpu_token_ops.token_attention(q, k, x, w_v, b_v, *options, True)
        made = self.forward(kernel, seed)
        eps = torch.finfo(self.dtype).eps
        assert_tensor_near(made["o"].double(), o, 2, "o", eps)
        assert_tensor_near(made["lse"].double(), lse, 64, "lse", torch.finfo(torch.float32).eps)
        # Weights are rounded to the storage type, hence what is left of that in the rest.
        sums = made["u"].double() + made["u_rest"].double()
        assert_tensor_near(sums, u, 1, "u", eps)
        exact = cpu_token_ops.token_attention_backward(
            *(du, self.dlse.double(), q, k, x, u, rest, lse, *options),
            *(self.positions, self.cos, self.sin),
            *(self.rotation.rotary_dim, self.rotation.interleaved, self.rotation.axes),
            *(self.rotation.base, False),
            *(True, True, True),
        )
        got = self.backward(kernel, seed, made)
        for name, want in zip(("dq", "dk", "dx"), exact, strict=True):
            assert_tensor_near(got[name].double(), want, 4, name, eps)
        assert self.margins.are_untouched


@pytest.mark.parametrize("name", CASES)
def test_matches_definition(kernel: ModuleType, name: str) -> None:
    Problem(CASES[name], torch.bfloat16).check(kernel, seed=0)


@pytest.mark.parametrize("name", ["queries", "small heads"])
def test_fp16(kernel: ModuleType, name: str) -> None:
    Problem(CASES[name], torch.float16).check(kernel, seed=0)


@pytest.mark.parametrize("name", ["two heads a warp", "queries", "groups", "many rows"])
def test_lengths_masks_and_causality(kernel: ModuleType, name: str) -> None:
    Problem(CASES[name], torch.bfloat16, masked=True, causal=False).check(kernel, seed=1)
    Problem(CASES[name], torch.bfloat16, masked=True, causal=True).check(kernel, seed=2)
    Problem(CASES[name], torch.bfloat16, masked=True, keeps_all=True).check(kernel, seed=3)


@pytest.mark.parametrize(
    "rotation",
    [
        RotationSpec(128, base=1024),
        RotationSpec(96, axes=3, base=1024),
        RotationSpec(128, interleaved=False, base=1024),
    ],
)
@pytest.mark.parametrize("has_table", [False, True])
def test_keys_are_turned_back(kernel: ModuleType, rotation: RotationSpec, has_table: bool) -> None:
    sizes = Sizes(2, 2, 36, 4, 2, 128, 64, 1)
    problem = Problem(sizes, torch.bfloat16, rotation=rotation, has_table=has_table)
    problem.check(kernel, seed=3)
    smaller = rotation._replace(rotary_dim=rotation.rotary_dim // 2)
    problem = Problem(sizes._replace(D=64), torch.float16, rotation=smaller, has_table=has_table)
    problem.check(kernel, seed=4)


def test_nan_stays_in_its_head(kernel: ModuleType) -> None:
    sizes = Sizes(1, 1, 20, 4, 2, 64, 64, 1)
    problem = Problem(sizes, torch.bfloat16)
    problem.q[0, 0, 2, 5] = math.nan  # heads 0 and 1 look at keys of head 0
    made = problem.forward(kernel, seed=0)
    got = problem.backward(kernel, 0, made)
    assert bool(made["lse"][0, 2].isnan()) and bool(made["lse"][0, 3].isfinite())
    assert bool(made["o"][0, 0, 2].isnan().all()) and bool(got["dk"][0, :, 1].isnan().all())
    others = made["o"][0, 0, [0, 1, 3]], got["dq"][0, 0, [0, 1, 3]], got["dk"][0, :, 0]
    assert all(bool(x.isfinite().all()) for x in others)


def test_blocks_for_every_multiprocessor(kernel: ModuleType) -> None:
    assert kernel.splits(8, 1500, 132) == 16
    assert kernel.splits(8, 100, 132) == 3  # of two chunks of 16 keys at least
    assert kernel.splits(1, 100000, 132) == 128
    assert kernel.splits(100, 1500, 132) == 1
    assert kernel.splits(1000, 1500, 132) == 1
    assert kernel.splits(1, 0, 132) == 1
