"""Grouped projections: the operator on any machine, its kernel on a Hopper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from formulas import plain_norm_rope, transposed_values
from fused_rope_xattn import Norm, grouped, ops, plan, split
from fused_rope_xattn.config import NormSpec, RotationSpec
from fused_rope_xattn.ops import HeadsProjection, TurningTensors
from fused_rope_xattn.planner import GPU
from fused_rope_xattn.rope import cos_sin
from fused_rope_xattn.verify.tf32 import round_to_tf32
from problems import assert_tensor_near

UNTURNED = RotationSpec()
TILES = 5


# ------------------------------------------------------------------------------- operator, on CPU


def turning(
    spec: RotationSpec, kind: str, batch: int, tokens: int, heads: int, device: str = "cpu"
) -> TurningTensors:
    """Positions ("implicit", "int32", "int64", "fp32", "fp64") or tables ("table", "full")."""
    if spec.rotary_dim == 0 or kind == "implicit":
        return TurningTensors(None, None, None)
    if kind in ("table", "full"):
        width = spec.rotary_dim if spec.full_width else spec.rotary_dim // 2
        shape = (batch, heads, tokens, width)
        return TurningTensors(
            None, torch.randn(shape, device=device), torch.randn(shape, device=device)
        )
    dtypes = {"int32": torch.int32, "int64": torch.int64, "fp32": torch.float32}
    positions = torch.randint(-5000, 5000, (batch, tokens, spec.axes), device=device).double()
    if kind.startswith("fp"):
        positions += torch.rand_like(positions)
    return TurningTensors(positions.to(dtypes.get(kind, torch.float64)), None, None)


def member(
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    depth: int,
    spec: RotationSpec = UNTURNED,
    kind: str = "implicit",
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> HeadsProjection:
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    return HeadsProjection(
        torch.randn(batch, tokens, depth, **options),
        torch.randn(heads * head_dim, depth, **options) * depth**-0.5,
        torch.randn(heads * head_dim, **options) if bias else None,
        turning(spec, kind, batch, tokens, heads, device),
        heads,
        spec,
    )


def reference(m: HeadsProjection) -> Tensor:  # [B, T, H, D] in fp64
    z = m.x.double() @ m.weight.double().t()
    bias = None if m.bias is None else m.bias.double()
    tensors: tuple[Tensor | None, ...] = m.turning
    if m.rotation.rotary_dim and m.turning.cos is None:
        cos, sin = cos_sin(m.rotation, m.turning.positions, m.x.shape[1], m.x.device, torch.float64)
        tensors = None, cos, sin
    return plain_norm_rope(z, m.num_heads, bias, NormSpec(), None, None, m.rotation, tensors)


def assert_rounded_once(got: Tensor, want: Tensor) -> None:
    """Half an ulp of the result, and fp32 sums."""
    assert got.shape == want.shape and got.is_contiguous()
    half_ulp = torch.finfo(got.dtype).eps / 2
    slack = 2e-5 * float(want.abs().max().clamp(min=1.0)) if want.numel() else 0.0
    error = (got.double() - want).abs()
    assert bool((error <= 1.002 * half_ulp * want.abs() + slack).all()), float(error.max())


SPECS = {
    "none": RotationSpec(),
    "neighbours": RotationSpec(32),
    "halves": RotationSpec(32, False),
    "axes": RotationSpec(32, False, axes=2, base=100.0),
    "full": RotationSpec(16, False, full_width=True),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_cpu_kernel_is_the_plain_formula(name: str) -> None:
    kind = "full" if name == "full" else "int64" if name == "axes" else "implicit"
    q = member(2, 5, 3, 32, 24, SPECS[name], kind)
    k = member(2, 7, 2, 32, 16, SPECS[name], kind, bias=False)
    v = member(2, 7, 2, 32, 8)
    *heads, v_transposed = ops.project_group(q, k, v)
    for got, m in zip(heads, (q, k, v), strict=True):
        assert_rounded_once(got, reference(m))
    assert v_transposed.shape == (0,)


REMOVALS = ["", "lengths", "keep", "lengths and keep"]


def removed(removal: str, batch: int, tokens: int, device: str = "cpu") -> dict[str, Tensor]:
    """What ``project_group`` gets of tokens that do not exist."""
    options = {}
    if "lengths" in removal:
        lengths = torch.randint(0, tokens + 3, (batch,), device=device, dtype=torch.int32)
        options["kv_lengths"] = lengths
    if "keep" in removal:
        options["key_keep"] = torch.rand(batch, tokens, device=device) < 0.6
    return options


def assert_transposed(got: Tensor, v: Tensor, options: dict[str, Tensor]) -> None:
    batch, tokens = v.shape[:2]
    exists = options.get("key_keep", torch.ones(batch, tokens, device=v.device, dtype=torch.bool))
    if "kv_lengths" in options:
        index = torch.arange(tokens, device=v.device)
        exists = exists & (index < options["kv_lengths"][:, None])
    assert got.is_contiguous() and torch.equal(got, transposed_values(v, exists))


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 21])
@pytest.mark.parametrize("removal", REMOVALS)
def test_the_cpu_kernel_transposes_values(removal: str, tokens: int) -> None:
    v = member(3, tokens, 2, 32, 8, dtype=torch.float32)
    options = removed(removal, 3, tokens)
    plain = ops.project_group(None, None, v)[2]
    *_, got, transposed = ops.project_group(None, None, v, transposes_v=True, **options)
    assert torch.equal(got, plain)
    assert_transposed(transposed, got, options)


def test_absent_members_are_empty() -> None:
    k = member(1, 3, 2, 8, 16)
    q_out, k_out, v_out, transposed = ops.project_group(None, k, None)
    assert q_out.shape == v_out.shape == transposed.shape == (0,) and k_out.shape == (1, 3, 2, 8)
    assert q_out is not v_out


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("absent", ["", "q", "kv"])
def test_opcheck(absent: str, device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != grouped.CAPABILITY:
        pytest.skip("grouped projections are Hopper's")
    q = None if "q" in absent else member(2, 5, 3, 32, 24, SPECS["halves"], device=device)
    k, v = (
        None if "kv" in absent else member(2, 4, 2, 32, 16, spec, device=device)
        for spec in (SPECS["neighbours"], SPECS["none"])
    )
    every = q, k, v
    args = [
        *(m and m.x for m in every),
        *(m and m.weight for m in every),
        *(m and m.bias for m in every),
        *(None,) * 6,
        *(3, 2),
        *(32 if q else 0, False, 1, 10000.0, False),
        *(32 if k else 0, True, 1, 10000.0, False),
        -1,
    ]
    torch.library.opcheck(torch.ops.fused_rope_xattn.project_group.default, tuple(args))


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("absent", [False, True])
def test_opcheck_of_transposed_values(absent: bool, device: str) -> None:
    if device == "cuda":
        on_hopper()
    options: dict[str, Any] = {"dtype": torch.float32, "device": device}
    k = member(2, 13, 2, 32, 16, **options)
    v = None if absent else member(2, 13, 2, 32, 24, **options)
    removal = removed("lengths and keep", 2, 13, device)
    args = [
        *(None, k.x, v and v.x, None, k.weight, v and v.weight, None, k.bias, v and v.bias),
        *(None,) * 6,
        *(1, 2),
        *(0, True, 1, 1.0, False) * 2,
        *(-1, True, removal["key_keep"], removal["kv_lengths"]),
    ]
    torch.library.opcheck(torch.ops.fused_rope_xattn.project_group.default, tuple(args))


# ------------------------------------------------------------------------------------- the choice


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def kernels(gpu: GPU | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    width = options.pop("width", 256)
    x, w = meta(2, 64, width, dtype=dtype), meta(256, width, dtype=dtype)
    w_out = meta(256, 256, dtype=dtype)
    called = plan(x, x, w, w, w, w_out, num_heads=4, path="split", gpu=gpu, **options)
    return called.kernels


def test_the_plan_names_the_group() -> None:
    rest = ("attention_forward", "gemm out")
    hopper, ampere = GPU("NVIDIA H200", (9, 0), 132), GPU("NVIDIA A100", (8, 0), 108)
    assert kernels(hopper) == ("project_group q k v", *rest)
    alone = ("gemm q", "norm_rope q", "gemm k", "norm_rope k", "gemm v")
    assert kernels(ampere) == (*alone, *rest)
    assert kernels(hopper, torch.float32) == (*alone, *rest)
    assert kernels(hopper, rope=None) == ("gemm q", "gemm k", "gemm v", *rest)
    assert kernels(hopper, width=36) == (*alone, *rest)
    normed = kernels(hopper, k_norm=Norm("rms"))
    assert normed == ("project_group q v", "gemm k", "norm_rope k", *rest)


def test_what_the_kernel_does_not_take() -> None:
    p = split.Projection(
        meta(1, 4, 64), meta(64, 64), meta(64), num_heads=2, rotation=RotationSpec(32)
    )
    assert grouped.obstacle(p) is None
    wide = p._replace(x=meta(1, 4, 64, dtype=torch.float32), bias=None)
    wide = wide._replace(weight=meta(64, 64, dtype=torch.float32))
    assert grouped.obstacle(wide._replace(tf32=True)) is None
    others = {
        "TF32": wide,
        "half type": p._replace(x=meta(1, 4, 64, dtype=torch.float32)),
        "bias": p._replace(bias=meta(64, dtype=torch.float32)),
        "norm": p._replace(norm=NormSpec(1)),
        "projected": p._replace(weight=None),
        "multiple": p._replace(weight=meta(64, 60)),
        "halves": p._replace(rotation=RotationSpec(24, False)),
        "axes": p._replace(rotation=RotationSpec(32, axes=4)),
        "base": p._replace(
            rotation=RotationSpec(32, base=0.5), positions=meta(1, 4, 1, dtype=torch.float32)
        ),
    }
    for word, other in others.items():
        assert word in str(grouped.obstacle(other)), word


# --------------------------------------------------------------------------------- kernel, on GPU


def on_hopper() -> None:
    if torch.cuda.get_device_capability() != grouped.CAPABILITY:
        pytest.skip("grouped projections are Hopper's")


def assert_group_is_right(
    q: HeadsProjection | None, k: HeadsProjection | None, v: HeadsProjection | None, tile: int
) -> None:
    got = ops.project_group(q, k, v, tile)
    again = ops.project_group(q, k, v, tile)
    for a, b, m in zip(got[:3], again[:3], (q, k, v), strict=True):
        assert torch.equal(a, b)
        if m is not None:
            assert_rounded_once(a, reference(m))


GPU_CASES: dict[str, tuple[int, RotationSpec, str]] = {
    # head_dim, rotation, kind
    "none": (64, RotationSpec(), "implicit"),
    "neighbours_32": (32, RotationSpec(32), "implicit"),
    "neighbours_64": (64, RotationSpec(64), "int64"),
    "neighbours_128": (128, RotationSpec(128), "int32"),
    "neighbours_256": (256, RotationSpec(256), "fp32"),
    "neighbours_8": (8, RotationSpec(8), "fp64"),
    "neighbours_part": (40, RotationSpec(6), "implicit"),
    "neighbours_axes": (96, RotationSpec(96, axes=3), "fp32"),
    "halves_16": (16, RotationSpec(16, False), "implicit"),
    "halves_64": (64, RotationSpec(64, False), "int64"),
    "halves_96": (96, RotationSpec(96, False), "int32"),
    "halves_128": (128, RotationSpec(128, False), "implicit"),
    "halves_256": (256, RotationSpec(256, False), "int64"),
    "halves_part": (72, RotationSpec(32, False), "fp32"),
    "halves_axes": (64, RotationSpec(64, False, axes=2), "int64"),
    "table": (64, RotationSpec(64), "table"),
    "table_halves": (80, RotationSpec(48, False), "table"),
    "full": (128, RotationSpec(128, full_width=True), "full"),
    "full_halves": (64, RotationSpec(32, False, full_width=True), "full"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("tile", range(TILES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(3, 2), (8, 4)], ids=["few_heads", "fours_of_heads"])
@pytest.mark.parametrize("name", GPU_CASES)
def test_the_kernel_is_the_plain_formula(
    name: str, heads: tuple[int, int], dtype: torch.dtype, tile: int
) -> None:
    on_hopper()
    head_dim, spec, kind = GPU_CASES[name]
    spec = spec._replace(base=100)  # with 1 all pairs would turn alike
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    q = member(2, 131, heads[0], head_dim, 200, spec, kind, **options)
    k = member(3, 300, heads[1], head_dim, 64, spec, kind, bias=False, **options)
    v = member(3, 300, heads[1], head_dim, 8, **options)
    if dtype is torch.float32:  # whose products are exact in TF32
        q, k, v = (
            m._replace(x=round_to_tf32(m.x), weight=round_to_tf32(m.weight)) for m in (q, k, v)
        )
    assert_group_is_right(q, k, v, tile=tile)


def integers(m: HeadsProjection) -> HeadsProjection:
    """-1, 0 and 1, whose products are exact in every type."""
    x, weight = (torch.randint_like(t, -1, 2) for t in (m.x, m.weight))
    return m._replace(x=x, weight=weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, columns, depth", [(512, 768, 768), (1000, 8, 72), (2049, 1032, 40)])
def test_one_wide_head_of_what_the_kernel_before_writes(
    rows: int, columns: int, depth: int, dtype: torch.dtype
) -> None:
    """As the output is projected, behind a kernel that lets this one start before it is done."""
    on_hopper()
    options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": "cuda"}
    weights = integers(member(1, rows, 1, columns, depth, **options))
    inputs = [integers(member(1, rows, 1, depth, 64, **options)) for _ in range(20)]
    results = []
    for before in inputs:
        x = ops.project_group(None, None, before)[2].flatten(2)
        results.append(ops.project_group(None, None, weights._replace(x=x))[2])
    for before, got in zip(inputs, results, strict=True):
        assert_rounded_once(got, reference(weights._replace(x=reference(before).flatten(2))))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", range(TILES))
@pytest.mark.parametrize("heads, head_dim", [(2, 32), (12, 64), (3, 72), (4, 128)])
@pytest.mark.parametrize("tokens", [1, 13, 300, 768])
@pytest.mark.parametrize("removal", REMOVALS)
def test_the_kernel_transposes_values(
    removal: str, tokens: int, heads: int, head_dim: int, tile: int
) -> None:
    """The very numbers of v; padding and removed tokens are zeros, whatever lay there."""
    on_hopper()
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cuda"}
    q = member(2, 131, heads, head_dim, 200, RotationSpec(8), **options)
    k, v = (member(3, tokens, heads, head_dim, depth, **options) for depth in (64, 72))
    removal_options = removed(removal, 3, tokens, "cuda")
    plain = ops.project_group(q, k, v, tile)
    padded = (3, heads, head_dim, (tokens + 7) // 8 * 8)
    torch.full(padded, math.nan, device="cuda")  # where the result may lie
    *got, transposed = ops.project_group(q, k, v, tile, True, **removal_options)
    assert all(torch.equal(a, b) for a, b in zip(got, plain[:3], strict=True))
    assert_transposed(transposed, got[2], removal_options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, wrong",
    [
        ("kv_lengths", torch.ones(4, dtype=torch.int32)),
        ("kv_lengths", torch.ones(3, 1, dtype=torch.int32)),
        ("key_keep", torch.ones(3, 12, dtype=torch.bool)),
        ("key_keep", torch.ones(13, dtype=torch.bool)),
    ],
)
def test_what_removes_tokens_must_fit(name: str, wrong: Tensor) -> None:
    """The operator's own check: a direct call must not read beyond what it was given."""
    on_hopper()
    v = member(3, 13, 2, 64, 64, dtype=torch.float32, device="cuda")
    with pytest.raises(RuntimeError, match=name):
        ops.project_group(None, None, v, -1, True, **{name: wrong.cuda()})


