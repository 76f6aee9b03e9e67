"""The operators ``torch.ops.fused_rope_xattn.*``: schema, fake kernel and typed call of each.

Defined at import by Python alone: an install without a binary has the same operators, and the first
call of a process may be under ``torch.compile``. Kernels come from cpu_ops.py and from the binary,
which registers its own for these schemas when ``_C`` is imported, hence after this module.

All operators are functional: results never alias arguments. Contract of every kernel: sizes of zero
are legal and launch nothing, results are contiguous, strides of size-1 dimensions carry no meaning.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .composite import compute_dtype
from .config import NormSpec, RotationSpec
from .schemas import SCHEMAS

if TYPE_CHECKING:
    from .config import BlockConfig
    from .split import BlockTensors

NAMESPACE = "fused_rope_xattn"

# Partial sums of the norm's gradients that norm_rope_backward writes, at most. The number must
# follow from the sizes alone, since compiled graphs see it: one row a block, enough to fill a GPU.
MAX_NORM_PARTIALS = 512

# Keys up to which attention_backward sums rows again where it gets no o_rest: kMaxRowSumKeys of the
# kernels.
MAX_ROW_SUM_KEYS = 1024


class ScoreOptions(NamedTuple):
    """What shapes the attention weights besides q and k."""

    attn_bias: Tensor | None  # [B|1, H|1, Tq|1, Tk|1] floating, added to the scores
    keep_mask: Tensor | None  # [B|1, H|1, Tq|1, Tk|1] bool, True = attend
    key_keep: Tensor | None  # [B, Tk] bool, False = no query attends to the key, which may be NaN
    kv_lengths: Tensor | None  # [B] int32
    seed: Tensor | None  # [1] int64, read when dropout_p > 0
    scale: float
    is_causal: bool
    dropout_p: float
    tf32: bool  # multiply fp32 in plain TF32


class TurningTensors(NamedTuple):
    """The tensors of one side's rotation; all None: positions 0..T-1, or no rotation."""

    positions: Tensor | None = None  # [B|1, T, axes]
    cos: Tensor | None = None  # [B|1, H|1, T, R/2], R if full width
    sin: Tensor | None = None


class Turning(NamedTuple):
    """One side's rotation."""

    tensors: TurningTensors = TurningTensors()
    spec: RotationSpec = RotationSpec()


UNTURNED = Turning()


def norm_rope(
    x: Tensor,  # [B, T, H*D] fp32 or the storage dtype
    bias: Tensor | None,  # [H*D]
    norm_weight: Tensor | None,  # [D], or [H*D] for an inner norm
    norm_bias: Tensor | None,
    positions: Tensor | None,  # [B|1, T, axes]
    cos: Tensor | None,  # [B|1, H|1, T, R/2], R if full width
    sin: Tensor | None,
    *,
    num_heads: int,
    norm: NormSpec,
    rotation: RotationSpec,
    dtype: torch.dtype,
) -> Tensor:  # [B, T, H, D]
    """``rope(norm(x + bias))`` in fp32, rounded once to ``dtype``."""
    result: Tensor = torch.ops.fused_rope_xattn.norm_rope.default(
        x.contiguous(),
        *_contiguous(bias, norm_weight, norm_bias),
        *_rotation_tensors(positions, cos, sin, compute_dtype(x)),
        num_heads,
        *norm,
        *_flat(rotation),
        dtype,
    )
    return result


