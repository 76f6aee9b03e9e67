"""Attention over tokens whose values are not projected: the choice and the formulas anywhere, the
kernels on a Hopper."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocks import (
    BLOCKS,
    FROZEN,
    Block,
    Run,
    assert_same,
    by_composite,
    by_function,
    freeze,
    make_block,
    plain_block,
    with_shared_x,
)
from fused_rope_xattn import grouped, ops, plan, split, token_attention, token_ops
from fused_rope_xattn.planner import GPU
from fused_rope_xattn.split import BlockTensors
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.case import Case
from pretence import Operators
from problems import assert_tensor_near

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
H200 = GPU("NVIDIA H200", (9, 0), 132)
A100 = GPU("NVIDIA A100", (8, 0), 108)


# ------------------------------------------------------------------------------------- the choice


def decode_call(
    batch: int = 8,
    queries: int = 1,
    keys: int = 1500,
    width: int = 1024,
    heads: int = 16,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    **options: Any,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    inner, inner_kv = heads * head_dim, (kv_heads or heads) * head_dim
    weights = draw(inner, width), draw(inner_kv, width), draw(inner_kv, width), draw(width, inner)
    args = draw(batch, queries, width), draw(batch, keys, width), *weights
    return args, {"num_heads": heads, "num_kv_heads": kv_heads, **options}


def kernels_of(gpu: GPU = H200, **fields: Any) -> tuple[str, ...]:
    args, options = decode_call(**fields)
    return plan(*args, **options, gpu=gpu).kernels


OVER_TOKENS = "token_sums", "token_values"


def test_a_decode_step_is_taken() -> None:
    assert kernels_of() == ("project_group q k", *OVER_TOKENS, "gemm out")
    assert kernels_of(rope=None) == ("gemm q", "gemm k", *OVER_TOKENS, "gemm out")
    assert "attention_forward" in kernels_of(A100)


TAKEN: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16},
    "rows": {"queries": 2, "heads": 8, "head_dim": 128},
    "groups": {
        "queries": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 128,
        "width": 256,
        "keys": 6000,
    },
    "small heads": {"head_dim": 32, "width": 512},
    "narrow": {"width": 512, "keys": 3000},
    "causal": {"is_causal": True, "queries": 1},
    "lengths": {"kv_lengths": torch.empty(8, dtype=torch.int64, device="meta")},
    "padding": {"kv_keep_mask": torch.empty(8, 1500, dtype=torch.bool, device="meta")},
}
REFUSED: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "many rows": {"queries": 2},
    "no rows": {"queries": 0},
    "few keys": {"keys": 100},
    "few keys of many samples": {"batch": 1000, "keys": 255},
    "values narrower than tokens": {"kv_heads": 4, "keys": 8000},
    "wide": {"width": 2048},
    "odd head dim": {"head_dim": 40},
    "dropout": {"dropout_p": 0.1},
    "bias": {"attn_bias": torch.empty(1500, dtype=torch.bfloat16, device="meta")},
    "mask with heads": {
        "kv_keep_mask": torch.empty(8, 16, 1, 1500, dtype=torch.bool, device="meta")
    },
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    assert set(OVER_TOKENS) <= set(kernels_of(**TAKEN[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    assert not set(OVER_TOKENS) & set(kernels_of(**REFUSED[name]))


def test_the_kernels_have_the_same_limits() -> None:
    text = (KERNELS / "token_attention.h").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"constexpr int (\w+) = (\d+);", text))
    assert int(numbers["kTokenRows"]) == token_attention.MOST_ROWS
    assert int(numbers["kTokenColumns"]) == token_attention.MOST_COLUMNS


# -------------------------------------------------------------------------- formulas, on any device


@pytest.fixture
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever values are projected by the call and the operators can do without."""

    def is_taken(config: Any, t: BlockTensors) -> bool:
        if t.w_v is None or config.dropout_p > 0:
            return False
        return t.attn_bias is None and t.keep_mask is None

    monkeypatch.setattr(token_attention, "is_taken", is_taken)


def normed(**options: Any) -> Block:
    """Norms, rotations, biases, lengths and grouped heads, without a bias of the scores."""
    return make_block(**options).replace(attn_bias=None)


