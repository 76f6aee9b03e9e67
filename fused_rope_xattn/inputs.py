"""The rules that a call must obey: tables of them, and every error message of the package's API.

Two tables. :data:`TENSORS` says of each tensor which dtypes and shapes it may have; :data:`RULES`
holds every other condition. Both are walked in order, and the first broken rule raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .arguments import Arguments, Problem, Side, Sizes
from .kv import ProjectedKV
from .norm import Norm
from .rope import RoPE, RopeLike, RotaryTable, sides
from .rules import (
    Rule,
    apply_rules,
    check_is_local,
    count_rules,
    is_bool,
    is_number,
    kind_rule,
    probability_rules,
    show,
)

PATHS = ("auto", "fused", "split", "composite")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# ------------------------------------------------------------------------------- what tensors obey


class Dim(NamedTuple):
    """One axis of a shape: a named size, or 1 as well where ``or_one``."""

    symbol: str
    or_one: bool


class TensorRule(NamedTuple):
    """What one tensor argument may look like."""

    dtypes: tuple[torch.dtype, ...] | None  # None: the dtype of x_query
    shapes: tuple[tuple[Dim, ...], ...]  # alternatives, told apart by their number of axes
    fewest_axes: int | None = None  # leading axes may be missing down to this number
    hint: str = ""


def _rule(
    *shapes: str,
    dtypes: tuple[torch.dtype, ...] | None = None,
    fewest_axes: int | None = None,
    hint: str = "",
) -> TensorRule:
    def dim(text: str) -> Dim:
        return Dim(text.removeprefix("1|"), text.startswith("1|"))

    parsed = tuple(tuple(dim(text) for text in shape.split()) for shape in shapes)
    return TensorRule(dtypes, parsed, fewest_axes, hint)


def _side_rules(side: str, tokens: str, width: str, heads: str) -> dict[str, TensorRule]:
    """The rules of the tensors that the query and the key side each have."""

    def table(shape: str) -> TensorRule:
        return _rule(shape, dtypes=FLOATS, fewest_axes=2)

    return {
        f"{side}_positions": _rule(tokens, f"1|B {tokens}", dtypes=INTEGERS + FLOATS),
        f"{side}_positions (axial)": _rule(
            f"{tokens} axes", f"1|B {tokens} axes", dtypes=INTEGERS + FLOATS
        ),
        f"{side} table": table(f"1|B 1|{heads} {tokens} R/2"),
        f"{side} table (full_width)": table(f"1|B 1|{heads} {tokens} R"),
        f"{side}_norm over head": _rule("D", dtypes=FLOATS),
        f"{side}_norm over inner": _rule(width, dtypes=FLOATS),
    }


TENSORS: dict[str, TensorRule] = {
    "x_query": _rule("B Tq Dq"),
    "x_kv": _rule("B Tk Dkv"),
    "x_kv.k": _rule("B Hkv Tk D"),
    "x_kv.v": _rule("B Hkv Tk D"),
    "x_value": _rule("B Tk Dv"),
    "w_q": _rule("H*D Dq"),
    "w_k": _rule("Hkv*D Dkv"),
    "w_v": _rule("Hkv*D Dv"),
    "w_out": _rule("Dout H*D"),
    "b_q": _rule("H*D"),
    "b_k": _rule("Hkv*D"),
    "b_v": _rule("Hkv*D"),
    "b_out": _rule("Dout"),
    "attn_bias": _rule(
        "1|B 1|H 1|Tq 1|Tk",
        dtypes=FLOATS,
        fewest_axes=0,
        hint="it is added to the scores; a boolean mask belongs into kv_keep_mask",
    ),
    "kv_lengths": _rule("B", dtypes=INTEGERS),
    "kv_keep_mask": _rule(
        "B Tk",
        "B 1|H 1|Tq Tk",
        dtypes=(torch.bool,),
        hint="True = attend; additive float masks belong into attn_bias",
    ),
    **_side_rules("q", "Tq", "H*D", "H"),
    **_side_rules("k", "Tk", "Hkv*D", "Hkv"),
}


def check_tensor(name: str, x: Any, sizes: Sizes, rule_name: str = "") -> None:
    """Raise what is wrong with tensor argument ``name``, if anything."""
    rule = TENSORS[rule_name or name]
    _check_is_dense(name, x)
    check_is_local(name, x)
    if rule.dtypes is None:
        if x.dtype != sizes.dtype:
            raise TypeError(
                f"{name}: expected {sizes.dtype} like {sizes.like}, got {x.dtype} "
                "(only under torch.autocast may they differ)"
            )
    elif x.dtype not in rule.dtypes:
        hint = f" ({rule.hint})" if rule.hint else ""
        raise TypeError(f"{name}: expected {_dtype_names(rule.dtypes)}, got {x.dtype}{hint}")
    if x.device != sizes.device:
        raise ValueError(
            f"{name}: expected device {sizes.device} like {sizes.like}, got {x.device}"
        )
    shape = x.shape
    for dims in rule.shapes:
        if rule.fewest_axes is not None and rule.fewest_axes <= len(shape) < len(dims):
            dims = dims[len(dims) - len(shape) :]
        if len(shape) == len(dims) and _fits(shape, dims, sizes):
            return
    wanted = " or ".join(_describe(dims, sizes) for dims in rule.shapes)
    if rule.fewest_axes is not None:
        wanted += " (leading axes may be missing)"
    raise ValueError(f"{name}: expected shape {wanted}, got {list(shape)}")


def is_dense(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested


def _check_is_dense(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        or_cached = " or a ProjectedKV" if name == "x_kv" else ""
        raise TypeError(f"{name}: expected a tensor{or_cached}, got {show(x)}")
    if not is_dense(x):
        kind = "a nested one" if x.is_nested else f"one of layout {x.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {kind}")


def _check_is_no_cache(x_kv: Any) -> None:
    if not isinstance(x_kv, Tensor):
        raise TypeError(f"x_kv: expected a tensor, got {show(x_kv)}")


def _fits(shape: Iterable[int], dims: tuple[Dim, ...], sizes: Sizes) -> bool:
    for size, dim in zip(shape, dims, strict=True):
        if size != sizes.named[dim.symbol] and not (dim.or_one and size == 1):
            return False
    return True


def _describe(dims: tuple[Dim, ...], sizes: Sizes) -> str:
    return f"[{', '.join('1|' * d.or_one + f'{d.symbol}={sizes.named[d.symbol]}' for d in dims)}]"


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    if dtypes == (torch.bool,):
        return "torch.bool"
    kinds = ["an integer dtype"] * (torch.int64 in dtypes)
    kinds += ["a floating-point dtype"] * (torch.float32 in dtypes)
    return " or ".join(kinds)


# ------------------------------------------------------------------------ what the rest obeys


def _is_rope(x: Any) -> bool:
    if isinstance(x, tuple):
        return len(x) == 2 and all(s is None or isinstance(s, (RoPE, RotaryTable)) for s in x)
    return x is None or isinstance(x, (RoPE, RotaryTable))


def _is_norm(x: Any) -> bool:
    return x is None or isinstance(x, Norm)


def _applied_already(argument: str) -> Rule:
    def holds(a: Arguments) -> bool:
        return getattr(a, argument) is None or not isinstance(a.x_kv, ProjectedKV)

    return Rule(argument, ValueError, holds, "None, since x_kv is a ProjectedKV")


ROPE_KIND = kind_rule(
    "rope", _is_rope, "a RoPE, a RotaryTable, None, or a pair (q_rope, k_rope) of these"
)

SCALE_RULES = (
    kind_rule("scale", lambda x: x is None or is_number(x), "a number or None"),
    Rule(
        "scale",
        ValueError,
        lambda a: a.scale is None or -math.inf < a.scale < math.inf,
        "a finite number",
    ),
)


# The subject is an Arguments.
ARGUMENT_RULES = (
    *count_rules("num_heads"),
    *count_rules("num_kv_heads", optional=True),
    *map(_applied_already, ("w_k", "w_v", "b_k", "b_v", "x_value", "k_positions", "k_norm")),
    Rule(
        "b_out",
        ValueError,
        lambda a: a.b_out is None or a.w_out is not None,
        "None, since w_out is None",
    ),
    ROPE_KIND,
    kind_rule("q_norm", _is_norm, "a Norm or None"),
    kind_rule("k_norm", _is_norm, "a Norm or None"),
    kind_rule("is_causal", is_bool, "a bool"),
    kind_rule("return_lse", is_bool, "a bool"),
    *probability_rules("dropout_p"),
    *SCALE_RULES,
    Rule("path", ValueError, lambda a: a.path in PATHS, f"one of {', '.join(PATHS)}"),
)

# The subject is a dict of sizes; source is the argument that sets the width of all heads.
HEAD_RULES = (
    Rule(
        "num_kv_heads",
        ValueError,
        lambda s: s["H"] % s["Hkv"] == 0,
        "a divisor of num_heads={0[H]}",
        "{0[Hkv]}",
    ),
    Rule(
        "{0[source]}",
        ValueError,
        lambda s: s["width"] > 0 and s["width"] % s["heads"] == 0,
        "a projected width that is a positive multiple of {0[heads]} heads",
        "{0[width]}",
    ),
)


# The subject is a Side.
ROPE_RULES = (
    Rule(
        "rope",
        ValueError,
        lambda s: s.rotary_dim <= s.head_dim,
        "at most head_dim={0.head_dim} rotating dims of {0.name}",
        "{0.rotary_dim}",
    ),
    Rule(
        "rope",
        ValueError,
        lambda s: s.rotary_dim % s.pairs_of == 0,
        "a multiple of {0.pairs_of} rotating dims of {0.name} (set rotary_dim)",
        "{0.rotary_dim}",
    ),
    Rule(
        "{0.name}_positions",
        ValueError,
        lambda s: s.positions is not None or s.axes == 1 or s.rotary_dim == 0,
        "positions of shape [T, {0.axes}] or [B, T, {0.axes}], since rope has {0.axes} axes",
        "None",
    ),
    Rule(
        "{0.name}_positions",
        ValueError,
        lambda s: s.positions is None or not isinstance(s.rope, RotaryTable),
        "None, since rope gives {0.name} a RotaryTable",
        "a tensor",
    ),
)


# ---------------------------------------------------------------------------- walking the tables

Kind: TypeAlias = Literal["block", "kv"]

_CHECKED = tuple(name for name in TENSORS if name in Arguments._fields and "positions" not in name)


def check(a: Arguments, kind: Kind = "block", projected: bool = False) -> Problem:
    """The sizes of a call that obeys every rule.

    ``kind`` is "block" for cross_attention and "kv" for project_kv. With ``projected`` the tokens
    of that side are its projections already, and its weights are None.
    """
    if kind == "kv":
        _check_is_no_cache(a.x_kv)
    apply_rules(ARGUMENT_RULES, a)
    sizes = _sizes(a, kind, projected)
    cached = isinstance(a.x_kv, ProjectedKV)
    if cached:
        check_tensor("x_kv.k", a.x_kv.k, sizes)
        check_tensor("x_kv.v", a.x_kv.v, sizes)
    for name in _CHECKED:
        x = getattr(a, name)
        if x is not None and not (cached and name == "x_kv"):
            check_tensor(name, x, sizes)
    q_label, k_label = ("rope[0]", "rope[1]") if isinstance(a.rope, tuple) else ("rope", "rope")
    q_rope, k_rope = sides(a.rope)
    if kind != "kv":
        _check_side(Side("q", q_rope, a.q_positions, sizes.named["D"]), q_label, a.q_norm, sizes)
    if not cached:
        _check_side(Side("k", k_rope, a.k_positions, sizes.named["D"]), k_label, a.k_norm, sizes)
    n = sizes.named
    return Problem(
        *(n["B"], n["Tq"], n["Tk"]),
        *(n["H"], n["Hkv"], n["D"]),
        *(n["Dq"], n["Dkv"], n["Dv"], n["Dout"]),
        dtype=sizes.dtype,
        device=sizes.device,
    )


def check_tokens(a: Arguments, kind: Kind) -> None:
    """The rules of tokens and of what removes them, for callers that project tokens on their own.

    Widths and dtypes are left to what they are projected by, head counts to what is done next: a
    projection that is sharded over devices makes only some of the heads.
    """
    if kind == "kv":
        _check_is_no_cache(a.x_kv)
        first, like, queries = a.x_kv, "x_kv", 0
        batch, keys, _ = _shape("x_kv", a.x_kv)
    else:
        first, like = a.x_query, "x_query"
        batch, queries, _ = _shape("x_query", a.x_query)
        if isinstance(a.x_kv, ProjectedKV):
            return
        keys = _shape("x_kv", a.x_kv)[1]
    named = {"B": batch, "Tq": queries, "Tk": keys}
    for name in ("x_kv", "x_value"):
        x = getattr(a, name)
        if x is not None:
            wanted = [batch, keys, _shape(name, x)[2]]
            if list(x.shape) != wanted:
                raise ValueError(f"{name}: expected shape {wanted}, got {list(x.shape)}")
    for name in ("kv_lengths", "kv_keep_mask", "attn_bias"):
        x = getattr(a, name)
        if x is not None:
            heads = x.shape[-3] if is_dense(x) and x.dim() > 2 else 0
            sizes = Sizes({**named, "H": heads}, first.dtype, first.device, like)
            check_tensor(name, x, sizes)


def check_rope(rope: RopeLike, head_dim: int) -> None:
    """The rules of a rotation that need no tokens."""
    apply_rules((ROPE_KIND,), Arguments(None, None, rope=rope))
    for name, side in zip(("q", "k"), sides(rope), strict=True):
        apply_rules(ROPE_RULES[:2], Side(name, side, None, head_dim))


def _check_side(side: Side, label: str, norm: Norm | None, sizes: Sizes) -> None:
    if isinstance(side.rope, RotaryTable):
        _check_table(side.rope, side.name, label, sizes)
    apply_rules(ROPE_RULES, side)
    if side.positions is not None:
        axial = " (axial)" if side.axes > 1 else ""
        named = {**sizes.named, "axes": side.axes}
        name = f"{side.name}_positions"
        check_tensor(name, side.positions, sizes._replace(named=named), name + axial)
    if norm is not None:
        rule = f"{side.name}_norm over {norm.over}"
        for part, x in (("weight", norm.weight), ("bias", norm.bias)):
            if x is not None:
                check_tensor(f"{side.name}_norm.{part}", x, sizes, rule)


def _check_table(table: RotaryTable, side: str, label: str, sizes: Sizes) -> None:
    rule, width = f"{side} table", "R/2"
    if table.full_width:
        rule, width = f"{side} table (full_width)", "R"
    # cos sets the rotating width, which sin must share; a scalar fails on its shape below.
    last = table.cos.shape[-1] if isinstance(table.cos, Tensor) and table.cos.dim() else 0
    named = {**sizes.named, width: last}
    for part, x in (("cos", table.cos), ("sin", table.sin)):
        check_tensor(f"{label}.{part}", x, sizes._replace(named=named), rule)


def _sizes(a: Arguments, kind: Kind, projected: bool) -> Sizes:
    """Bind each symbol of the shapes to the first tensor that has it."""
    named: dict[str, Any] = {"H": a.num_heads, "Hkv": a.num_kv_heads or a.num_heads}
    if kind == "block":
        first, like, heads = a.x_query, "x_query", "H"
        named["B"], named["Tq"], named["Dq"] = _shape("x_query", a.x_query)
    else:
        first, like, heads = a.x_kv, "x_kv", "Hkv"
        named["Tq"] = named["Dq"] = 0
    if isinstance(a.x_kv, ProjectedKV):
        _, kv_heads, named["Tk"], _ = _shape("x_kv.k", a.x_kv.k)
        named["Hkv"] = a.num_kv_heads or kv_heads
        named["Dkv"] = named["Dv"] = 0
    else:
        batch, named["Tk"], named["Dkv"] = _shape("x_kv", a.x_kv)
        named["Dv"] = named["Dkv"] if a.x_value is None else _shape("x_value", a.x_value)[2]
        named.setdefault("B", batch)
        if not projected:
            _shape("w_k", a.w_k)
            _shape("w_v", a.w_v)
    if projected:
        source, width = like, named["Dq" if kind == "block" else "Dkv"]
    else:
        source = "w_q" if kind == "block" else "w_k"
        width = _shape(source, getattr(a, source))[0]
    apply_rules(HEAD_RULES, {**named, "source": source, "width": width, "heads": named[heads]})
    if first.dtype not in FLOATS:
        raise TypeError(f"{like}: expected {_dtype_names(FLOATS)}, got {first.dtype}")
    named["D"] = width // named[heads]
    named["H*D"], named["Hkv*D"] = named["H"] * named["D"], named["Hkv"] * named["D"]
    named["Dout"] = None if a.w_out is None else _shape("w_out", a.w_out)[0]
    return Sizes(named, first.dtype, first.device, like)


def _shape(name: str, x: Any) -> tuple[int, ...]:
    """The shape of a tensor that has as many axes as its rule says."""
    dims = TENSORS[name].shapes[0]
    _check_is_dense(name, x)
    if x.dim() != len(dims):
        symbols = ", ".join(dim.symbol for dim in dims)
        raise ValueError(f"{name}: expected shape [{symbols}], got {list(x.shape)}")
    shape: tuple[int, ...] = x.shape
    return shape