def norm_rope_backward(
    grad: Tensor,  # [B, T, H, D]
    x: Tensor | None,  # [B, T, H*D], wanted by a norm
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    num_heads: int,
    norm: NormSpec,
    rotation: RotationSpec,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, T, H*D], [G, W] fp32, [G, W] fp32
    """Adjoint of :func:`norm_rope`: ``dx`` in grad's dtype, partial sums of the norm's gradients.

    A norm weight or bias that is None gets partial sums of shape ``[0, W]``.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.fused_rope_xattn.norm_rope_backward.default(
        grad.contiguous(),
        *_contiguous(x, bias, norm_weight, norm_bias),
        *_rotation_tensors(positions, cos, sin, compute_dtype(grad)),
        num_heads,
        *norm,
        *_flat(rotation),
    )
    return result


def attention_forward(
    q: Tensor,  # [B, Tq, H, D]
    k: Tensor,  # [B, Tk, Hkv, D]
    v: Tensor,  # [B, Tk, Hkv, D]
    options: ScoreOptions,
    v_transposed: Tensor | None = None,  # of project_group, with the same lengths and key_keep
) -> tuple[Tensor, Tensor]:  # [B, Tq, H, D], [B, H, Tq] fp32
    """Softmax attention over the kept keys. A row without any has o = 0 and lse = -inf.

    A kernel that reads values transposed makes them from ``v`` where they are not given.
    """
    result: tuple[Tensor, Tensor] = torch.ops.fused_rope_xattn.attention_forward.default(
        readable(q), readable(k), readable(v), *options, v_transposed
    )
    return result


def attention_forward_with_rest(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions
) -> tuple[Tensor, Tensor, Tensor]:  # o, lse, and [B, Tq, H, D]
    """:func:`attention_forward`, and what rounding took from ``o``, which the backward wants.

    For half types only.
    """
    result: tuple[Tensor, Tensor, Tensor] = (
        torch.ops.fused_rope_xattn.attention_forward_with_rest.default(
            readable(q), readable(k), readable(v), *options
        )
    )
    return result


def attention_backward(
    dout: Tensor,  # [B, Tq, H, D]
    dlse: Tensor | None,  # [B, H, Tq]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: ScoreOptions,
    *,
    need_dq: bool,
    need_dkv: bool,
    need_dbias: bool,
    deterministic: bool = True,
    o_rest: Tensor | None = None,
    q_turning: Turning = UNTURNED,
    k_turning: Turning = UNTURNED,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dq, dk, dv, dbias``; what is not needed is an empty tensor of shape ``[0]``.

    ``o_rest``: see :func:`attention_forward_with_rest`; without it each row is summed again.
    ``q_turning``, ``k_turning``: how q and k were rotated; dq and dk are gradients of what they
    were before.
    """
    wide = compute_dtype(q)
    bias = options.attn_bias
    if need_dbias and bias is not None and bias.shape[-1] == 1:
        dbias = _gradient_of_row_bias(bias, dlse, lse)
        need_dbias = False
    else:
        dbias = None
    result: tuple[Tensor, Tensor, Tensor, Tensor] = (
        torch.ops.fused_rope_xattn.attention_backward.default(
            readable(dout),
            None if dlse is None else dlse.contiguous(),
            readable(q),
            readable(k),
            readable(v),
            readable(o),
            lse.contiguous(),
            *options,
            need_dq,
            need_dkv,
            need_dbias,
            deterministic,
            o_rest,
            *_rotation_tensors(*q_turning.tensors, wide),
            *_rotation_tensors(*k_turning.tensors, wide),
            *_flat(q_turning.spec),
            *_flat(k_turning.spec),
        )
    )
    return result if dbias is None else (*result[:3], dbias)


