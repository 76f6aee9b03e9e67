"""The autograd functions of the split path: what is saved, and which gradient goes where.

The gradients are split.py's. A backward that is itself recorded (``create_graph=True``) goes
through composite.py instead, which autograd can differentiate again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import composite, fused, split, token_attention
from .config import BlockConfig, NormSpec, RotationSpec
from .rope import Rotation
from .split import Activations, BlockTensors, Grads, Needs, Projection, ProjectionNeeds


def attend(config: BlockConfig, t: BlockTensors) -> tuple[Tensor, Tensor]:
    """The block by the kernels: ``(y, lse)``. The caller has switched autocast off."""
    if not torch.is_grad_enabled():
        y, activations = _forward(config, t, keep_rest=False)
        return y, activations.lse
    if torch.compiler.is_compiling():
        t = BlockTensors(*_distinct(t))
    y, lse = CrossAttentionFunction.apply(config, *t)
    return y, lse


def project_heads(p: Projection) -> Tensor:  # [B, T, H, D]
    """One projection by the split path."""
    if not torch.is_grad_enabled():
        with _autocast_off(p.x):
            return split.project_forward(p)
    heads: Tensor = ProjectHeadsFunction.apply(*p)
    return heads


_NUM_TENSORS = len(BlockTensors._fields)
_FIRST_TABLE = BlockTensors._fields.index("q_positions")  # no gradients from here on


class CrossAttentionFunction(torch.autograd.Function):
    """The whole block as one node: ``apply(config, *BlockTensors(...)) -> (y, lse)``.

    The tensors are those of :class:`~fused_rope_xattn.split.BlockTensors` in its order, checked
    already; one dtype throughout but for norm weights, ``attn_bias``, positions and tables.
    Positions and tables get no gradient here; the composite path gives tables theirs.
    """

    @staticmethod
    def forward(ctx: Any, config: BlockConfig, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        t = BlockTensors(*tensors)  # type: ignore[arg-type]
        if t.x_value is t.x_kv:
            t = t._replace(x_value=None)
        needs = _block_needs(ctx.needs_input_grad[1:], shares_x=t.x_value is None)
        with _autocast_off(t.x_query):
            y, activations = _forward(config, t, keep_rest=needs.attention)

        ctx.config, ctx.needs = config, needs
        t, saved = split.needed(t, activations, needs)
        ctx.save_for_backward(*t, *saved)
        ctx.set_materialize_grads(False)  # lse is seldom used: None then, instead of zeros
        return y, activations.lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        config, needs = ctx.config, ctx.needs
        kept = ctx.saved_tensors  # once: checkpointing refuses a second look
        t, saved = BlockTensors(*kept[:_NUM_TENSORS]), Activations(*kept[_NUM_TENSORS:])
        if dy is None and dlse is None:
            return (None,) * (1 + _NUM_TENSORS)
        with _autocast_off(dlse if dy is None else dy):
            # Without attention the backward is a plain GEMM, which autograd can record as it is.
            if _is_recorded() and needs.attention:
                return None, *_recorded_block_backward(config, t, saved, needs, dy, dlse)
            grads = _backward(config, t, saved, needs, dy, dlse)
        return (
            None,  # config
            grads.q.x,  # x_query
            grads.k.x,  # x_kv
            grads.v.x,  # x_value
            grads.q.weight,  # w_q
            grads.k.weight,  # w_k
            grads.v.weight,  # w_v
            grads.w_out,  # w_out
            grads.q.bias,  # b_q
            grads.k.bias,  # b_k
            grads.v.bias,  # b_v
            grads.b_out,  # b_out
            grads.q.norm_weight,  # q_norm_weight
            grads.q.norm_bias,  # q_norm_bias
            grads.k.norm_weight,  # k_norm_weight
            grads.k.norm_bias,  # k_norm_bias
            grads.attn_bias,  # attn_bias
            None,  # q_positions
            None,  # q_cos
            None,  # q_sin
            None,  # k_positions
            None,  # k_cos
            None,  # k_sin
            None,  # kv_lengths
            None,  # keep_mask
            None,  # key_keep
            None,  # seed
        )


class ProjectHeadsFunction(torch.autograd.Function):
    """One projection, normed and rotated: ``apply(*Projection(...)) -> heads`` [B, T, H, D].

    The arguments are those of :class:`~fused_rope_xattn.split.Projection` in its order.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        p = Projection(*args)
        wanted = ctx.needs_input_grad
        _refuse_table_gradients(wanted[5:8])
        with _autocast_off(p.x):
            heads = split.project_forward(p)
        ctx.needs = ProjectionNeeds(*wanted[:5])
        ctx.options = p[8:]
        ctx.save_for_backward(*p[:8])
        return heads

    @staticmethod
    def backward(ctx: Any, dheads: Tensor) -> tuple[Tensor | None, ...]:
        p = Projection(*ctx.saved_tensors, *ctx.options)
        with _autocast_off(dheads):
            if _is_recorded():
                return _recorded_projection_backward(p, dheads)
            grads = split.project_backward(p, dheads, ctx.needs)
        return (
            grads.x,  # x
            grads.weight,  # weight
            grads.bias,  # bias
            grads.norm_weight,  # norm_weight
            grads.norm_bias,  # norm_bias
            None,  # positions
            None,  # cos
            None,  # sin
            None,  # num_heads
            None,  # norm
            None,  # rotation
            None,  # tf32
        )


