"""Rotary position embedding: the description, the tables, and the one definition of the rotation.

A head's first R dims are R/2 pairs. Pair ``p = a * (Ra / 2) + j`` belongs to axis block ``a`` of
width ``Ra = R / axes`` and turns by ``positions[..., a] * base ** (-2j / Ra)``. Its two members are
dims ``(2p, 2p + 1)`` (interleaved) or ``(a * Ra + j, a * Ra + j + Ra / 2)`` (half).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .config import RotationSpec, as_text
from .rules import is_bool, is_count, is_number, show


@dataclass(frozen=True)
class RoPE:
    """Immutable description of a rotation by positions; holds no tensor.

    Args:
        base: frequency base; pair ``j`` turns by ``base ** (-2j / R)`` a position.
        rotary_dim: how many leading dims of a head rotate (``None``: all of them).
        interleaved: pairs ``(2j, 2j + 1)``; otherwise ``(j, j + R / 2)``.
        axes: number of equal blocks for axial RoPE, in the order of the positions' last axis.
    """

    base: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = True
    axes: int = 1
    base_text: str = field(init=False, repr=False, compare=False)  # see config.py

    def __post_init__(self) -> None:
        if not is_number(self.base):
            raise TypeError(f"RoPE: base must be a number, got {show(self.base)}")
        if not is_count(self.axes):
            raise TypeError(f"RoPE: axes must be an int, got {show(self.axes)}")
        if not (self.rotary_dim is None or is_count(self.rotary_dim)):
            raise TypeError(f"RoPE: rotary_dim must be an int or None, got {show(self.rotary_dim)}")
        if not is_bool(self.interleaved):
            raise TypeError(f"RoPE: interleaved must be a bool, got {show(self.interleaved)}")
        if not 0 < self.base < math.inf:
            raise ValueError(f"RoPE: base must be a positive finite number, got {self.base}")
        object.__setattr__(self, "base_text", as_text(self.base))
        if self.axes < 1:
            raise ValueError(f"RoPE: axes must be at least 1, got {self.axes}")
        if self.rotary_dim is not None and (
            self.rotary_dim < 0 or self.rotary_dim % (2 * self.axes)
        ):
            raise ValueError(
                f"RoPE: rotary_dim must be a non-negative multiple of 2 * axes = {2 * self.axes}, "
                f"got {self.rotary_dim}"
            )


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Explicit cosines and sines, which win over positions.

    Args:
        cos: ``[B|1, H|1, T, R/2]``, or ``[..., R]`` with ``full_width``; leading axes may be
            missing. Any float dtype; used in fp32 (fp64 in an fp64 call).
        sin: like ``cos``.
        interleaved: pairs ``(2j, 2j + 1)``; otherwise ``(j, j + R / 2)``.
        full_width: one value a dim: ``out = cos * x + sin * (J x)`` with
            ``(J x)[first] = -x[second]`` and ``(J x)[second] = x[first]``.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = True
    full_width: bool = False

    def __post_init__(self) -> None:
        for name in ("interleaved", "full_width"):
            value = getattr(self, name)
            if not is_bool(value):
                raise TypeError(f"RotaryTable: {name} must be a bool, got {show(value)}")


RopeSide: TypeAlias = RoPE | RotaryTable | None
RopeLike: TypeAlias = RopeSide | tuple[RopeSide, RopeSide]


class Rotation(NamedTuple):
    """One side's rotation with its tensors in the shapes that the operators take."""

    spec: RotationSpec = RotationSpec()
    positions: Tensor | None = None  # [B|1, T, axes]; None with no tables: 0..T-1
    cos: Tensor | None = None  # [B|1, H|1, T, R/2], or R when full_width
    sin: Tensor | None = None


def sides(rope: RopeLike) -> tuple[RopeSide, RopeSide]:
    """Split ``rope`` into what turns the queries and what turns the keys."""
    if isinstance(rope, tuple):
        return rope
    return rope, rope


def resolve(rope: RopeSide, positions: Tensor | None, head_dim: int) -> Rotation:
    """Bring a checked description of one side into the operators' shapes; copies no table."""
    return Rotation(spec_of(rope, head_dim), *turning_tensors(rope, positions))


def spec_of(rope: RopeSide, head_dim: int) -> RotationSpec:
    """The part of :func:`resolve` that is no tensor."""
    if rope is None:
        return RotationSpec()
    if isinstance(rope, RotaryTable):
        width = rope.cos.shape[-1]
        rotary_dim = width if rope.full_width else 2 * width
        return RotationSpec(rotary_dim, rope.interleaved, 1, rope.full_width)
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    return RotationSpec(rotary_dim, rope.interleaved, rope.axes, False, float(rope.base_text))


def turning_tensors(
    rope: RopeSide, positions: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``positions`` [B|1, T, axes], ``cos`` and ``sin`` [B|1, H|1, T, R/2 or R]."""
    if isinstance(rope, RotaryTable):
        if rope.cos.shape[-1] == 0:
            return None, None, None
        return None, _as_4d(rope.cos), _as_4d(rope.sin)
    if positions is None or rope is None or rope.rotary_dim == 0:
        return None, None, None
    return _as_batch_token_axis(positions, rope.axes), None, None


def cos_sin(
    spec: RotationSpec,
    positions: Tensor | None,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[B|1, 1, T, R/2]`` in ``dtype`` of angles computed in fp64."""
    if positions is None:
        positions = torch.arange(tokens, device=device)[None, :, None]
    width = spec.rotary_dim // spec.axes
    pair = torch.arange(width // 2, device=device, dtype=torch.float64)
    inv_freq = torch.pow(spec.base, pair * (-2.0 / width))
    angle = (positions.to(torch.float64)[..., None] * inv_freq).flatten(-2)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, spec: RotationSpec) -> Tensor:
    """Rotate the first R dims of ``x`` ``[B, H, T, D]``; differentiable in all three tensors."""
    turning, passing = x[..., : spec.rotary_dim], x[..., spec.rotary_dim :]
    first, second = _split_pairs(turning, spec)
    if spec.full_width:
        (cos_1, cos_2), (sin_1, sin_2) = _split_pairs(cos, spec), _split_pairs(sin, spec)
    else:
        cos_1, cos_2, sin_1, sin_2 = cos, cos, sin, sin
    turned = _join_pairs(first * cos_1 - second * sin_1, second * cos_2 + first * sin_2, spec)
    return turned if passing.shape[-1] == 0 else torch.cat([turned, passing], dim=-1)


def _split_pairs(x: Tensor, spec: RotationSpec) -> tuple[Tensor, Tensor]:
    """``[..., R]`` to the first and the second members of its pairs, ``[..., R/2]`` each."""
    if spec.interleaved:
        return x[..., 0::2], x[..., 1::2]
    blocks = x.unflatten(-1, (spec.axes, 2, spec.rotary_dim // (2 * spec.axes)))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def _join_pairs(first: Tensor, second: Tensor, spec: RotationSpec) -> Tensor:
    if spec.interleaved:
        return torch.stack([first, second], dim=-1).flatten(-2)
    block = (spec.axes, spec.rotary_dim // (2 * spec.axes))
    halves = [first.unflatten(-1, block), second.unflatten(-1, block)]
    return torch.stack(halves, dim=-2).flatten(-3)


def _as_4d(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x


def _as_batch_token_axis(positions: Tensor, axes: int) -> Tensor:
    """``[T]``, ``[B, T]``, ``[T, A]`` or ``[B, T, A]`` to ``[B|1, T, A]``."""
    if axes == 1 and positions.dim() < 3:
        positions = positions[..., None]
    return positions if positions.dim() == 3 else positions[None]
