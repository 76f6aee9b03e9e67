"""What a user would write without this package: eager PyTorch with each SDPA backend, and compiled.

The block is F.linear, norms and RoPE in fp32 from precomputed tables, scaled_dot_product_attention
or another package's attention, F.linear. Tables and masks are built outside the timed call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.compiler.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..rope import Rotation, cos_sin, resolve, rotate, sides
from .case import NORMS, Case, Inputs
from .cores import CORES, Attend

BACKENDS: dict[str, SDPBackend | None] = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The math backend stores every score; beyond this many it says nothing about anybody's code.
MAX_MATH_SCORES = 1 << 24
NORM_EPS = 1e-6

Leaves = dict[str, Tensor]
Turn = Callable[[Tensor], Tensor]


class Peer(NamedTuple):
    """One way of running the eager block."""

    backend: str  # of BACKENDS or CORES
    compiled: bool

    @property
    def name(self) -> str:
        if self.backend in CORES:
            return self.backend
        return f"compile {self.backend}" if self.compiled else f"eager {self.backend}"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Everything that calls the block must happen in here."""
        backend = BACKENDS.get(self.backend)
        # torch.compile's caches know a graph by its code alone: another backend's would be taken.
        own_graph = torch.compiler.config.patch(  # type: ignore[attr-defined] # added on import
            force_disable_caches=True
        )
        with (
            nullcontext() if backend is None else sdpa_kernel(backend),
            own_graph if self.compiled else nullcontext(),
        ):
            yield

    def prepare(self, inputs: Inputs) -> Callable[[Leaves], Tensor]:
        """The block, as this peer runs it."""
        core = CORES.get(self.backend)
        block = eager_block(inputs, None if core is None else core.attend(inputs.case))
        if not self.compiled:
            return block
        # The cache is keyed by the code, not by the backend that was active when it was compiled.
        torch.compiler.reset()
        compiled: Callable[[Leaves], Tensor] = torch.compile(block, fullgraph=True, dynamic=False)
        return compiled


def peers_of(case: Case, compile: bool) -> list[Peer]:
    """The peers worth running on a problem; some may still turn out not to support it."""
    if case.lse:
        return []  # nobody else returns it
    small = case.B * case.H * case.Tq * case.Tk <= MAX_MATH_SCORES
    names = [name for name in BACKENDS if small or name != "math"]
    peers = [Peer(name, False) for name in names]
    peers += [Peer(c.name, False) for c in CORES.values() if c.installed and c.covers(case)]
    return peers + [Peer(name, True) for name in names if compile]


def not_installed() -> list[str]:
    """Packages whose attention a benchmark would run if it found them."""
    return [core.name for core in CORES.values() if not core.installed]


def eager_block(inputs: Inputs, attend: Attend | None = None) -> Callable[[Leaves], Tensor]:
    """The block on the inputs' leaves, with everything that is no leaf built beforehand.

    ``attend`` takes the place of SDPA.
    """
    case = inputs.case
    q_rotation, k_rotation = _turns(inputs)
    turn_q = _turning(case.q_norm, "q", case.H, q_rotation)
    turn_k = _turning(case.k_norm, "k", case.kv_heads, k_rotation)
    core = _sdpa(inputs) if attend is None else _without_bias(attend)

    def block(leaf: Leaves) -> Tensor:
        q = turn_q(F.linear(leaf["x_query"], leaf["w_q"], leaf.get("b_q")), leaf)
        if case.projected:
            k, v = leaf["k"], leaf["v"]
        else:
            x_value = leaf.get("x_value", leaf["x_kv"])
            k = turn_k(F.linear(leaf["x_kv"], leaf["w_k"], leaf.get("b_k")), leaf)
            v = _split(F.linear(x_value, leaf["w_v"], leaf.get("b_v")), case.kv_heads)
        o = core(q, k, v, leaf.get("attn_bias")).flatten(2)
        return F.linear(o, leaf["w_out"], leaf.get("b_out")) if "w_out" in leaf else o

    return block


def _split(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, I] -> [B, H, T, D]"""
    y: Tensor = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return y


def _turning(
    norm: str, side: str, num_heads: int, turn: Turn
) -> Callable[[Tensor, Leaves], Tensor]:
    """A projection's result [B, T, I] -> its heads [B, H, T, D], normed and rotated."""
    spec = NORMS[norm]
    if spec is None:
        return lambda x, leaf: turn(_split(x, num_heads))
    kind, over, _, _ = spec

    def normed(x: Tensor, leaf: Leaves) -> Tensor:
        weight, bias = leaf.get(f"{side}_norm_weight"), leaf.get(f"{side}_norm_bias")
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
        y = x.float() if over == "inner" else x.float().unflatten(-1, (num_heads, -1))
        shape = y.shape[-1:]
        if kind == "rms":
            y = F.rms_norm(y, shape, weight, NORM_EPS)
        else:
            y = F.layer_norm(y, shape, weight, bias, NORM_EPS)
        return turn(_split(y.flatten(2) if over == "head" else y, num_heads).to(x.dtype))

    return normed


def _sdpa(inputs: Inputs) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    case = inputs.case
    options: dict[str, Any] = {"scale": case.scale, "dropout_p": case.dropout_p}
    if case.kv_heads != case.H:
        options["enable_gqa"] = True
    keep = _keep(inputs)
    # SDPA aligns a causal mask to the first key, this package to the last.
    if case.causal and keep is None and case.Tq == case.Tk and case.bias == "none":
        options["is_causal"] = True
    elif case.causal:
        lengths = _lengths(inputs)
        query, key = (torch.arange(n, device=lengths.device) for n in (case.Tq, case.Tk))
        visible = key <= query[:, None] + (lengths - case.Tq)[:, None, None, None]
        keep = visible if keep is None else keep & visible

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        mask = keep
        if bias is not None:
            mask = bias if keep is None else bias.masked_fill(~keep, -torch.inf)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return o.transpose(1, 2)

    return attend


def _keep(inputs: Inputs) -> Tensor | None:
    """The keys that lengths and mask leave, [B, 1|H, 1|Tq, Tk]; None if they leave all."""
    case, keep = inputs.case, inputs.fixed.get("kv_keep_mask")
    if keep is not None and keep.dim() == 2:
        keep = keep[:, None, None]
    if case.lengths == "none":
        return keep
    lengths = _lengths(inputs)
    exists = (torch.arange(case.Tk, device=lengths.device) < lengths[:, None])[:, None, None]
    return exists if keep is None else keep & exists


def _lengths(inputs: Inputs) -> Tensor:
    """[B|1]"""
    found: Tensor | None = inputs.fixed.get("kv_lengths")
    if found is None:
        found = torch.full((1,), inputs.case.Tk, device=inputs.leaves["x_query"].device)
    return found


def _without_bias(attend: Attend) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    return lambda q, k, v, bias: attend(q, k, v)


def _turns(inputs: Inputs) -> tuple[Turn, Turn]:
    case, fixed = inputs.case, inputs.fixed
    device = inputs.leaves["x_query"].device
    q_rope, k_rope = sides(fixed["rope"])
    q = resolve(q_rope, fixed.get("q_positions"), case.D)
    k = resolve(None if case.projected else k_rope, fixed.get("k_positions"), case.D)
    return _turn(q, case.Tq, device), _turn(k, case.Tk, device)


def _turn(rotation: Rotation, tokens: int, device: torch.device) -> Turn:
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
