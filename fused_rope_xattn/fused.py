"""The path of problems too small to fill a GPU: each direction one operator, three short kernels.

Saved for the backward is what the split path saves, so split.py's backward serves what
:func:`backward` does not cover.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import block_ops, ops, split
from .arguments import Problem
from .block_ops import BlockNeeds
from .config import NORM_NONE, BlockConfig
from .ops import TurningTensors
from .signature import wants_gradients
from .split import Activations, BlockTensors, Grads, Needs, ProjectionGrads

HEAD_DIMS = (16, 32, 64, 128)
WIDTH_MULTIPLE = 8
LEAST_TILE_COLUMNS = 32  # of a projection, all of whose columns are looked up in tables

TILE_QUERIES = 16  # of one head, which a block of the attention kernel takes


class Limits(NamedTuple):
    """Up to where the small tiles pay. Beyond, larger tiles, keys split over blocks, and products
    of several projections in one launch win back what the launches cost.
    """

    tiles: int  # of TILE_QUERIES rows of one head, all together
    keys: int
    projections: int  # multiplications, all projections together
    # Multiplications of q k^T: the backward's small tiles read keys and queries often.
    backward: int
    backward_tiles: int  # of TILE_QUERIES rows again


# Measured on an H200, which has 132 multiprocessors.
LIMITS = {
    "fp32": Limits(1056, 1024, 2**32, 2**26, 1056),
    "tf32": Limits(528, 1024, 2**29, 2**25, 528),
    "half": Limits(528, 512, 2**29, 2**24, 264),
}
# What few queries look at is read once, at the memory's pace, by eight blocks a head at most.
FEW_QUERIES = TILE_QUERIES
MOST_STREAMING_QUERIES = 2048  # of all heads and samples; more of them and the split path wins
MOST_STREAMED_KEYS = 4096


def forward(config: BlockConfig, t: BlockTensors) -> tuple[Tensor, Activations]:
    """As :func:`.split.forward`."""
    y, q, k, v, o, lse = ops.block_forward(config, t)
    if t.w_out is None:
        y = o.flatten(2)
    if t.w_k is None:
        assert t.x_value is not None
        k, v = t.x_kv, t.x_value
    return y, Activations(q, k, v, o, lse)


def backward(
    config: BlockConfig,
    t: BlockTensors,
    saved: Activations,
    needs: Needs,
    dy: Tensor,  # like y
    dlse: Tensor | None,  # [B, H, Tq]
) -> Grads:
    """As :func:`.split.backward`, where :func:`takes_backward` agrees."""
    assert saved.v is not None
    zeros: dict[str, Tensor] = {}
    if dlse is None and needs.kv:
        zeros = split.shift_of_all_keys(split.key_projection(config, t), needs.k)
    g = block_ops.block_backward(
        dy,
        dlse,
        t.x_query,
        t.x_kv,
        t.x_value,
        t.w_q,
        t.w_k,
        t.w_v,
        t.w_out,
        saved.q,
        saved.k,
        saved.v,
        saved.o,
        saved.lse,
        TurningTensors(t.q_positions, t.q_cos, t.q_sin),
        TurningTensors(t.k_positions, t.k_cos, t.k_sin),
        split.score_options(config, t),
        q_rotation=config.q_rotation,
        k_rotation=config.k_rotation,
        needs=BlockNeeds(
            x_query=needs.q.x,
            x_kv=needs.k.x,
            x_value=needs.v.x and t.x_value is not None,
            w_q=needs.q.weight,
            w_k=needs.k.weight,
            w_v=needs.v.weight,
            w_out=needs.w_out,
            b_q=needs.q.bias,
            b_k=needs.k.bias and not zeros,
            b_v=needs.v.bias,
            b_out=needs.b_out,
        ),
    )
    return Grads(
        ProjectionGrads(g.x_query, g.w_q, g.b_q),
        ProjectionGrads(g.x_kv, g.w_k, g.b_k)._replace(**zeros),
        ProjectionGrads(g.x_value, g.w_v, g.b_v),
        None,
        g.w_out,
        g.b_out,
    )


def takes_backward(config: BlockConfig, saved: Activations, needs: Needs) -> bool:
    """Whether :func:`backward` covers what is wanted, and is expected to be the fastest."""
    if not config.fused or not needs.attention or needs.attn_bias:
        return False
    batch, queries, heads, head_dim = saved.q.shape
    limits = limits_of(saved.q.dtype, config.tf32)
    return _is_small_backward(batch, queries, heads, head_dim, saved.k.shape[1], limits)


def _is_small_backward(
    batch: int, queries: int, heads: int, head_dim: int, keys: int, limits: Limits
) -> bool:
    tiles = _query_tiles(batch, queries, heads)
    multiplications = batch * queries * heads * head_dim * keys
    return bool(multiplications <= limits.backward and tiles <= limits.backward_tiles)


def _query_tiles(batch: int, queries: int, heads: int) -> int:
    return batch * heads * ((queries + TILE_QUERIES - 1) // TILE_QUERIES)


def limits_of(dtype: torch.dtype, tf32: bool) -> Limits:
    if dtype == torch.float32:
        return LIMITS["tf32" if tf32 else "fp32"]
    return LIMITS["half"]


def obstacle(problem: Problem, config: BlockConfig, t: BlockTensors) -> str | None:
    """Why this path cannot take a call that the kernels can, None if it can."""
    if t.w_q is None:
        return "the queries come projected"
    if config.dropout_p > 0:
        return "it has dropout"
    if config.q_norm.kind != NORM_NONE or config.k_norm.kind != NORM_NONE:
        return "it has a norm"
    if problem.D not in HEAD_DIMS:
        return f"it takes head dims of {_listed(HEAD_DIMS)}, not {problem.D}"
    widths = {"Dq": problem.Dq, "Dout": problem.Dout}
    if t.w_k is not None:
        widths |= {"Dkv": problem.Dkv, "Dv": problem.Dv}
    for name, width in widths.items():
        if width is not None and width % WIDTH_MULTIPLE:
            return f"it takes multiples of {WIDTH_MULTIPLE} as widths, not {name}={width}"
    sides = (("H", problem.H, t.q_cos), ("Hkv", problem.Hkv, t.k_cos))
    for name, heads, table in sides:
        # The last tile would look up angles of a head behind the last.
        is_own = table is not None and table.size(1) > 1
        if is_own and heads * problem.D % LEAST_TILE_COLUMNS:
            dim = problem.D
            return f"it takes heads of {dim} with tables of their own in pairs, not {name}={heads}"
    return None


def pays(problem: Problem, config: BlockConfig, t: BlockTensors) -> bool:
    """Whether this path is expected to be the fastest."""
    if torch.compiler.is_exporting():
        return False  # an exported program must not depend on how its lengths compare to these
    p = problem
    multiplications = p.B * p.Tq * p.H * p.D * (p.Dq + (p.Dout or 0))
    if t.w_k is not None:
        multiplications += p.B * p.Tk * p.Hkv * p.D * (p.Dkv + p.Dv)
    limits = limits_of(t.x_query.dtype, config.tf32)
    return bool(
        _query_tiles(p.B, p.Tq, p.H) <= limits.tiles
        and (p.Tk <= limits.keys or _streams_keys(p, t))
        and multiplications <= limits.projections
        and not _trains_the_other_way(p, t, limits)
    )


def _trains_the_other_way(p: Problem, t: BlockTensors, limits: Limits) -> bool:
    """Whether the backward would be the split path's, which in half types wants of its forward what
    rounding takes from o, and sums every row again without it."""
    is_small = _is_small_backward(p.B, p.Tq, p.H, p.D, p.Tk, limits)
    return limits is LIMITS["half"] and not is_small and wants_gradients(t)


def _streams_keys(p: Problem, t: BlockTensors) -> bool:
    """Whether few queries look at finished keys, and nobody wants gradients.

    Over many keys the split path's backward is the faster one, and wants more of the forward than
    this path keeps.
    """
    if t.w_k is not None or t.attn_bias is not None:
        return False
    if p.Tq > FEW_QUERIES or p.Tk > MOST_STREAMED_KEYS:
        return False
    if p.B * p.H * p.Tq > MOST_STREAMING_QUERIES:
        return False
    return not wants_gradients((t.x_query, t.x_kv, t.x_value, t.w_q, t.w_out, t.b_q, t.b_out))


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
