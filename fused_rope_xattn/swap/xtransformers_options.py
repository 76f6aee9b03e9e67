"""The options of x-transformers' ``Attention`` that change what it computes, and are refused."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import nn

from .adapter import Place, Refused

_OFF = (
    *("max_attend_past", "sparse_topk", "to_latent_q", "to_latent_kv", "to_rotateable_k"),
    *("qkv_receive_diff_residuals", "laser", "to_v_gate", "to_output_gate", "to_v_head_gate"),
    *("qk_norm_dim_scale", "q_rmsnorm", "k_rmsnorm", "value_rmsnorm", "data_dependent_alibi"),
    *("rel_proj_pos_bias", "head_scale", "attn_on_attn", "orthog_projected_values"),
    *("orthog_projected_values_per_head", "hybrid_module", "causal"),
)
_ATTEND_OFF = (
    *("pre_softmax_talking_heads", "post_softmax_talking_heads", "pre_scale_post_talking_heads"),
    *("selective", "cog_signed", "l2_distance", "add_zero_kv", "head_learned_sink"),
    *("softclamp_logits", "cope", "flash_pack_seq", "inverted_attention", "causal"),
)


def refuse_options(module: Any, place: Place) -> None:
    """Raise :class:`Refused` for the first option that this block does not reproduce."""
    attend = module.attend
    on = [name for name in _OFF if _is_on(getattr(module, name, None))]
    on += [f"attend.{name}" for name in _ATTEND_OFF if _is_on(getattr(attend, name, None))]
    if on:
        raise Refused(f"it uses {', '.join(on)}")
    if getattr(module, "qk_norm_groups", 1) != 1:
        raise Refused("its qk_norm has groups")
    softmax = attend.attn_fn
    if not (isinstance(softmax, functools.partial) and softmax.func is F.softmax):
        raise Refused("its weights are no softmax of the scores")
    if module.to_v.out_features != module.to_k.out_features:
        raise Refused("its values have another head dim than its keys")
    if not isinstance(module.to_out, nn.Linear | nn.Identity):
        raise Refused(f"to_out is a {type(module.to_out).__name__}")
    for _, parent in place.parents:
        if getattr(parent, "cross_residual_attn", False):
            raise Refused("cross_residual_attn hands scores from layer to layer")


def _is_on(option: Any) -> bool:
    return isinstance(option, nn.Module) or bool(option)
