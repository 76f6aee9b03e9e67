"""The block as its users write it without this package: the yardstick of accuracy.

Each projection is an ``nn.Linear``, whose result is rounded to the storage dtype before anything
happens to it; norm and rotation run in fp32 behind it and round again. What follows, attention and
output projection, are the lines of composite.py. The composite path itself rounds q and k once, as
every path of the package does; measured against that, the kernels would get a stricter rule.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F

from fused_rope_xattn import composite, cross_attention
from fused_rope_xattn.arguments import Arguments
from fused_rope_xattn.dropout import draw_seed
from fused_rope_xattn.prepare import prepare
from fused_rope_xattn.rope import Rotation


def eager_composite(*args: Any, **kwargs: Any) -> Any:
    """``cross_attention(*args, **kwargs)``, whatever ``path`` says."""
    bound = inspect.signature(cross_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    a = Arguments(**bound.arguments)
    problem, config, t = prepare(a)
    if config.dropout_p > 0:
        t = t._replace(seed=draw_seed(problem.device))
    q = F.linear(t.x_query, t.w_q, t.b_q)
    t = t._replace(x_query=q, w_q=None, b_q=None)  # type: ignore[arg-type]
    if t.w_k is not None and t.w_v is not None:
        x_value = t.x_kv if t.x_value is None else t.x_value
        k, v = F.linear(t.x_kv, t.w_k, t.b_k), F.linear(x_value, t.w_v, t.b_v)
        norm = (config.k_norm, t.k_norm_weight, t.k_norm_bias)
        rotation = Rotation(config.k_rotation, t.k_positions, t.k_cos, t.k_sin)
        k = composite.project_heads(k, None, None, problem.Hkv, norm, rotation)
        v = composite.split_heads(v, problem.Hkv)
        t = t._replace(x_kv=k, x_value=v, w_k=None, w_v=None, b_k=None, b_v=None)
    y, lse = composite.cross_attention(config, *t, need_lse=a.return_lse)
    return (y, lse) if a.return_lse else y
