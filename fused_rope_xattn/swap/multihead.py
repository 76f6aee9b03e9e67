"""``torch.nn.MultiheadAttention``: packed or separate weights, every mask, no rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import cross_attention
from .adapter import Adapter, Draw, Place, Refused, Role, Unserved, role_of_name


class MultiheadAttention(Adapter):
    """Its weights are used in place: the parts of the packed one are views of it."""

    kind = "torch.nn.MultiheadAttention"
    classes = (torch.nn.MultiheadAttention,)

    def role(self, module: Any, place: Place) -> Role:
        if module.kdim != module.embed_dim or module.vdim != module.embed_dim:
            return "cross"
        return role_of_name(place)

    def examine(self, module: Any, place: Place) -> bool:
        if module.bias_k is not None or module.bias_v is not None:
            raise Refused("add_bias_kv appends a learned key")
        if module.add_zero_attn:
            raise Refused("add_zero_attn appends a key of zeros")
        return place.attention_weights

    def forward(
        self,
        module: Any,
        query: Tensor,  # [Tq, B, E], with batch_first [B, Tq, E], or [Tq, E]
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,  # [B, Tk] or [Tk]; bool: True = padding
        need_weights: bool = True,
        attn_mask: Tensor | None = None,  # [Tq, Tk] or [B*H, Tq, Tk]; bool: True = removed
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        if need_weights and module.swap_state:
            return Unserved("the call asks for attention weights (need_weights=True)")
        if is_causal and attn_mask is None:
            return Unserved("is_causal is a hint about attn_mask, which is missing")
        if query.is_nested or query.dim() not in (2, 3):
            return Unserved("its tokens are not tensors of two or three axes")
        heads, shared = module.num_heads, value is key
        q, k, v = _batch_first(module, query), _batch_first(module, key), None
        if not shared:
            v = _batch_first(module, value)
        keep, bias = _masks(key_padding_mask, attn_mask, q.shape[0], heads)
        if keep is not None and keep.dim() == 4:
            keep = keep.expand(q.shape[0], -1, -1, -1)
        w_q, w_k, w_v = _weights(module)
        b_q = b_k = b_v = None
        if module.in_proj_bias is not None:
            b_q, b_k, b_v = module.in_proj_bias.chunk(3)
        y = cross_attention(
            q,
            k,
            w_q,
            w_k,
            w_v,
            module.out_proj.weight,
            num_heads=heads,
            b_q=b_q,
            b_k=b_k,
            b_v=b_v,
            b_out=module.out_proj.bias,
            x_value=v,
            rope=None,
            kv_keep_mask=keep,
            attn_bias=bias,
            dropout_p=module.dropout if module.training else 0.0,
        )
        if query.dim() == 2:
            return y[0], None
        return (y if module.batch_first else y.transpose(0, 1)), None

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = [draw.normal(2, 5, module.embed_dim)]
        tokens += [draw.normal(2, 7, width) for width in (module.kdim, module.vdim)]
        if not module.batch_first:
            tokens = [x.transpose(0, 1) for x in tokens]
        padding = torch.zeros(2, 7, dtype=torch.bool, device=draw.device)
        padding[0, 4:] = True
        return tuple(tokens), {"key_padding_mask": padding, "need_weights": False}


def _batch_first(module: Any, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x[None]
    return x if module.batch_first else x.transpose(0, 1)


def _weights(module: Any) -> tuple[Tensor, ...]:
    if module.in_proj_weight is not None:
        parts: tuple[Tensor, ...] = module.in_proj_weight.chunk(3)
        return parts
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight


def _masks(
    padding: Tensor | None, mask: Tensor | None, batch: int, heads: int
) -> tuple[Tensor | None, Tensor | None]:
    """``kv_keep_mask`` and ``attn_bias``: bool masks turned round, float masks added."""
    keeps: list[Tensor] = []
    biases: list[Tensor] = []
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        if padding.dtype == torch.bool:
            keeps.append(~padding)
        else:
            biases.append(padding[:, None, None, :])
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, heads))
        if mask.dtype == torch.bool:
            keeps.append(~mask)
        else:
            biases.append(mask)
    bias = biases[0] + biases[1] if len(biases) == 2 else next(iter(biases), None)
    if len(keeps) == 2:
        return keeps[0][:, None, None, :] & keeps[1], bias
    return next(iter(keeps), None), bias
