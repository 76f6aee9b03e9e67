"""``Attention`` of x-transformers with ``context``: two tables, memory keys, query masks.

Its grouped heads are dealt the other way round (query head h reads key head h mod Hkv), so rows of
``to_q`` and columns of ``to_out`` move; its memory keys are appended to projected ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..children import change_of
from ..functional import cross_attention, project_kv
from ..kv import ProjectedKV
from ..norm import Norm
from ..rope import RopeSide, RotaryTable
from .adapter import Adapter, Draw, Place, Refused, Role, Unserved, role_of_name
from .layout import head_rows
from .xtransformers_options import refuse_options

Frequencies = tuple[Tensor, Any]  # angles [1|B, T, R], each twice; xPos scale like it, or 1.0

_UNSERVED = (
    *("rel_pos", "polar_pos_emb", "pos", "prev_attn", "mem", "mem_mask", "cache", "value_residual"),
    *("additional_key_values", "additional_key_value_mask", "kv_input_residual"),
    *("q_delta", "k_delta", "v_delta", "o_delta", "attn_delta", "flash_pack_seq_kwargs"),
)


class XTransformersAttention(Adapter):
    kind = "x-transformers Attention"
    classes = ("x_transformers.x_transformers.Attention",)
    children = ("to_q", "to_k", "to_v")
    must_probe = True  # its options change from week to week

    def role(self, module: Any, place: Place) -> Role:
        for path, parent in place.parents:
            types: Any = getattr(parent, "layer_types", None)
            if types is not None:
                index = place.path[len(path) :].lstrip(".").split(".")[1]
                return "cross" if types[int(index)] == "c" else "self"
        if module.to_k.in_features != module.to_q.in_features:
            return "cross"
        return role_of_name(place)

    def examine(self, module: Any, place: Place) -> None:
        refuse_options(module, place)
        if type(module.to_out) is not nn.Identity:
            change = change_of(module.to_out)
            if change is not None:
                raise Refused(f"to_out {change}")

    def forward(
        self,
        module: Any,
        x: Tensor,  # [B, Tq, C]
        context: Tensor | None = None,  # [B, Tk, Ckv]
        mask: Tensor | None = None,  # [B, Tq], True = keep
        context_mask: Tensor | None = None,  # [B, Tk], True = keep
        attn_mask: Tensor | None = None,  # up to [B, H, Tq, Tk], True = keep
        rel_pos: Any = None,
        attn_bias: Tensor | None = None,
        rotary_pos_emb: Frequencies | None = None,
        context_rotary_pos_emb: Frequencies | None = None,
        polar_pos_emb: Any = None,
        pos: Any = None,
        prev_attn: Any = None,
        mem: Any = None,
        mem_mask: Any = None,
        return_intermediates: bool = False,
        cache: Any = None,
        value_residual: Any = None,
        additional_key_values: Any = None,
        additional_key_value_mask: Any = None,
        kv_input_residual: Any = None,
        q_delta: Any = None,
        k_delta: Any = None,
        v_delta: Any = None,
        o_delta: Any = None,
        attn_delta: Any = None,
        flash_pack_seq_kwargs: Any = None,
        causal: bool | None = None,
    ) -> Any:
        others = (
            *(rel_pos, polar_pos_emb, pos, prev_attn, mem, mem_mask, cache, value_residual),
            *(additional_key_values, additional_key_value_mask, kv_input_residual),
            *(q_delta, k_delta, v_delta, o_delta, attn_delta, flash_pack_seq_kwargs),
        )
        given = [name for name, x in zip(_UNSERVED, others, strict=True) if x is not None]
        if given:
            return Unserved(f"arguments {', '.join(given)}")
        obstacle = _obstacle(module, x, context, attn_mask, attn_bias, causal)
        if obstacle is not None:
            return Unserved(obstacle)
        x_kv = x if context is None else context
        k_rotation = rotary_pos_emb if context is None else context_rotary_pos_emb
        rope: tuple[RopeSide, RopeSide] = (None, None)
        if rotary_pos_emb is not None:
            if k_rotation is None:
                return Unserved("rotary_pos_emb without context_rotary_pos_emb")
            q_table = _table(rotary_pos_emb, x.shape[1], module)
            rope = q_table, _table(k_rotation, x_kv.shape[1], module, key=True)
        key_mask = mask if context_mask is None and context is None else context_mask
        keep = _keep_mask(key_mask, attn_mask, x.shape[0], module.num_mem_kv)
        y = _attend(module, x, x_kv, rope, keep, attn_bias)
        if module.sublayer_dropout is not None:
            y = module.sublayer_dropout(y)
        if mask is not None:
            y = torch.where(mask[..., None], y, 0.0)
        return (y, Intermediates(module, x_kv)) if return_intermediates else y

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = [draw.normal(2, n, m.in_features) for n, m in ((5, module.to_q), (7, module.to_k))]
        rotated = min(32, _head_dim(module) // 2 * 2)
        tables = []
        for count in (5, 7):
            angle = torch.randn((1, count, rotated // 2), generator=draw.generator)
            tables.append((angle.to(draw.device).repeat_interleave(2, -1), 1.0))
        keep = torch.ones(2, 7, dtype=torch.bool, device=draw.device)
        keep[0, 4:] = False
        options = {"context_mask": keep, "rotary_pos_emb": tables[0]}
        return tuple(tokens), {**options, "context_rotary_pos_emb": tables[1]}


class Intermediates:
    """What a caller may want beside the output, in the place of x-transformers' own class.

    Scores are not kept, as they are not with ``flash=True``; keys and values before rotation are
    computed when they are asked for.
    """

    qk_similarities = pre_softmax_attn = post_softmax_attn = None
    layer_type = hybrid_hidden = log_probs = None

    def __init__(self, module: Any, x_kv: Tensor) -> None:
        self._module, self._x_kv = module, x_kv

    @property
    def values(self) -> Tensor:  # [B, Hkv, Tk, D]
        heads: Tensor = self._module.split_v_heads(self._module.to_v(self._x_kv))
        return heads

    @property
    def cached_kv(self) -> tuple[Tensor, Tensor]:
        k = self._module.split_k_heads(self._module.to_k(self._x_kv))
        if self._module.qk_norm:
            k = F.normalize(k, dim=-1)
        return k, self.values

    def to_tuple(self) -> tuple[None, None, None]:
        return None, None, None


def _obstacle(
    module: Any,
    x: Tensor,
    context: Tensor | None,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    causal: bool | None,
) -> str | None:
    if type(module.to_out) is not nn.Identity:
        change = change_of(module.to_out)
        if change is not None:
            return f"to_out {change}"
    if causal:
        return "it is causal"
    if x.dim() != 3 or (context is not None and context.dim() != 3):
        return "its tokens have not three axes"
    if module.num_mem_kv and (attn_mask is not None or attn_bias is not None):
        return "a mask or bias over memory keys"
    return None


def _head_dim(module: Any) -> int:
    head_dim: int = module.to_q.out_features // module.heads
    return head_dim


def _table(rotation: Frequencies, tokens: int, module: Any, key: bool = False) -> RopeSide:
    angle, scale = rotation  # longer ones than the tokens are cut to their end
    angle = angle[:, -tokens:, ::2].float()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # [1|B, 1, T, R/2]
    if isinstance(scale, Tensor):
        scale = scale[:, -tokens:, ::2][:, None].float()
        cos, sin = (cos / scale, sin / scale) if key else (cos * scale, sin * scale)
    still = module.heads - module.rotate_num_heads  # the first heads do not rotate
    if still:
        heads = (-1, module.heads, -1, -1)
        rotates = torch.arange(module.heads, device=cos.device)[:, None, None] >= still
        cos = torch.where(rotates, cos.expand(heads), 1.0)
        sin = torch.where(rotates, sin.expand(heads), 0.0)
    return RotaryTable(cos, sin)


def _keep_mask(
    key_mask: Tensor | None, attn_mask: Tensor | None, batch: int, memories: int
) -> Tensor | None:
    keep = key_mask
    if key_mask is not None and memories:
        keep = F.pad(key_mask, (memories, 0), value=True)
    if attn_mask is None:
        return keep
    attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if keep is not None:
        attn_mask = attn_mask & keep[:, None, None, :]
    return attn_mask.expand(batch, -1, -1, -1)


def _attend(
    module: Any,
    x: Tensor,
    x_kv: Tensor,
    rope: tuple[RopeSide, RopeSide],
    keep: Tensor | None,
    attn_bias: Tensor | None,
) -> Tensor:
    heads, kv_heads, head_dim = module.heads, module.kv_heads, _head_dim(module)
    w_q: Tensor = module.to_q.weight
    w_out: Any = getattr(module.to_out, "weight", None)
    if 1 < kv_heads < heads:
        order = torch.arange(heads, device=w_q.device).view(-1, kv_heads).t().flatten()
        rows = head_rows(order, head_dim)
        w_q, w_out = w_q[rows], w_out[:, rows]
        if keep is not None and keep.dim() == 4 and keep.shape[1] > 1:
            keep = keep[:, order]
        if attn_bias is not None and attn_bias.dim() > 2 and attn_bias.shape[-3] > 1:
            attn_bias = attn_bias[..., order, :, :]
    norm, scale = None, module.attend.scale
    if module.qk_norm:  # cosine similarity: RMSNorm but for a factor of sqrt(D) on either side
        norm, scale = Norm("rms", eps=1e-24 / head_dim), scale / head_dim
    kv: Any = x_kv
    weights: tuple[Any, Any] = (module.to_k.weight, module.to_v.weight)
    side: dict[str, Any] = {"rope": rope, "k_norm": norm}
    if module.num_mem_kv:
        projected = project_kv(
            x_kv, *weights, num_heads=heads, num_kv_heads=kv_heads, rope=rope, k_norm=norm
        )
        kv, weights = _with_memories(module, projected), (None, None)
        side = {"rope": rope[0]}
    y: Tensor = cross_attention(
        x,
        kv,
        w_q,
        *weights,
        w_out,
        num_heads=heads,
        num_kv_heads=kv_heads,
        q_norm=norm,
        kv_keep_mask=keep,
        attn_bias=attn_bias,
        dropout_p=module.attend.dropout if module.attend.training else 0.0,
        scale=scale,
        **side,
    )
    return y


def _with_memories(module: Any, kv: ProjectedKV) -> ProjectedKV:
    """Learned keys and values before the others, never rotated."""
    batch, mem_k, mem_v = kv.k.shape[0], module.mem_k, module.mem_v
    if module.qk_norm:
        mem_k = F.normalize(mem_k, dim=-1) * mem_k.shape[-1] ** 0.5
    k, v = (
        torch.cat([memory.to(x.dtype).expand(batch, -1, -1, -1), x], dim=2)
        for memory, x in ((mem_k, kv.k), (mem_v, kv.v))
    )
    return ProjectedKV(k, v)
