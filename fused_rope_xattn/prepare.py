"""From arguments to what every path takes: one config and one list of tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import composite
from .arguments import Arguments, Problem
from .config import BlockConfig, NormSpec
from .inputs import INTEGERS, Kind, check
from .kv import ProjectedKV
from .norm import Norm
from .rope import RopeSide, RotaryTable, sides, spec_of, turning_tensors
from .rules import check_is_local
from .signature import signature
from .split import BlockTensors

# What autocast casts: the operands of matrix products, which must share one dtype.
_MODEL_TENSORS = (
    *("x_query", "x_kv", "x_value"),
    *("w_q", "w_k", "w_v", "w_out"),
    *("b_q", "b_k", "b_v", "b_out"),
)

_MASKED = "beside lengths or masks give x.to_local()"


class Prepared(NamedTuple):
    """A call ready for any path."""

    problem: Problem
    config: BlockConfig
    tensors: BlockTensors


class Checked(NamedTuple):
    """What the checks of a call found, and what else follows from its signature alone."""

    problem: Problem
    config: BlockConfig  # its switches off: those below say which are on
    configs: dict[tuple[bool, bool], tuple[BlockConfig, BlockConfig]]  # by tf32 and deterministic
    choices: dict[tuple[str, bool], Any]  # by path and tf32: what planner.py chose

    def switched(self) -> tuple[BlockConfig, BlockConfig]:
        """The config with what torch's global switches say now, and that of the fused path."""
        problem = self.problem
        tf32 = problem.dtype is torch.float32 and allows_tf32(problem.device.type)
        switches = (tf32, torch.are_deterministic_algorithms_enabled())
        configs = self.configs.get(switches)
        if configs is None:
            tf32, deterministic = switches
            config = self.config._replace(tf32=tf32, deterministic=deterministic)
            configs = self.configs[switches] = (config, config._replace(fused=True))
        return configs


def prepare(a: Arguments, kind: Kind = "block", projected: bool = False) -> Prepared:
    """Check the call, fill in defaults, and bring masks, tables and positions into shape.

    ``kind`` and ``projected`` are those of :func:`.inputs.check`.
    """
    checked = check_once(a, kind, projected)
    config, _ = checked.switched()
    return Prepared(checked.problem, config, block_tensors(a, checked.problem, kind))


def block_tensors(a: Arguments, problem: Problem, kind: Kind = "block") -> BlockTensors:
    """The tensors of a checked call, in the shapes and dtypes that every path takes."""
    x_query, x_kv, w_q, w_k, w_v, w_out, b_q, b_k, b_v, b_out, x_value = a[:11]
    q_rope, k_rope = sides(a.rope)
    if kind == "kv":
        q_rope = None
    if isinstance(x_kv, ProjectedKV):
        k, v = x_kv
        x_kv, x_value, k_rope = k.transpose(1, 2), v.transpose(1, 2), None
    keep_mask, key_keep, attn_bias = _masks(a.kv_keep_mask, a.attn_bias, problem)
    return BlockTensors(
        x_query,
        x_kv,
        x_value,
        w_q,
        w_k,
        w_v,
        w_out,
        b_q,
        b_k,
        b_v,
        b_out,
        *_norm_tensors(a.q_norm),
        *_norm_tensors(a.k_norm),
        attn_bias,
        *_turning(q_rope, a.q_positions, problem.dtype),
        *_turning(k_rope, a.k_positions, problem.dtype),
        _lengths(a.kv_lengths, problem.Tk),
        keep_mask,
        key_keep,
        None,  # seed: drawn when the call runs
    )


_checked: dict[Any, Checked] = {}
_MOST_CHECKED = 4096


def check_once(a: Arguments, kind: Kind, projected: bool) -> Checked:
    """The sizes and options of a call, from an earlier one where nothing that matters differs."""
    if torch.compiler.is_compiling():
        return _check(a, kind, projected)
    try:
        key = (kind, projected, signature(a))
        found = _checked.get(key)
    except (AttributeError, TypeError, RuntimeError):  # something has no place in a key
        return _check(a, kind, projected)
    if found is None:
        found = _check(a, kind, projected)
        if len(_checked) >= _MOST_CHECKED:  # lengths that never repeat must not pile up
            _checked.clear()
        _checked[key] = found
    return found


def _check(a: Arguments, kind: Kind, projected: bool) -> Checked:
    problem = check(a, kind, projected)
    q_rope, k_rope = sides(a.rope)
    cached = isinstance(a.x_kv, ProjectedKV)
    config = BlockConfig(
        problem.H,
        problem.Hkv,
        spec_of(None if kind == "kv" else q_rope, problem.D),
        spec_of(None if cached else k_rope, problem.D),
        NormSpec() if a.q_norm is None else a.q_norm.spec,
        NormSpec() if a.k_norm is None else a.k_norm.spec,
        problem.D**-0.5 if a.scale is None else float(a.scale),
        a.is_causal,
        float(a.dropout_p),
    )
    return Checked(problem, config, {}, {})


