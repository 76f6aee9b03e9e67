"""A backward's last products in one launch: the choice and the call anywhere, the kernel on a
Hopper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from blocks import (
    BLOCKS,
    FROZEN,
    INNER,
    INNER_KV,
    B,
    Block,
    assert_same,
    by_function,
    freeze,
    plain_block,
    with_static_weights,
)
from fused_rope_xattn import gradient_products, grouped, ops, split
from fused_rope_xattn.autograd import ProjectHeadsFunction, attend
from fused_rope_xattn.gradient_products import Product, added, compute, of_tokens, of_weight
from fused_rope_xattn.split import BlockTensors, Projection
from fused_rope_xattn.verify.tf32 import round_to_tf32
from pretence import Operators
from problems import assert_tensor_near

H200_SMS = 132
KERNELS = Path(__file__).resolve().parents[1] / "kernels"


def exact(p: Product) -> Tensor:
    """In fp64."""
    terms = [tuple(x.double().flatten(0, -2) for x in term) for term in p.terms]
    total = sum((x.t() if p.over_tokens else x) @ y for x, y in terms)
    assert isinstance(total, Tensor)
    return total


def assert_rounded_once(got: Tensor | None, p: Product) -> None:
    """Half an ulp of the result, and fp32 sums."""
    want = exact(p)
    assert got is not None and got.shape == want.shape and got.is_contiguous()
    half_ulp = torch.finfo(got.dtype).eps / 2
    slack = 2e-5 * float(want.abs().max().clamp(min=1.0)) if want.numel() else 0.0
    error = (got.double() - want).abs()
    assert bool((error <= 1.002 * half_ulp * want.abs() + slack).all()), float(error.max())


def drawn(
    batch: int, tokens: int, inner: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """A projection's gradient [B, T, I], its weight [I, C] and its x [B, T, C]."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    return draw(batch, tokens, inner), draw(inner, width), draw(batch, tokens, width)


