"""Blocks for the split path's tests: tensors and options as CrossAttentionFunction takes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rope_xattn import composite
from fused_rope_xattn.autograd import CrossAttentionFunction
from fused_rope_xattn.config import NORM_LAYER, NORM_RMS, BlockConfig, NormSpec, RotationSpec
from fused_rope_xattn.rope import Rotation
from fused_rope_xattn.split import BlockTensors, Projection
from problems import assert_tensor_near

B, TQ, TK, H, HKV, D, DQ, DKV, DV, DOUT = 2, 5, 7, 4, 2, 8, 12, 10, 6, 9
INNER, INNER_KV = H * D, HKV * D


class Block(NamedTuple):
    config: BlockConfig
    tensors: BlockTensors

    def replace(self, **tensors: Any) -> Block:
        return Block(self.config, self.tensors._replace(**tensors))

    @property
    def leaves(self) -> dict[str, Tensor]:
        fields = self.tensors._asdict()
        return {n: x for n, x in fields.items() if x is not None and x.requires_grad}


def make_block(
    dtype: torch.dtype = torch.float64, tq: int = TQ, tk: int = TK, batch: int = B, **options: Any
) -> Block:
    """Everything at once: biases, both kinds of norm, axial and partial rotation, bias, lengths."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()

    config = BlockConfig(
        num_heads=H,
        num_kv_heads=HKV,
        q_rotation=RotationSpec(D, axes=2, base=100.0),
        k_rotation=RotationSpec(4, interleaved=False, base=50.0),
        q_norm=NormSpec(NORM_RMS, False, 1e-6),
        k_norm=NormSpec(NORM_LAYER, True, 1e-5),
        scale=0.3,
    )
    tensors = BlockTensors(
        x_query=leaf(batch, tq, DQ),
        x_kv=leaf(batch, tk, DKV),
        x_value=leaf(batch, tk, DV),
        w_q=leaf(INNER, DQ),
        w_k=leaf(INNER_KV, DKV),
        w_v=leaf(INNER_KV, DV),
        w_out=leaf(DOUT, INNER),
        b_q=leaf(INNER),
        b_k=leaf(INNER_KV),
        b_v=leaf(INNER_KV),
        b_out=leaf(DOUT),
        q_norm_weight=leaf(D),
        q_norm_bias=None,
        k_norm_weight=leaf(INNER_KV),
        k_norm_bias=leaf(INNER_KV),
        attn_bias=leaf(1, H, 1, tk),
        q_positions=torch.randint(-9, 9, (batch, tq, 2)),
        q_cos=None,
        q_sin=None,
        k_positions=None,
        k_cos=None,
        k_sin=None,
        kv_lengths=torch.full((batch,), tk, dtype=torch.int32),
        keep_mask=None,
        key_keep=None,
        seed=None,
    )
    return Block(config._replace(**options), tensors)


def plain_block(dtype: torch.dtype = torch.float64, **sizes: int) -> Block:
    """Neither norm nor rotation nor mask."""
    block = make_block(dtype, **sizes, q_norm=NormSpec(), k_norm=NormSpec())
    config = block.config._replace(q_rotation=RotationSpec(), k_rotation=RotationSpec())
    extras = ("q_norm_weight", "k_norm_weight", "k_norm_bias", "q_positions", "kv_lengths")
    return Block(config, block.tensors._replace(**dict.fromkeys((*extras, "attn_bias"))))


def with_shared_x(block: Block) -> Block:
    return block.replace(x_value=None, w_v=block.tensors.w_k.detach().flip(0).requires_grad_())


def with_tables(block: Block) -> Block:
    q_cos, q_sin = torch.randn(2, 1, H, block.tensors.x_query.shape[1], D).to(block.tensors.w_q)
    k_cos, k_sin = torch.randn(2, 1, 1, block.tensors.x_kv.shape[1], 3).to(block.tensors.w_q)
    config = block.config._replace(
        q_rotation=RotationSpec(D, full_width=True), k_rotation=RotationSpec(6, False)
    )
    block = block.replace(q_positions=None, q_cos=q_cos, q_sin=q_sin, k_cos=k_cos, k_sin=k_sin)
    return Block(config, block.tensors)


def with_projected_kv(block: Block) -> Block:
    """k and v as ProjectedKV holds them: views of [B, Hkv, Tk, D]."""
    batch, tokens = block.tensors.x_kv.shape[:2]
    shape = (batch, HKV, tokens, D)
    k, v = (torch.randn(shape, dtype=block.tensors.w_q.dtype).transpose(1, 2) for _ in range(2))
    made_from = ("w_k", "w_v", "b_k", "b_v", "k_norm_weight", "k_norm_bias", "k_positions")
    block = block.replace(
        x_kv=k.requires_grad_(), x_value=v.requires_grad_(), **dict.fromkeys(made_from)
    )
    return block


