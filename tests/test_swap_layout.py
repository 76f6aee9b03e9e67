"""Rows of projections between pairings and between orders of heads."""

from __future__ import annotations

import pytest
import torch

from fused_rope_xattn import RoPE, cross_attention
from fused_rope_xattn.swap import head_rows, pair_rows, select_rows
from problems import Target, assert_tensor_near


@pytest.mark.parametrize(
    "head_dim, rotary_dim, axes",
    [(16, None, 1), (16, None, 2), (24, 16, 2), (24, 8, 1), (12, 0, 1)],
)
@pytest.mark.parametrize("source", ["half", "interleaved"])
def test_moved_rows_give_the_same_attention(
    target: Target, head_dim: int, rotary_dim: int | None, axes: int, source: str
) -> None:
    other = {"half": "interleaved", "interleaved": "half"}[source]
    heads, inner = 3, 3 * head_dim
    x, kv = (torch.randn(2, t, 20, device=target.device) for t in (9, 12))
    w_q, w_k, w_v = (torch.randn(inner, 20, device=target.device) / 4 for _ in range(3))
    b_q, b_k = (torch.randn(inner, device=target.device) for _ in range(2))
    tail = (axes,) if axes > 1 else ()
    shapes = {"q_positions": (2, 9, *tail), "k_positions": (2, 12, *tail)}
    positions = {n: torch.randint(-5, 30, s).to(target.device) for n, s in shapes.items()}

    def attend(pairing: str, **weights: torch.Tensor) -> torch.Tensor:
        rope = RoPE(100.0, rotary_dim, pairing == "interleaved", axes)
        path = target.path if head_dim % 8 == 0 else "auto"  # which kernels do not take
        b = {"b_q": weights["b_q"], "b_k": weights["b_k"], "path": path}
        return cross_attention(
            x,
            kv,
            weights["w_q"],
            weights["w_k"],
            w_v,
            None,
            num_heads=heads,
            rope=rope,
            **positions,
            **b,
        )

    own = {"w_q": w_q, "w_k": w_k, "b_q": b_q, "b_k": b_k}
    rows = pair_rows(head_dim, heads, source=source, target=other, rotary_dim=rotary_dim, axes=axes)
    moved = {name: select_rows(x, rows) for name, x in own.items()}
    assert_tensor_near(attend(other, **moved), attend(source, **own), 512)


def test_croco_by_its_formula() -> None:
    """``new[2 (a Q + j) + t] = old[2 a Q + t Q + j]`` inside each head."""
    quarter = 4
    rows = pair_rows(16, 2, source="half", target="interleaved", axes=2)
    for head in range(2):
        for a in range(2):
            for t in range(2):
                for j in range(quarter):
                    new = head * 16 + 2 * (a * quarter + j) + t
                    assert int(rows[new]) == head * 16 + 2 * a * quarter + t * quarter + j


def test_there_and_back_is_where_it_was() -> None:
    there = pair_rows(20, 3, source="half", target="interleaved", rotary_dim=12, axes=3)
    back = pair_rows(20, 3, source="interleaved", target="half", rotary_dim=12, axes=3)
    assert torch.equal(there[back], torch.arange(60))


def test_rows_of_heads() -> None:
    assert head_rows(torch.tensor([1, 0]), 3).tolist() == [3, 4, 5, 0, 1, 2]
    assert select_rows(None, torch.arange(3)) is None


@pytest.mark.parametrize("rotary_dim, axes", [(18, 1), (6, 2), (-2, 1)])
def test_impossible_widths(rotary_dim: int, axes: int) -> None:
    with pytest.raises(ValueError, match="rotary_dim: expected a multiple"):
        pair_rows(16, 2, source="half", target="interleaved", rotary_dim=rotary_dim, axes=axes)


def test_unknown_pairing() -> None:
    with pytest.raises(ValueError, match="pairing: expected"):
        pair_rows(16, 2, source="halved", target="interleaved")  # type: ignore[arg-type]