def _forward(
    config: BlockConfig, t: BlockTensors, *, keep_rest: bool
) -> tuple[Tensor, Activations]:
    if config.fused:
        return fused.forward(config, t)
    if token_attention.is_taken(config, t):
        return token_attention.forward(config, t, keep_rest=keep_rest)
    return split.forward(config, t, keep_rest=keep_rest)


def _backward(
    config: BlockConfig,
    t: BlockTensors,
    saved: Activations,
    needs: Needs,
    dy: Tensor | None,
    dlse: Tensor | None,
) -> Grads:
    if saved.u is not None:
        return token_attention.backward(config, t, saved, needs, dy, dlse)
    if dy is not None and fused.takes_backward(config, saved, needs):
        return fused.backward(config, t, saved, needs, dy, dlse)
    return split.backward(config, t, saved, needs, dy, dlse)


def _block_needs(flags: tuple[bool, ...], shares_x: bool) -> Needs:
    """From a flag for each of BlockTensors, whether its gradient is wanted."""
    _refuse_table_gradients(flags[_FIRST_TABLE:])
    wanted: Any = BlockTensors(*flags)  # type: ignore[arg-type]
    return Needs(
        q=ProjectionNeeds(
            wanted.x_query, wanted.w_q, wanted.b_q, wanted.q_norm_weight, wanted.q_norm_bias
        ),
        k=ProjectionNeeds(
            wanted.x_kv, wanted.w_k, wanted.b_k, wanted.k_norm_weight, wanted.k_norm_bias
        ),
        v=ProjectionNeeds(
            wanted.x_kv if shares_x else wanted.x_value, wanted.w_v, wanted.b_v, False, False
        ),
        attn_bias=wanted.attn_bias,
        w_out=wanted.w_out,
        b_out=wanted.b_out,
    )


def _refuse_table_gradients(wanted: tuple[bool, ...]) -> None:
    if any(wanted):
        raise ValueError(
            "positions, cos and sin must not require grad here; "
            'cross_attention(..., path="composite") gives gradients to cos and sin'
        )


def _distinct(tensors: Iterable[Tensor | None]) -> list[Any]:
    """The tensors, a repeated one (self-attention, one table for q and k) as a view of itself.

    torch.compile refuses an autograd.Function that gets the same tensor twice.
    """
    result: list[Tensor | None] = []
    for x in tensors:
        repeated = x is not None and any(x is earlier for earlier in result)
        result.append(x.view_as(x) if x is not None and repeated else x)
    return result


def _is_recorded() -> bool:
    """Whether autograd records this backward. Compiled graphs have no second derivative to record
    for, though they may be traced with gradients enabled."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _autocast_off(x: Tensor | None) -> contextlib.AbstractContextManager[Any]:
    """The arguments have their final dtypes: autocast must not cast GEMMs in here once more."""
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


# -------------------------------------------------------------------------------- double backward


def _recorded_block_backward(
    config: BlockConfig,
    t: BlockTensors,
    saved: Activations,
    needs: Needs,
    dy: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:  # one for each of BlockTensors
    """The gradients by autograd through the composite, ready to be differentiated themselves."""
    t = BlockTensors(*map(_alias, t))  # type: ignore[arg-type]
    args = t
    if not any(needs.q):  # start from the finished queries instead
        config = config._replace(q_norm=NormSpec(), q_rotation=RotationSpec())
        args = args._replace(x_query=saved.q.flatten(2))
    if not needs.kv:
        args = args._replace(x_kv=saved.k)
        if saved.v is not None:  # else from tokens, as the forward
            args = args._replace(x_value=saved.v)
    y, lse = composite.cross_attention(config, *args, need_lse=dlse is not None)
    outputs = [] if dy is None else [(y, dy)]
    if lse is not None and dlse is not None:
        outputs.append((lse, dlse))
    return _grads_to(t, outputs)


def _recorded_projection_backward(p: Projection, dheads: Tensor) -> tuple[Tensor | None, ...]:
    p = Projection(*map(_alias, p[:8]), *p[8:])  # type: ignore[arg-type, call-arg]
    norm = (p.norm, p.norm_weight, p.norm_bias)
    rotation = Rotation(p.rotation, p.positions, p.cos, p.sin)
    heads = composite.project_heads(p.x, p.weight, p.bias, p.num_heads, norm, rotation)
    return *_grads_to(p[:8], [(heads, dheads)]), *(None,) * len(p[8:])


def _alias(x: Tensor | None) -> Tensor | None:
    """A view to differentiate by. The tensor itself would not do: where one argument was computed
    from another, the other's gradient would hold its share twice."""
    return x.view_as(x) if x is not None and x.requires_grad else x


def _grads_to(
    inputs: tuple[Tensor | None, ...], outputs: list[tuple[Tensor, Tensor]]
) -> list[Tensor | None]:
    """Recorded gradients of the inputs that require one, from pairs of an output and its own."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    values, grads_of_values = zip(*outputs, strict=True)
    grads = iter(
        torch.autograd.grad(values, wanted, grads_of_values, create_graph=True, allow_unused=True)
    )
    return [next(grads) if x is not None and x.requires_grad else None for x in inputs]
