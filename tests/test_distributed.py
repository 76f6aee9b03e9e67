"""Two processes on the CPU: data parallel, fully sharded, and tensor parallel over heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fused_rope_xattn import FusedRoPECrossAttention, cross_attention
from processes import WORLD, assert_same, in_two_processes

pytestmark = pytest.mark.slow

DIM, HEADS = 32, 4


def build(**options: Any) -> FusedRoPECrossAttention:
    torch.manual_seed(0)
    return FusedRoPECrossAttention(DIM, HEADS, **{"bias": True, **options})


def batch(samples: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and a goal, the same in all processes."""
    torch.manual_seed(1)
    return tuple(torch.randn(samples, tokens, DIM) for tokens in (9, 13, 9))


def part(x: Tensor, rank: int) -> Tensor:
    return x.chunk(WORLD)[rank]


def loss_of(y: Tensor, goal: Tensor) -> Tensor:
    return (y - goal).square().mean()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"qk_norm": "rms", "num_kv_heads": 2},
}


# ---- data parallel ----


def _ddp(rank: int, options: dict[str, Any]) -> None:
    single, twin = build(**options), DistributedDataParallel(build(**options))
    x, kv, goal = batch()
    lengths = torch.tensor([13, 5, 0, 9])
    loss_of(single(x, kv, kv_lengths=lengths), goal).backward()
    y = twin(part(x, rank), part(kv, rank), kv_lengths=part(lengths, rank))
    loss_of(y, part(goal, rank)).backward()
    for (name, p), q in zip(single.named_parameters(), twin.parameters(), strict=True):
        assert_same(q.grad, p.grad, name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    in_two_processes(_ddp, tmp_path, options)


def _ddp_with_dropout_and_frozen_keys(rank: int) -> None:
    module = build(dropout=0.3)
    for child in (module.k_proj, module.v_proj):
        child.requires_grad_(False)
    twin = DistributedDataParallel(module)
    optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    x, kv, goal = batch()
    for _ in range(3):
        optimiser.zero_grad()
        loss_of(twin(part(x, rank), part(kv, rank)), part(goal, rank)).backward()
        optimiser.step()
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    others = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(others, mine)
    assert torch.equal(others[0], others[1]) and bool(mine.isfinite().all())


def test_ddp_with_dropout_and_frozen_keys(tmp_path: Path) -> None:
    in_two_processes(_ddp_with_dropout_and_frozen_keys, tmp_path)


# ---- fully sharded ----


class Blocks(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(build(**options) for _ in range(2))

    def forward(self, x: Tensor, kv: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, kv)
        return x


def _fsdp(rank: int, options: dict[str, Any], by_linear: bool) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    single, sharded = Blocks(**options), Blocks(**options)
    for block in sharded.blocks:
        if by_linear:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                fully_shard(getattr(block, name), mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x, kv, goal = batch()
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (single, sharded)]
    for _ in range(2):
        loss_of(single(x, kv), goal).backward()
        loss_of(sharded(part(x, rank), part(kv, rank)), part(goal, rank)).backward()
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            assert isinstance(q, DTensor)
            assert_same(q.grad, p.grad, name)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()


@pytest.mark.parametrize("by_linear", [False, True], ids=["blocks", "linears"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_fsdp2(tmp_path: Path, options: dict[str, Any], by_linear: bool) -> None:
    """Shards of whole blocks, and shards of each linear, which is then called itself."""
    in_two_processes(_fsdp, tmp_path, options, by_linear)


def _fsdp_from_meta(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    single = build(qk_norm="layer", rope_base=77.0)
    with torch.device("meta"):
        late = build(qk_norm="layer", rope_base=77.0)
    fully_shard(late, mesh=mesh)
    late.to_empty(device="cpu")
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(late, single.state_dict(), options=full)
    x, kv, _ = batch()
    assert_same(late(x, kv), single(x, kv))
    state = get_model_state_dict(late, options=full)
    if rank == 0:
        want = single.state_dict()
        assert state.keys() == want.keys()
        assert all(torch.equal(state[n], want[n]) for n in want)


def test_fsdp2_from_meta_and_back_to_a_state_dict(tmp_path: Path) -> None:
    in_two_processes(_fsdp_from_meta, tmp_path)


# ---- tensor parallel over heads ----

PLAN = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    "out_proj": RowwiseParallel,
}


def _tensor_parallel(rank: int, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    single, sharded = build(**options), build(**options)
    parallelize_module(sharded, mesh, {name: style() for name, style in PLAN.items()})
    x, kv, goal = batch()
    bias = torch.randn(HEADS, 9, 13)
    keep = torch.rand(4, HEADS, 1, 13) < 0.7
    mine = slice(rank * HEADS // WORLD, (rank + 1) * HEADS // WORLD)
    y = single(x, kv, attn_bias=bias, kv_keep_mask=keep)
    z = sharded(x, kv, attn_bias=bias[mine], kv_keep_mask=keep[:, mine])
    assert_same(z, y)
    loss_of(y, goal).backward()
    loss_of(z, goal).backward()
    for (name, p), q in zip(single.named_parameters(), sharded.named_parameters(), strict=True):
        if "norm" in name:  # replicated: each process has the share of its heads
            dist.all_reduce(q[1].grad)
        assert_same(q[1].grad, p.grad, name)
    projected = sharded.project_kv(kv)
    assert projected.k.shape[1] == single.num_kv_heads // WORLD
    assert_same(sharded(x, projected), single(x, kv))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_tensor_parallel_over_heads(tmp_path: Path, options: dict[str, Any]) -> None:
    """Masks and biases with an axis of heads are given as each process's share."""
    in_two_processes(_tensor_parallel, tmp_path, options)


def _tensor_parallel_by_function(rank: int) -> None:
    module = build(bias=False)
    x, kv, goal = batch()
    want = module(x, kv)
    loss_of(want, goal).backward()
    rows = [module.q_proj, module.k_proj, module.v_proj]
    leaves = [part(m.weight.detach(), rank).clone().requires_grad_() for m in rows]
    columns = module.out_proj.weight.detach().chunk(WORLD, dim=1)[rank].clone().requires_grad_()
    y = cross_attention(x, kv, *leaves, columns, num_heads=HEADS // WORLD)
    total = y.detach().clone()
    dist.all_reduce(total)
    assert_same(total, want)
    leaf = total.requires_grad_()
    (dy,) = torch.autograd.grad(loss_of(leaf, goal), leaf)
    y.backward(dy)
    for shard, m in zip(leaves, rows, strict=True):
        assert_same(shard.grad, part(m.weight.grad, rank))
    assert_same(columns.grad, module.out_proj.weight.grad.chunk(WORLD, dim=1)[rank])


def test_tensor_parallel_by_the_function(tmp_path: Path) -> None:
    in_two_processes(_tensor_parallel_by_function, tmp_path)


def _inner_norms(rank: int) -> None:
    """A norm over all heads needs all of them: refused by name, not computed over a share."""
    sharded = build(qk_norm="rms", qk_norm_over="inner")
    mesh = init_device_mesh("cpu", (WORLD,))
    parallelize_module(sharded, mesh, {name: style() for name, style in PLAN.items()})
    x, kv, _ = batch()
    with pytest.raises(ValueError, match=r"k_norm\.weight"):
        sharded(x, kv)


def test_tensor_parallel_refuses_norms_over_all_heads(tmp_path: Path) -> None:
    in_two_processes(_inner_norms, tmp_path)
