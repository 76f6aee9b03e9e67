"""Random problems over the whole space of options, each a function of two numbers.

Sizes from 0 to a few hundred, heads, widths, dtypes, rotations, positions of any size and sign,
masks, memory layouts of inputs and of incoming gradients, NaN in removed tokens, and which inputs
require grad. Problem ``index`` of a seed is the same on every machine of the same kind, so that two
numbers are all it takes to have it again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..fused import HEAD_DIMS
from .case import Case, Inputs, draw_inputs
from .cases import OPTIONS, normalised
from .reference import kept_keys

LAYOUTS = ("solid", "transposed", "sliced", "misaligned")
LARGEST_TOKENS = {"cpu": 40, "cuda": 300}
DTYPES = {
    "cpu": ("fp64", "fp32", "fp32", "bf16", "fp16"),
    "cuda": ("fp32",) * 4 + ("bf16",) * 5 + ("fp16",) * 4 + ("tf32",) * 2 + ("fp64",),
}
HEADS = ((1, None), (2, None), (3, 1), (4, 2), (6, 3), (8, None))
# Those of the kernels, and in the second row what they must leave to others.
COVERED_DIMS = (8, 16, 16, 24, 32, 32, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 136, 256)
OTHER_DIMS = (10, 12, 15, 30, 44, 264)
# The reference writes its dropout mask out one Philox call for each weight.
MOST_DROPPED = 40_000


@dataclass(frozen=True)
class FuzzProblem:
    """One random problem."""

    seed: int  # of the run
    index: int
    case: Case
    frozen_share: float  # of the leaves, which do not require grad
    strided_share: float  # of the leaves, which are not solid
    grad_layout: str  # of dy: one of LAYOUTS, or "expanded"
    mirrored: bool  # positions with their signs turned
    poisoned: bool  # NaN where no query looks

    def is_frozen(self, leaf: str) -> bool:
        return self._chance(f"frozen {leaf}").random() < self.frozen_share

    def layout(self, leaf: str) -> str:
        chance = self._chance(f"layout {leaf}")
        return chance.choice(LAYOUTS) if chance.random() < self.strided_share else "solid"

    def _chance(self, what: str) -> random.Random:
        return random.Random(f"{self.seed}/{self.index}/{what}")

    def draw(self, device: torch.device, repeat: int = 0) -> Inputs:
        """Fresh data, another for each ``repeat``."""
        data_seed = (self.seed * 1_000_003 + self.index) * 64 + repeat
        inputs = draw_inputs(self.case, device, data_seed % 2**63)
        if self.mirrored:
            for name in ("q_positions", "k_positions"):
                if name in inputs.fixed:
                    inputs.fixed[name] = -inputs.fixed[name]
        dy = inputs.grads["y"]
        if self.grad_layout == "expanded" and dy.numel():
            inputs.grads["y"] = dy[:1, :1].expand_as(dy)
        return inputs


def draw_problem(seed: int, index: int, device_type: str, path: str = "auto") -> FuzzProblem:
    """Problem ``index`` of ``seed``; with ``path`` "fused" one which that path can take."""
    rng = random.Random(f"{seed}/{index}/{device_type}/{path}")
    case = _draw_case(rng, device_type, for_fused=path == "fused")
    has_mask = (case.lengths, case.mask) != ("none", "none")
    return FuzzProblem(
        seed,
        index,
        case,
        frozen_share=rng.choice((0.0, 0.0, 0.3, 0.7, 1.0)),
        strided_share=rng.choice((0.0, 0.0, 0.5)),
        grad_layout=rng.choice((*LAYOUTS, "solid", "solid", "expanded")),
        mirrored=case.positions != "default" and rng.random() < 0.5,
        poisoned=has_mask and case.Tq > 0 and rng.random() < 0.5,
    )


def _draw_case(rng: random.Random, device_type: str, for_fused: bool) -> Case:
    choice: dict[str, Any] = {
        name: rng.choice(values) for name, values in OPTIONS.items() if name != "heads"
    }
    largest = LARGEST_TOKENS[device_type]
    heads = rng.choice(HEADS)
    dims: Sequence[int] = HEAD_DIMS if for_fused else COVERED_DIMS
    if not for_fused and rng.random() < 0.06:
        dims = OTHER_DIMS
    sizes = (_batch(rng), _tokens(rng, largest), _tokens(rng, largest))
    mostly_none = ("none",) * 9
    choice |= {
        "sizes": sizes,
        "heads": heads,
        "D": rng.choice(dims),
        "widths": tuple(_width(rng, for_fused) for _ in range(3)),
        "Dout": rng.choice((None, None, 0, _width(rng, for_fused))),
        "scale": rng.choice((None, None, 0.37, 0.02, -0.2, 0.0)),
        "dropout_p": 0.0,
    }
    if rng.random() < 0.5:
        choice["widths"] = (choice["widths"][0], rng.choice((None, choice["widths"][1])), None)
    for side in ("q_norm", "k_norm"):
        kinds = mostly_none + OPTIONS[side]
        choice[side] = "none" if for_fused else rng.choice(kinds)
    if not for_fused and rng.random() < 0.3:
        weights = sizes[0] * heads[0] * sizes[1] * sizes[2]
        if weights <= MOST_DROPPED and sizes[0] * heads[0] <= 8:
            choice["dropout_p"] = rng.choice((0.1, 0.3, 0.5, 0.9, 1.0))
    case = normalised(choice, "random")
    return case.at(rng.choice([d for d in DTYPES[device_type] if d != "fp64" or not for_fused]))


def _batch(rng: random.Random) -> int:
    return 0 if rng.random() < 0.02 else rng.choice((1, 1, 2, 2, 3, 4, 7))


def _tokens(rng: random.Random, largest: int) -> int:
    """None seldom, few often, and the rest up to ``largest``."""
    kind = rng.random()
    if kind < 0.03:
        return 0
    if kind < 0.25:
        return rng.randint(1, 16)
    return rng.randint(1, largest if kind < 0.7 else max(1, largest // 4))


def _width(rng: random.Random, for_fused: bool) -> int:
    if for_fused or rng.random() < 0.7:
        return 8 * rng.randint(1, 24)
    return rng.randint(1, 150)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in memory of their own, behind other strides."""
    if layout == "transposed":
        turned = tuple(reversed(range(x.dim())))
        return x.permute(turned).clone(memory_format=torch.contiguous_format).permute(turned)
    if layout == "sliced" and x.dim():
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
        view = wide[..., 1::2]
        return view.copy_(x)
    if layout == "misaligned":  # off any 16-byte boundary
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


