"""The block as a module: real ``nn.Linear`` children, no buffers, no frequency tensor."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from .arguments import Arguments
from .children import as_norm, change_of
from .functional import attend, project_keys_and_values
from .inputs import check_rope
from .kv import ProjectedKV
from .norm import Norm
from .planner import warn_once
from .prepare import without_removed_tokens
from .rope import RoPE, RopeLike, RotaryTable, sides

ModuleRope = RopeLike | Literal["default"]

_CHILDREN = ("q_proj", "k_proj", "v_proj", "out_proj", "q_norm", "k_norm")
_NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
_EPS = 1e-6


class FusedRoPECrossAttention(nn.Module):
    """Cross-attention block with rotary embeddings; see :func:`~.functional.cross_attention`.

    ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` are ``nn.Linear``s, ``q_norm`` and
    ``k_norm`` are ``nn.RMSNorm``s or ``nn.LayerNorm``s (None without ``qk_norm``). Where a child
    was replaced, wrapped, hooked, quantised or parametrised, the children are called themselves,
    and only what lies between them is computed here.

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
        inner_dim = dim if inner_dim is None else inner_dim
        kv_dim = dim if kv_dim is None else kv_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_options(inner_dim, num_heads, self.num_kv_heads, dropout, qk_norm, qk_norm_over)
        self.head_dim = inner_dim // num_heads
        self.dropout = dropout
        self.rope: RopeLike = (
            RoPE(rope_base) if isinstance(rope, str) and rope == "default" else rope
        )
        _check_rope(self.rope, self.head_dim)
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
        options = Arguments(
            x_query,
            x_kv,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            x_value=x_value,
            rope=self.rope if _is_default(rope) else rope,
            q_positions=q_positions,
            k_positions=k_positions,
            kv_lengths=kv_lengths,
            kv_keep_mask=kv_keep_mask,
            attn_bias=attn_bias,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            return_lse=return_lse,
        )
        changed = self._changed_children()
        if changed:
            return self._forward_by_children(options, changed)
        if not isinstance(x_kv, ProjectedKV):
            options = self._with_kv_weights(options)
        return attend(
            options._replace(
                w_q=self.q_proj.weight,
                b_q=self.q_proj.bias,
                w_out=self.out_proj.weight,
                b_out=self.out_proj.bias,
                q_norm=as_norm(self._modules["q_norm"], self.qk_norm_over),
            )
        )

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
        return self._project_kv(options, self._changed_children())

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

    def _changed_children(self) -> set[str]:
        """Names of the children that must be called themselves."""
        found = [(name, change_of(self._modules[name])) for name in _CHILDREN]
        changed = {name: what for name, what in found if what is not None}
        if changed:
            told = ", ".join(f"{name} {what}" for name, what in changed.items())
            warn_once(f"FusedRoPECrossAttention calls its children one by one, since {told}")
        return set(changed)

    def _with_kv_weights(self, options: Arguments) -> Arguments:
        return options._replace(
            w_k=self.k_proj.weight,
            w_v=self.v_proj.weight,
            b_k=self.k_proj.bias,
            b_v=self.v_proj.bias,
            k_norm=as_norm(self._modules["k_norm"], self.qk_norm_over),
        )

    def _project_kv(self, options: Arguments, changed: set[str]) -> ProjectedKV:
        if changed.isdisjoint(("k_proj", "v_proj", "k_norm")):
            return project_keys_and_values(self._with_kv_weights(options))
        x_value = options.x_kv if options.x_value is None else options.x_value
        k, v = self.k_proj(options.x_kv), self.v_proj(x_value)
        # Heads by width: a projection that is sharded over devices holds only some of them.
        kv_heads = k.shape[-1] // self.head_dim
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

    def _forward_by_children(self, options: Arguments, changed: set[str]) -> Any:
        kv = options.x_kv
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
        heads = q.shape[-1] // self.head_dim
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
        self, x: Tensor, name: str, heads: int, changed: set[str]
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


def _check_options(
    inner_dim: int,
    num_heads: int,
    num_kv_heads: int,
    dropout: float,
    qk_norm: str | None,
    qk_norm_over: str,
) -> None:
    if num_heads < 1 or inner_dim < 1 or inner_dim % num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of the inner width {inner_dim}, got {num_heads}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}"
        )
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout: expected a probability within [0, 1], got {dropout}")
    if qk_norm is not None and qk_norm not in _NORMS:
        raise ValueError(f'qk_norm: expected "rms", "layer" or None, got {qk_norm!r}')
    if qk_norm_over not in ("head", "inner"):
        raise ValueError(f'qk_norm_over: expected "head" or "inner", got {qk_norm_over!r}')


def _check_rope(rope: RopeLike, head_dim: int) -> None:
    for side in sides(rope):
        if isinstance(side, RotaryTable):
            raise TypeError(
                "rope: a module holds no tables, which .to() and state_dict() would miss; "
                "pass a RotaryTable to forward(rope=...)"
            )
    check_rope(rope, head_dim)
