"""What a user would write without this package: eager PyTorch with each SDPA backend, and compiled.

The block is F.linear, RoPE in fp32 from precomputed tables, scaled_dot_product_attention, F.linear.
Building the tables is not part of the timed call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..rope import Rotation, cos_sin, resolve, rotate, sides
from .case import Case, Inputs

BACKENDS: dict[str, SDPBackend | None] = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The math backend stores every score; beyond this many it says nothing about anybody's code.
MAX_MATH_SCORES = 1 << 24

Leaves = dict[str, Tensor]


class Peer(NamedTuple):
    """One way of running the eager block."""

    backend: str
    compiled: bool

    @property
    def name(self) -> str:
        return f"compile {self.backend}" if self.compiled else f"eager {self.backend}"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Everything that calls the block must happen in here."""
        backend = BACKENDS[self.backend]
        with nullcontext() if backend is None else sdpa_kernel(backend):
            yield

    def prepare(self, block: Callable[[Leaves], Tensor]) -> Callable[[Leaves], Tensor]:
        if not self.compiled:
            return block
        # The cache is keyed by the code, not by the backend that was active when it was compiled.
        torch.compiler.reset()
        compiled: Callable[[Leaves], Tensor] = torch.compile(block, fullgraph=True, dynamic=False)
        return compiled


def peers_of(case: Case, compile: bool) -> list[Peer]:
    """The peers worth running on a problem; some may still turn out not to support it."""
    if not _plain(case):
        return []
    small = case.B * case.H * case.Tq * case.Tk <= MAX_MATH_SCORES
    names = [name for name in BACKENDS if small or name != "math"]
    modes = (False, True) if compile else (False,)
    return [Peer(name, compiled) for compiled in modes for name in names]


def _plain(case: Case) -> bool:
    """Whether the block below computes it; other options have no one counterpart in SDPA code."""
    options = (case.q_norm, case.k_norm, case.lengths, case.mask, case.bias)
    # SDPA aligns a causal mask to the first key, this package to the last.
    aligned = not case.causal or case.Tq == case.Tk
    return aligned and not case.lse and all(option == "none" for option in options)


def eager_block(inputs: Inputs) -> Callable[[Leaves], Tensor]:
    """The block on the inputs' leaves, with the tables of its rotations built beforehand."""
    case = inputs.case
    turn_q, turn_k = _turns(inputs)
    heads, kv_heads, dropout_p = case.H, case.kv_heads, case.dropout_p
    options: dict[str, Any] = {"scale": case.scale, "is_causal": case.causal}
    if kv_heads != heads:
        options["enable_gqa"] = True

    def split(x: Tensor, num_heads: int) -> Tensor:  # [B, T, I] -> [B, H, T, D]
        y: Tensor = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
        return y

    def block(leaf: Leaves) -> Tensor:
        q = turn_q(split(F.linear(leaf["x_query"], leaf["w_q"], leaf.get("b_q")), heads))
        if case.projected:
            k, v = leaf["k"], leaf["v"]
        else:
            x_value = leaf.get("x_value", leaf["x_kv"])
            k = turn_k(split(F.linear(leaf["x_kv"], leaf["w_k"], leaf.get("b_k")), kv_heads))
            v = split(F.linear(x_value, leaf["w_v"], leaf.get("b_v")), kv_heads)
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)
        o = o.transpose(1, 2).flatten(2)
        return F.linear(o, leaf["w_out"], leaf.get("b_out")) if "w_out" in leaf else o

    return block


def _turns(inputs: Inputs) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    case, fixed = inputs.case, inputs.fixed
    device = inputs.leaves["x_query"].device
    q_rope, k_rope = sides(fixed["rope"])
    q = resolve(q_rope, fixed.get("q_positions"), case.D)
    k = resolve(k_rope, fixed.get("k_positions"), case.D)
    return _turn(q, case.Tq, device), _turn(k, case.Tk, device)


def _turn(rotation: Rotation, tokens: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """x [B, H, T, D] -> its rotation, computed in fp32, in the dtype of x."""
    spec, positions, cos, sin = rotation
    if spec.rotary_dim == 0:
        return lambda x: x
    if cos is None or sin is None:
        cos, sin = cos_sin(spec, positions, tokens, device, torch.float32)
    table_cos, table_sin = cos.float(), sin.float()

    def turn(x: Tensor) -> Tensor:
        return rotate(x.float(), table_cos, table_sin, spec).to(x.dtype)

    return turn
