"""Cross-attention whose keys are spread over processes, each of which holds a slice of them.

A process attends to its own keys; what the processes found is merged by the log-sum-exp of their
scores, which tells how much of a query's softmax stands in each slice. Only merged heads and
``lse`` travel, never keys or values, so that the cost does not grow with the keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .functional import DEFAULT_ROPE, cross_attention
from .kv import ProjectedKV
from .norm import Norm
from .rope import RoPE, sides

_BIASES = ("b_q", "b_k", "b_v")


def cross_attention_sharded_keys(
    x_query: Tensor,  # [B, Tq, Dq]
    x_kv: Tensor | ProjectedKV,  # [B, this process's keys, Dkv]
    w_q: Tensor,
    w_k: Tensor | None,
    w_v: Tensor | None,
    w_out: Tensor | None,
    *,
    group: dist.ProcessGroup | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:  # y [B, Tq, Dout], or (y, lse)
    """:func:`.cross_attention` to the keys of all processes of ``group`` together.

    ``x_kv`` (or a ProjectedKV) is this process's slice of the keys; slices may differ in length,
    and one may be empty. What has an axis of keys belongs to the slice too: ``x_value``,
    ``k_positions``, ``kv_lengths`` (how many keys of the slice exist), ``kv_keep_mask``,
    ``attn_bias`` and the table of a :class:`RotaryTable` for keys. Everything else is the same on
    every process, and so are ``y`` and ``lse``.

    In the backward every process must hand in the same gradients of ``y`` and ``lse``, as it does
    when all compute the same loss. The gradients of what belongs to the slice are the slice's.
    Those of what is the same everywhere, weights and ``x_query``, come out whole: they are summed
    over ``group`` here and must not be summed again.

    Every process must make the call. With dropout each should have a generator seeded differently,
    or keys at the same place in two slices are dropped together.

    Args:
        group: the processes that share the keys; default all.
        options: those of :func:`.cross_attention`, but for ``is_causal``: a causal mask is given as
            the slice's share of it, in ``kv_keep_mask``.

    Raises:
        ValueError: ``is_causal``, or keys that are rotated without ``k_positions``, whose default
            would count from 0 in every slice.
    """
    _check(x_kv, options)
    b_out = options.pop("b_out", None)
    if w_out is None and b_out is not None:
        raise ValueError("b_out: must be None without w_out")
    names = [name for name in _BIASES if options.get(name) is not None]
    shared = _replicated([x_query, w_q, w_k, w_v, *(options[name] for name in names)], group)
    options |= zip(names, shared[4:], strict=True)
    for name in ("q_norm", "k_norm"):
        options[name] = _replicated_norm(options.get(name), group)
    x_query, w_q, w_k, w_v = shared[:4]
    part = cross_attention(x_query, x_kv, w_q, w_k, w_v, None, return_lse=True, **options)
    y, lse = merge_partial(*part, group=group)
    if w_out is not None:  # behind the merge: its gradients are whole
        y = F.linear(y, w_out.to(y.dtype), None if b_out is None else b_out.to(y.dtype))
    return (y, lse) if return_lse else y


def merge_partial(
    o: Tensor,  # [B, Tq, H*D]
    lse: Tensor,  # [B, H, Tq]
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """What attention to all keys gives, from what each process found among its own.

    ``o`` and ``lse`` are those of :func:`.cross_attention` with ``w_out=None`` and
    ``return_lse=True``. Both results are the same on every process. In the backward every process
    must hand in the same gradients; each gets those of its own ``o`` and ``lse``, without any
    communication.
    """
    merged: tuple[Tensor, Tensor] = _Merge.apply(o, lse, group)
    return merged


def _check(x_kv: Any, options: dict[str, Any]) -> None:
    if options.get("is_causal"):
        raise ValueError(
            "is_causal: expected False over sharded keys; give the slice's share of the mask as"
            " kv_keep_mask"
        )
    rope = options.get("rope", DEFAULT_ROPE)
    is_rotated = not isinstance(x_kv, ProjectedKV) and isinstance(sides(rope)[1], RoPE)
    if is_rotated and options.get("k_positions") is None:
        raise ValueError(
            "k_positions: expected the positions of this process's keys, got None, which would"
            " count from 0 in every slice"
        )


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, lse: Tensor, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        every = [torch.empty_like(lse) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, lse.contiguous(), group=group)
        total = torch.stack(every).logsumexp(dim=0)
        # Where no process has a key, both are -inf.
        share = torch.where(lse == -torch.inf, 0.0, (lse - total).exp())
        wide = (_by_head(o, lse) * _over_dims(share)).flatten(2)
        dist.all_reduce(wide, group=group)
        merged = wide.to(o.dtype)
        ctx.save_for_backward(o, merged, share)
        return merged, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, None]:
        o, merged, share = ctx.saved_tensors
        wide = _by_head(grad, share)
        difference = _by_head(o, share) - _by_head(merged, share)
        along = (wide * difference).sum(dim=-1).transpose(1, 2)  # [B, H, Tq]
        do = (wide * _over_dims(share)).flatten(2).to(o.dtype)
        return do, share * (along + dlse), None


def _by_head(o: Tensor, lse: Tensor) -> Tensor:  # [B, Tq, H, D] in the dtype of lse
    heads: Tensor = o.to(lse.dtype).unflatten(-1, (lse.shape[1], -1))
    return heads


def _over_dims(x: Tensor) -> Tensor:  # [B, H, Tq] to [B, Tq, H, 1]
    return x.transpose(1, 2)[..., None]


class _Replicate(torch.autograd.Function):
    """The tensors as they are; the sum over the group as their gradients."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        summed: list[Tensor | None] = []
        for grad, is_wanted in zip(grads, ctx.needs_input_grad[1:], strict=True):
            if not is_wanted:
                summed.append(None)
                continue
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            wide = wide.contiguous()
            dist.all_reduce(wide, group=ctx.group)
            summed.append(wide.to(grad.dtype))
        return None, *summed


def _replicated(tensors: list[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Those that require grad, replaced; anything else as it is."""
    found = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
    if not found or not torch.is_grad_enabled():
        return tensors
    replaced = iter(_Replicate.apply(group, *found))
    return [next(replaced) if isinstance(x, Tensor) and x.requires_grad else x for x in tensors]


def _replicated_norm(norm: Any, group: dist.ProcessGroup | None) -> Any:
    if not isinstance(norm, Norm):
        return norm
    weight, bias = _replicated([norm.weight, norm.bias], group)
    return replace(norm, weight=weight, bias=bias)
