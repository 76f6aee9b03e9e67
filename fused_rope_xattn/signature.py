"""What the checks of a call depend on, as a hashable key: calls that share it are checked once.

The checks take longer than everything else that Python does for a small call. The key holds no
tensor, so that it keeps none alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .arguments import Arguments
from .kv import ProjectedKV
from .norm import Norm
from .rope import RoPE, RotaryTable

_FIRST_OPTION = Arguments._fields.index("rope")
_FIRST_NUMBER = Arguments._fields.index("num_heads")


def signature(a: Arguments) -> tuple[Any, ...]:
    """The key of a call.

    AttributeError where an argument has no place in one; other things that do not belong there,
    such as lists and symbolic sizes, show when the key is hashed.
    """
    x_kv, numbers = a.x_kv, a[_FIRST_NUMBER:]
    tensors = a[:_FIRST_OPTION]
    if isinstance(x_kv, ProjectedKV):
        tensors = (a.x_query, *x_kv, *tensors[2:])  # one more than otherwise: no two keys meet
    looks = [
        None if x is None else (x.shape, x.dtype, x.device, x.layout, type(x)) for x in tensors
    ]
    return (
        tuple(looks),
        _rope(a.rope),
        None if a.q_norm is None else _norm(a.q_norm),
        None if a.k_norm is None else _norm(a.k_norm),
        numbers,
        tuple(map(type, numbers)),  # 1, 1.0 and True are one key otherwise
        wants_gradients(tensors),
    )


def wants_gradients(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd will record what is computed from these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _tensor(x: Any) -> Any:
    return None if x is None else (x.shape, x.dtype, x.device, x.layout, type(x))


def _norm(norm: Norm) -> Any:
    return (norm.kind, norm.eps, norm.over, _tensor(norm.weight), _tensor(norm.bias))


def _rope(rope: Any) -> Any:
    if type(rope) is RoPE:  # its own hash and comparison are Python's
        return (RoPE, rope.base_text, rope.rotary_dim, rope.interleaved, rope.axes)
    if isinstance(rope, tuple):
        return tuple([_rope(side) for side in rope])
    if isinstance(rope, RotaryTable):
        return (rope.interleaved, rope.full_width, _tensor(rope.cos), _tensor(rope.sin))
    return rope