def autocast_dtype(x: Any) -> torch.dtype | None:
    """What autocast wants products of ``x`` in; None where it is off."""
    if not isinstance(x, Tensor):
        return None
    device_type = "cuda" if x.is_cuda else x.device.type  # the text of a device takes its time
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast(a: Arguments, dtype: torch.dtype) -> Arguments:
    """``a`` with the operands of its matrix products in ``dtype``."""
    operands = {name: getattr(a, name) for name in _MODEL_TENSORS}
    flat = [t for x in operands.values() for t in (x if isinstance(x, ProjectedKV) else (x,))]
    if all(t.dtype == torch.float64 for t in flat if isinstance(t, Tensor)):
        return a  # autocast leaves fp64 alone
    return a._replace(**{name: _cast(x, dtype) for name, x in operands.items()})


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, ProjectedKV):
        return ProjectedKV(_cast(x.k, dtype), _cast(x.v, dtype))
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@torch.compiler.assume_constant_result  # compiled code has a guard on it already
def allows_tf32(device_type: str) -> bool:
    """Whether torch is told to multiply fp32 matrices in TF32 on that device."""
    return device_type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"


def without_removed_tokens(a: Arguments) -> Arguments:
    """``a`` with 0 in the tokens of ``x_kv`` and ``x_value`` that no query attends to.

    For callers that project them on their own and have checked them: NaN in such a token must not
    reach a gradient.
    """
    if a.kv_lengths is None and a.kv_keep_mask is None and a.attn_bias is None:
        return a
    keep = _key_keep(a.kv_keep_mask, a.attn_bias, *a.x_kv.shape[:2])
    if a.kv_lengths is not None:
        within = torch.arange(a.x_kv.shape[1], device=a.x_kv.device) < a.kv_lengths[:, None]
        keep = within if keep is None else keep & within
    if keep is None:
        return a
    check_is_local("x_kv", a.x_kv, _MASKED)
    check_is_local("x_value", a.x_value, _MASKED)
    x_value = None if a.x_value is None else composite.keep_rows(a.x_value, keep)
    return a._replace(x_kv=composite.keep_rows(a.x_kv, keep), x_value=x_value)


def _key_keep(
    kv_keep_mask: Tensor | None, attn_bias: Tensor | None, batch: int, keys: int
) -> Tensor | None:
    """Bool ``[B, Tk]``, False for keys that mask or bias remove for every query and head."""
    keep = None
    if kv_keep_mask is not None:
        keep = kv_keep_mask if kv_keep_mask.dim() == 2 else kv_keep_mask.any(dim=2).any(dim=1)
    if attn_bias is not None and attn_bias.dim():
        bias = _unexpanded(attn_bias.detach())
        # One with axes of queries or heads would have to be read as a whole to know.
        if all(n == 1 for n in bias.shape[-3:-1]):
            finite = bias != -math.inf
            finite = finite[:, 0, 0] if finite.dim() == 4 else finite.reshape(1, finite.shape[-1])
            keep = finite.expand(batch, keys) if keep is None else keep & finite
    return None if keep is None else keep.contiguous()


def _unexpanded(x: Tensor) -> Tensor:  # [.., Tk]
    """``x`` with 1 for the axes of heads and queries that ``expand`` made: they say nothing."""
    for axis in range(max(0, x.dim() - 3), x.dim() - 1):
        if x.shape[axis] > 1 and x.stride(axis) == 0:
            x = x.narrow(axis, 0, 1)
    return x


def _masks(
    mask: Tensor | None, bias: Tensor | None, problem: Problem
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``keep_mask`` [B, 1|H, 1|Tq, Tk], ``key_keep`` [B, Tk], ``attn_bias`` with four axes."""
    if mask is None and bias is None:
        return None, None, None
    if mask is not None and mask.dim() == 4:
        mask = _unexpanded(mask)
        if mask.shape[1] == 1 and mask.shape[2] == 1:
            mask = mask[:, 0, 0]
    key_keep = _key_keep(mask, bias, problem.B, problem.Tk)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
        if bias.dtype == torch.float64 and problem.dtype != torch.float64:
            bias = bias.float()
    return (None if mask is None or mask.dim() == 2 else mask), key_keep, bias


def _lengths(kv_lengths: Tensor | None, keys: int) -> Tensor | None:
    """Key counts as int32 within 0..Tk: values cannot be checked without a synchronisation."""
    if kv_lengths is None:
        return None
    if kv_lengths.dtype not in (torch.int32, torch.int64):
        kv_lengths = kv_lengths.to(torch.int64)
    return kv_lengths.clamp(0, keys).to(torch.int32)


def _norm_tensors(norm: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    if norm is None:
        return None, None
    weight, bias = norm.weight, norm.bias
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        weight, bias = weight.float(), bias.float()  # kernels read both in one dtype
    return weight, bias


def _turning(
    rope: RopeSide, positions: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``positions, cos, sin`` in the dtypes and layouts that the operators read."""
    if positions is None and not isinstance(rope, RotaryTable):
        return None, None, None
    positions, cos, sin = turning_tensors(rope, positions)
    if positions is not None:
        if positions.dtype in (torch.float16, torch.bfloat16):
            positions = positions.to(torch.float32)
        elif positions.dtype in INTEGERS[2:]:
            positions = positions.to(torch.int64)
        positions = positions.contiguous()
    if cos is not None and sin is not None:
        cos, sin = _table(cos, dtype), _table(sin, dtype)
    return positions, cos, sin


def _table(table: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float64:
        table = table.to(torch.float32)
    return table if table.stride(-1) == 1 else table.contiguous()
