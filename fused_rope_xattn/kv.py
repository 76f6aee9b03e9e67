"""Keys and values that are projected once and attended to many times."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ProjectedKV(NamedTuple):
    """What :func:`project_kv` returns, and :func:`cross_attention` accepts as ``x_kv``."""

    k: Tensor  # [B, Hkv, Tk, D], normed and rotated already
    v: Tensor  # [B, Hkv, Tk, D]