def _gradient_of_row_bias(bias: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """Gradient of a bias ``[B|1, H|1, Tq|1, 1]``: what a whole row shares moves its lse alone."""
    if dlse is None:
        return torch.zeros_like(bias)
    rows = torch.where(lse == -math.inf, 0.0, dlse).unsqueeze(-1)
    return rows.sum_to_size(bias.shape).to(bias.dtype)


def block_forward(
    config: BlockConfig, t: BlockTensors
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The whole block without norms and dropout in three chained kernels: ``y, q, k, v, o, lse``.

    What is not computed is an empty tensor of shape ``[0]``: ``k`` and ``v`` without ``w_k`` and
    ``w_v``, ``y`` without ``w_out``.
    """
    x_kv, x_value = t.x_kv, t.x_value
    if t.w_k is None:
        x_kv, x_value = readable(x_kv), None if x_value is None else readable(x_value)
    else:
        x_kv, x_value = x_kv.contiguous(), None if x_value is None else x_value.contiguous()
    wide = compute_dtype(t.x_query)
    return torch.ops.fused_rope_xattn.block_forward.default(  # type: ignore[no-any-return]
        t.x_query.contiguous(),
        x_kv,
        x_value,
        t.w_q.contiguous(),
        *_contiguous(t.w_k, t.w_v, t.w_out, t.b_q, t.b_k, t.b_v, t.b_out),
        *_rotation_tensors(t.q_positions, t.q_cos, t.q_sin, wide),
        *_rotation_tensors(t.k_positions, t.k_cos, t.k_sin, wide),
        t.attn_bias,
        t.keep_mask,
        t.key_keep,
        t.kv_lengths,
        config.num_heads,
        config.num_kv_heads,
        *_flat(config.q_rotation),
        *_flat(config.k_rotation),
        config.scale,
        config.is_causal,
        config.tf32,
    )


class HeadsProjection(NamedTuple):
    """One member of a group of projections, to be rotated or not."""

    x: Tensor  # [B, T, C]
    weight: Tensor  # [H*D, C]
    bias: Tensor | None  # [H*D]
    turning: TurningTensors
    num_heads: int
    rotation: RotationSpec


def project_group(
    q: HeadsProjection | None,
    k: HeadsProjection | None,
    v: HeadsProjection | None,  # never rotated; as many heads as k
    tile: int = -1,  # index of a tile size of the kernel; negative: its choice
    transposes_v: bool = False,
    key_keep: Tensor | None = None,  # [B, T] bool
    kv_lengths: Tensor | None = None,  # [B] int32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [B, T, H, D] each, [B, H, D, T padded to 8]
    """``rotate(heads(x @ weight.T + bias))`` of each member, one launch, rounded once.

    fp32 is multiplied in TF32. With ``transposes_v``, for fp32 alone, the last result is v as TF32
    attention on a Hopper reads it: tokens that do not exist are zeros, and each eight of them stand
    in the order 0, 2, 4, 6, 1, 3, 5, 7. The result of an absent member is an empty tensor of shape
    ``[0]``.
    """
    members = q, k, v
    kv = k or v
    turning = [
        _rotation_tensors(*m.turning, compute_dtype(m.x)) if m else (None, None, None)
        for m in (q, k)
    ]
    return torch.ops.fused_rope_xattn.project_group.default(  # type: ignore[no-any-return]
        *_contiguous(*(m and m.x for m in members)),
        *_contiguous(*(m and m.weight for m in members)),
        *_contiguous(*(m and m.bias for m in members)),
        *turning[0],
        *turning[1],
        q.num_heads if q else 1,
        kv.num_heads if kv else 1,
        *_flat(q.rotation if q else RotationSpec()),
        *_flat(k.rotation if k else RotationSpec()),
        tile,
        transposes_v,
        *_contiguous(key_keep, kv_lengths),
    )


def padded_tokens(tokens: int) -> int:
    """A row of transposed values, as the copy engine reads it."""
    return (tokens + 7) // 8 * 8


def gradient_products(
    left: list[Tensor],  # of every term: [N, I]
    right: list[Tensor],  # [I, C], or [N, C] in a product over tokens
    num_terms: list[int],  # of each product; its terms are neighbours
    over_tokens: list[bool],
) -> list[Tensor]:  # [N, C], or [I, C]
    """Sums of ``left @ right``, or of ``left.T @ right`` over tokens, one launch, rounded once.

    fp32 is multiplied in TF32.
    """
    return torch.ops.fused_rope_xattn.gradient_products.default(  # type: ignore[no-any-return]
        [x.contiguous() for x in left], [x.contiguous() for x in right], num_terms, over_tokens
    )


def readable(x: Tensor) -> Tensor:  # [B, T, H, D]
    """``x`` itself if kernels can read its rows in pieces of 16 bytes, else a contiguous copy.

    Looks at strides only, which traced tensors have too; kernels check the data pointer.
    """
    piece = 16 // x.element_size()
    batch, token, head, dim = x.stride()
    if dim == 1 and batch % piece == token % piece == head % piece == 0:
        return x
    return x.contiguous()


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _rotation_tensors(
    positions: Tensor | None, cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As kernels read them: contiguous positions, tables in one dtype and one layout."""
    positions = None if positions is None else positions.contiguous()
    if cos is None or sin is None:
        return positions, None, None
    cos, sin = cos.to(dtype), sin.to(dtype)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return positions, cos, sin


def _flat(rotation: RotationSpec) -> tuple[int, bool, int, float, bool]:
    """A rotation in the order of the schemas; NormSpec has their order already."""
    rotary_dim, interleaved, axes, full_width, base = rotation
    return rotary_dim, interleaved, axes, base, full_width


def norm_partials(tokens: int) -> int:
    """G of norm_rope_backward's partial sums for that many tokens, B*T."""
    partials: int = torch.sym_min(tokens, MAX_NORM_PARTIALS)
    return partials


def has_cuda_kernels() -> bool:
    """Whether a binary has registered CUDA kernels for the operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::attention_forward", "CUDA")


# ------------------------------------------------------------------------------------ registration

LIBRARY = torch.library.Library(NAMESPACE, "DEF")
for _schema in SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake(f"{NAMESPACE}::norm_rope", lib=LIBRARY)
def _fake_norm_rope(
    x: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    *options: object,  # norm_kind .. full_width, dtype
) -> Tensor:
    batch, tokens, inner = x.shape
    dtype = options[-1]
    assert isinstance(dtype, torch.dtype)
    return x.new_empty((batch, tokens, num_heads, inner // num_heads), dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::norm_rope_backward", lib=LIBRARY)
def _fake_norm_rope_backward(
    grad: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    norm_kind: int,
    norm_inner: bool,
    *options: object,  # norm_eps .. full_width
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, head_dim = grad.shape
    width = heads * head_dim if norm_inner else head_dim
    partials = norm_partials(batch * tokens)
    dtype = compute_dtype(grad)
    return (
        grad.new_empty((batch, tokens, heads * head_dim)),
        grad.new_empty((0 if norm_weight is None else partials, width), dtype=dtype),
        grad.new_empty((0 if norm_bias is None else partials, width), dtype=dtype),
    )


@torch.library.register_fake(f"{NAMESPACE}::attention_forward", lib=LIBRARY)
def _fake_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *options: object
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, queries), dtype=compute_dtype(q))


@torch.library.register_fake(f"{NAMESPACE}::attention_forward_with_rest", lib=LIBRARY)
def _fake_attention_forward_with_rest(
    q: Tensor, k: Tensor, v: Tensor, *options: object
) -> tuple[Tensor, Tensor, Tensor]:
    return (*_fake_attention_forward(q, k, v, *options), q.new_empty(q.shape))


@torch.library.register_fake(f"{NAMESPACE}::attention_backward", lib=LIBRARY)
def _fake_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    attn_bias: Tensor | None,
    *options: object,  # keep_mask .. tf32, need_dq, need_dkv, need_dbias, deterministic ..
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    need_dq, need_dkv, need_dbias = options[8:11]
    dbias = attn_bias if need_dbias else None
    return (
        q.new_empty(q.shape if need_dq else 0),
        k.new_empty(k.shape if need_dkv else 0),
        v.new_empty(v.shape if need_dkv else 0),
        q.new_empty(0) if dbias is None else dbias.new_empty(dbias.shape),
    )


@torch.library.register_fake(f"{NAMESPACE}::block_forward", lib=LIBRARY)
def _fake_block_forward(
    x_query: Tensor,
    x_kv: Tensor,
    x_value: Tensor | None,
    w_q: Tensor,
    w_k: Tensor | None,
    w_v: Tensor | None,
    w_out: Tensor | None,
    *options: object,  # b_q .. tf32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, queries, _ = x_query.shape
    heads, kv_heads = options[14:16]
    assert isinstance(heads, int | torch.SymInt)
    assert isinstance(kv_heads, int | torch.SymInt)
    head_dim = w_q.shape[0] // heads
    kv_shape = (0,) if w_k is None else (batch, x_kv.shape[1], kv_heads, head_dim)
    return (
        x_query.new_empty(0 if w_out is None else (batch, queries, w_out.shape[0])),
        x_query.new_empty((batch, queries, heads, head_dim)),
        x_query.new_empty(kv_shape),
        x_query.new_empty(kv_shape),
        x_query.new_empty((batch, queries, heads, head_dim)),
        x_query.new_empty((batch, heads, queries), dtype=compute_dtype(x_query)),
    )


@torch.library.register_fake(f"{NAMESPACE}::project_group", lib=LIBRARY)
def _fake_project_group(
    x_q: Tensor | None,
    x_k: Tensor | None,
    x_v: Tensor | None,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor | None,
    *options: object,  # b_q .. kv_lengths
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, kv_heads = options[9:11]
    assert isinstance(heads, int | torch.SymInt)
    assert isinstance(kv_heads, int | torch.SymInt)
    given = [x for x in (x_q, x_k, x_v) if x is not None]

    def result(x: Tensor | None, weight: Tensor | None, num_heads: int | torch.SymInt) -> Tensor:
        if x is None or weight is None:
            return given[0].new_empty(0)
        return x.new_empty((x.shape[0], x.shape[1], num_heads, weight.shape[0] // num_heads))

    v = result(x_v, w_v, kv_heads)
    v_transposed = given[0].new_empty(0)
    if len(options) > 22 and options[22] and x_v is not None:  # transposes_v
        batch, tokens, _, head_dim = v.shape
        v_transposed = v.new_empty((batch, kv_heads, head_dim, padded_tokens(tokens)))
    return result(x_q, w_q, heads), result(x_k, w_k, kv_heads), v, v_transposed


@torch.library.register_fake(f"{NAMESPACE}::gradient_products", lib=LIBRARY)
def _fake_gradient_products(
    left: list[Tensor], right: list[Tensor], num_terms: list[int], over_tokens: list[bool]
) -> list[Tensor]:
    results, first = [], 0
    for count, is_over_tokens in zip(num_terms, over_tokens, strict=True):
        rows, columns = left[first].shape[1 if is_over_tokens else 0], right[first].shape[1]
        results.append(left[first].new_empty((rows, columns)))
        first += count
    return results
