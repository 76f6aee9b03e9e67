"""The one-launch path: the whole forward as one operator, for problems too small to fill a GPU.

Saved for the backward is what the split path saves, so split.py's backward serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops, split
from .arguments import Problem
from .config import NORM_NONE, BlockConfig
from .ops import TurningTensors
from .split import Activations, BlockTensors

HEAD_DIMS = (16, 32, 64, 128)
WIDTH_MULTIPLE = 8

# Up to where one launch pays. Beyond, larger tiles, keys split over blocks, and cuBLAS win back
# what the launches cost.
LARGEST_TILES = 264  # of TILE_QUERIES rows of one head: two for each multiprocessor
TILE_QUERIES = 64
LARGEST_KEYS = 512
LARGEST_PROJECTIONS = 2**29  # multiplications, all projections together


def forward(config: BlockConfig, t: BlockTensors) -> tuple[Tensor, Activations]:
    """As :func:`.split.forward`."""
    y, q, k, v, o, lse = ops.block_forward(
        t.x_query,
        t.x_kv,
        t.x_value,
        t.w_q,
        t.w_k,
        t.w_v,
        t.w_out,
        t.b_q,
        t.b_k,
        t.b_v,
        t.b_out,
        TurningTensors(t.q_positions, t.q_cos, t.q_sin),
        TurningTensors(t.k_positions, t.k_cos, t.k_sin),
        split.score_options(config, t),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        q_rotation=config.q_rotation,
        k_rotation=config.k_rotation,
    )
    if t.w_out is None:
        y = o.flatten(2)
    if t.w_k is None:
        assert t.x_value is not None
        k, v = t.x_kv, t.x_value
    return y, Activations(q, k, v, o, lse)


def obstacle(problem: Problem, config: BlockConfig, t: BlockTensors) -> str | None:
    """Why one launch cannot take a call that the kernels can, None if it can."""
    if t.w_q is None:
        return "the queries come projected"
    if config.dropout_p > 0:
        return "it has dropout"
    if config.q_norm.kind != NORM_NONE or config.k_norm.kind != NORM_NONE:
        return "it has a norm"
    if problem.D not in HEAD_DIMS:
        return f"one launch takes head dims of {_listed(HEAD_DIMS)}, not {problem.D}"
    widths = {"Dq": problem.Dq, "Dout": problem.Dout}
    if t.w_k is not None:
        widths |= {"Dkv": problem.Dkv, "Dv": problem.Dv}
    for name, width in widths.items():
        if width is not None and width % WIDTH_MULTIPLE:
            return f"one launch takes multiples of {WIDTH_MULTIPLE} as widths, not {name}={width}"
    return None


def pays(problem: Problem, t: BlockTensors) -> bool:
    """Whether one launch is expected to be the fastest path."""
    if torch.compiler.is_exporting():
        return False  # an exported program must not depend on how its lengths compare to these
    p = problem
    tiles = p.B * p.H * ((p.Tq + TILE_QUERIES - 1) // TILE_QUERIES)
    multiplications = p.B * p.Tq * p.H * p.D * (p.Dq + (p.Dout or 0))
    if t.w_k is not None:
        multiplications += p.B * p.Tk * p.Hkv * p.D * (p.Dkv + p.Dv)
    return bool(
        tiles <= LARGEST_TILES and p.Tk <= LARGEST_KEYS and multiplications <= LARGEST_PROJECTIONS
    )


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