def masked(**options: Any) -> Block:
    """Causal, with removed keys and a sample that sees nothing."""
    block = normed(is_causal=True, **options)
    batch, keys, _ = block.tensors.x_kv.shape
    return block.replace(
        kv_lengths=torch.tensor([keys - 2, 0], dtype=torch.int32),
        key_keep=torch.arange(keys).expand(batch, keys) != 1,
    )


MADE: dict[str, Callable[..., Block]] = {
    # The gradient of b_k would be 0 but for rounding errors.
    "plain": lambda **options: plain_block(**options).replace(b_k=None),
    "normed": normed,
    "masked": masked,
    "shared": lambda **options: with_shared_x(normed(**options)),
    "shared masked": lambda **options: with_shared_x(masked(**options)),
    "no_w_out": lambda **options: normed(**options).replace(w_out=None, b_out=None),
    "one query": lambda **options: normed(tq=1, **options),
}


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("name", MADE)
def test_is_the_block(name: str) -> None:
    block = MADE[name]()
    with Operators() as seen:
        by_function(block)
    assert "token_attention" in seen.names and "attention_forward" not in seen.names
    for lse_too in (False, True):
        assert_same(block, lse_too)


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("made", ["normed", "shared masked"])
@pytest.mark.parametrize("frozen", [name for name in FROZEN if name != "all_but_attn_bias"])
def test_frozen_blocks(made: str, frozen: str) -> None:
    assert_same(freeze(MADE[made](), FROZEN[frozen]), lse_too=False)


@pytest.mark.usefixtures("_everywhere")
def test_only_what_is_wanted_is_computed() -> None:
    def operators(*wanted: str) -> list[str]:
        block = MADE["plain"]()
        block = freeze(block, tuple(name for name in block.leaves if name not in wanted))
        y, _ = by_function(block)
        with Operators() as seen:
            torch.autograd.grad(y.sum(), list(block.leaves.values()))
        return seen.names

    assert "token_attention_backward" not in operators("w_v", "w_out")
    assert "token_attention_backward" in operators("w_v", "w_q")


@pytest.mark.usefixtures("_everywhere")
def test_removed_tokens_may_hold_anything() -> None:
    block = MADE["shared masked"]()
    with torch.no_grad():
        block.tensors.x_kv[0, 1] = float("nan")
        block.tensors.x_kv[0, -2:] = float("inf")
        block.tensors.x_kv[1] = float("nan")
    y, lse = by_function(block)
    grads = torch.autograd.grad(y.sum(), list(block.leaves.values()), allow_unused=True)
    assert all(bool(x.isfinite().all()) for x in (y, *grads) if x is not None)
    assert bool((lse[1] == -torch.inf).all())


@pytest.mark.usefixtures("_everywhere")
def test_second_derivatives() -> None:
    def second(run: Run, block: Block) -> tuple[Tensor, ...]:
        leaves = list(block.leaves.values())
        y, _ = run(block)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        total = torch.stack([x.square().sum() for x in first]).sum()
        return torch.autograd.grad(total, leaves)

    for frozen in ((), FROZEN["kv_side"]):
        block = freeze(normed(), frozen)
        for got, want in zip(second(by_function, block), second(by_composite, block), strict=True):
            assert_tensor_near(got, want, 4096)


@pytest.mark.usefixtures("_everywhere")
def test_rounding_on_the_cpu() -> None:
    """The accuracy that the formulas have when sums are exact: the rule's slack is for kernels."""
    case = Case("tokens", 2, 1, 300, H=8, D=32, Dq=64, Dkv=256, biases="qkvo", dtype="bf16")
    with pytest.MonkeyPatch.context() as patch:
        from fused_rope_xattn import planner, prepare

        patch.setattr(planner, "_device_obstacle", lambda device, gpu: None)
        prepare._checked.clear()
        assert_accurate(case, device="cpu", path="split")
    prepare._checked.clear()


