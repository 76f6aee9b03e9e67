"""The split path: the block as a short sequence of GEMMs and operators, forward and backward.

Pure functions of tensors; autograd.py decides what is saved. With ``heads`` the view of I = H*D
channels as [H, D], the forward is::

    q, k, v = heads(rope(norm(x @ w.T + b)))       one launch where possible
    o, lse  = attention_forward(q, k, v)
    y       = merge(o) @ w_out.T + b_out

and :func:`backward` is its mirror image. GEMMs go through torch. A projection that is normed or
rotated leaves its GEMM in fp32 and is rounded to the storage type once, by the operator behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import composite, gradient_products, grouped, ops
from .config import NORM_NONE, BlockConfig, NormSpec, RotationSpec
from .gradient_products import Product
from .products import product


class BlockTensors(NamedTuple):
    """Every tensor of the block, in the order of CrossAttentionFunction's arguments.

    Without ``w_k`` and ``w_v``, ``x_kv`` and ``x_value`` are keys and values that are projected
    already, [B, Tk, Hkv, D]. Else ``x_value`` None means that values come from ``x_kv``.
    """

    x_query: Tensor  # [B, Tq, Dq]
    x_kv: Tensor  # [B, Tk, Dkv]
    x_value: Tensor | None  # [B, Tk, Dv]
    w_q: Tensor  # [I, Dq]
    w_k: Tensor | None  # [Hkv*D, Dkv]
    w_v: Tensor | None  # [Hkv*D, Dv]
    w_out: Tensor | None  # [Dout, I]
    b_q: Tensor | None
    b_k: Tensor | None
    b_v: Tensor | None
    b_out: Tensor | None
    q_norm_weight: Tensor | None  # [D], or [I] for an inner norm
    q_norm_bias: Tensor | None
    k_norm_weight: Tensor | None
    k_norm_bias: Tensor | None
    attn_bias: Tensor | None  # [B|1, H|1, Tq|1, Tk|1]
    q_positions: Tensor | None  # [B|1, Tq, axes]
    q_cos: Tensor | None  # [B|1, H|1, Tq, R/2], R if full width
    q_sin: Tensor | None
    k_positions: Tensor | None
    k_cos: Tensor | None
    k_sin: Tensor | None
    kv_lengths: Tensor | None  # [B] int32
    keep_mask: Tensor | None  # [B|1, H|1, Tq|1, Tk|1] bool
    key_keep: Tensor | None  # [B, Tk] bool
    seed: Tensor | None  # [1] int64


class Activations(NamedTuple):
    """What the forward computes on its way, and the backward reads."""

    q: Tensor  # [B, Tq, H, D]
    k: Tensor  # [B, Tk, Hkv, D]
    v: Tensor | None  # [B, Tk, Hkv, D]; None: not projected, see token_attention.py
    o: Tensor  # [B, Tq, H, D]
    lse: Tensor  # [B, H, Tq]
    o_rest: Tensor | None = None  # [B, Tq, H, D], what rounding took from o; None: not kept
    u: Tensor | None = None  # [H, B, Tq, Dv], of what o is a projection where values are not
    u_rest: Tensor | None = None  # what rounding took from u


_Group = TypeVar("_Group", BlockTensors, Activations)


class Projection(NamedTuple):
    """One of q, k, v on its way from tokens to heads."""

    x: Tensor  # [B, T, C]; the heads themselves, [B, T, H, D], when there is no weight
    weight: Tensor | None  # [H*D, C]
    bias: Tensor | None  # [H*D]
    norm_weight: Tensor | None = None  # [D], or [H*D] for an inner norm
    norm_bias: Tensor | None = None
    positions: Tensor | None = None  # [B|1, T, axes]
    cos: Tensor | None = None  # [B|1, H|1, T, R/2], R if full width
    sin: Tensor | None = None
    num_heads: int = 1
    norm: NormSpec = NormSpec()
    rotation: RotationSpec = RotationSpec()
    tf32: bool = False  # fp32 products may be taken in TF32

    @property
    def is_plain(self) -> bool:
        """Neither normed nor rotated: the GEMM alone gives the heads."""
        return self.norm.kind == NORM_NONE and self.rotation.rotary_dim == 0


class ProjectionNeeds(NamedTuple):
    """Which gradients of a projection are wanted."""

    x: bool
    weight: bool
    bias: bool
    norm_weight: bool
    norm_bias: bool


class Needs(NamedTuple):
    """Which gradients of the block are wanted."""

    q: ProjectionNeeds
    k: ProjectionNeeds
    v: ProjectionNeeds
    attn_bias: bool
    w_out: bool
    b_out: bool

    @property
    def kv(self) -> bool:
        return any(self.k) or any(self.v)

    @property
    def attention(self) -> bool:
        """Whether the gradient has to go through the attention at all."""
        return any(self.q) or self.kv or self.attn_bias


class ProjectionGrads(NamedTuple):
    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


class Grads(NamedTuple):
    q: ProjectionGrads = ProjectionGrads()
    k: ProjectionGrads = ProjectionGrads()
    v: ProjectionGrads = ProjectionGrads()  # v.x is None where x_kv gives the values: see k.x
    attn_bias: Tensor | None = None
    w_out: Tensor | None = None
    b_out: Tensor | None = None


# ------------------------------------------------------------------------------------ the block


def forward(config: BlockConfig, t: BlockTensors, *, keep_rest: bool) -> tuple[Tensor, Activations]:
    """``y`` [B, Tq, Dout] ([B, Tq, I] without w_out) and what the backward needs.

    ``keep_rest``: a backward through the attention follows.
    """
    options = score_options(config, t)
    (q, k, v), v_transposed = project_all(
        query_projection(config, t),
        key_projection(config, t),
        value_projection(config, t),
        transposed_for=options if _reads_transposed_values(config, t) else None,
    )
    o_rest = None
    if keep_rest and composite.compute_dtype(q) != q.dtype:
        o, lse, o_rest = ops.attention_forward_with_rest(q, k, v, options)
    else:
        o, lse = ops.attention_forward(q, k, v, options, v_transposed)
    del v_transposed  # as large as what follows
    return project_output(config, t, o), Activations(q, k, v, o, lse, o_rest)


def backward(
    config: BlockConfig,
    t: BlockTensors,
    saved: Activations,
    needs: Needs,
    dy: Tensor | None,  # like y; None: y was not used
    dlse: Tensor | None,  # [B, H, Tq]
) -> Grads:
    """The wanted gradients; :func:`needed` says which tensors are read for them."""
    dout, w_out, db_out = output_backward(config, t, saved.o, needs, dy)
    if not needs.attention:
        (dw_out,) = gradient_products.compute(w_out)
        return Grads(w_out=dw_out, b_out=db_out)

    q, q_turning = turned_back(query_projection(config, t))
    k, v = kv_without_removed_tokens(config, t, needs)
    k, k_turning = turned_back(k)
    assert saved.v is not None
    dq, dk, dv, dbias = ops.attention_backward(
        torch.zeros_like(saved.o) if dout is None else dout,
        dlse,
        saved.q,
        saved.k,
        saved.v,
        saved.o,
        saved.lse,
        score_options(config, t),
        need_dq=any(needs.q),
        need_dkv=needs.kv,
        need_dbias=needs.attn_bias,
        deterministic=config.deterministic,
        o_rest=None if _wants_exact_sums(k, saved.k, needs.k) else saved.o_rest,
        q_turning=q_turning,
        k_turning=k_turning,
    )

    zeros = shift_of_all_keys(key_projection(config, t), needs.k) if dlse is None else {}
    needs_k = needs.k._replace(**dict.fromkeys(zeros, False))
    q_rest = before_products(q, dq, needs.q)
    v_rest = before_products(v, dv, needs.v)
    k_rest = before_products(k, dk, needs_k)
    del dout, dq, dk, dv  # as large as what follows
    x_k, x_v = k_rest.x, v_rest.x
    if t.x_value is None and x_k is not None and x_v is not None:
        # Keys and values come from the same x: one gradient for both.
        x_k, x_v = gradient_products.added(x_v, x_k), None
    dw_out, dx_q, dw_q, dx_k, dx_v, dw_k, dw_v = gradient_products.compute(
        w_out, q_rest.x, q_rest.weight, x_k, x_v, k_rest.weight, v_rest.weight, tf32=config.tf32
    )
    return Grads(
        with_products(q, q_rest, dx_q, dw_q),
        with_products(k, k_rest, dx_k, dw_k)._replace(**zeros),
        with_products(v, v_rest, dx_v, dw_v),
        dbias if needs.attn_bias else None,
        dw_out,
        db_out,
    )


def needed(t: BlockTensors, saved: Activations, needs: Needs) -> tuple[BlockTensors, Activations]:
    """Both without the tensors that no wanted gradient depends on, nor a second derivative."""
    if not any(needs.q):
        t = _without(t, "x_query w_q b_q q_norm_weight q_norm_bias q_positions q_cos q_sin")
    if not needs.kv:
        x_value = t.x_kv if t.x_value is None else t.x_value
        t = _without(t, "x_kv w_k b_k k_norm_weight k_norm_bias k_positions k_cos k_sin")
        # Where values are not projected, dq depends on the tokens.
        t = t._replace(x_value=x_value) if saved.u is not None else _without(t, "x_value w_v b_v")
    if not needs.attention:
        t = _without(t, "w_out attn_bias kv_lengths keep_mask key_keep seed")
        t = _without(t, "x_value w_v b_v")
        saved = _without(saved, "q k v lse o_rest u u_rest")
        saved = saved if needs.w_out else _without(saved, "o")
    return t, saved


def _without(group: _Group, fields: str) -> _Group:
    missing: dict[str, Any] = dict.fromkeys(fields.split())
    return group._replace(**missing)


# ------------------------------------------------------------------------- parts of the block


def query_projection(config: BlockConfig, t: BlockTensors) -> Projection:
    return Projection(
        t.x_query,
        t.w_q,
        t.b_q,
        t.q_norm_weight,
        t.q_norm_bias,
        t.q_positions,
        t.q_cos,
        t.q_sin,
        config.num_heads,
        config.q_norm,
        config.q_rotation,
        config.tf32,
    )


def key_projection(config: BlockConfig, t: BlockTensors) -> Projection:
    return Projection(
        t.x_kv,
        t.w_k,
        t.b_k,
        t.k_norm_weight,
        t.k_norm_bias,
        t.k_positions,
        t.k_cos,
        t.k_sin,
        config.num_kv_heads,
        config.k_norm,
        config.k_rotation,
        config.tf32,
    )


def value_projection(config: BlockConfig, t: BlockTensors) -> Projection:
    x = t.x_kv if t.x_value is None else t.x_value
    return Projection(x, t.w_v, t.b_v, num_heads=config.num_kv_heads, tf32=config.tf32)


def output_projection(config: BlockConfig, t: BlockTensors, o: Tensor) -> Projection:
    """Of ``o``, [B, Tq, H, D]; its result is one head."""
    return Projection(o.flatten(2), t.w_out, t.b_out, tf32=config.tf32)


def _reads_transposed_values(config: BlockConfig, t: BlockTensors) -> bool:
    """Whether the attention does, on a Hopper, of values that are projected here."""
    if not config.tf32 or t.w_v is None or torch.compiler.is_exporting():
        return False  # an exported program must not depend on how its lengths compare to these
    (batch, queries, _), head_dim = t.x_query.shape, t.w_v.shape[0] // config.num_kv_heads
    return grouped.tf32_pays(batch, config.num_heads, queries, t.x_kv.shape[1], head_dim)


def turned_back(p: Projection) -> tuple[Projection, ops.Turning]:
    """A projection whose rotation the attention's backward undoes, and that rotation.

    Behind a norm it stays, to be undone together with it.
    """
    if p.norm.kind != NORM_NONE or p.weight is None:
        return p, ops.UNTURNED
    turning = ops.Turning(ops.TurningTensors(p.positions, p.cos, p.sin), p.rotation)
    return p._replace(positions=None, cos=None, sin=None, rotation=RotationSpec()), turning


def _wants_exact_sums(k: Projection, keys: Tensor, needs: ProjectionNeeds) -> bool:
    """Whether rows are summed again although ``o_rest`` is there.

    What ``o_rest`` leaves of an error is common to all keys of a query. Behind a norm the gradient
    of the keys' bias is a sum over them in which little else is left.
    """
    few = keys.shape[1] <= ops.MAX_ROW_SUM_KEYS
    return k.norm.kind != NORM_NONE and k.bias is not None and needs.bias and few


def score_options(config: BlockConfig, t: BlockTensors) -> ops.ScoreOptions:
    return ops.ScoreOptions(
        t.attn_bias,
        t.keep_mask,
        t.key_keep,
        t.kv_lengths,
        t.seed,
        config.scale,
        config.is_causal,
        config.dropout_p,
        config.tf32,
    )


def kept_tokens(t: BlockTensors) -> Tensor | None:
    """Bool [B, Tk], False where lengths or mask remove a token for every query; None: nowhere."""
    keep = t.key_keep
    if t.kv_lengths is not None:
        index = torch.arange(t.x_kv.shape[1], device=t.kv_lengths.device)
        within = index < t.kv_lengths[:, None]
        keep = within if keep is None else keep & within
    return keep


def kv_without_removed_tokens(
    config: BlockConfig, t: BlockTensors, needs: Needs
) -> tuple[Projection, Projection]:
    """Keys and values with removed tokens set to 0 where their own value would matter.

    The gradient of a removed token is 0, but 0 times the NaN that may stand in it is not.
    """
    k, v = key_projection(config, t), value_projection(config, t)
    keep = kept_tokens(t) if needs.kv and t.w_k is not None else None
    if keep is None:
        return k, v
    if needs.k.weight or k.norm.kind != NORM_NONE or (t.x_value is None and needs.v.weight):
        k = k._replace(x=composite.keep_rows(k.x, keep))
    if t.x_value is None:
        v = v._replace(x=k.x)
    elif needs.v.weight:
        v = v._replace(x=composite.keep_rows(v.x, keep))
    return k, v


def shift_of_all_keys(k: Projection, needs: ProjectionNeeds) -> dict[str, Tensor]:
    """The gradient of what is added to every key, unrotated: 0, by name.

    It moves all scores of a query alike, which softmax does not see. Summed up over the tokens its
    gradient would be nothing but rounding errors, which share a sign within a query.
    """
    name = "bias" if k.norm.kind == NORM_NONE else "norm_bias"
    param: Tensor | None = getattr(k, name)
    if param is None or k.rotation.rotary_dim > 0 or not getattr(needs, name):
        return {}
    return {name: torch.zeros_like(param)}


def output_backward(
    config: BlockConfig, t: BlockTensors, o: Tensor, needs: Needs, dy: Tensor | None
) -> tuple[Tensor | None, Product | None, Tensor | None]:
    """``dout`` [B, Tq, H, D], the product for ``dw_out``, ``db_out``."""
    if dy is None:
        return None, None, None
    dy = dy.flatten(0, 1)  # [B*Tq, Dout]
    dout = w_out = db_out = None
    if needs.attention:
        dout = dy if t.w_out is None else _through_output(dy, t.w_out, config.tf32)
        dout = dout.view(o.shape)
    if needs.w_out:
        w_out = gradient_products.of_weight(dy, o.flatten(2))
    if needs.b_out and t.b_out is not None:
        db_out = _sum_tokens(dy, t.b_out)
    return dout, w_out, db_out


def _through_output(dy: Tensor, w_out: Tensor, tf32: bool) -> Tensor:  # [B*Tq, H*D]
    (dout,) = gradient_products.compute(gradient_products.of_tokens(dy, w_out), tf32=tf32)
    assert dout is not None
    return dout


# ------------------------------------------------------------------------------- one projection


def project_all(
    *every: Projection, transposed_for: ops.ScoreOptions | None = None
) -> tuple[list[Tensor], Tensor | None]:  # [B, T, H, D] each
    """Queries, keys and, where they are projected, values: as many as possible in one launch.

    And values transposed for the attention of ``transposed_for``, if that launch makes values.
    """
    chosen = grouped.select(every, tuple(map(grouped.is_taken, every)))
    if not any(chosen):
        return [project_forward(p) for p in every], None
    members = (p if c else None for p, c in zip(every, chosen, strict=True))
    group, v_transposed = grouped.project(*members, transposed_for=transposed_for)
    heads = iter(group)
    every_head = [
        next(heads) if c else project_forward(p) for p, c in zip(every, chosen, strict=True)
    ]
    return every_head, v_transposed


def project_output(config: BlockConfig, t: BlockTensors, o: Tensor) -> Tensor:  # [B, Tq, Dout]
    p = output_projection(config, t, o)
    if p.weight is None:
        return p.x
    if grouped.takes_output(p):
        (y,), _ = grouped.project(None, None, p)
    else:
        y = F.linear(p.x, p.weight, p.bias)
    # No view for autograd, which would forbid to write into it: nobody else holds its memory.
    return torch.ops.aten._unsafe_view.default(  # type: ignore[no-any-return]
        y, (*p.x.shape[:-1], p.weight.shape[0])
    )


def project_forward(p: Projection) -> Tensor:  # [B, T, H, D]
    if p.weight is None:
        return p.x
    if not p.is_plain and grouped.is_taken(p):
        return grouped.project(p, None, None)[0][0]
    if p.is_plain:
        return composite.split_heads(F.linear(p.x, p.weight, p.bias), p.num_heads)
    return ops.norm_rope(
        _wide_gemm(p.x, p.weight),
        p.bias,
        p.norm_weight,
        p.norm_bias,
        p.positions,
        p.cos,
        p.sin,
        num_heads=p.num_heads,
        norm=p.norm,
        rotation=p.rotation,
        dtype=p.x.dtype,
    )


class BeforeProducts(NamedTuple):
    """A projection's backward but for the products that its last gradients are."""

    grads: ProjectionGrads  # the others
    x: Product | None = None
    weight: Product | None = None


