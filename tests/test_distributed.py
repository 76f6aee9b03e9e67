"""Two processes: data parallel, fully sharded, and tensor parallel over heads."""

from __future__ import annotations

from functools import partial
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fused_rope_xattn import FusedRoPECrossAttention, cross_attention
from problems import assert_tensor_near
from processes import WORLD, TwoProcesses, assert_same, here, mesh, whole

pytestmark = pytest.mark.slow

DIM, HEADS = 32, 4


def build(**options: Any) -> FusedRoPECrossAttention:
    torch.manual_seed(0)
    return FusedRoPECrossAttention(DIM, HEADS, **{"bias": True, "device": here(), **options})


def batch(samples: int = 4, queries: int = 9, keys: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and a goal, the same in all processes."""
    torch.manual_seed(1)
    lengths = queries, keys, queries
    return tuple(torch.randn(samples, tokens, DIM, device=here()) for tokens in lengths)


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
    lengths = torch.tensor([13, 5, 0, 9], device=here())
    loss_of(single(x, kv, kv_lengths=lengths), goal).backward()
    y = twin(part(x, rank), part(kv, rank), kv_lengths=part(lengths, rank))
    loss_of(y, part(goal, rank)).backward()
    for (name, p), q in zip(single.named_parameters(), twin.parameters(), strict=True):
        assert_same(q.grad, p.grad, name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_ddp(two_processes: TwoProcesses, options: dict[str, Any]) -> None:
    two_processes(_ddp, options)


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


def test_ddp_with_dropout_and_frozen_keys(two_processes: TwoProcesses) -> None:
    two_processes(_ddp_with_dropout_and_frozen_keys)


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
    single, sharded = Blocks(**options), Blocks(**options)
    for block in sharded.blocks:
        if by_linear:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                fully_shard(getattr(block, name), mesh=mesh())
        fully_shard(block, mesh=mesh())
    fully_shard(sharded, mesh=mesh())
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
def test_fsdp2(two_processes: TwoProcesses, options: dict[str, Any], by_linear: bool) -> None:
    """Shards of whole blocks, and shards of each linear, which is then called itself."""
    two_processes(_fsdp, options, by_linear)


def _fsdp_from_meta(rank: int) -> None:
    single = build(qk_norm="layer", rope_base=77.0)
    late = build(qk_norm="layer", rope_base=77.0, device="meta")
    fully_shard(late, mesh=mesh())
    late.to_empty(device=here())
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(late, single.state_dict(), options=full)
    x, kv, _ = batch()
    assert_same(late(x, kv), single(x, kv))
    state = get_model_state_dict(late, options=full)
    if rank == 0:
        want = single.state_dict()
        assert state.keys() == want.keys()
        assert all(torch.equal(state[n], want[n]) for n in want)


def test_fsdp2_from_meta_and_back_to_a_state_dict(two_processes: TwoProcesses) -> None:
    two_processes(_fsdp_from_meta)


def _fsdp_in_bf16(rank: int, options: dict[str, Any]) -> None:
    sharded = Blocks(**options, device="meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part_of_model in (*sharded.blocks, sharded):
        fully_shard(part_of_model, mesh=mesh(), mp_policy=policy)
    sharded.to_empty(device=here())
    for child in sharded.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    single = Blocks(**options)
    single.load_state_dict({n: p.full_tensor() for n, p in sharded.named_parameters()})
    single.bfloat16()
    x, kv, goal = batch()
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in single.parameters()]
    for r in range(WORLD):  # each process's gradients are rounded before fp32 adds them up
        want = single(part(x, r).bfloat16(), part(kv, r).bfloat16())
        grads = torch.autograd.grad(loss_of(want, part(goal, r)), list(single.parameters()))
        for total, grad in zip(totals, grads):
            total += grad.float() / WORLD
        if r == rank:
            y = sharded(part(x, r), part(kv, r))
            assert y.dtype == torch.bfloat16
            assert_tensor_near(y, want, 4)
    loss_of(y, part(goal, rank)).backward()
    for (name, q), total in zip(sharded.named_parameters(), totals, strict=True):
        assert q.grad.dtype == torch.float32
        assert_tensor_near(whole(q.grad), total, 4, name, torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_fsdp2_in_bf16_from_meta(two_processes: TwoProcesses, options: dict[str, Any]) -> None:
    """Made on meta and reset there after; computed in bf16, gradients added up in fp32."""
    two_processes(_fsdp_in_bf16, options)


# ---- tensor parallel over heads ----

PLAN = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    "out_proj": RowwiseParallel,
}


def _tensor_parallel(rank: int, options: dict[str, Any]) -> None:
    single, sharded = build(**options), build(**options)
    parallelize_module(sharded, mesh(), {name: style() for name, style in PLAN.items()})
    x, kv, goal = batch()
    bias = torch.randn(HEADS, 9, 13, device=here())
    keep = torch.rand(4, HEADS, 1, 13, device=here()) < 0.7
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
def test_tensor_parallel_over_heads(two_processes: TwoProcesses, options: dict[str, Any]) -> None:
    """Masks and biases with an axis of heads are given as each process's share."""
    two_processes(_tensor_parallel, options)


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


def test_tensor_parallel_by_the_function(two_processes: TwoProcesses) -> None:
    two_processes(_tensor_parallel_by_function)


UNEVENLY = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="nn.Linear of a sequence that is cut into unequal parts fails in torch 2.11",
)
TOKENS = [
    pytest.param(Replicate(), 9, 13, id="replicated"),
    pytest.param(Shard(1), 8, 14, id="sequence"),
    pytest.param(Shard(1), 9, 13, id="sequence_unevenly", marks=UNEVENLY),
]