@pytest.mark.gpu
@pytest.mark.parametrize("tile", range(TILES))
def test_more_tiles_than_blocks(tile: int) -> None:
    """Blocks go around their ring many times, and through members of different depths."""
    on_hopper()
    q = member(1, 3001, 8, 64, 72, RotationSpec(64), device="cuda")
    k = member(5, 1777, 8, 64, 328, RotationSpec(64, False), "int32", device="cuda")
    v = member(5, 1777, 8, 64, 136, device="cuda")
    assert_group_is_right(q, k, v, tile=tile)


@pytest.mark.gpu
def test_one_row_and_no_rows() -> None:
    on_hopper()
    q = member(1, 1, 2, 64, 64, RotationSpec(64), device="cuda")
    empty = member(0, 3, 2, 64, 64, RotationSpec(64), device="cuda")
    for tile in range(TILES):
        assert_group_is_right(q, empty, empty, tile=tile)
    assert_group_is_right(empty, None, None, tile=-1)


@pytest.mark.gpu
def test_nan_stays_in_its_row() -> None:
    on_hopper()
    q = member(1, 100, 2, 64, 72, RotationSpec(64), device="cuda")
    clean = ops.project_group(q, None, None)[0]
    q.x[0, 37] = math.nan
    got = ops.project_group(q, None, None)[0]
    assert bool(got[0, 37].isnan().all())
    others = torch.arange(100, device="cuda") != 37
    assert torch.equal(got[0, others], clean[0, others])