def drawn(
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    width: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, ...]:
    """q, k, x, w_v, b_v, do."""

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device) * scale).to(dtype)

    return (
        draw(batch, queries, heads, head_dim),
        draw(batch, keys, kv_heads, head_dim),
        draw(batch, keys, width),
        draw(kv_heads * head_dim, width, scale=width**-0.5),
        draw(kv_heads * head_dim),
        draw(batch, queries, heads, head_dim),
    )


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_opcheck(device: str) -> None:
    if device == "cuda":
        on_hopper()
    q, k, x, w_v, b_v, _ = drawn(2, 3, 40, 4, 2, 32, 72, torch.bfloat16, device)
    lengths = torch.tensor([33, 0], dtype=torch.int32, device=device)
    options = (None, lengths, 0.2, True)
    namespace = torch.ops.fused_rope_xattn
    torch.library.opcheck(namespace.token_attention.default, (q, k, x, w_v, b_v, *options, True))
    _, lse, u, rest = namespace.token_attention(q, k, x, w_v, b_v, *options, True)
    du = torch.randn(u.shape, device=device).to(u.dtype)
    for wanted in ((True, True, True), (True, False, False)):
        turning = (None, None, None, 32, True, 1, 100.0, False)
        args = (du, None, q, k, x, u, rest, lse, *options, *turning, *wanted)
        torch.library.opcheck(namespace.token_attention_backward.default, args)


# -------------------------------------------------------------------------------- kernels, on GPU


def on_hopper() -> None:
    if torch.cuda.get_device_capability() != grouped.CAPABILITY:
        pytest.skip("attention over tokens is taken on a Hopper")


@pytest.fixture
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also problems whose values are projected in no time."""
    on_hopper()
    monkeypatch.setattr(token_attention, "LEAST", 0)


SIZES = {
    "decode": (8, 1, 1500, 16, 16, 64, 1024),
    "one chunk": (1, 1, 16, 16, 16, 64, 128),
    "part of a chunk": (3, 1, 7, 4, 4, 64, 136),
    "one key": (2, 2, 1, 8, 8, 32, 8),
    "queries": (2, 5, 300, 3, 3, 64, 264),
    "groups": (2, 4, 333, 4, 2, 128, 520),
    "one key head": (5, 1, 1000, 16, 1, 64, 1024),
    "wide heads": (4, 2, 700, 8, 8, 128, 1024),
    "small heads": (4, 1, 700, 16, 16, 32, 1000),
    "many samples": (300, 1, 40, 16, 16, 64, 256),
    "no keys": (2, 1, 0, 4, 4, 64, 64),
    "no queries": (2, 0, 20, 4, 4, 64, 64),
    "no samples": (0, 1, 20, 4, 4, 64, 64),
}


def score_options(**changes: Any) -> ops.ScoreOptions:
    none = ops.ScoreOptions(None, None, None, None, None, 0.125, False, 0.0, False)
    return none._replace(**changes)


def both_ways(tensors: tuple[Tensor, ...], options: ops.ScoreOptions) -> dict[str, Tensor]:
    q, k, x, w_v, b_v, do = tensors
    heads, (kv_heads, head_dim) = q.shape[2], k.shape[2:]
    o, lse, sums = token_ops.token_attention(q, k, x, w_v, b_v, options, keep=True)
    w = w_v.view(kv_heads, head_dim, -1).repeat_interleave(heads // kv_heads, dim=0)
    du = torch.einsum("bqhd,hdc->hbqc", do.to(w.dtype), w).contiguous()
    dlse = torch.full_like(lse, 0.25)
    dq, dk, dx = token_ops.token_attention_backward(
        du, dlse, q, k, x, sums, lse, options, need_dq=True, need_dk=True, need_dx=True
    )
    u = sums.u.to(lse.dtype) + sums.rest.to(lse.dtype)
    return {"o": o, "lse": lse, "u": u, "dq": dq, "dk": dk, "dx": dx}


def assert_right(tensors: tuple[Tensor, ...], options: ops.ScoreOptions) -> None:
    """Against the operators' CPU kernels in fp64."""
    got, again = both_ways(tensors, options), both_ways(tensors, options)
    on_cpu = {
        name: None if x is None or not isinstance(x, Tensor) else x.cpu()
        for name, x in options._asdict().items()
    }
    exact = options._replace(**{n: x for n, x in on_cpu.items() if x is not None})
    want = both_ways(tuple(x.cpu().double() for x in tensors), exact)
    for name, x in got.items():
        assert torch.equal(x, again[name]), name
        assert_tensor_near(
            x.cpu().double(), want[name], 8.0, name, torch.finfo(tensors[0].dtype).eps
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_the_kernels_are_the_formulas(name: str, dtype: torch.dtype) -> None:
    on_hopper()
    assert_right(drawn(*SIZES[name], dtype, "cuda"), score_options())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["queries", "groups", "one key head", "small heads"])