def most_visible(inputs: Inputs) -> Tensor:
    """The most keys that any query sees, as a tensor without axes."""
    kept = _kept(inputs, inputs.case.causal)
    if "attn_bias" in inputs.leaves:
        kept = kept & (inputs.leaves["attn_bias"] != -torch.inf)
    counts = kept.sum(dim=-1).flatten()
    return counts.amax() if counts.numel() else counts.new_zeros(())


def poison(inputs: Inputs) -> None:
    """NaN, in place, into the tokens that lengths and mask keep from every query."""
    alive = _kept(inputs, is_causal=False).any(dim=2).any(dim=1)
    for name, shape in (("x_kv", 0), ("x_value", 0), ("k", 1), ("v", 1)):
        if name in inputs.leaves:
            removed = ~alive[:, None, :, None] if shape else ~alive[..., None]
            inputs.leaves[name].masked_fill_(removed, torch.nan)


def _kept(inputs: Inputs, is_causal: bool) -> Tensor:  # bool [B, 1|H, 1|Tq, Tk]
    case, fixed = inputs.case, inputs.fixed
    device = inputs.grads["y"].device
    lengths, mask = fixed.get("kv_lengths"), fixed.get("kv_keep_mask")
    return kept_keys(case.B, case.Tq, case.Tk, lengths, mask, is_causal, device)