def block_products(
    queries: int,
    keys: int,
    dim: int,
    inner: int,
    kv_dim: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> list[Product]:
    """Those of a whole block whose keys and values come from the same x."""
    dq, w_q, x_q = drawn(batch, queries, inner, dim, dtype, device)
    dk, w_k, x_kv = drawn(batch, keys, inner, kv_dim, dtype, device)
    dv, w_v, _ = drawn(batch, keys, inner, kv_dim, dtype, device)
    dy, _, o = drawn(batch, queries, dim, inner, dtype, device)
    dx_kv = added(of_tokens(dv, w_v), of_tokens(dk, w_k))
    of_q = of_tokens(dq, w_q), of_weight(dq, x_q)
    return [of_weight(dy, o), *of_q, dx_kv, of_weight(dk, x_kv), of_weight(dv, x_kv)]


def on_meta(products: list[Product]) -> list[Product]:
    """The same sizes without numbers."""
    return [
        p._replace(terms=tuple((x.to("meta"), y.to("meta")) for x, y in p.terms)) for p in products
    ]


# ------------------------------------------------------------------------------- operator, on CPU


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_cpu_kernel_is_the_plain_formula(dtype: torch.dtype) -> None:
    products = block_products(5, 7, 24, 16, 8, batch=2, dtype=dtype)
    for got, p in zip(gradient_products._together(products), products, strict=True):
        assert got.dtype == dtype
        assert_rounded_once(got, p)


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_opcheck(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != grouped.CAPABILITY:
        pytest.skip("gradient products are Hopper's")
    products = block_products(5, 7, 24, 16, 8, device=device)
    terms = [tuple(x.flatten(0, -2) for x in term) for p in products for term in p.terms]
    left, right = map(list, zip(*terms, strict=True))
    args = (left, right, [len(p.terms) for p in products], [p.over_tokens for p in products])
    torch.library.opcheck(torch.ops.fused_rope_xattn.gradient_products.default, args)


# ------------------------------------------------------------------------------------- the choice


def obstacle(products: list[Product], tf32: bool = False) -> str:
    return str(gradient_products.obstacle(on_meta(products), H200_SMS, tf32))


def meta(tokens: int, inner: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`drawn`, without numbers."""
    shapes = (1, tokens, inner), (inner, width), (1, tokens, width)
    grad, weight, x = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in shapes)
    return grad, weight, x


def test_which_blocks_are_taken() -> None:
    mast3r = block_products(1536, 1536, 768, 768, 768)
    assert obstacle(mast3r) == "None"
    # Blocks share the depth of a few tiles, but no more than the GPU has room for.
    assert obstacle(block_products(4096, 28736, 256, 256, 64)) == "None"
    assert obstacle(block_products(65536, 256, 128, 128, 128)) == "None"
    in_fp32 = block_products(4096, 28736, 256, 256, 64, dtype=torch.float32)
    assert "too few tiles" in obstacle(in_fp32, tf32=True)  # copies first
    wide, narrow = meta(65536, 768, 768), meta(64, 8, 8)
    assert "too few tiles" in obstacle([of_weight(*wide[::2]), of_weight(*narrow[::2])])
    assert obstacle([p for p in mast3r if not p.over_tokens]) == "None"  # 24 steps at most
    assert obstacle(block_products(512, 512, 512, 512, 512)) == "None"
    assert "not two" in obstacle(mast3r[:1])
    alone = of_tokens(*(x.float() for x in meta(1536, 768, 768)[:2]))
    assert obstacle([alone], tf32=True) == "None"
    for tokens, inner in (1024, 768), (1536, 832), (1536, 3072):  # 48 tiles; 13 and 48 steps
        other = of_tokens(*(x.float() for x in meta(tokens, inner, 768)[:2]))
        assert "not two" in obstacle([other], tf32=True)
    over_tokens = of_weight(*(x.float() for x in meta(1536, 768, 768)[::2]))
    assert "not two" in obstacle([over_tokens], tf32=True)
    assert "TF32 is allowed" in obstacle([alone, alone])
    assert "8 terms" in obstacle(mast3r * 2)


def test_large_ones_fill_the_gpu_by_themselves() -> None:
    def found(tokens: int) -> str:
        grad, weight, x = meta(tokens, 2048, 1024)
        return obstacle([of_tokens(grad, weight), of_weight(grad, x)])

    at_limit = gradient_products.LARGEST // (2 * 2048 * 1024)
    assert found(at_limit) == "None"
    assert "fills" in found(at_limit + 1)


def test_what_the_kernel_does_not_take() -> None:
    grad, weight, x = meta(4096, 2048, 1024)
    weight_product = of_weight(grad, x)
    assert obstacle([of_tokens(grad, weight), weight_product]) == "None"
    wide = [of_tokens(grad.float(), weight.float()), of_weight(grad.float(), x.float())]
    assert "TF32" in obstacle(wide)
    assert gradient_products.obstacle(wide, H200_SMS, tf32=True) is None
    others = {
        "half type": of_tokens(grad.float(), weight.float()),
        "one half": of_tokens(grad.half(), weight.half()),
        "multiple": of_tokens(grad, weight[:, :1020].contiguous()),
        "contiguous": of_tokens(grad, weight.t().contiguous().t()),
    }
    for word, other in others.items():
        assert word in obstacle([other, weight_product]), word


def test_other_devices_take_none() -> None:
    assert not gradient_products.is_taken(block_products(5, 7, 24, 16, 8))


def test_the_kernel_has_the_same_tile() -> None:
    text = (KERNELS / "gradient_products_sm90.h").read_text(encoding="utf-8")
    numbers = {
        "kGradientTile": gradient_products.TILE,
        "kGradientDepthBytes": 2 * gradient_products.DEPTH,
        "kMaxGradientTerms": gradient_products.MOST_TERMS,
        "kFewSteps": gradient_products.FEW_STEPS,
    }
    for name, value in numbers.items():
        assert re.findall(rf"constexpr int {name} = (\d+)[;,]", text) == [str(value)]


# --------------------------------------------------------------------------------------- the call


@pytest.fixture(params=["alone", "together"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products one by one, or the operator's CPU kernel wherever there are two."""
    if request.param == "together":
        monkeypatch.setattr(gradient_products, "is_taken", lambda products, *_: len(products) > 1)
    return str(request.param)


def test_results_are_where_the_products_were(way: str) -> None:
    first, second, *_ = block_products(5, 7, 24, 16, 8)
    results = compute(None, first, None, second)
    assert results[0] is None and results[2] is None
    assert_rounded_once(results[1], first)
    assert_rounded_once(results[3], second)
    assert compute() == [] and compute(None) == [None]


def test_tokens_in_strides(way: str) -> None:
    grad, weight, x = drawn(2, 6, 16, 8, torch.float32)
    strided = of_weight(grad[:, ::2], x[:, ::2]), of_tokens(grad[:, 1:4], weight)
    for got, p in zip(compute(*strided), strided, strict=True):
        assert_rounded_once(got, p)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_together(name: str, way: str) -> None:
    assert_same(BLOCKS[name]())


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_blocks_together(name: str, way: str) -> None:
    assert_same(freeze(BLOCKS["everything"](), FROZEN[name]), lse_too=False)


def operators_of_backward(block: Block) -> list[str]:
    y, _ = by_function(block)
    with Operators() as seen:
        torch.autograd.grad(y.sum(), list(block.leaves.values()))
    return [name for name in seen.names if name in ("mm", "addmm_", "gradient_products")]


def test_one_launch_after_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = plain_block().replace(x_value=None)
    shared = shared.replace(w_v=shared.tensors.w_k.detach().requires_grad_())
    assert operators_of_backward(shared) == ["mm"] * 5 + ["addmm_", "mm", "mm"]
    monkeypatch.setattr(gradient_products, "is_taken", lambda products, *_: len(products) > 1)
    assert operators_of_backward(shared) == ["mm", "gradient_products"]  # dout comes before


def half_block(queries: int, keys: int) -> Block:
    """Of widths that the kernel takes."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16().requires_grad_()

    block = plain_block(torch.bfloat16).replace(
        x_query=leaf(B, queries, 16),
        x_kv=leaf(B, keys, 24),
        x_value=None,
        w_q=leaf(INNER, 16),
        w_k=leaf(INNER_KV, 24),
        w_v=leaf(INNER_KV, 24),
        w_out=leaf(16, INNER),
        b_out=leaf(16),
        b_k=None,  # its gradient is 0 but for rounding errors
    )
    return with_static_weights(block)


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
def test_one_graph_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is part of the graph, here for a GPU that any problem fills."""

    def is_taken(products: list[Product], *_: bool) -> bool:
        return gradient_products.obstacle(products, 1) is None

    monkeypatch.setattr(gradient_products, "is_taken", is_taken)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(tensors: BlockTensors) -> tuple[Tensor, Tensor]:
        return attend(config, tensors)

    counts = []
    for queries, keys in ((5, 7), (100, 70), (70, 300)):
        block = half_block(queries, keys)
        config, leaves = block.config, list(block.leaves.values())
        dy = torch.randn(B, queries, 16).bfloat16()
        y, _ = compiled(block.tensors)
        with Operators() as seen:
            got = torch.autograd.grad(y, leaves, dy)
        assert seen.names.count("gradient_products") == 1
        want = torch.autograd.grad(by_function(block)[0], leaves, dy)
        for a, b in zip(got, want, strict=True):
            assert_tensor_near(a, b, 4)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


def test_a_projection_of_its_own(way: str) -> None:
    leaves = [torch.randn(*shape).double().requires_grad_() for shape in ((2, 5, 12), (16, 12))]
    p = Projection(leaves[0], leaves[1], None, num_heads=2)
    heads = ProjectHeadsFunction.apply(*p)
    grad = torch.randn_like(heads)
    want = torch.autograd.grad(split.project_forward(p), leaves, grad)
    for got, w in zip(torch.autograd.grad(heads, leaves, grad), want, strict=True):
        assert_tensor_near(got, w)


# --------------------------------------------------------------------------------- kernel, on GPU


def on_hopper() -> None:
    if torch.cuda.get_device_capability() != grouped.CAPABILITY:
        pytest.skip("gradient products are Hopper's")


def exact_in_tf32(products: list[Product]) -> list[Product]:
    """The same of operands that TF32 does not round."""
    return [
        p._replace(terms=tuple((round_to_tf32(x), round_to_tf32(y)) for x, y in p.terms))
        for p in products
    ]


def assert_right(products: list[Product]) -> None:
    if products[0].terms[0][0].dtype is torch.float32:
        products = exact_in_tf32(products)
    got = gradient_products._together(products)
    again = gradient_products._together(products)
    for a, b, p in zip(got, again, products, strict=True):
        assert torch.equal(a, b)
        assert_rounded_once(a, p)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [8, 40, 64, 72, 128, 136, 264])
@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 128, 200, 1000])
def test_the_kernel_is_the_plain_formula(tokens: int, width: int, dtype: torch.dtype) -> None:
    on_hopper()
    for inner in (8, 64, 200):
        options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
        assert_right(block_products(tokens, 77, width, inner, 136, batch=2, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_tiles(dtype: torch.dtype) -> None:
    on_hopper()
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    assert_right(block_products(1536, 1536, 768, 768, 768, **options))
    assert_right(block_products(1000, 3000, 1032, 520, 1160, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_that_share_a_depth(dtype: torch.dtype) -> None:
    on_hopper()
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    assert_right(block_products(4096, 28736, 256, 256, 64, **options))
    assert_right(block_products(5000, 3073, 136, 72, 40, **options))


@pytest.mark.gpu
def test_nothing_to_multiply() -> None:
    on_hopper()
    assert_right(block_products(0, 5, 8, 16, 24, device="cuda"))
    assert_right(block_products(5, 0, 8, 16, 24, device="cuda"))
    assert_right(block_products(0, 0, 8, 16, 24, device="cuda"))


@pytest.mark.gpu
def test_views_that_start_anywhere() -> None:
    on_hopper()

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x.new_empty(3), x.flatten()])[3:].view(x.shape)

    products = block_products(70, 33, 72, 64, 40, device="cuda")
    moved = [
        p._replace(terms=tuple((shifted(x), shifted(y)) for x, y in p.terms)) for p in products
    ]
    for a, b in zip(*map(gradient_products._together, (products, moved)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_nan_stays_in_its_row_and_column() -> None:
    on_hopper()
    grad, weight, x = drawn(1, 300, 200, 136, torch.bfloat16, "cuda")
    products = [of_tokens(grad, weight), of_weight(grad, x)]
    clean = gradient_products._together(products)
    grad[0, 130, 70] = float("nan")
    got = gradient_products._together(products)
    for before, after, row in zip(clean, got, (130, 70), strict=True):
        others = torch.arange(len(before), device="cuda") != row
        assert bool(after[row].isnan().all()) and torch.equal(after[others], before[others])


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    on_hopper()
    products = block_products(200, 300, 136, 64, 72, device="cuda")
    gradient_products._together(products)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gradient_products._together(products)
    products[0].terms[0][0].normal_()
    graph.replay()
    for got, p in zip(results, products, strict=True):
        assert_rounded_once(got, p)


@pytest.mark.gpu
def test_a_medium_block_takes_it() -> None:
    """MASt3R's sizes: the gradients are those of products one by one, up to rounding."""
    on_hopper()
    from fused_rope_xattn import cross_attention

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    x, kv = (torch.randn(2, 768, 768, **options) for _ in range(2))
    weights = [
        (torch.randn(768, 768, device="cuda") / 28).bfloat16().requires_grad_() for _ in range(4)
    ]
    y = cross_attention(x, kv, *weights, num_heads=12, path="split")
    leaves = [x, kv, *weights]

    def run() -> tuple[list[str], tuple[Tensor, ...]]:
        with Operators() as seen:
            grads = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
        return seen.names, grads

    names, together = run()
    assert names.count("gradient_products") == 1 and names.count("mm") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_products, "is_taken", lambda *_: False)
        names, alone = run()
    assert "gradient_products" not in names
    for a, b in zip(together, alone, strict=True):
        assert_tensor_near(a, b, 4)


def test_the_operator_is_defined_without_a_binary() -> None:
    assert any(schema.startswith("gradient_products(") for schema in ops.SCHEMAS)