def test_masks(name: str) -> None:
    on_hopper()
    batch, _, keys, *_ = SIZES[name]
    tensors = drawn(*SIZES[name], torch.bfloat16, "cuda")
    lengths = torch.randint(0, keys + 1, (batch,), dtype=torch.int32, device="cuda")
    lengths[0] = 0
    keep = torch.rand(batch, keys, device="cuda") > 0.3
    for changes in (
        {"kv_lengths": lengths},
        {"key_keep": keep},
        {"is_causal": True},
        {"kv_lengths": lengths, "key_keep": keep, "is_causal": True},
    ):
        assert_right(tensors, score_options(**changes))


@pytest.mark.gpu
def test_what_is_removed_may_be_nan() -> None:
    on_hopper()
    q, k, x, *rest = drawn(*SIZES["queries"], torch.bfloat16, "cuda")
    options = score_options(
        kv_lengths=torch.tensor([250, 0], dtype=torch.int32, device="cuda"),
        key_keep=(torch.arange(300, device="cuda") % 7 != 3).expand(2, 300).contiguous(),
    )
    clean = both_ways((q, k, x, *rest), options)
    for t in (k, x):
        t[1] = float("nan")
        t[0, 250:] = float("nan")
        t[:, 3::7] = float("inf")
    for name, got in both_ways((q, k, x, *rest), options).items():
        assert torch.equal(got, clean[name]), name


@pytest.mark.gpu
def test_nan_stays_in_its_head() -> None:
    on_hopper()
    tensors = drawn(*SIZES["groups"], torch.bfloat16, "cuda")
    clean = both_ways(tensors, score_options())
    tensors[0][0, 1, 2] = float("nan")  # a query of head 2
    tensors[1][0, 5, 1] = float("nan")  # a key of the heads 2 and 3
    got = both_ways(tensors, score_options())
    assert torch.equal(got["o"][:, :, :2], clean["o"][:, :, :2])
    assert torch.equal(got["dq"][:, :, :2], clean["dq"][:, :, :2])
    assert torch.equal(got["dk"][:, :, 0], clean["dk"][:, :, 0])
    assert bool(got["o"][0, :, 2].isnan().all()) and torch.equal(got["o"][1], clean["o"][1])


@pytest.mark.gpu
@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"H": 16, "D": 64, "Dq": 256, "Dkv": 1024},
        {"H": 8, "Hkv": 4, "D": 64, "Dq": 256, "Dkv": 512, "Dv": 200, "Tq": 2},
        {"H": 4, "D": 128, "Dq": 128, "Dkv": 256, "Tq": 4, "rope": "half"},
    ],
)
def test_accuracy(fields: dict[str, Any], dtype: str) -> None:
    sizes = {"B": 4, "Tq": 1, "Tk": 600, **fields}
    assert_accurate(
        Case("tokens", **sizes, biases="qkvo", dtype=dtype), device="cuda", path="split"
    )


@pytest.mark.gpu
def test_a_decode_step_takes_it() -> None:
    on_hopper()
    from fused_rope_xattn import cross_attention

    args, options = decode_call()
    leaves = [(torch.randn(x.shape, device="cuda") / 8).bfloat16().requires_grad_() for x in args]
    with Operators() as seen:
        y = cross_attention(*leaves, **options)
        torch.autograd.grad(y.square().sum(), leaves)
    assert "token_attention" in seen.names and "token_attention_backward" in seen.names
    assert "attention_backward" not in seen.names


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    on_hopper()
    tensors = drawn(*SIZES["decode"], torch.bfloat16, "cuda")
    options = score_options()
    both_ways(tensors, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both_ways(tensors, options)
    tensors[0].normal_()
    graph.replay()
    for name, want in both_ways(tensors, options).items():
        assert torch.equal(results[name], want), name


def test_values_are_projected_elsewhere() -> None:
    """CPU tensors, and whatever the rule refuses, go the other way."""
    block = BLOCKS["plain"]()
    assert not token_attention.is_taken(block.config, block.tensors)
    with Operators() as seen:
        by_function(block)
    assert "attention_forward_with_rest" in seen.names or "attention_forward" in seen.names
    assert split.Activations._fields[2] == "v"
