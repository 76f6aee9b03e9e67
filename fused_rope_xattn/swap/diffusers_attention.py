"""``Attention`` of diffusers attending to another sequence, with its plain processors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..children import change_of
from ..functional import cross_attention
from ..norm import Norm
from .adapter import Adapter, Draw, Place, Refused, Role, Unserved, qualified_name
from .diffusers_mask import mask_or_bias

_FILE = "diffusers.models.attention_processor"
_PLAIN, _SDPA, _FUSED = (
    f"{_FILE}.{name}" for name in ("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0")
)
_RMS = "diffusers.models.normalization.RMSNorm"
_NORMS = (_RMS, "diffusers.models.normalization.FP32LayerNorm")
_NO_CHILDREN = ("spatial_norm", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class DiffusersAttention(Adapter):
    kind = "diffusers Attention"
    classes = (f"{_FILE}.Attention",)
    children = ("to_q", "to_k", "to_v", "to_kv", "to_out.0")

    def role(self, module: Any, place: Place) -> Role:
        return "cross" if module.is_cross_attention else "self"

    def examine(self, module: Any, place: Place) -> None:
        for name in _NO_CHILDREN:
            if getattr(module, name, None) is not None:
                raise Refused(f"it has a {name}")
        if module.to_out is None or module.to_k is None:
            raise Refused("it has no projection of its own for keys or outputs")
        if module.inner_kv_dim != module.inner_dim:
            raise Refused("it has fewer key heads than query heads")
        obstacle = _obstacle_of_norms(module) or _obstacle_of_processor(module)
        if obstacle is not None:
            raise Refused(obstacle)

    def forward(
        self,
        module: Any,
        hidden_states: Tensor,  # [B, Tq, C] or [B, C, height, width]
        encoder_hidden_states: Tensor | None = None,  # [B, Tk, Ckv]
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Any:
        given = [name for name, value in cross_attention_kwargs.items() if value is not None]
        if given:
            return Unserved(f"arguments {', '.join(given)}")
        obstacle = _obstacle_of_norms(module) or _obstacle_of_processor(module)
        if obstacle is not None:
            return Unserved(obstacle)
        fused = qualified_name(type(module.processor)) == _FUSED
        if encoder_hidden_states is None and fused:
            return Unserved("it attends to itself with fused projections")
        x, x_kv = hidden_states, encoder_hidden_states
        if x.dim() == 4:
            x = x.flatten(2).transpose(1, 2)
        batch, keys = x.shape[0], x.shape[1] if x_kv is None else x_kv.shape[1]
        keep, bias = None, None
        if attention_mask is not None:
            masks = mask_or_bias(attention_mask, batch, module.heads, keys)
            if masks is None:
                return Unserved(f"an attention_mask of shape {list(attention_mask.shape)}")
            keep, bias = masks
            if keep is not None and qualified_name(type(module.processor)) == _PLAIN:
                return Unserved("its processor adds a boolean mask to the scores")
        if module.group_norm is not None:
            x = module.group_norm(x.transpose(1, 2)).transpose(1, 2)
        if x_kv is None:
            x_kv = x
        elif module.norm_cross is not None:
            x_kv = module.norm_encoder_hidden_states(x_kv)
        (w_k, w_v), (b_k, b_v) = _kv_projections(module, fused)
        y = cross_attention(
            x,
            x_kv,
            module.to_q.weight,
            w_k,
            w_v,
            module.to_out[0].weight,
            num_heads=module.heads,
            b_q=module.to_q.bias,
            b_k=b_k,
            b_v=b_v,
            b_out=module.to_out[0].bias,
            rope=None,
            q_norm=_norm(module.norm_q),
            k_norm=_norm(module.norm_k),
            kv_keep_mask=keep,
            attn_bias=bias,
            scale=module.scale if qualified_name(type(module.processor)) == _PLAIN else None,
        )
        return _finished(module, y, hidden_states)

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = draw.normal(2, 5, module.query_dim), draw.normal(2, 7, module.cross_attention_dim)
        return tokens, {"attention_mask": draw.normal(2, 1, 7)}


def _finished(module: Any, y: Tensor, hidden_states: Tensor) -> Tensor:
    """What follows the output projection."""
    y = module.to_out[1](y)
    if hidden_states.dim() == 4:
        y = y.transpose(1, 2).reshape(hidden_states.shape)
    if module.residual_connection:
        y = y + hidden_states
    return y if module.rescale_output_factor == 1.0 else y / module.rescale_output_factor


def _obstacle_of_processor(module: Any) -> str | None:
    """What computes the attention may be exchanged at any time."""
    name = qualified_name(type(module.processor))
    if name not in (_PLAIN, _SDPA, _FUSED):
        return f"its processor is {name}"
    if name == _PLAIN and module.norm_q is not None:
        return "its processor ignores its norms"
    if module.fused_projections != (name == _FUSED):
        return "its processor does not fit its fused projections"
    return None


def _kv_projections(module: Any, fused: bool) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Weights and biases of keys and values."""
    if not fused:
        k, v = module.to_k, module.to_v
        return (k.weight, v.weight), (k.bias, v.bias)
    weight, bias = module.to_kv.weight, module.to_kv.bias  # rows of keys, then of values
    return weight.chunk(2), (None, None) if bias is None else bias.chunk(2)


def _norm(norm: Any) -> Norm | None:
    if norm is None:
        return None
    kind: Any = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    return Norm(kind, norm.weight, norm.bias, norm.eps)


def _obstacle_of_norms(module: Any) -> str | None:
    """Whether its norms are others than those over each head that :func:`_norm` describes."""
    head_dim = module.inner_dim // module.heads
    for norm in (module.norm_q, module.norm_k):
        if norm is None:
            continue
        name = qualified_name(type(norm))
        if type(norm) is nn.LayerNorm:
            change, shape = change_of(norm), norm.normalized_shape
        elif name in _NORMS:
            change = "has hooks" if norm._forward_hooks or norm._forward_pre_hooks else None
            shape = norm.dim if name == _RMS else norm.normalized_shape
        else:
            return f"its norm is a {type(norm).__name__}"
        if change is not None or tuple(shape) != (head_dim,):
            return f"its norm {change or f'has shape {list(shape)}'}"
    return None