def _tensor_parallel_of_dtensors(
    rank: int, options: dict[str, Any], tokens: Placement, queries: int, keys: int
) -> None:
    single, sharded = build(**options), build(**options)
    into = {name: ColwiseParallel(input_layouts=tokens) for name in PLAN}
    out = RowwiseParallel(output_layouts=tokens, use_local_output=False)
    parallelize_module(sharded, mesh(), into | {"out_proj": out})
    *leaves, goal = batch(queries=queries, keys=keys)
    shards = [distribute_tensor(t, mesh(), [tokens]).requires_grad_() for t in leaves]
    for leaf in leaves:
        leaf.requires_grad_()
    y, z = single(*leaves), sharded(*shards)
    assert isinstance(z, DTensor)
    assert z.placements == (tokens,)
    assert_same(z, y)
    loss_of(y, goal).backward()
    loss_of(z, distribute_tensor(goal, mesh(), [tokens])).backward()
    for name, a, b in zip(("x_query", "x_kv"), shards, leaves):
        assert_same(a.grad, b.grad, name)
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        if "norm" in name:
            dist.all_reduce(q.grad)
        assert_same(q.grad, p.grad, name)
    assert_same(sharded(shards[0], sharded.project_kv(shards[1])), y)


@pytest.mark.parametrize(("tokens", "queries", "keys"), TOKENS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_tensor_parallel_of_dtensors(
    two_processes: TwoProcesses,
    options: dict[str, Any],
    tokens: Placement,
    queries: int,
    keys: int,
) -> None:
    """Tokens come as DTensors and leave as DTensors, whole or cut along the sequence."""
    two_processes(_tensor_parallel_of_dtensors, options, tokens, queries, keys)


QUERIES_ONLY = {name: PLAN[name] for name in ("q_proj", "out_proj")}


def _one_key_head(rank: int) -> None:
    single, sharded = build(num_kv_heads=1), build(num_kv_heads=1)
    parallelize_module(sharded, mesh(), {name: style() for name, style in QUERIES_ONLY.items()})
    x, kv, goal = batch()
    y, z = single(x, kv), sharded(x, kv)
    assert_same(z, y)
    loss_of(y, goal).backward()
    loss_of(z, goal).backward()
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        if name.startswith(("k_", "v_")):
            dist.all_reduce(q.grad)
        assert_same(q.grad, p.grad, name)


def test_tensor_parallel_with_one_key_head(two_processes: TwoProcesses) -> None:
    """All processes hold it: only queries and output are sharded."""
    two_processes(_one_key_head)


def _refusals(rank: int) -> None:
    x, kv, _ = batch()
    dx, dkv = (distribute_tensor(t, mesh(), [Replicate()]) for t in (x, kv))
    mask = torch.ones(4, 13, dtype=torch.bool, device=here())

    def refused(module: nn.Module, error: Any, message: str, *call: Any, **options: Any) -> None:
        with pytest.raises(error, match=message):
            module(*call, **options)

    def sharded(plan: dict[str, Any], **options: Any) -> nn.Module:
        styles = {name: style() for name, style in plan.items()}
        return parallelize_module(build(**options), mesh(), styles)

    over_all = sharded(PLAN, qk_norm="rms", qk_norm_over="inner")
    refused(over_all, ValueError, r"^k_norm\.weight: ", x, kv)
    refused(sharded(PLAN, num_kv_heads=1), ValueError, "^k_proj: expected whole heads", x, kv)
    refused(sharded(QUERIES_ONLY, num_kv_heads=2), ValueError, "^num_kv_heads: .* share", x, kv)
    refused(build(), TypeError, "^x_query: .*, got a DTensor", dx, dkv)
    refused(build(), TypeError, "^x_kv: .*, got a DTensor", x, dkv)
    refused(sharded(PLAN), TypeError, "^x_kv: .*, got a DTensor", x, dkv, kv_keep_mask=mask)
    whole_mask = distribute_tensor(mask, mesh(), [Replicate()])
    refused(sharded(PLAN), TypeError, "^kv_keep_mask: ", x, kv, kv_keep_mask=whole_mask)
    for name in ("q_proj", "k_proj", "v_proj"):
        kept = PLAN | {name: partial(ColwiseParallel, use_local_output=False)}
        refused(sharded(kept), TypeError, f"^{name}: .*use_local_output=True", x, kv)


def test_tensor_parallel_refuses_what_it_cannot_do(two_processes: TwoProcesses) -> None:
    """By name, and before anything is computed over a share that needs the whole."""
    two_processes(_refusals)
