"""Memory attention of SAM 2, SAM 3 and EdgeTAM in transformers: tables come with each call.

They have the full width of a head, each frequency written twice; one of each pair is read.
Attention weights are not returned, as they are not with transformers' own default, SDPA.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..functional import cross_attention
from ..rope import RotaryTable
from .adapter import Adapter, Draw, Place, Role, Unserved, role_of_name

Table = tuple[Tensor, Tensor]  # cos, sin [.., T, D/2]

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MODELS = "transformers.models"


class Sam2VideoAttention(Adapter):
    """Keys repeat the table of the queries; the last ones are not rotated."""

    kind = "transformers Sam2VideoRoPEAttention"
    classes = (
        f"{_MODELS}.sam2_video.modeling_sam2_video.Sam2VideoRoPEAttention",
        f"{_MODELS}.sam3_tracker_video.modeling_sam3_tracker_video.Sam3TrackerVideoRoPEAttention",
    )
    children = _LINEARS

    def role(self, module: Any, place: Place) -> Role:
        if module.rope_k_repeat or module.kv_in_dim != module.hidden_size:
            return "cross"
        return role_of_name(place)

    def forward(
        self,
        module: Any,
        query: Tensor,  # [B, P, Tq, C]
        key: Tensor,  # [B, P, Tk, Ckv]
        value: Tensor,
        position_embeddings: Table,  # full width, [.., Tq, D]
        num_k_exclude_rope: int = 0,
        **kwargs: Any,
    ) -> Any:
        rotated = key.shape[-2] - num_k_exclude_rope
        obstacle = _obstacle(query, key, value, rotated, kwargs)
        if obstacle is not None:
            return obstacle
        q_table, k_table = _pairs(position_embeddings), None
        if rotated > 0:
            repeats = rotated // query.shape[2] if module.rope_k_repeat else 1
            k_table = _padded(_tiled(q_table, max(repeats, 1)), 0, num_k_exclude_rope)
        return _attend(module, query, key, value, q_table, k_table)

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        repeats, tail = (2, 3) if module.rope_k_repeat else (1, 0)
        tokens = _probe_tokens(module, draw, 4, 4 * repeats + tail)
        return (*tokens, _probe_table(module, draw, 4)), {"num_k_exclude_rope": tail}


class EdgeTamCrossAttention(Adapter):
    """Keys come in groups; the last tokens of each are a small grid, the others do not rotate."""

    kind = "transformers EdgeTamVideoRoPECrossAttention"
    classes = (f"{_MODELS}.edgetam_video.modeling_edgetam_video.EdgeTamVideoRoPECrossAttention",)
    children = _LINEARS

    def forward(
        self,
        module: Any,
        query: Tensor,  # [B, P, Tq, C]
        key: Tensor,  # [B, P, Tk, Ckv]
        value: Tensor,
        position_embeddings: Table,  # full width, [.., Tq, D]
        position_embeddings_k: Table,  # of a group's grid
        num_k_exclude_rope: int = 0,
        rope_k_repeat: int = 0,  # groups
        **kwargs: Any,
    ) -> Any:
        rotated, k_table = key.shape[-2] - num_k_exclude_rope, None
        obstacle = _obstacle(query, key, value, rotated, kwargs)
        if obstacle is not None:
            return obstacle
        if rotated > 0:
            if rope_k_repeat < 1 or rotated % rope_k_repeat:
                return Unserved(f"{rotated} keys do not make {rope_k_repeat} groups")
            k_table = _pairs(position_embeddings_k)
            still = rotated // rope_k_repeat - k_table[0].shape[-2]
            if still < 0:
                return Unserved("a group of keys is shorter than its table")
            k_table = _tiled(_padded(k_table, still, 0), rope_k_repeat)
            k_table = _padded(k_table, 0, num_k_exclude_rope)
        return _attend(module, query, key, value, _pairs(position_embeddings), k_table)

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = _probe_tokens(module, draw, 9, 2 * (3 + 4) + 2)
        tables = [_probe_table(module, draw, tokens) for tokens in (9, 4)]
        return (*tokens, *tables), {"num_k_exclude_rope": 2, "rope_k_repeat": 2}


def _obstacle(
    query: Tensor, key: Tensor, value: Tensor, rotated: int, kwargs: dict[str, Any]
) -> Unserved | None:
    unknown = [name for name, given in kwargs.items() if given is not None]
    if unknown:
        return Unserved(f"arguments {', '.join(unknown)}")
    if query.dim() != 4 or key.dim() != 4 or key.shape[:2] != query.shape[:2]:
        return Unserved("queries and keys come in different batches")
    return Unserved("more keys are left out than there are") if rotated < 0 else None


def _pairs(tables: Table) -> Table:
    """One value a pair, from tables that hold each twice."""
    cos, sin = tables
    return cos[..., ::2], sin[..., ::2]


def _tiled(table: Table, repeats: int) -> Table:
    if repeats == 1:
        return table
    cos, sin = (x.repeat(*[1] * (x.dim() - 2), repeats, 1) for x in table)
    return cos, sin


def _padded(table: Table, before: int, after: int) -> Table:
    """With rows that rotate nothing."""
    if before == 0 and after == 0:
        return table
    edges = (0, 0, before, after)
    return F.pad(table[0], edges, value=1.0), F.pad(table[1], edges)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, q_table: Table, k_table: Table | None
) -> tuple[Tensor, None]:
    y = cross_attention(
        query.flatten(0, 1),
        key.flatten(0, 1),
        module.q_proj.weight,
        module.k_proj.weight,
        module.v_proj.weight,
        module.o_proj.weight,
        num_heads=module.num_attention_heads,
        b_q=module.q_proj.bias,
        b_k=module.k_proj.bias,
        b_v=module.v_proj.bias,
        b_out=module.o_proj.bias,
        x_value=None if value is key else value.flatten(0, 1),
        rope=(RotaryTable(*q_table), None if k_table is None else RotaryTable(*k_table)),
        dropout_p=module.dropout_p if module.training else 0.0,
        scale=module.scaling,
    )
    return y.unflatten(0, query.shape[:2]), None


def _probe_tokens(module: Any, draw: Draw, queries: int, keys: int) -> tuple[Tensor, ...]:
    query = draw.normal(2, 1, queries, module.hidden_size)
    return query, *(draw.normal(2, 1, keys, module.kv_in_dim) for _ in range(2))


def _probe_table(module: Any, draw: Draw, tokens: int) -> Table:
    cos, sin = draw.angles(1, tokens, module.head_dim // 2)
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
