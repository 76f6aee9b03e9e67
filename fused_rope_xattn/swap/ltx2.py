"""``LTX2Attention`` of diffusers: audio to video, video to audio, and text.

RMSNorm over all heads together, a table for each head, and optionally a gate for each head between
the attention and the output projection, which is why that projection is called here by itself then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..children import as_norm
from ..functional import cross_attention
from ..rope import RopeSide, RotaryTable
from .adapter import Adapter, Draw, Place, Refused, Role, Unserved, qualified_name, role_of_name
from .diffusers_mask import mask_or_bias

Tables = tuple[Tensor, Tensor]

_FILE = "diffusers.models.transformers.transformer_ltx2"
_PROCESSORS = (f"{_FILE}.LTX2AudioVideoAttnProcessor", f"{_FILE}.LTX2PerturbedAttnProcessor")
_CROSS = ("audio_to_video_attn", "video_to_audio_attn")


class LTX2Attention(Adapter):
    kind = "diffusers LTX2Attention"
    classes = (f"{_FILE}.LTX2Attention",)
    children = ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k")

    def role(self, module: Any, place: Place) -> Role:
        if module.cross_attention_dim != module.query_dim or place.name in _CROSS:
            return "cross"
        return role_of_name(place)

    def examine(self, module: Any, place: Place) -> None:
        if module.rope_type not in ("interleaved", "split"):
            raise Refused(f"its rope_type is {module.rope_type!r}")
        if module.inner_kv_dim != module.inner_dim:
            raise Refused("it has fewer key heads than query heads")
        if module.fused_projections:
            raise Refused("its projections are fused; call unfuse_qkv_projections() first")
        for norm in (module.norm_q, module.norm_k):
            if type(norm) is not nn.RMSNorm or norm.normalized_shape != (module.inner_dim,):
                raise Refused("its norm is no RMSNorm over all heads")
        obstacle = _obstacle_of_processor(module)
        if obstacle is not None:
            raise Refused(obstacle)

    def forward(
        self,
        module: Any,
        hidden_states: Tensor,  # [B, Tq, Cq]
        encoder_hidden_states: Tensor | None = None,  # [B, Tk, Ckv]
        attention_mask: Tensor | None = None,
        query_rotary_emb: Tables | None = None,
        key_rotary_emb: Tables | None = None,
        **kwargs: Any,  # perturbations, which only self-attention gets
    ) -> Any:
        given = [name for name, value in kwargs.items() if value is not None]
        if given:
            return Unserved(f"arguments {', '.join(given)}")
        obstacle = _obstacle_of_processor(module)
        if obstacle is not None:
            return Unserved(obstacle)
        x_kv = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        heads = module.heads
        rope: tuple[RopeSide, RopeSide] = (None, None)
        if query_rotary_emb is not None:
            k_tables = query_rotary_emb if key_rotary_emb is None else key_rotary_emb
            if module.rope_type == "split" and any(
                t[0].dim() != 4 for t in (query_rotary_emb, k_tables)
            ):
                return Unserved("its tables pair dims of different heads")
            rope = _table(query_rotary_emb, module), _table(k_tables, module)
        keep, bias = None, None
        if attention_mask is not None:
            masks = mask_or_bias(attention_mask, x_kv.shape[0], heads, x_kv.shape[1])
            if masks is None:
                return Unserved(f"an attention_mask of shape {list(attention_mask.shape)}")
            keep, bias = masks
        gated = module.to_gate_logits is not None
        w_out = module.to_out[0]
        y = cross_attention(
            hidden_states,
            x_kv,
            module.to_q.weight,
            module.to_k.weight,
            module.to_v.weight,
            None if gated else w_out.weight,
            num_heads=heads,
            b_q=module.to_q.bias,
            b_k=module.to_k.bias,
            b_v=module.to_v.bias,
            b_out=None if gated else w_out.bias,
            rope=rope,
            q_norm=as_norm(module.norm_q, "inner"),
            k_norm=as_norm(module.norm_k, "inner"),
            kv_keep_mask=keep,
            attn_bias=bias,
        )
        if gated:
            gates = 2.0 * torch.sigmoid(module.to_gate_logits(hidden_states))  # [B, Tq, H]
            y = w_out((y.unflatten(2, (heads, -1)) * gates[..., None]).flatten(2))
        return module.to_out[1](y)

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = draw.normal(2, 5, module.query_dim), draw.normal(2, 7, module.cross_attention_dim)
        tables = [_probe_tables(module, draw, count) for count in (5, 7)]
        return tokens, {"query_rotary_emb": tables[0], "key_rotary_emb": tables[1]}


def _obstacle_of_processor(module: Any) -> str | None:
    """What computes the attention may be exchanged at any time."""
    processor = module.processor
    name = qualified_name(type(processor))
    if name not in _PROCESSORS:
        return f"its processor is {name}"
    if processor._attention_backend is not None or processor._parallel_config is not None:
        return "an attention backend or context parallelism was set"
    return None


def _table(tables: Tables, module: Any) -> RotaryTable:
    cos, sin = tables
    if module.rope_type == "split":  # [B, H, T, D/2], pairs half a head apart
        return RotaryTable(cos, sin, interleaved=False)
    heads = (module.heads, module.head_dim)  # [B, T, H*D], a value for each dim of all heads
    cos, sin = (x.unflatten(-1, heads).transpose(-3, -2) for x in (cos, sin))
    return RotaryTable(cos, sin, full_width=True)


def _probe_tables(module: Any, draw: Draw, tokens: int) -> Tables:
    if module.rope_type == "split":
        return draw.angles(2, module.heads, tokens, module.head_dim // 2)
    cos, sin = draw.angles(2, tokens, module.inner_dim // 2)
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
