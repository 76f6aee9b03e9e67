"""What the checks of a call depend on, as a hashable key: calls that share it are checked once.

The checks take longer than everything else that Python does for a small call.
"""

from __future__ import annotations

from typing import Any

from .arguments import Arguments
from .kv import ProjectedKV
from .norm import Norm
from .rope import RotaryTable


def signature(a: Arguments) -> tuple[Any, ...] | None:
    """The key of a call; None where an argument has no place in one, such as symbolic sizes."""
    try:
        key = (
            _tokens(a.x_kv),
            *[_tensor(x) for x in (a.x_query, a.x_value, a.w_q, a.w_k, a.w_v, a.w_out)],
            *[_tensor(x) for x in (a.b_q, a.b_k, a.b_v, a.b_out, a.q_positions, a.k_positions)],
            *[_tensor(x) for x in (a.kv_lengths, a.kv_keep_mask, a.attn_bias)],
            _rope(a.rope),
            _norm(a.q_norm),
            _norm(a.k_norm),
            a.path,
            # Each with its type: 1, 1.0 and True are one key otherwise.
            *[(type(x), x) for x in (a.num_heads, a.num_kv_heads, a.is_causal, a.return_lse)],
            *[(type(x), x) for x in (a.dropout_p, a.scale)],
        )
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


def _tensor(x: Any) -> Any:
    return None if x is None else (type(x), x.shape, x.dtype, x.device)


def _tokens(x: Any) -> Any:
    return (ProjectedKV, _tensor(x.k), _tensor(x.v)) if isinstance(x, ProjectedKV) else _tensor(x)


def _norm(norm: Norm | None) -> Any:
    return norm and (norm.kind, norm.eps, norm.over, _tensor(norm.weight), _tensor(norm.bias))


def _rope(rope: Any) -> Any:
    """A table by what its tensors look like, so that no key keeps one alive."""
    if isinstance(rope, tuple):
        return tuple([_rope(side) for side in rope])
    if isinstance(rope, RotaryTable):
        return (rope.interleaved, rope.full_width, _tensor(rope.cos), _tensor(rope.sin))
    return rope
