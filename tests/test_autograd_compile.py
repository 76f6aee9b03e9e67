"""The split path under torch.compile, on the CPU: one graph, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from blocks import (
    BLOCKS,
    DQ,
    INNER_KV,
    TQ,
    B,
    assert_same,
    by_composite,
    by_composite_projection,
    make_projection,
    plain_block,
    with_static_weights,
)
from fused_rope_xattn.autograd import attend, project_heads
from fused_rope_xattn.split import BlockTensors, Projection
from problems import assert_tensor_near


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED = ["most", "tables", "projected", "no_w_out"]


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_for_all_lengths(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(tensors: BlockTensors) -> tuple[Tensor, Tensor]:
        return attend(block.config, tensors)

    block = BLOCKS[name](torch.float32)
    counts = []
    for tq, tk in ((5, 7), (6, 9), (16, 32)):
        block = with_static_weights(BLOCKS[name](torch.float32, tq=tq, tk=tk))
        assert_same(block, run=lambda b: compiled(b.tensors))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_self_attention() -> None:
    """The same tensor in several places, which Dynamo does not take as it is."""
    x = torch.randn(B, TQ, DQ, requires_grad=True)
    block = plain_block(torch.float32, tk=TQ)
    w_k = torch.randn(INNER_KV, DQ, requires_grad=True)
    block = block.replace(x_query=x, x_kv=x, x_value=x, w_k=w_k, w_v=w_k)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(tensors: BlockTensors) -> tuple[Tensor, Tensor]:
        return attend(block.config, tensors)

    y, _ = compiled(block.tensors)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w_k), dy)
    want = torch.autograd.grad(by_composite(block)[0], (x, w_k), dy)
    for a, b in zip(got, want, strict=True):
        assert_tensor_near(a, b, 256)


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_projection() -> None:
    p = make_projection("norm", torch.float32)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(*tensors: Tensor | None) -> Tensor:
        return project_heads(Projection(*tensors, *p[8:]))

    leaves = [x for x in p[:5] if x is not None]
    heads, want = compiled(*p[:8]), by_composite_projection(p)
    dy = torch.randn_like(want)
    assert_tensor_near(heads.detach(), want.detach())
    got_grads, want_grads = (torch.autograd.grad(y, leaves, dy) for y in (heads, want))
    for a, b in zip(got_grads, want_grads, strict=True):
        assert_tensor_near(a, b, 256)