@pytest.mark.gpu
def test_views_that_start_anywhere() -> None:
    on_hopper()
    q = member(1, 70, 2, 64, 72, RotationSpec(64), device="cuda")

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x.new_empty(3), x.flatten()])[3:].view(x.shape)

    assert q.bias is not None
    moved = q._replace(x=shifted(q.x), weight=shifted(q.weight), bias=shifted(q.bias))
    assert torch.equal(ops.project_group(moved, None, None)[0], ops.project_group(q, None, None)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("start", [2**20, 2**31, 2**40])
def test_far_positions_keep_their_phase(start: int) -> None:
    on_hopper()
    near = member(1, 64, 1, 64, 64, RotationSpec(64), "int64", dtype=torch.float16, device="cuda")
    assert near.turning.positions is not None
    far = near._replace(turning=TurningTensors(near.turning.positions + start, None, None))
    assert_rounded_once(ops.project_group(far, None, None)[0], reference(far))


@pytest.mark.gpu
def test_the_forward_allocates_no_wide_product() -> None:
    on_hopper()
    x, weight, *_ = member(2, 512, 4, 64, 256, device="cuda")
    p = split.Projection(x, weight, None, num_heads=4, rotation=RotationSpec(64))
    split.project_forward(p)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    split.project_forward(p)
    assert torch.cuda.max_memory_allocated() - before <= 2 * 512 * 256 * 2


def test_assert_near_is_what_it_says() -> None:
    """The bound of this file accepts the storage type's rounding and nothing coarser."""
    want = torch.randn(1000).double()
    assert_rounded_once(want.bfloat16(), want)
    with pytest.raises(AssertionError):
        assert_rounded_once(want.bfloat16() * 1.02, want)
    assert_tensor_near(want, want)
