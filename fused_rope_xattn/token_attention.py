"""The split path where few queries look at many keys that the call projects.

A head's output is ``W_v (sum of p_t x_t) + b_v``: attention over the tokens themselves, then one
small product a head. Values are never projected, nor is their gradient: as much arithmetic as
there are rows, H*Tq of a sample, instead of columns of ``w_v``. Keys cannot do the same, because
their rotation depends on the token. autograd.py takes this route by :func:`is_taken` alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import composite, gradient_products, grouped, ops, split, token_ops
from .grouped import DTYPES, WIDTH_MULTIPLE
from .split import Activations, Grads, Needs, ProjectionGrads
from .token_ops import TokenSums

if TYPE_CHECKING:
    from .config import BlockConfig
    from .split import BlockTensors, Projection

HEAD_DIMS = (32, 64, 128)
MOST_ROWS = 16  # queries of all heads of a sample: one tile of the kernels
MOST_COLUMNS = 1024  # of the tokens, and of the keys of all heads
# Multiplications that values would take. Below, the kernels for all are faster (measured).
LEAST = 3_000_000_000
# Of a sample: with fewer, the sums of its tokens would take more room than its values, and a block
# would have little to do. Fewer were not measured.
LEAST_KEYS = 256


def obstacle(config: BlockConfig, t: BlockTensors) -> str | None:
    """Why values are projected on a Hopper, None if they are not."""
    if t.w_q is None or t.w_k is None or t.w_v is None:
        return "something comes projected"
    x = t.x_kv if t.x_value is None else t.x_value
    batch, queries, _ = t.x_query.shape
    keys, width = x.shape[1:]
    inner = t.w_k.shape[0]
    if queries < 1 or config.num_heads * queries > MOST_ROWS:
        return f"a sample has no rows, or more than {MOST_ROWS}"
    if keys < LEAST_KEYS or batch * keys * inner * width < LEAST:
        return "values are projected in no time"
    if config.dropout_p > 0 or t.attn_bias is not None or t.keep_mask is not None:
        return "it has dropout, a bias or a mask that tells heads or queries apart"
    if x.dtype not in DTYPES or any(y is not None and y.dtype != x.dtype for y in t[:11]):
        return "it is not of one half type"
    if inner // config.num_kv_heads not in HEAD_DIMS:
        return "its head dim is another than 32, 64 and 128"
    if width % WIDTH_MULTIPLE or inner > MOST_COLUMNS:
        return f"a width is no multiple of {WIDTH_MULTIPLE} or above {MOST_COLUMNS}"
    if width > inner:
        return "its values are narrower than its tokens"
    return None


def is_taken(config: BlockConfig, t: BlockTensors) -> bool:
    """Whether the call goes this way."""
    if config.fused or not t.x_query.is_cuda or torch.compiler.is_exporting():
        return False  # an exported program must not depend on how its lengths compare to these
    return grouped.is_hopper(t.x_query.device.index) and obstacle(config, t) is None


def takes_rotation(k: Projection) -> bool:
    """Whether the kernel of dk undoes the rotation of k: by angles that all heads share, of pairs
    whose members the same thread has. Else, and behind a norm, an operator of its own does."""
    rotary_dim, interleaved, axes, full_width, base = k.rotation
    if k.weight is None or full_width:
        return False
    if k.cos is not None and k.cos.shape[1] != 1:
        return False
    if k.positions is not None and k.positions.is_floating_point() and base < 1:
        return False  # a frequency above one turn
    head_dim = k.weight.shape[0] // k.num_heads
    return interleaved or (rotary_dim == head_dim and axes == 1)


def forward(config: BlockConfig, t: BlockTensors, *, keep_rest: bool) -> tuple[Tensor, Activations]:
    """As :func:`.split.forward`."""
    assert t.w_v is not None
    (q, k), _ = split.project_all(
        split.query_projection(config, t), split.key_projection(config, t)
    )
    o, lse, sums = token_ops.token_attention(
        q, k, _tokens(t), t.w_v, t.b_v, split.score_options(config, t), keep=keep_rest
    )
    y = split.project_output(config, t, o)
    return y, Activations(q, k, None, o, lse, u=sums.u, u_rest=sums.rest)


def backward(
    config: BlockConfig,
    t: BlockTensors,
    saved: Activations,
    needs: Needs,
    dy: Tensor | None,
    dlse: Tensor | None,  # [B, H, Tq]
) -> Grads:
    """As :func:`.split.backward`, of a forward that kept ``u``."""
    dout, w_out, db_out = split.output_backward(config, t, saved.o, needs, dy)
    if dout is None:
        dout = torch.zeros_like(saved.o)
    # The tokens that values come from are read where they exist alone, unlike those of keys.
    needs_k = needs._replace(v=needs.v._replace(weight=False))
    k, _ = split.kv_without_removed_tokens(config, t, needs_k)
    k_turning = ops.UNTURNED
    if takes_rotation(k):
        k, k_turning = split.turned_back(k)
    keys = split.key_projection(config, t)
    zeros = split.shift_of_all_keys(keys, needs.k) if dlse is None else {}
    needs = needs._replace(k=needs.k._replace(**dict.fromkeys(zeros, False)))
    v, dq, dk = _attention_backward(config, t, saved, needs, dout, dlse, k_turning)

    q = split.query_projection(config, t)
    q_rest = split.before_products(q, dq, needs.q)
    k_rest = split.before_products(k, dk, needs.k)
    x_k, dx_k = k_rest.x, None
    if t.x_value is None and x_k is not None and v.x is not None:
        # Keys and values come from the same x: what is there already is added in the product.
        ((dz, w_k),) = x_k.terms
        dx_k = v.x.flatten(0, 1).addmm_(dz.flatten(0, 1), w_k)
        x_k, v = None, v._replace(x=None)
    # Those of few queries in one launch: beside the gradient of w_k, which is as deep as there are
    # keys, none would be.
    dw_out, dx_q, dw_q = gradient_products.compute(w_out, q_rest.x, q_rest.weight)
    dx, dw_k = gradient_products.compute(x_k, k_rest.weight)
    return Grads(
        split.with_products(q, q_rest, dx_q, dw_q),
        split.with_products(k, k_rest, dx if dx_k is None else dx_k, dw_k)._replace(**zeros),
        v,
        None,
        dw_out,
        db_out,
    )


def _attention_backward(
    config: BlockConfig,
    t: BlockTensors,
    saved: Activations,
    needs: Needs,
    dout: Tensor,  # [B, Tq, H, D]
    dlse: Tensor | None,
    k_turning: ops.Turning,
) -> tuple[ProjectionGrads, Tensor, Tensor]:
    """Gradients of the values' projection, those of x apart from the keys', ``dq`` and ``dk``."""
    assert t.w_v is not None
    assert saved.u is not None
    assert saved.u_rest is not None
    dheads = _by_key_head(dout.permute(2, 0, 1, 3), config)  # [Hkv, N, D]
    w_v = t.w_v.unflatten(0, (config.num_kv_heads, -1))  # [Hkv, D, Dv]
    dq = dk = dx = saved.q.new_empty(0)
    if any(needs.q) or any(needs.k) or needs.v.x:
        dq, dk, dx = token_ops.token_attention_backward(
            torch.bmm(dheads, w_v).view(saved.u.shape),
            dlse,
            saved.q,
            saved.k,
            _tokens(t),
            TokenSums(saved.u, saved.u_rest),
            saved.lse,
            split.score_options(config, t),
            need_dq=any(needs.q),
            need_dk=any(needs.k),
            need_dx=needs.v.x,
            k_turning=k_turning,
        )
    dw_v = db_v = None
    if needs.v.weight:
        dw_v = torch.bmm(dheads.transpose(1, 2), _by_key_head(saved.u, config)).flatten(0, 1)
    if needs.v.bias and t.b_v is not None:
        # Weights of a query add up to 1, or to 0 where it sees no key.
        blind = (saved.lse == -math.inf).permute(1, 0, 2)[..., None]
        seen = dout.permute(2, 0, 1, 3).masked_fill(blind, 0.0)
        wide = composite.compute_dtype(seen)
        db_v = _by_key_head(seen, config).sum(1, dtype=wide).flatten().to(t.b_v.dtype)
    return ProjectionGrads(dx if needs.v.x else None, dw_v, db_v), dq, dk


def _tokens(t: BlockTensors) -> Tensor:  # [B, Tk, Dv]
    return t.x_kv if t.x_value is None else t.x_value


def _by_key_head(rows: Tensor, config: BlockConfig) -> Tensor:
    """``[H, B, Tq, C]`` as ``[Hkv, N, C]``, all rows that share a key head together."""
    return rows.reshape(config.num_kv_heads, -1, rows.shape[-1])
