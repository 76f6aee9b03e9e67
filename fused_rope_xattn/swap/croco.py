"""``CrossAttention`` of CroCo, DUSt3R, MASt3R and CUT3R: 2-D RoPE by positions (y, x).

These models come as repositories, not packages, and their class lives under many names; it is known
by its children and arguments. A head is ``[u_y | v_y | u_x | v_x]``: pairs a half apart in each of
two blocks, which is this package's ``RoPE(axes=2, interleaved=False)``. No row has to move.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..functional import cross_attention
from ..rope import RoPE
from .adapter import Adapter, Draw, Place, Refused

_LINEARS = ("projq", "projk", "projv", "proj")
_CHILDREN = {*_LINEARS, "attn_drop", "proj_drop"}
_ROTATIONS = ("RoPE2D", "cuRoPE2D")


class CrocoCrossAttention(Adapter):
    kind = "CroCo CrossAttention"
    children = _LINEARS
    by_structure = True
    must_probe = True

    def matches(self, module: nn.Module) -> bool:
        return type(module).__name__ == "CrossAttention" and module._modules.keys() >= _CHILDREN

    def examine(self, module: Any, place: Place) -> tuple[float, float] | None:
        """Base and factor of its frequencies; None without rotation."""
        extra = module._modules.keys() - _CHILDREN - {"rope"}
        if extra:
            raise Refused(f"it has further children: {', '.join(sorted(extra))}")
        for name in ("attn_drop", "proj_drop"):
            if type(getattr(module, name)) is not nn.Dropout:
                raise Refused(f"{name} is a {type(getattr(module, name)).__name__}")
        rope = getattr(module, "rope", None)
        if rope is None:
            return None
        if type(rope).__name__ not in _ROTATIONS:
            raise Refused(f"its rotation is a {type(rope).__name__}")
        if module.projq.out_features // module.num_heads % 4:
            raise Refused("its head dim is not a multiple of 4")
        return float(rope.base), float(getattr(rope, "F0", 1.0))

    def forward(
        self,
        module: Any,
        query: Tensor,  # [B, Tq, C]
        key: Tensor,  # [B, Tk, C]
        value: Tensor,
        qpos: Tensor | None,  # [B, Tq, 2] as (y, x); None: that side is not rotated
        kpos: Tensor | None,
    ) -> Any:
        sides: list[RoPE | None] = [None, None]
        positions: list[Tensor | None] = [None, None]
        if module.swap_state is not None:
            base, factor = module.swap_state
            for side, pos in enumerate((qpos, kpos)):
                if pos is not None:
                    sides[side] = RoPE(base, axes=2, interleaved=False)
                    positions[side] = pos if factor == 1.0 else pos.double() * factor
        y = cross_attention(
            query,
            key,
            module.projq.weight,
            module.projk.weight,
            module.projv.weight,
            module.proj.weight,
            num_heads=module.num_heads,
            b_q=module.projq.bias,
            b_k=module.projk.bias,
            b_v=module.projv.bias,
            b_out=module.proj.bias,
            x_value=None if value is key else value,
            rope=(sides[0], sides[1]),
            q_positions=positions[0],
            k_positions=positions[1],
            dropout_p=module.attn_drop.p if module.attn_drop.training else 0.0,
            scale=module.scale,
        )
        return module.proj_drop(y)

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        width = module.projq.in_features
        axis = torch.arange(3, device=draw.device)
        grid = torch.cartesian_prod(axis, axis)
        qpos, kpos = grid[:6].expand(2, -1, -1), torch.stack([grid, grid.flip(-1)])
        query, key = draw.normal(2, 6, width), draw.normal(2, 9, module.projk.in_features)
        return (query, key, draw.normal(2, 9, module.projv.in_features), qpos, kpos), {}