def project_backward(
    p: Projection,
    dheads: Tensor,  # [B, T, H, D]
    needs: ProjectionNeeds,
) -> ProjectionGrads:
    rest = before_products(p, dheads, needs)
    return with_products(p, rest, *gradient_products.compute(rest.x, rest.weight))


def before_products(p: Projection, dheads: Tensor, needs: ProjectionNeeds) -> BeforeProducts:
    if not any(needs):
        return BeforeProducts(ProjectionGrads())
    if p.weight is None:
        return BeforeProducts(ProjectionGrads(x=dheads))
    wants_bias = needs.bias and p.bias is not None
    if wants_bias and p.norm.kind != NORM_NONE:
        # A norm makes the bias gradient a sum in which much cancels, and the rounding of its terms
        # to a half type would weigh as much as all errors before it: they stay in fp32.
        dheads = dheads.to(composite.compute_dtype(dheads))
    dz, norm_weight_parts, norm_bias_parts = _heads_backward(p, dheads)
    dbias = _sum_tokens(dz.flatten(0, 1), p.bias) if wants_bias and p.bias is not None else None
    dz = dz.to(p.weight.dtype)
    grads = ProjectionGrads(
        bias=dbias,
        norm_weight=_sum_parts(norm_weight_parts, p.norm_weight) if needs.norm_weight else None,
        norm_bias=_sum_parts(norm_bias_parts, p.norm_bias) if needs.norm_bias else None,
    )
    return BeforeProducts(
        grads,
        gradient_products.of_tokens(dz, p.weight) if needs.x else None,
        gradient_products.of_weight(dz, p.x) if needs.weight else None,
    )


