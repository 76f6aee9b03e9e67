"""``RoPEAttention`` of SAM 2, SAM 2.1 and SAM 3 as Meta wrote it: a grid, tiled over the keys.

Query t of a grid of width w stands at (x, y) = (t mod w, t div w). The keys repeat that grid, and
the last ``num_k_exclude_rope`` of them are not rotated, which position (0, 0) says as well. Its
table of complex numbers is therefore never read: positions are computed at each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..functional import cross_attention
from ..rope import RoPE
from .adapter import Adapter, Draw, Place, Refused, Role, Unserved, role_of_name

_LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj")
_ATTRIBUTES = ("compute_cis", "freqs_cis", "rope_k_repeat", "num_heads", "dropout_p")
_SAME_TABLE = 1e-4  # its angles come from fp32 arithmetic


class Sam2RoPEAttention(Adapter):
    kind = "SAM 2 RoPEAttention"
    children = _LINEARS
    by_structure = True
    must_probe = True

    def matches(self, module: nn.Module) -> bool:
        return (
            type(module).__name__ == "RoPEAttention"
            and module._modules.keys() >= set(_LINEARS)
            and all(hasattr(module, name) for name in _ATTRIBUTES)
        )

    def role(self, module: Any, place: Place) -> Role:
        return _role(module, place, module.q_proj.in_features)

    def examine(self, module: Any, place: Place) -> tuple[float, int, int]:
        """theta, and width and height of the grid that its table was made for."""
        extra = module._modules.keys() - set(_LINEARS)
        if extra:
            raise Refused(f"it has further children: {', '.join(sorted(extra))}")
        theta = getattr(module.compute_cis, "keywords", {}).get("theta")
        table = module.freqs_cis
        if theta is None or not isinstance(table, Tensor) or not table.is_complex():
            raise Refused("its table is not made by compute_cis(dim, theta)")
        if table.is_meta:
            raise Refused("its table is on the meta device")
        head_dim = module.q_proj.out_features // module.num_heads
        if table.dim() != 2 or table.shape[1] * 2 != head_dim or head_dim % 4:
            raise Refused(f"its table has shape {list(table.shape)} for a head dim of {head_dim}")
        return float(theta), *_grid_of(table, float(theta))

    def forward(
        self,
        module: Any,
        q: Tensor,  # [B, Tq, C]
        k: Tensor,  # [B, Tk, Ckv]
        v: Tensor,
        num_k_exclude_rope: int = 0,
    ) -> Any:
        theta, width, height = module.swap_state
        queries, keys = q.shape[1], k.shape[1]
        rotated = keys - num_k_exclude_rope
        if queries != width * height:
            width = int(queries**0.5 + 0.5)  # the queries must be a square, which it assumes too
            if width * width != queries or not queries:
                return Unserved(f"{queries} queries are no square, and not its grid")
        if queries != keys and not module.rope_k_repeat:
            return Unserved("there are more keys than queries, and rope_k_repeat is off")
        if rotated > 0 and rotated % queries:
            return Unserved(f"{rotated} rotated keys are no multiple of {queries} queries")
        rope = RoPE(theta, axes=2)
        k_positions = None
        if rotated > 0:
            k_positions = grid_positions(width, queries, keys, q.device, rotated)
        return cross_attention(
            q,
            k,
            module.q_proj.weight,
            module.k_proj.weight,
            module.v_proj.weight,
            module.out_proj.weight,
            num_heads=module.num_heads,
            b_q=module.q_proj.bias,
            b_k=module.k_proj.bias,
            b_v=module.v_proj.bias,
            b_out=module.out_proj.bias,
            x_value=None if v is k else v,
            rope=(rope, rope if rotated > 0 else None),
            q_positions=grid_positions(width, queries, queries, q.device),
            k_positions=k_positions,
            dropout_p=module.dropout_p if module.training else 0.0,
        )

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        repeats, tail = (2, 3) if module.rope_k_repeat else (1, 0)
        keys = 4 * repeats + tail
        q = draw.normal(2, 4, module.q_proj.in_features)
        k = draw.normal(2, keys, module.k_proj.in_features)
        v = draw.normal(2, keys, module.v_proj.in_features)
        return (q, k, v), {"num_k_exclude_rope": tail}


def grid_positions(
    width: int, period: int, tokens: int, device: torch.device, rotated: int | None = None
) -> Tensor:  # int64 [tokens, 2]
    """(x, y) of tokens that go through a grid of ``period`` places again and again, row by row.

    Tokens from ``rotated`` on stand at (0, 0), where the angle is 0.
    """
    t = torch.arange(tokens, device=device)
    if tokens != period:
        t = t % period
    if rotated is not None and rotated != tokens:
        t[rotated:] = 0
    return torch.stack([t % width, t // width], dim=-1)


def _grid_of(table: Tensor, theta: float) -> tuple[int, int]:
    """Width and height of the grid whose table this is."""
    tokens, pairs = table.shape
    widths = [w for w in range(1, tokens + 1) if tokens % w == 0]
    widths.sort(key=lambda w: abs(w * w - tokens))  # a square first
    table = table.detach().cpu()
    frequency = theta ** (-2.0 * torch.arange(pairs // 2, dtype=torch.float64) / pairs)
    for width in widths:
        x_y = grid_positions(width, tokens, tokens, table.device).double()
        angle = (x_y[:, :, None] * frequency).flatten(1)
        difference = torch.view_as_real(table).double() - torch.stack(
            [angle.cos(), angle.sin()], -1
        )
        if float(difference.abs().max()) < _SAME_TABLE:
            return width, tokens // width
    raise Refused("its table is not that of a grid with its theta")


def _role(module: Any, place: Place, query_width: int) -> Role:
    if module.rope_k_repeat or module.k_proj.in_features != query_width:
        return "cross"
    return role_of_name(place)
