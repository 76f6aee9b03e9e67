"""The block as a module: real ``nn.Linear`` children, no buffers, no frequency tensor."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from .arguments import Arguments
from .children import as_norm, changes_of, weight_and_bias
from .config import as_text
from .functional import attend, isolating, project_keys_and_values
from .inputs import check_tokens
from .kv import ProjectedKV
from .module_rules import (
    ModuleOptions,
    check_module_rope,
    check_options,
    check_shares,
    heads_of,
)
from .norm import Norm
from .planner import warn_once
from .prepare import without_removed_tokens
from .rope import RoPE, RopeLike

ModuleRope = RopeLike | Literal["default"]

_CHILDREN = ("q_proj", "k_proj", "v_proj", "out_proj", "q_norm", "k_norm")
_NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
_EPS = 1e-6


class FusedRoPECrossAttention(nn.Module):
    """Cross-attention block with rotary embeddings; see :func:`~.functional.cross_attention`.

    ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` are ``nn.Linear``s, ``q_norm`` and
    ``k_norm`` are ``nn.RMSNorm``s or ``nn.LayerNorm``s (None without ``qk_norm``). Where a child
    was replaced, wrapped, hooked, quantised or parametrised, the children are called themselves,
    with one warning, and only what lies between them is computed here.

    Args:
        dim: width of the query tokens.
        num_heads: H.
        dropout: probability of dropping an attention weight, in training only.
        rope_base: base of the default ``rope``.
        kv_dim: width of the key tokens; default ``dim``.
        value_dim: width of the value tokens; default ``kv_dim``.
        inner_dim: ``H * D``; default ``dim``.
        out_dim: width of the output; default ``dim``.
        num_kv_heads: Hkv; default H.
        bias: whether the q, k and v projections have biases.
        out_bias: whether the output projection has one; default ``bias``.
        rope: a :class:`RoPE`, None (nothing rotates) or a pair of these for queries and keys;
            default ``RoPE(rope_base)``. Tables go to :meth:`forward`.
        qk_norm: None, "rms" or "layer".
        qk_norm_over: "head", or "inner" for all heads of a token together.
        scale: of the scores; default ``D ** -0.5``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        dropout: float = 0.0,
        rope_base: float = 10000.0,
        *,
        kv_dim: int | None = None,
        value_dim: int | None = None,
        inner_dim: int | None = None,
        out_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        rope: ModuleRope = "default",
        qk_norm: Literal["rms", "layer"] | None = None,
        qk_norm_over: Literal["head", "inner"] = "head",
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (kv_dim, value_dim, inner_dim, out_dim, num_kv_heads)
        rest = (bias, out_bias, qk_norm, qk_norm_over, scale, dtype)
        check_options(ModuleOptions(dim, num_heads, dropout, *sizes, *rest))
        inner_dim = dim if inner_dim is None else inner_dim
        kv_dim = dim if kv_dim is None else kv_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = inner_dim // num_heads
        self.dropout = dropout
        self.rope: RopeLike = (
            RoPE(rope_base) if isinstance(rope, str) and rope == "default" else rope
        )
        check_module_rope(self.rope, self.head_dim)
        self.qk_norm = qk_norm
        self.qk_norm_over = qk_norm_over
        self.scale = scale

        kv_inner = self.num_kv_heads * self.head_dim
        value_dim = kv_dim if value_dim is None else value_dim
        out_dim = dim if out_dim is None else out_dim
        out_bias = bias if out_bias is None else out_bias
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, inner_dim, bias=bias, **where)
        self.k_proj = nn.Linear(kv_dim, kv_inner, bias=bias, **where)
        self.v_proj = nn.Linear(value_dim, kv_inner, bias=bias, **where)
        self.out_proj = nn.Linear(inner_dim, out_dim, bias=out_bias, **where)
        widths = (inner_dim, kv_inner) if qk_norm_over == "inner" else (self.head_dim,) * 2
        for name, width in zip(("q_norm", "k_norm"), widths, strict=True):
            norm = None if qk_norm is None else _NORMS[qk_norm](width, eps=_EPS, **where)
            self.register_module(name, norm)

    def forward(
        self,
        x_query: Tensor,  # [B, Tq, dim]
        x_kv: Tensor | ProjectedKV,  # [B, Tk, kv_dim]
        *,
        x_value: Tensor | None = None,
        q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        kv_keep_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        is_causal: bool = False,
        return_lse: bool = False,
        rope: ModuleRope = "default",
    ) -> Any:  # y [B, Tq, out_dim], or (y, lse) with lse [B, H, Tq]
        """Arguments as for :func:`~.functional.cross_attention`; ``rope`` replaces the module's."""
        changed = self._changed_children()
        w_q = w_k = w_v = w_out = b_q = b_k = b_v = b_out = q_norm = k_norm = None
        if not changed:
            children = self._modules
            w_q, b_q = weight_and_bias(children["q_proj"])
            w_out, b_out = weight_and_bias(children["out_proj"])
            q_norm = as_norm(children["q_norm"], self.qk_norm_over)
            if not isinstance(x_kv, ProjectedKV):
                w_k, b_k = weight_and_bias(children["k_proj"])
                w_v, b_v = weight_and_bias(children["v_proj"])
                k_norm = as_norm(children["k_norm"], self.qk_norm_over)
        arguments = Arguments(
            x_query,
            x_kv,
            w_q,
            w_k,
            w_v,
            w_out,
            b_q,
            b_k,
            b_v,
            b_out,
            x_value,
            q_positions,
            k_positions,
            kv_lengths,
            kv_keep_mask,
            attn_bias,
            self.rope if _is_default(rope) else rope,
            q_norm,
            k_norm,
            self.num_heads,
            self.num_kv_heads,
            is_causal,
            self.dropout if self.training else 0,
            self.scale,
            return_lse=return_lse,
        )
        return self._forward_by_children(arguments, changed) if changed else attend(arguments)

    def project_kv(
        self,
        x_kv: Tensor,  # [B, Tk, kv_dim]
        *,
        x_value: Tensor | None = None,
        k_positions: Tensor | None = None,
        rope: ModuleRope = "default",
    ) -> ProjectedKV:
        """Keys and values to pass to :meth:`forward` as ``x_kv``, any number of times."""
        options = Arguments(
            None,
            x_kv,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            x_value=x_value,
            rope=self.rope if _is_default(rope) else rope,
            k_positions=k_positions,
        )
        changed = self._changed_children()
        if changed:
            check_tokens(options, "kv")
        return isolating(lambda a: self._project_kv(a, changed), options)

    # Both as text, which is what keeps torch.compile from compiling twice: see config.py.

    @property
    def dropout(self) -> float:
        return float(self._dropout)

    @dropout.setter
    def dropout(self, dropout: float) -> None:
        self._dropout = as_text(dropout)

    @property
    def scale(self) -> float | None:
        return None if self._scale is None else float(self._scale)

    @scale.setter
    def scale(self, scale: float | None) -> None:
        self._scale = None if scale is None else as_text(scale)

    def extra_repr(self) -> str:
        shown = [f"num_heads={self.num_heads}", f"head_dim={self.head_dim}", f"rope={self.rope}"]
        if self.num_kv_heads != self.num_heads:
            shown.insert(1, f"num_kv_heads={self.num_kv_heads}")
        if self.dropout:
            shown.append(f"dropout={self.dropout}")
        if self.qk_norm is not None:
            shown.append(f"qk_norm={self.qk_norm} over {self.qk_norm_over}")
        if self.scale is not None:
            shown.append(f"scale={self.scale}")
        return ", ".join(shown)

    # ------------------------------------------------------------------------ changed children

    def _changed_children(self) -> dict[str, str]:
        """What became of the children that must be called themselves, by name."""
        changed = changes_of(self._modules, _CHILDREN)
        if changed:
            told = ", ".join(f"{name} {what}" for name, what in changed.items())
            warn_once(f"FusedRoPECrossAttention calls its children one by one, since {told}")
        return changed

    def _project_kv(self, options: Arguments, changed: dict[str, str]) -> ProjectedKV:
        if not any(name in changed for name in ("k_proj", "v_proj", "k_norm")):
            w_k, b_k = weight_and_bias(self._modules["k_proj"])
            w_v, b_v = weight_and_bias(self._modules["v_proj"])
            k_norm = as_norm(self._modules["k_norm"], self.qk_norm_over)
            with_weights = options._replace(w_k=w_k, w_v=w_v, b_k=b_k, b_v=b_v, k_norm=k_norm)
            return project_keys_and_values(with_weights)
        x_value = options.x_kv if options.x_value is None else options.x_value
        k, v = self.k_proj(options.x_kv), self.v_proj(x_value)
        kv_heads = heads_of("k_proj", k, self.head_dim)
        heads_of("v_proj", v, self.head_dim)
        k, k_norm = self._normed(k, "k_norm", kv_heads, changed)
        return project_keys_and_values(
            options._replace(
                x_kv=k,
                x_value=v,
                num_heads=kv_heads * (self.num_heads // self.num_kv_heads),
                num_kv_heads=kv_heads,
                k_norm=k_norm,
            ),
            projected=True,
        )

    def _forward_by_children(self, options: Arguments, changed: dict[str, str]) -> Any:
        kv = options.x_kv
        check_tokens(options, "block")
        if not isinstance(kv, ProjectedKV):
            tokens = without_removed_tokens(options)
            kv = self._project_kv(
                Arguments(
                    None,
                    tokens.x_kv,
                    num_heads=self.num_heads,
                    num_kv_heads=self.num_kv_heads,
                    x_value=tokens.x_value,
                    rope=options.rope,
                    k_positions=options.k_positions,
                ),
                changed,
            )
        q = self.q_proj(options.x_query)
        heads = heads_of("q_proj", q, self.head_dim)
        check_shares(heads, kv.k.shape[1], self.num_heads, self.num_kv_heads)
        q, q_norm = self._normed(q, "q_norm", heads, changed)
        attended = attend(
            options._replace(
                x_query=q,
                x_kv=kv,
                x_value=None,
                k_positions=None,
                num_heads=heads,
                num_kv_heads=kv.k.shape[1],
                q_norm=q_norm,
            ),
            projected=True,
        )
        if options.return_lse:
            return self.out_proj(attended[0]), attended[1]
        return self.out_proj(attended)

    def _normed(
        self, x: Tensor, name: str, heads: int, changed: dict[str, str]
    ) -> tuple[Tensor, Norm | None]:
        """``x`` ``[B, T, H*D]`` after a changed norm, or as it is and the unchanged norm."""
        child = self._modules[name]
        if child is None or name not in changed:
            return x, as_norm(child, self.qk_norm_over)
        if self.qk_norm_over == "inner":
            return child(x), None
        return child(x.unflatten(-1, (heads, self.head_dim))).flatten(-2), None


def _is_default(rope: Any) -> bool:
    return isinstance(rope, str) and rope == "default"
