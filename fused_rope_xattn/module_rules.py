"""The rules that the options of the module must obey."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import FLOATS, SCALE_RULES, check_rope
from .rope import RopeLike, RotaryTable, sides
from .rules import (
    Rule,
    apply_rules,
    check_is_local,
    count_rules,
    is_bool,
    kind_rule,
    probability_rules,
)


class ModuleOptions(NamedTuple):
    """The options of ``FusedRoPECrossAttention`` but for its rotation, as they were given."""

    dim: Any
    num_heads: Any
    dropout: Any
    kv_dim: Any
    value_dim: Any
    inner_dim: Any
    out_dim: Any
    num_kv_heads: Any
    bias: Any
    out_bias: Any
    qk_norm: Any
    qk_norm_over: Any
    scale: Any
    dtype: Any

    @property
    def inner_width(self) -> int:
        width: int = self.dim if self.inner_dim is None else self.inner_dim
        return width


def _is_floating(dtype: Any) -> bool:
    return dtype is None or (isinstance(dtype, torch.dtype) and dtype in FLOATS)


OPTION_RULES = (
    *count_rules("dim"),
    *count_rules("num_heads"),
    *(
        rule
        for name in ("kv_dim", "value_dim", "inner_dim", "out_dim", "num_kv_heads")
        for rule in count_rules(name, optional=True)
    ),
    Rule(
        "num_heads",
        ValueError,
        lambda o: o.inner_width % o.num_heads == 0,
        "a divisor of the inner width {0.inner_width}",
    ),
    Rule(
        "num_kv_heads",
        ValueError,
        lambda o: o.num_kv_heads is None or o.num_heads % o.num_kv_heads == 0,
        "a divisor of num_heads={0.num_heads}",
    ),
    *probability_rules("dropout"),
    kind_rule("bias", is_bool, "a bool"),
    kind_rule("out_bias", lambda x: x is None or is_bool(x), "a bool or None"),
    Rule(
        "qk_norm",
        ValueError,
        lambda o: o.qk_norm in (None, "rms", "layer"),
        '"rms", "layer" or None',
    ),
    Rule(
        "qk_norm_over",
        ValueError,
        lambda o: o.qk_norm_over in ("head", "inner"),
        '"head" or "inner"',
    ),
    *SCALE_RULES,
    kind_rule("dtype", _is_floating, "a floating-point dtype or None"),
)


def check_options(options: ModuleOptions) -> None:
    apply_rules(OPTION_RULES, options)


def check_module_rope(rope: RopeLike, head_dim: int) -> None:
    for side in sides(rope):
        if isinstance(side, RotaryTable):
            raise TypeError(
                "rope: expected a RoPE, None or a pair of these, got a RotaryTable, which .to() "
                "and state_dict() would miss in a module; pass it to forward(rope=...)"
            )
    check_rope(rope, head_dim)


def heads_of(name: str, x: Tensor, head_dim: int) -> int:
    """How many heads a projection made: one that is sharded over devices makes only some."""
    check_is_local(name, x, "parallelize it with use_local_output=True")
    width = x.shape[-1]
    if width == 0 or width % head_dim:
        raise ValueError(f"{name}: expected whole heads of {head_dim} dims, got {width} dims")
    return width // head_dim


def check_shares(heads: int, kv_heads: int, num_heads: int, num_kv_heads: int) -> None:
    """The heads of this process belong together: a share of all, or the one head of the keys."""
    is_one = kv_heads == num_kv_heads == 1
    if not is_one and heads * num_kv_heads != kv_heads * num_heads:
        raise ValueError(
            f"num_kv_heads: expected the same share of {num_heads} query heads and {num_kv_heads} "
            f"key heads, got {heads} and {kv_heads} of them"
        )
