"""The package's functions: :func:`cross_attention` and :func:`project_kv`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import autograd, composite, planner, split
from .arguments import Arguments
from .config import NormSpec, RotationSpec
from .dropout import draw_seed
from .inputs import is_dense
from .kv import ProjectedKV
from .norm import Norm
from .prepare import Prepared, autocast, autocast_dtype, block_tensors, check_once, prepare
from .rope import RoPE, RopeLike, Rotation
from .rules import is_dtensor

DEFAULT_ROPE = RoPE()


def cross_attention(
    x_query: Tensor,  # [B, Tq, Dq]
    x_kv: Tensor | ProjectedKV,  # [B, Tk, Dkv]
    w_q: Tensor,  # [H*D, Dq]
    w_k: Tensor | None,  # [Hkv*D, Dkv]
    w_v: Tensor | None,  # [Hkv*D, Dv]
    w_out: Tensor | None,  # [Dout, H*D]
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    b_q: Tensor | None = None,  # [H*D]
    b_k: Tensor | None = None,  # [Hkv*D]
    b_v: Tensor | None = None,  # [Hkv*D]
    b_out: Tensor | None = None,  # [Dout]
    x_value: Tensor | None = None,  # [B, Tk, Dv]
    rope: RopeLike = DEFAULT_ROPE,
    q_positions: Tensor | None = None,  # [T], [B, T], [T, axes] or [B, T, axes]
    k_positions: Tensor | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    kv_lengths: Tensor | None = None,  # int [B]
    kv_keep_mask: Tensor | None = None,  # bool [B, Tk] or [B, 1|H, 1|Tq, Tk]
    attn_bias: Tensor | None = None,  # broadcastable to [B, H, Tq, Tk]
    is_causal: bool = False,
    dropout_p: float = 0,  # 0.0; see config.py for why it is written so
    scale: float | None = None,
    path: str = "auto",
    return_lse: bool = False,
) -> Any:  # y [B, Tq, Dout], or (y, lse) with lse [B, H, Tq]
    """Multi-head cross-attention with rotary embeddings, from tokens to tokens.

    ::

        q = heads(x_query @ w_q.T + b_q)           k = heads(x_kv @ w_k.T + b_k)
        q, k = rope(q_norm(q)), rope(k_norm(k))    v = heads(x_value @ w_v.T + b_v)
        s = scale * q @ k.T + attn_bias
        p = dropout(softmax(s over the keys that are kept))
        y = merge(p @ v) @ w_out.T + b_out

    ``B`` is the batch, ``Tq`` and ``Tk`` the query and key lengths, ``H`` and ``Hkv`` the query and
    key-value heads, ``D`` the head dim (rows of ``w_q`` over ``H``). Channel ``h * D + d`` belongs
    to head ``h``; query head ``h`` attends to key-value head ``h // (H // Hkv)``.

    Tokens, weights and biases share one dtype: fp32, bf16, fp16 or fp64. Under ``torch.autocast``
    they may differ and are cast once. Norms, rotation and softmax run in fp32 (fp64 in fp64), and
    q and k are rounded to the dtype once, after both. Strides are free; nothing is written to.
    Any of B, Tq and Tk may be 0.

    Args:
        x_query: tokens that look.
        x_kv: tokens that are looked at, or what :func:`project_kv` made of them. With the latter
            ``w_k``, ``w_v`` and every other option of the keys' and values' making must be None.
        w_q, w_k, w_v, w_out: weights as ``nn.Linear`` holds them, ``[out, in]``. With
            ``w_out=None`` the merged heads ``[B, Tq, H*D]`` are returned.
        num_heads: H.
        num_kv_heads: Hkv, a divisor of H; default H (that of a ProjectedKV).
        b_q, b_k, b_v, b_out: biases.
        x_value: tokens of the values where they differ from those of the keys.
        rope: a :class:`RoPE`, a :class:`RotaryTable`, None for no rotation, or a pair of these for
            queries and keys.
        q_positions, k_positions: integers or floats of any sign, with a last axis of ``rope.axes``
            where that is above 1. Default: 0..T-1. They have no effect on a side whose rope is
            None, and are refused beside a table.
        q_norm, k_norm: norms between projection and rotation.
        kv_lengths: keys at and beyond the length do not exist; clamped to 0..Tk.
        kv_keep_mask: True = attend.
        attn_bias: added to the scores, in any float dtype; -inf removes the key, like the mask.
            It is never expanded, and gets a gradient of its own shape if it requires one.
        is_causal: query i sees key j where ``j <= i + length - Tq``, ``length`` being the sample's
            key count.
        dropout_p: probability of dropping an attention weight, applied whenever it is above 0. The
            seed comes from torch's generator of the tensors' device.
        scale: of the scores; default ``D ** -0.5``.
        path: "auto", or "split" (the kernels), "fused" (those of small problems) or "composite"
            (PyTorch's own operators) to force one.
        return_lse: also return the natural log of the sum of exp of the scores, in fp32 (fp64 in
            fp64), dropout left out.

    Returns:
        ``y`` in the dtype of the tokens (of autocast, under it), or ``(y, lse)``. A query that sees
        no key has a row of 0 before ``w_out``, -inf in ``lse``, and gradients of exactly 0. NaN or
        Inf in a key or value that lengths or mask remove for every query reach neither results
        nor gradients.

    Raises:
        TypeError, ValueError: an argument is not as described here, or ``path`` cannot be taken;
            before anything is computed.

    The forward is deterministic, and so is the backward under
    ``torch.use_deterministic_algorithms(True)``. Double backward, forward-mode AD, ``torch.func``,
    fp64, CPU tensors, gradients into tables and positions, and head dims that the kernels do not
    cover run on PyTorch's own operators, with the same result.
    """
    arguments = Arguments(
        x_query,
        x_kv,
        w_q,
        w_k,
        w_v,
        w_out,
        b_q,
        b_k,
        b_v,
        b_out,
        x_value,
        q_positions,
        k_positions,
        kv_lengths,
        kv_keep_mask,
        attn_bias,
        rope,
        q_norm,
        k_norm,
        num_heads,
        num_kv_heads,
        is_causal,
        dropout_p,
        scale,
        path,
        return_lse,
    )
    return attend(arguments)


def project_kv(
    x_kv: Tensor,  # [B, Tk, Dkv]
    w_k: Tensor,  # [Hkv*D, Dkv]
    w_v: Tensor,  # [Hkv*D, Dv]
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    b_k: Tensor | None = None,  # [Hkv*D]
    b_v: Tensor | None = None,  # [Hkv*D]
    x_value: Tensor | None = None,  # [B, Tk, Dv]
    rope: RopeLike = DEFAULT_ROPE,
    k_positions: Tensor | None = None,
    k_norm: Norm | None = None,
) -> ProjectedKV:
    """Keys, normed and rotated, and values, for any number of :func:`cross_attention` calls.

    Arguments are those of :func:`cross_attention`; of a pair ``rope`` the second is used. The
    result is differentiable. Lengths and masks belong to the calls that use it: NaN or Inf in a
    token that all of them remove reaches no gradient here either.
    """
    arguments = Arguments(
        None,
        x_kv,
        None,
        w_k,
        w_v,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        b_k=b_k,
        b_v=b_v,
        x_value=x_value,
        rope=rope,
        k_positions=k_positions,
        k_norm=k_norm,
    )
    return isolating(project_keys_and_values, arguments)


def attend(a: Arguments, projected: bool = False) -> Any:
    """:func:`cross_attention` of its arguments. With ``projected``, ``x_query`` is what a
    projection outside made, and there are no ``w_q`` and ``w_out``.

    Autocast's casts are done here and once, instead of at every product.
    """

    dtype = autocast_dtype(a.x_query)
    if dtype is None:
        return _attend(a, projected)
    with torch.autocast(a.x_query.device.type, enabled=False):
        return _attend(autocast(a, dtype), projected)


def project_keys_and_values(a: Arguments, projected: bool = False) -> ProjectedKV:
    """:func:`project_kv` of its arguments. With ``projected``, ``x_kv`` and ``x_value`` are what
    projections outside made, and there are no weights: this norms and rotates."""

    dtype = autocast_dtype(a.x_kv)
    if dtype is None:
        return _project_kv(prepare(a, "kv", projected))
    with torch.autocast(a.x_kv.device.type, enabled=False):
        return _project_kv(prepare(autocast(a, dtype), "kv", projected))


def isolating(make: Callable[[Arguments], ProjectedKV], a: Arguments) -> ProjectedKV:
    """``make(a)``, in whose backward a token that holds NaN or Inf touches nothing but itself.

    Which tokens later calls will remove is not known here, but NaN must not come in by the weight
    gradients of those: 0 times NaN is NaN. So the products see 0 there, and NaN is put back behind
    them, for whoever does attend to the token.
    """
    is_wrong = not is_dense(a.x_kv) or not (a.x_value is None or is_dense(a.x_value))
    if is_wrong or not torch.is_grad_enabled():
        return make(a)
    x_kv, k_broken = _without_broken_tokens(a.x_kv)
    x_value, v_broken = a.x_value, k_broken
    if x_value is not None:
        x_value, v_broken = _without_broken_tokens(x_value)
    k, v = make(a._replace(x_kv=x_kv, x_value=x_value))
    return ProjectedKV(
        k.masked_fill(k_broken[:, None, :, None], math.nan),
        v.masked_fill(v_broken[:, None, :, None], math.nan),
    )


def _without_broken_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [B, T, C] with 0 in tokens that hold NaN or Inf, and bool [B, T]: which those are."""
    broken: Any = ~x.isfinite().all(-1)
    zeroed = x.masked_fill(broken[..., None], 0.0)
    return zeroed, broken.full_tensor() if is_dtensor(broken) else broken


def _attend(a: Arguments, projected: bool) -> Any:
    checked = check_once(a, "block", projected)
    problem, t = checked.problem, block_tensors(a, checked.problem)
    config, fused_config = checked.switched()
    prepared = Prepared(problem, config, t)
    path, reason = planner.choose(prepared, a.path, known=checked.choices)
    if path == "fused":
        config = fused_config
    if config.dropout_p > 0:
        t = t._replace(seed=draw_seed(problem.device))
    lse: Tensor | None
    if path != "composite":
        if t.w_q is None:  # the kernels start from finished queries then
            t = t._replace(x_query=_normed_and_rotated(split.query_projection(config, t)))
            config = config._replace(q_norm=NormSpec(), q_rotation=RotationSpec())
        y, lse = autograd.attend(config, t)
    else:
        if a.path == "auto":
            _warn_of_missing_kernels(problem.device, reason)
        y, lse = composite.cross_attention(config, *t, need_lse=a.return_lse)
    return (y, lse) if a.return_lse else y


def _project_kv(prepared: Prepared) -> ProjectedKV:
    problem, config, t = prepared
    values = t.x_kv if t.x_value is None else t.x_value
    if t.w_v is not None:
        values = F.linear(values, t.w_v, t.b_v)
    path, reason = planner.choose(prepared, "auto")
    projection = split.key_projection(config, t)
    if path == "split" and t.w_k is not None:
        k = autograd.project_heads(projection)
    else:
        _warn_of_missing_kernels(problem.device, reason)
        k = _normed_and_rotated(projection)
    v = composite.split_heads(values, config.num_kv_heads)
    return ProjectedKV(k.transpose(1, 2), v.transpose(1, 2))


def _normed_and_rotated(p: split.Projection) -> Tensor:  # [B, T, H, D]
    norm = (p.norm, p.norm_weight, p.norm_bias)
    rotation = Rotation(p.rotation, p.positions, p.cos, p.sin)
    return composite.project_heads(p.x, p.weight, p.bias, p.num_heads, norm, rotation)


def _warn_of_missing_kernels(device: torch.device, reason: str) -> None:
    if device.type == "cuda" and reason == planner.kernels_missing(device):
        planner.warn_once(f"fused_rope_xattn runs on PyTorch's own operators: {reason}")
