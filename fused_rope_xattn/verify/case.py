"""One problem as plain data, and fresh random inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fused_rope_xattn import Norm, ProjectedKV, RoPE, RotaryTable

NormKind = Literal["rms", "layer"]
NormExtent = Literal["head", "inner"]

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class Case:
    """A call of cross_attention, described; every field but the sizes has the block's default."""

    name: str
    B: int
    Tq: int
    Tk: int
    H: int
    D: int
    Dq: int
    Dkv: int | None = None  # Dq
    Hkv: int | None = None  # H
    Dv: int | None = None  # values come from x_kv; a number gives x_value that width
    Dout: int | None = None  # Dq; 0 = no output projection
    dtype: str = "fp32"
    biases: str = ""  # any of q k v o
    rope: str = "interleaved"  # a key of ROPES
    positions: str = "default"  # a key of POSITIONS
    q_norm: str = "none"  # a key of NORMS
    k_norm: str = "none"
    lengths: str = "none"  # none | ragged | zero
    mask: str = "none"  # a key of MASKS
    bias: str = "none"  # which of b h q k are not 1 in attn_bias, "-inf" appended for holes
    causal: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    lse: bool = False
    projected: bool = False  # x_kv is a ProjectedKV

    @property
    def kv_heads(self) -> int:
        return self.Hkv or self.H

    @property
    def kv_width(self) -> int:
        return self.Dkv or self.Dq

    @property
    def out_width(self) -> int:
        return self.Dq if self.Dout is None else self.Dout

    @property
    def vanishing(self) -> frozenset[str]:
        """Gradients that are 0 in exact arithmetic, so that a ratio of errors says nothing.

        The softmax does not see a shift of a whole row, which is all that a bias without a key
        axis is.
        """
        axes = self.bias.partition("-")[0]
        shifts_rows = self.bias != "none" and not axes.endswith("k") and not self.lse
        return frozenset({"dattn_bias"} if shifts_rows else ())

    @property
    def storage(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def at(self, dtype: str) -> Case:
        """The same problem in another dtype."""
        return replace(self, dtype=dtype)


@dataclass
class Inputs:
    """Random data of one case: leaves may require grad, the rest never does."""

    case: Case
    seed: int
    leaves: dict[str, Tensor]
    fixed: dict[str, Any]
    grads: dict[str, Tensor]  # of y and, where it is returned, of lse

    def call(self, leaves: dict[str, Tensor] | None = None) -> tuple[list[Any], dict[str, Any]]:
        """(args, kwargs) of cross_attention, with other leaves of the same shapes if given."""
        leaf = self.leaves if leaves is None else leaves
        case, get = self.case, leaf.get
        x_kv: Any = get("x_kv")
        if case.projected:
            x_kv = ProjectedKV(leaf["k"], leaf["v"])
        args = [get("x_query"), x_kv, get("w_q"), get("w_k"), get("w_v"), get("w_out")]
        kwargs: dict[str, Any] = {"num_heads": case.H, **self.fixed}
        for name in ("b_q", "b_k", "b_v", "b_out", "x_value", "attn_bias"):
            if name in leaf:
                kwargs[name] = leaf[name]
        for side in ("q", "k"):
            spec = NORMS[case.q_norm if side == "q" else case.k_norm]
            if spec is not None and not (side == "k" and case.projected):
                weight, bias = get(f"{side}_norm_weight"), get(f"{side}_norm_bias")
                kwargs[f"{side}_norm"] = Norm(spec[0], weight, bias, over=spec[1])
        return args, kwargs

    @property
    def args(self) -> list[Any]:
        return self.call()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.call()[1]


class Source:
    """Random tensors on one device from one seed."""

    def __init__(self, device: str | torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        x = torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype)
        return x * std

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    @property
    def exact(self) -> torch.dtype:
        """The dtype of tables and of float positions."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


# kind, over, has weight, has bias
NORMS: dict[str, tuple[NormKind, NormExtent, bool, bool] | None] = {
    "none": None,
    "rms": ("rms", "head", True, False),
    "rms_bare": ("rms", "head", False, False),
    "rms_inner": ("rms", "inner", True, False),
    "layer": ("layer", "head", True, True),
    "layer_inner": ("layer", "inner", True, True),
}


def _half_dims(case: Case) -> int:
    """An even rotary_dim of about half a head."""
    return max(2, case.D // 4 * 2)


def _table(
    case: Case,
    src: Source,
    side: str,
    lead: str = "",
    rotary_dim: int = 0,
    interleaved: bool = True,
    full_width: bool = False,
) -> RotaryTable:
    """Random angles (``full_width``: the members of a pair differ) with some identity rows."""
    tokens, heads = (case.Tq, case.H) if side == "q" else (case.Tk, case.kv_heads)
    sizes = {"b": case.B, "h": heads, "1": 1}
    rotary_dim = rotary_dim or case.D // 2 * 2
    shape = [sizes[s] for s in lead] + [tokens, rotary_dim if full_width else rotary_dim // 2]
    angle = src.normal(*shape, std=3.0, dtype=src.exact)
    angle[..., tokens - tokens // 4 :, :] = 0.0
    return RotaryTable(angle.cos(), angle.sin(), interleaved=interleaved, full_width=full_width)


def _tables(**options: Any) -> Callable[[Case, Source], Any]:
    def build(case: Case, src: Source) -> Any:
        values: dict[str, Any] = dict(options)
        if values.get("rotary_dim") == "half":
            values["rotary_dim"] = _half_dims(case)
        k_side = None if case.projected else _table(case, src, "k", **values)
        return _table(case, src, "q", **values), k_side

    return build


ROPES: dict[str, Callable[[Case, Source], Any]] = {
    "interleaved": lambda c, s: RoPE(),
    "half": lambda c, s: RoPE(interleaved=False),
    "base": lambda c, s: RoPE(base=100.5),
    "partial": lambda c, s: RoPE(rotary_dim=_half_dims(c)),
    "partial_half": lambda c, s: RoPE(rotary_dim=_half_dims(c), interleaved=False),
    "axial": lambda c, s: RoPE(100.0, axes=2, rotary_dim=c.D // 4 * 4),
    "axial_half": lambda c, s: RoPE(100.0, axes=2, rotary_dim=c.D // 4 * 4, interleaved=False),
    "axial3_partial": lambda c, s: RoPE(axes=3, rotary_dim=c.D // 8 * 6),
    "none": lambda c, s: None,
    "q_only": lambda c, s: (RoPE(), None),
    "k_only": lambda c, s: (None, RoPE(interleaved=False)),
    "two_kinds": lambda c, s: (RoPE(500.0), RoPE(interleaved=False, rotary_dim=_half_dims(c))),
    "table": _tables(),
    "table_half": _tables(interleaved=False),
    "table_batch": _tables(lead="b1"),
    "table_heads": _tables(lead="h", rotary_dim="half"),
    "table_batch_heads": _tables(lead="bh", interleaved=False),
    "table_full": _tables(full_width=True),
    "table_full_half": _tables(lead="1h", full_width=True, interleaved=False, rotary_dim="half"),
    "table_and_rope": lambda c, s: (_table(c, s, "q", "b1"), RoPE(interleaved=False)),
}
AXES = {"axial": 2, "axial_half": 2, "axial3_partial": 3}


def _int_positions(low: int, high: int, batched: bool, dtype: torch.dtype = torch.int64) -> Any:
    def build(case: Case, src: Source, shape: list[int]) -> Tensor:
        lead = [case.B] if batched else []
        return src.integers(low, high, *lead, *shape).to(dtype)

    return build


def _float_positions(spread: float, batched: bool) -> Any:
    def build(case: Case, src: Source, shape: list[int]) -> Tensor:
        lead = [case.B] if batched else []
        return src.normal(*lead, *shape, std=spread, dtype=src.exact)

    return build


POSITIONS: dict[str, Any] = {
    "default": None,
    "int": _int_positions(0, 512, batched=False),
    "int32": _int_positions(-5, 64, batched=True, dtype=torch.int32),
    "batch": _int_positions(0, 300, batched=True),
    "negative": _int_positions(-400, 0, batched=False),
    "huge": _int_positions(10**6, 2 * 10**6, batched=False),
    "float": _float_positions(30.0, batched=False),
    "float_batch": _float_positions(200.0, batched=True),
}

MASKS: dict[str, str | None] = {
    "none": None,
    "keys": "bk",
    "keys4": "b11k",
    "heads": "bh1k",
    "rows": "b1qk",
    "full": "bhqk",
}


def _mask(case: Case, src: Source) -> Tensor:
    """Keeps two keys of three; a mask with a query axis also empties one row."""
    axes = MASKS[case.mask]
    assert axes is not None
    sizes = {"b": case.B, "h": case.H, "q": case.Tq, "k": case.Tk, "1": 1}
    keep = src.uniform(*(sizes[a] for a in axes)) < 0.67
    if "q" in axes and keep.numel():
        keep[0, :, 0] = False
    return keep


def _attn_bias(case: Case, src: Source) -> Tensor:
    axes, _, holes = case.bias.partition("-")
    sizes = {"b": case.B, "h": case.H, "q": case.Tq, "k": case.Tk, "1": 1}
    bias = src.normal(*(sizes[a] for a in axes))
    if holes:
        bias = bias.masked_fill(src.uniform(*bias.shape) < 0.25, -torch.inf)
    return bias


def _lengths(case: Case, src: Source) -> Tensor:
    lengths = src.integers(min(4, case.Tk), case.Tk + 1, case.B)
    if case.lengths == "zero" and case.B:
        lengths[-1] = 0
    return lengths.to(torch.int32)


def _leaves(case: Case, src: Source) -> dict[str, Tensor]:
    """Everything that can require grad; weights are scaled so that activations stay near 1."""
    inner, kv_inner = case.H * case.D, case.kv_heads * case.D
    value_width = case.kv_width if case.Dv is None else case.Dv

    def linear(rows: int, columns: int) -> Tensor:
        return src.normal(rows, columns, std=columns**-0.5)

    leaves = {"x_query": src.normal(case.B, case.Tq, case.Dq), "w_q": linear(inner, case.Dq)}
    if case.projected:
        leaves["k"] = src.normal(case.B, case.kv_heads, case.Tk, case.D)
        leaves["v"] = src.normal(case.B, case.kv_heads, case.Tk, case.D)
    else:
        leaves["x_kv"] = src.normal(case.B, case.Tk, case.kv_width)
        leaves["w_k"] = linear(kv_inner, case.kv_width)
        leaves["w_v"] = linear(kv_inner, value_width)
        if case.Dv is not None:
            leaves["x_value"] = src.normal(case.B, case.Tk, case.Dv)
    if case.out_width:
        leaves["w_out"] = linear(case.out_width, inner)
    widths = {"q": inner, "k": kv_inner, "v": kv_inner, "o": case.out_width}
    for letter in case.biases:
        if not (letter in "kv" and case.projected) and widths[letter]:
            name = "b_out" if letter == "o" else f"b_{letter}"
            leaves[name] = src.normal(widths[letter])
    for side, spec in (("q", NORMS[case.q_norm]), ("k", NORMS[case.k_norm])):
        if spec is None or (side == "k" and case.projected):
            continue
        width = case.D if spec[1] == "head" else (inner if side == "q" else kv_inner)
        if spec[2]:
            leaves[f"{side}_norm_weight"] = 1.0 + src.normal(width, std=0.2)
        if spec[3]:
            leaves[f"{side}_norm_bias"] = src.normal(width, std=0.2)
    if case.bias != "none":
        leaves["attn_bias"] = _attn_bias(case, src)
    return leaves


def _fixed(case: Case, src: Source) -> dict[str, Any]:
    fixed: dict[str, Any] = {"rope": ROPES[case.rope](case, src)}
    build, axes = POSITIONS[case.positions], AXES.get(case.rope, 1)
    if build is not None:
        q_side, k_side = rotated_sides(case)
        if q_side:
            fixed["q_positions"] = build(case, src, [case.Tq] + [axes] * (axes > 1))
        if k_side:
            fixed["k_positions"] = build(case, src, [case.Tk] + [axes] * (axes > 1))
    if case.Hkv is not None:
        fixed["num_kv_heads"] = case.Hkv
    if case.lengths != "none":
        fixed["kv_lengths"] = _lengths(case, src)
    if case.mask != "none":
        fixed["kv_keep_mask"] = _mask(case, src)
    fixed |= {"is_causal": case.causal, "dropout_p": case.dropout_p, "return_lse": case.lse}
    if case.scale is not None:
        fixed["scale"] = case.scale
    return fixed


def rotated_sides(case: Case) -> tuple[bool, bool]:
    """Which of q and k are rotated by positions."""
    tabled = case.rope.startswith("table")
    q_side = case.rope not in ("none", "k_only") and not tabled
    k_side = case.rope not in ("none", "q_only") and (not tabled or case.rope == "table_and_rope")
    return q_side, k_side and not case.projected


def draw_inputs(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> Inputs:
    """Fresh random inputs; the leaves do not require grad yet."""
    src = Source(device, case.storage, seed)
    leaves, fixed = _leaves(case, src), _fixed(case, src)
    width = case.out_width or case.H * case.D
    grads = {"y": src.normal(case.B, case.Tq, width)}
    if case.lse:
        grads["lse"] = src.normal(case.B, case.H, case.Tq, dtype=src.exact)
    return Inputs(case, seed, leaves, fixed, grads)
