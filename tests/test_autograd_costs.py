"""What the split path's backward runs and what its forward keeps: no more than is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocks import (
    DKV,
    DOUT,
    DQ,
    DV,
    FROZEN,
    HKV,
    INNER,
    INNER_KV,
    TK,
    TQ,
    B,
    Block,
    D,
    H,
    by_function,
    freeze,
    make_block,
    plain_block,
    with_shared_x,
)
from fused_rope_xattn.split import BlockTensors


class Recorder(TorchDispatchMode):
    """Names of the operators that run, with the shapes of their tensor results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor):
            self.calls.append((func._overloadpacket.__name__, tuple(first.shape)))
        return out

    def products(self) -> list[tuple[int, ...]]:
        return sorted(shape for name, shape in self.calls if name in ("mm", "addmm"))


def backward_of(block: Block) -> Recorder:
    y, _ = by_function(block)
    recorder = Recorder()
    with recorder:
        torch.autograd.grad(y, list(block.leaves.values()), torch.randn_like(y))
    return recorder


DX_Q, DX_K, DX_V = (B * TQ, DQ), (B * TK, DKV), (B * TK, DV)
DW_Q, DW_K, DW_V, DW_OUT = (INNER, DQ), (INNER_KV, DKV), (INNER_KV, DV), (DOUT, INNER)
DO, Q_AGAIN, K_AGAIN = (B * TQ, INNER), (B * TQ, INNER), (B * TK, INNER_KV)


def test_only_wanted_products_run() -> None:
    """Without norms, one product for each gradient of x or a weight, and one for dout."""
    block = plain_block()
    every = [DX_Q, DX_K, DX_V, DW_Q, DW_K, DW_V, DW_OUT, DO]
    assert backward_of(block).products() == sorted(every)
    assert backward_of(freeze(block, FROZEN["encoder"])).products() == sorted(
        [DX_Q, DW_Q, DW_K, DW_V, DW_OUT, DO]
    )
    assert backward_of(freeze(block, FROZEN["weights"])).products() == sorted(
        [DX_Q, DX_K, DX_V, DO]
    )
    assert backward_of(freeze(block, FROZEN["kv_side"])).products() == sorted(
        [DX_Q, DW_Q, DW_OUT, DO]
    )
    for only in (["w_out"], ["b_out"]):
        recorder = backward_of(freeze(block, tuple(n for n in block.leaves if n not in only)))
        assert recorder.products() == ([DW_OUT] if only == ["w_out"] else [])
        assert "attention_backward" not in [name for name, _ in recorder.calls]


def test_norms_cost_one_product_more() -> None:
    assert backward_of(make_block()).products() == sorted(
        [DX_Q, DX_K, DX_V, DW_Q, DW_K, DW_V, DW_OUT, DO, Q_AGAIN, K_AGAIN]
    )


def test_a_shared_x_gets_one_gradient() -> None:
    """Both parts are added up by the second product, not by a pass of its own."""
    recorder = backward_of(with_shared_x(plain_block()))
    names = [name for name, _ in recorder.calls]
    assert names.count("addmm_") == 1 and "add" not in names


def test_lse_that_is_not_used_costs_nothing() -> None:
    recorder = backward_of(make_block())
    assert not [c for c in recorder.calls if c[1] == (B, H, TQ) and "zeros" in c[0]]


def saved_by(block: Block) -> list[Tensor]:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        by_function(block)
    return kept


def held(block: Block) -> set[str]:
    """Names of the arguments that are kept, and "q", "k", "o", "lse" by their shapes."""
    names = {x.data_ptr(): n for n, x in block.tensors._asdict().items() if x is not None}
    shapes = {(B, TQ, H, D): "q_or_o", (B, TK, HKV, D): "k_or_v", (B, H, TQ): "lse"}
    return {names.get(x.data_ptr()) or shapes[tuple(x.shape)] for x in saved_by(block)}


def test_only_what_the_backward_reads_is_saved() -> None:
    block = make_block()
    activations = {"q_or_o", "k_or_v", "lse"}
    query = {"x_query", "w_q", "b_q", "q_norm_weight", "q_positions"}
    keys = {"x_kv", "x_value", "w_k", "w_v", "b_k", "b_v", "k_norm_weight", "k_norm_bias"}
    scores = {"attn_bias", "kv_lengths", "w_out"}
    assert held(block) == activations | query | keys | scores | {"b_out"}
    for side, names in (("query_side", query), ("kv_side", keys)):
        frozen = freeze(block, FROZEN[side])
        assert held(frozen) == (activations | query | keys | scores | {"b_out"}) - names
    assert held(freeze(block, FROZEN["all_but_w_out"])) == {"q_or_o", "b_out"}
    assert held(freeze(block, FROZEN["all_but_b_out"])) == {"b_out"}
    assert held(freeze(block, BlockTensors._fields[:16])) == set()
