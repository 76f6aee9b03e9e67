"""Grouped projections, of queries, keys and values or of the output: which of them the kernel
takes, and the call.

On Hopper a projection that is rotated needs no product in fp32 between two kernels: bias and
rotation happen on the accumulators. What the kernel does not take goes the other way, one by one:
see :func:`.split.project_forward`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import ops
from .config import NORM_NONE
from .ops import HeadsProjection, ScoreOptions, TurningTensors

if TYPE_CHECKING:
    from .split import Projection

CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)
WIDTH_MULTIPLE = 8  # of depth and columns
HALF_WIDTH_MULTIPLE = 8  # of what lies between the members of a pair of halves
LARGEST_HEAD_DIM = 256  # that rotate
MOST_AXES = 3
# Of an output projection, in TF32: torch's product splits the depth where rows are few, and gains
# more than it loses by waiting for the end of the attention where multiplications are many.
FEWEST_OUTPUT_ROWS = 512
LARGEST_OUTPUT = 2**32

# Where the attention of a Hopper takes its own instructions in TF32, as kernels/attention_sm90.cpp
# decides.
LARGEST_TF32_HEAD_DIM = 128
FEWEST_TF32_QUERIES = 64
LEAST_TF32_FLOPS = 200_000_000


def obstacle(p: Projection) -> str | None:
    """Why the grouped kernel cannot take a projection on a Hopper, None if it can."""
    if p.weight is None:
        return "it is projected already"
    if p.norm.kind != NORM_NONE:
        return "it has a norm"
    is_tf32 = p.tf32 and p.x.dtype == torch.float32
    if not (is_tf32 or p.x.dtype in DTYPES) or p.weight.dtype != p.x.dtype:
        return "it is not of one half type, nor of fp32 where TF32 is allowed"
    if p.bias is not None and p.bias.dtype != p.x.dtype:
        return "its bias has another type"
    columns, depth = p.weight.shape
    head_dim = columns // p.num_heads
    if 0 in (depth, head_dim) or depth % WIDTH_MULTIPLE or head_dim % WIDTH_MULTIPLE:
        return f"a width is 0 or no multiple of {WIDTH_MULTIPLE}"
    return _rotation_obstacle(p, head_dim)


def _rotation_obstacle(p: Projection, head_dim: int) -> str | None:
    rotary_dim, interleaved, axes, _, base = p.rotation
    if rotary_dim == 0:
        return None
    if head_dim > LARGEST_HEAD_DIM:
        return f"it rotates heads of more than {LARGEST_HEAD_DIM} dims"
    if not interleaved and rotary_dim // (2 * axes) % HALF_WIDTH_MULTIPLE:
        return f"its halves are no multiples of {HALF_WIDTH_MULTIPLE} dims"
    if p.cos is None and axes > MOST_AXES:
        return f"it has more than {MOST_AXES} axes"
    if p.positions is not None and p.positions.is_floating_point() and base < 1:
        return "it has fractional positions and a base below 1"
    return None


def is_taken(p: Projection) -> bool:
    """Whether the grouped kernel can compute ``p``."""
    return p.x.is_cuda and is_hopper(p.x.device.index) and obstacle(p) is None


def select(projections: tuple[Projection, ...], taken: tuple[bool, ...]) -> tuple[bool, ...]:
    """Of the projections that the kernel can take, those that it should: with nothing to rotate
    in any of them, torch's own products have nothing to wait for."""
    if any(t and not p.is_plain for p, t in zip(projections, taken, strict=True)):
        return taken
    return (False,) * len(projections)


def output_obstacle(p: Projection) -> str | None:
    """Why this kernel should not make the output, behind the attention on a Hopper."""
    if torch.compiler.is_exporting():
        return "an exported program must not depend on how its lengths compare to limits"
    if p.x.dtype in DTYPES:
        return "torch's product in half types is faster"
    rows = p.x.shape[:-1].numel()
    if p.weight is not None and rows * p.weight.numel() > LARGEST_OUTPUT:
        return "it fills the GPU by itself"
    if rows < FEWEST_OUTPUT_ROWS:
        return "its rows are few"
    return obstacle(p)


def takes_output(p: Projection) -> bool:
    """Whether this kernel makes the output, of which ``p`` is the projection."""
    return p.x.is_cuda and is_hopper(p.x.device.index) and output_obstacle(p) is None


def tf32_pays(batch: int, heads: int, queries: int, keys: int, head_dim: int) -> bool:
    """Whether a Hopper's attention reads values transposed; else the portable kernel multiplies."""
    flops = 4 * batch * heads * queries * keys * head_dim
    is_large = queries >= FEWEST_TF32_QUERIES and flops >= LEAST_TF32_FLOPS
    return bool(is_large and head_dim <= LARGEST_TF32_HEAD_DIM)


def project(
    q: Projection | None,
    k: Projection | None,
    v: Projection | None = None,
    *,
    transposed_for: ScoreOptions | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Heads [B, T, H, D] of each projection that is given, in one launch.

    ``transposed_for``: the scores of an attention that reads values transposed. These are the
    second result, if ``v`` is given.
    """
    members = _member(q), _member(k), _member(v)
    if v is None or transposed_for is None:
        *heads, v_transposed = ops.project_group(*members)
    else:
        *heads, v_transposed = ops.project_group(
            *members,
            transposes_v=True,
            key_keep=transposed_for.key_keep,
            kv_lengths=transposed_for.kv_lengths,
        )
    given = [y for y, p in zip(heads, (q, k, v), strict=True) if p is not None]
    return given, None if v is None or transposed_for is None else v_transposed


def _member(p: Projection | None) -> HeadsProjection | None:
    if p is None:
        return None
    assert p.weight is not None
    turning = TurningTensors(p.positions, p.cos, p.sin)
    return HeadsProjection(p.x, p.weight, p.bias, turning, p.num_heads, p.rotation)


def is_hopper(index: int | None) -> bool:
    found: bool = _has_hopper_kernels(index)
    return found


@torch.compiler.assume_constant_result
def _has_hopper_kernels(index: int | None) -> bool:
    return _capability(index) == CAPABILITY


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
