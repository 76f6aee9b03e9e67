"""The CPU kernel of ``block_backward``, composed of cpu_ops.py's."""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_ops, composite, cpu_ops, ops
from .config import RotationSpec
from .rope import Rotation


def register() -> None:
    """Hand the kernel to the dispatcher; once a process."""
    ops.LIBRARY.impl(block_backward.__name__, block_backward, "CPU")


@torch.no_grad()
def block_backward(
    dy: Tensor,  # [B, Tq, Dout], [B, Tq, H*D] without w_out
    dlse: Tensor | None,
    x_query: Tensor | None,
    x_kv: Tensor | None,
    x_value: Tensor | None,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor | None,
    w_out: Tensor | None,
    q: Tensor,  # [B, Tq, H, D]
    k: Tensor,  # [B, Tk, Hkv, D]
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_positions: Tensor | None,
    q_cos: Tensor | None,
    q_sin: Tensor | None,
    k_positions: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    attn_bias: Tensor | None,
    keep_mask: Tensor | None,
    key_keep: Tensor | None,
    kv_lengths: Tensor | None,
    *options: float,  # q_rotary_dim .. k_full_width, scale .. tf32, need_x_query .. need_b_out
) -> tuple[Tensor, ...]:
    scale, is_causal, tf32 = options[10:13]
    needs = block_ops.BlockNeeds(*map(bool, options[13:]))
    got: dict[str, Tensor] = {}
    dout = (dy if w_out is None else _product(dy, w_out)).view(o.shape)
    need_kv = needs.x_kv or needs.x_value or needs.w_k or needs.w_v or needs.b_k or needs.b_v
    scores = (attn_bias, keep_mask, key_keep, kv_lengths, None, scale, bool(is_causal), 0.0)
    dq, dk, dv, _ = cpu_ops.attention_backward(
        *(dout, dlse, q, k, v, o, lse, *scores, bool(tf32)),
        need_dq=bool(needs.x_query or needs.w_q or needs.b_q),
        need_dkv=bool(need_kv),
        need_dbias=False,
        deterministic=True,
    )

    dz_q = _turned_back(dq, (q_positions, q_cos, q_sin), options[:5]) if dq.numel() else dq
    if needs.x_query and w_q is not None:
        got["x_query"] = _product(dz_q.flatten(2), w_q)
    got |= _of_parameters("q", needs, dz_q, x_query)
    got |= _of_parameters("out", needs, dy.unsqueeze(2), o.flatten(2))
    if w_k is None or w_v is None or not need_kv:  # keys and values were finished
        got |= {"x_kv": dk, "x_value": dv}
    else:
        assert x_kv is not None
        dz_k = _turned_back(dk, (k_positions, k_cos, k_sin), options[5:10])
        terms = {"x_kv": [(dz_k, w_k)], "x_value": [(dv, w_v)]}
        if x_value is None:
            terms["x_kv"] += terms.pop("x_value")
        for name, pairs in terms.items():
            if getattr(needs, name):
                wide = [_wide(dz.flatten(2)) @ _wide(w) for dz, w in pairs]
                got[name] = sum(wide[1:], wide[0]).to(q.dtype)
        keep = composite.visible_pairs(
            cpu_ops._config(q, k, 1.0, False, 0.0), q, k, None, kv_lengths, None, key_keep
        )
        for name, dz, x in (("k", dz_k, x_kv), ("v", dv, x_kv if x_value is None else x_value)):
            kept = x if keep is None else composite.keep_rows(x, keep[:, 0, 0])
            got |= _of_parameters(name, needs, dz, kept)
    return tuple(
        got[name].contiguous() if need and name in got else q.new_empty(0)
        for name, need in needs._asdict().items()
    )


def _wide(x: Tensor) -> Tensor:
    return x.to(composite.compute_dtype(x))


def _product(x: Tensor, weight: Tensor) -> Tensor:  # [.., N] @ [N, C], rounded once
    return (_wide(x) @ _wide(weight)).to(x.dtype)


def _turned_back(
    grad: Tensor,  # [B, T, H, D]
    turning: tuple[Tensor | None, Tensor | None, Tensor | None],
    rotation: tuple[float, ...],  # rotary_dim .. full_width
) -> Tensor:
    rotary_dim, interleaved, axes, base, full_width = rotation
    spec = RotationSpec(int(rotary_dim), bool(interleaved), int(axes), bool(full_width), base)
    return cpu_ops._rotate_back(_wide(grad), Rotation(spec, *turning)).to(grad.dtype)


def _of_parameters(
    name: str, needs: block_ops.BlockNeeds, dz: Tensor, x: Tensor | None
) -> dict[str, Tensor]:
    """Gradients of weight and bias from ``dz`` [B, T, H, D] and ``x`` [B, T, C]."""
    got: dict[str, Tensor] = {}
    if getattr(needs, f"w_{name}") and x is not None:
        rows = _wide(dz.flatten(2).flatten(0, 1))
        got[f"w_{name}"] = (rows.t() @ _wide(x.flatten(0, 1))).to(dz.dtype)
    if getattr(needs, f"b_{name}"):
        got[f"b_{name}"] = _wide(dz.flatten(2)).sum((0, 1)).to(dz.dtype)
    return got