def with_masks(block: Block) -> Block:
    """Ragged lengths, a mask with heads, removed keys, and a sample that sees nothing."""
    tq, tk = block.tensors.x_query.shape[1], block.tensors.x_kv.shape[1]
    config = block.config._replace(is_causal=True)
    block = block.replace(
        kv_lengths=torch.tensor([tk - 2, 0], dtype=torch.int32),
        keep_mask=torch.rand(B, H, tq, tk) > 0.3,
        key_keep=torch.arange(tk).expand(B, tk) != 1,
    )
    return Block(config, block.tensors)


def with_dropout(block: Block) -> Block:
    block = block.replace(seed=torch.tensor([-81985529216486896]))
    return Block(block.config._replace(dropout_p=0.35), block.tensors)


def without_w_out(block: Block) -> Block:
    return block.replace(w_out=None, b_out=None)


BLOCKS: dict[str, Callable[..., Block]] = {
    "everything": make_block,
    "plain": plain_block,
    "shared_x": lambda *a, **k: with_shared_x(make_block(*a, **k)),
    "shared_x_plain": lambda *a, **k: with_shared_x(plain_block(*a, **k)),
    "tables": lambda *a, **k: with_tables(make_block(*a, **k)),
    "projected": lambda *a, **k: with_projected_kv(make_block(*a, **k)),
    "masks": lambda *a, **k: with_masks(make_block(*a, **k)),
    "dropout": lambda *a, **k: with_dropout(make_block(*a, **k)),
    "no_w_out": lambda *a, **k: without_w_out(make_block(*a, **k)),
    "most": lambda *a, **k: with_dropout(with_masks(with_shared_x(make_block(*a, **k)))),
}


def with_static_weights(block: Block) -> Block:
    """As parameters of a module are, only tokens change their sizes."""
    for x in (*block.tensors[3:15], block.tensors.seed):
        if x is not None:
            torch._dynamo.mark_static(x)
    return block


FROZEN = {
    "query_side": ("x_query", "w_q", "b_q", "q_norm_weight"),
    "kv_side": ("x_kv", "x_value", "w_k", "w_v", "b_k", "b_v", "k_norm_weight", "k_norm_bias"),
    "key_side": ("x_kv", "w_k", "b_k", "k_norm_weight", "k_norm_bias"),
    "encoder": ("x_kv", "x_value"),
    "weights": ("w_q", "w_k", "w_v", "w_out", "q_norm_weight", "k_norm_weight", "k_norm_bias"),
    "all_but_w_out": (*BlockTensors._fields[:6], *BlockTensors._fields[7:16]),
    "all_but_b_out": (*BlockTensors._fields[:10], *BlockTensors._fields[11:16]),
    "all_but_attn_bias": BlockTensors._fields[:15],
}


def freeze(block: Block, names: tuple[str, ...]) -> Block:
    fields = block.tensors._asdict()
    frozen = {n: fields[n].detach() for n in names if fields[n] is not None}
    return block.replace(**frozen)


def by_function(block: Block) -> tuple[Tensor, Tensor]:
    return CrossAttentionFunction.apply(block.config, *block.tensors)


def by_composite(block: Block) -> tuple[Tensor, Tensor]:
    y, lse = composite.cross_attention(block.config, *block.tensors)
    assert lse is not None
    return y, lse


Run = Callable[[Block], tuple[Tensor, Tensor]]


def results(run: Run, block: Block, dy: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """y, lse and the gradient of every leaf."""
    y, lse = run(block)
    leaves = block.leaves
    outputs, grads = ([y], [dy]) if dlse is None else ([y, lse], [dy, dlse])
    got = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    got = [
        torch.zeros_like(x) if g is None else g for g, x in zip(got, leaves.values(), strict=True)
    ]
    return {"y": y.detach(), "lse": lse.detach(), **dict(zip(leaves, got, strict=True))}


def assert_same(
    block: Block, lse_too: bool = True, ulps: float = 256, run: Run = by_function
) -> None:
    y, lse = by_composite(block)
    dy = torch.randn_like(y)
    dlse = torch.randn_like(lse).masked_fill(lse == -math.inf, 0.0) if lse_too else None
    got, want = (results(r, block, dy, dlse) for r in (run, by_composite))
    assert got.keys() == want.keys()
    for name in want:
        assert_tensor_near(got[name], want[name], 256, name)


def make_projection(name: str, dtype: torch.dtype = torch.float64) -> Projection:
    block = with_tables(make_block(dtype)) if name == "table" else make_block(dtype)
    t, c = block.tensors, block.config
    rotation = (t.k_positions, t.k_cos, t.k_sin)
    p = Projection(
        t.x_kv, t.w_k, t.b_k, t.k_norm_weight, t.k_norm_bias, *rotation, HKV, c.k_norm, c.k_rotation
    )
    if name == "no_norm":
        p = p._replace(norm_weight=None, norm_bias=None, norm=NormSpec())
    return p


def by_composite_projection(p: Projection) -> Tensor:
    norm = (p.norm, p.norm_weight, p.norm_bias)
    rotation = Rotation(p.rotation, p.positions, p.cos, p.sin)
    return composite.project_heads(p.x, p.weight, p.bias, p.num_heads, norm, rotation)
