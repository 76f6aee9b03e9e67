"""What a call consists of: its arguments, and the sizes that they agree on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .rope import RoPE, RopeSide, RotaryTable


class Arguments(NamedTuple):
    """The arguments of ``cross_attention``, tensors first; those of the queries are None for
    ``project_kv``."""

    x_query: Any
    x_kv: Any  # the only one of the tensors that may be a ProjectedKV
    w_q: Any = None
    w_k: Any = None
    w_v: Any = None
    w_out: Any = None
    b_q: Any = None
    b_k: Any = None
    b_v: Any = None
    b_out: Any = None
    x_value: Any = None
    q_positions: Any = None
    k_positions: Any = None
    kv_lengths: Any = None
    kv_keep_mask: Any = None
    attn_bias: Any = None
    rope: Any = None
    q_norm: Any = None
    k_norm: Any = None
    num_heads: Any = None
    num_kv_heads: Any = None
    is_causal: Any = False
    dropout_p: Any = 0
    scale: Any = None
    path: Any = "auto"
    return_lse: Any = False


class Problem(NamedTuple):
    """The sizes of a checked call."""

    B: int
    Tq: int
    Tk: int
    H: int
    Hkv: int
    D: int
    Dq: int
    Dkv: int
    Dv: int
    Dout: int | None  # None: no output projection
    dtype: torch.dtype
    device: torch.device


class Sizes(NamedTuple):
    """What the tensors of a call must agree on."""

    named: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    like: str  # the argument that set dtype and device


class Side(NamedTuple):
    """How the queries or the keys are to be rotated."""

    name: str  # "q" | "k"
    rope: RopeSide
    positions: Any
    head_dim: int

    @property
    def rotary_dim(self) -> int:
        if isinstance(self.rope, RotaryTable):
            width: int = self.rope.cos.shape[-1]
            return width if self.rope.full_width else 2 * width
        if self.rope is None:
            return 0
        return self.head_dim if self.rope.rotary_dim is None else self.rope.rotary_dim

    @property
    def axes(self) -> int:
        return self.rope.axes if isinstance(self.rope, RoPE) else 1

    @property
    def pairs_of(self) -> int:
        return 2 * self.axes
