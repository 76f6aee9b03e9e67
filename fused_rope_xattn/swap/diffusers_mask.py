"""The attention masks of diffusers, as its ``prepare_attention_mask`` reads them."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_or_bias(
    mask: Tensor, batch: int, heads: int, keys: int
) -> tuple[Tensor | None, Tensor | None] | None:
    """``kv_keep_mask`` (bool: True = attend) or ``attn_bias``; None for shapes of another meaning.

    ``[B, Tk]`` or ``[B, 1|Tq, Tk]`` serve all heads, ``[B*H, Tk]`` or ``[B*H, 1|Tq, Tk]`` one each.
    """
    if mask.dim() not in (2, 3) or mask.shape[-1] != keys:
        return None
    mask = mask[:, None] if mask.dim() == 2 else mask
    if mask.shape[0] == batch:
        mask = mask[:, None]
    elif mask.shape[0] == batch * heads:
        mask = mask.unflatten(0, (batch, heads))
    else:
        return None
    return (mask, None) if mask.dtype == torch.bool else (None, mask)