def with_products(
    p: Projection, rest: BeforeProducts, dx: Tensor | None, dweight: Tensor | None
) -> ProjectionGrads:
    if dx is not None:
        rest = rest._replace(grads=rest.grads._replace(x=dx.view(p.x.shape)))
    return rest.grads._replace(weight=dweight)


def _heads_backward(p: Projection, dheads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """From the heads back to the GEMM's output, [B, T, H*D], and the norm's partial sums."""
    if p.is_plain or p.weight is None:
        return dheads.flatten(2), None, None
    # The GEMM is done again for a norm: its fp32 output would be the largest tensor to keep.
    z = None if p.norm.kind == NORM_NONE else _wide_gemm(p.x, p.weight)
    return ops.norm_rope_backward(
        dheads,
        z,
        p.bias,
        p.norm_weight,
        p.norm_bias,
        p.positions,
        p.cos,
        p.sin,
        num_heads=p.num_heads,
        norm=p.norm,
        rotation=p.rotation,
    )


def _wide_gemm(x: Tensor, weight: Tensor) -> Tensor:  # [B, T, C], [N, C] -> [B, T, N]
    """``x @ weight.T`` not rounded to a half type: fp32 out of the accumulators."""
    z = product(x.flatten(0, 1), weight)
    return z.view(x.shape[0], x.shape[1], weight.shape[0])


def _sum_tokens(rows: Tensor, param: Tensor) -> Tensor:  # [N, C] -> [C]
    return rows.sum(0, dtype=composite.compute_dtype(rows)).to(param.dtype)


def _sum_parts(parts: Tensor | None, param: Tensor | None) -> Tensor | None:  # [G, W] -> [W]
    return None if parts is None or param is None else parts.sum(0).to(param.dtype)
