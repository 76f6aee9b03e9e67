"""Vision blocks of published models, written out from their formulas, against one call each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import RoPE, RotaryTable, cross_attention
from problems import Target
from written_out import (
    TOLERANCE,
    agree,
    attend,
    complex_rotate,
    heads,
    j_interleaved,
    leaves_of,
    linears,
    merge,
    sam2_angles,
    weights,
)

# ---- CroCo, DUSt3R, MASt3R, CUT3R: 2-D half pairs, (y, x) positions, per sample ----


def croco_rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """[u_y | v_y | u_x | v_x] of a head [B, H, T, D], positions [B, T, 2] as (y, x)."""
    quarter = x.shape[-1] // 4
    frequency = base ** (-torch.arange(quarter, device=x.device).float() / quarter)
    parts = []
    for axis, block in enumerate(x.chunk(2, dim=-1)):
        angle = (positions[..., axis, None].float() * frequency)[:, None]
        u, v = block.chunk(2, dim=-1)
        parts += [u * angle.cos() - v * angle.sin(), v * angle.cos() + u * angle.sin()]
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("num_queries, num_keys", [(48, 48), (48, 49)])
def test_croco(target: Target, num_queries: int, num_keys: int) -> None:
    """One sample portrait, one landscape, and a pose token at (-1, -1) among the keys."""
    layers = linears(target.device, q=(96, 96), k=(96, 96), v=(96, 96), out=(96, 96))
    query = torch.randn(2, num_queries, 96, device=target.device, requires_grad=True)
    memory = torch.randn(2, num_keys, 96, device=target.device, requires_grad=True)
    grid = torch.cartesian_prod(torch.arange(6), torch.arange(8)).to(target.device)
    tall = torch.cartesian_prod(torch.arange(8), torch.arange(6)).to(target.device)
    qpos = torch.stack([grid, tall])
    pose = torch.full((2, num_keys - 48, 2), -1, device=target.device)
    kpos = torch.cat([pose, torch.stack([tall, grid])], dim=1)

    q = croco_rotate(heads(layers["q"](query), 3), qpos, 100.0)
    k = croco_rotate(heads(layers["k"](memory), 3), kpos, 100.0)
    want = layers["out"](merge(attend(q, k, heads(layers["v"](memory), 3))))
    w, b = weights(layers)
    rope = RoPE(100.0, interleaved=False, axes=2)
    got = cross_attention(
        query,
        memory,
        *w,
        num_heads=3,
        rope=rope,
        q_positions=qpos,
        k_positions=kpos,
        path=target.path,
        **b,
    )
    agree(got, want, leaves_of(layers, query, memory))


def test_croco_weights_move_to_interleaved_pairs(target: Target) -> None:
    """Rows new[2 (a Q + j) + t] = old[2 a Q + t Q + j] of q and k, with the same positions."""
    layers = linears(target.device, q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64))
    w, b = weights(layers)
    x, kv = (torch.randn(2, t, 64, device=target.device) for t in (9, 12))
    positions = {
        n: torch.randint(-1, 20, (2, t, 2), device=target.device)
        for n, t in (("q_positions", 9), ("k_positions", 12))
    }
    quarter = 8
    order = torch.empty(32, dtype=torch.int64)
    for a in range(2):
        for t in range(2):
            for j in range(quarter):
                order[2 * (a * quarter + j) + t] = 2 * a * quarter + t * quarter + j
    order = torch.cat([order, 32 + order]).to(target.device)
    half = cross_attention(
        x,
        kv,
        *w,
        num_heads=2,
        rope=RoPE(100.0, interleaved=False, axes=2),
        path=target.path,
        **positions,
        **b,
    )
    moved = {**b, "b_q": b["b_q"][order], "b_k": b["b_k"][order]}
    got = cross_attention(
        x,
        kv,
        w[0][order],
        w[1][order],
        w[2],
        w[3],
        num_heads=2,
        rope=RoPE(100.0, axes=2),
        path=target.path,
        **positions,
        **moved,
    )
    assert float((got - half).abs().max()) < TOLERANCE


@pytest.mark.parametrize("side", ["q", "k"])
def test_cut3r_leaves_a_side_unrotated(target: Target, side: str) -> None:
    """qpos=None or kpos=None there means no rotation of that side."""
    layers = linears(target.device, q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64))
    x, kv = (torch.randn(1, t, 64, device=target.device, requires_grad=True) for t in (9, 12))
    q, k = heads(layers["q"](x), 2), heads(layers["k"](kv), 2)
    rope = RoPE(100.0, interleaved=False, axes=2)
    positions = torch.randint(-1, 24, (1, 9 if side == "q" else 12, 2), device=target.device)
    if side == "q":
        q = croco_rotate(q, positions, 100.0)
    else:
        k = croco_rotate(k, positions, 100.0)
    want = layers["out"](merge(attend(q, k, heads(layers["v"](kv), 2))))
    w, b = weights(layers)
    got = cross_attention(
        x,
        kv,
        *w,
        num_heads=2,
        rope=(rope, None) if side == "q" else (None, rope),
        path=target.path,
        **{f"{side}_positions": positions},
        **b,
    )
    agree(got, want, leaves_of(layers, x, kv))


# ---- SAM 2, SAM 3, EdgeTAM: complex tables of an x-y grid, tiled over memories, a bare tail ----


@pytest.mark.parametrize("head_dim, num_heads", [(32, 1), (256, 1), (32, 2)])
@pytest.mark.parametrize("tail", [0, 5])
def test_sam2(target: Target, head_dim: int, num_heads: int, tail: int) -> None:
    """16 = 4 x 4 queries; three tiled memories; ``tail`` object pointers keep their phase."""
    inner, width = head_dim * num_heads, 64
    layers = linears(
        target.device, q=(width, inner), k=(16, inner), v=(16, inner), out=(inner, width)
    )
    num_keys = 3 * 16 + tail
    x = torch.randn(2, 16, width, device=target.device, requires_grad=True)
    memory = torch.randn(2, num_keys, 16, device=target.device, requires_grad=True)
    places = torch.randn(2, num_keys, 16, device=target.device)
    angle = sam2_angles(4, 4, head_dim, target.device)

    q = complex_rotate(heads(layers["q"](x), num_heads), angle)
    k = heads(layers["k"](memory + places), num_heads)
    turned = complex_rotate(k[:, :, : num_keys - tail], angle.repeat(3, 1))
    k = torch.cat([turned, k[:, :, num_keys - tail :]], dim=2)
    want = layers["out"](merge(attend(q, k, heads(layers["v"](memory), num_heads))))

    w, b = weights(layers)
    all_angles = torch.cat([angle.repeat(3, 1), angle.new_zeros(tail, head_dim // 2)])
    rope = tuple(RotaryTable(a.cos(), a.sin()) for a in (angle, all_angles))
    got = cross_attention(
        x,
        memory + places,
        *w,
        num_heads=num_heads,
        x_value=memory,
        rope=rope,
        path=target.path,
        **b,
    )
    agree(got, want, leaves_of(layers, x, memory))


def test_sam2_as_axial_positions(target: Target) -> None:
    """The same grid without tables: positions (x, y), base 1e4, axes of D / 2."""
    layers = linears(target.device, q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64))
    x, kv = (torch.randn(2, 20, 64, device=target.device, requires_grad=True) for _ in range(2))
    angle = sam2_angles(5, 4, 64, target.device)
    q, k = (complex_rotate(heads(layers[n](t), 1), angle) for n, t in (("q", x), ("k", kv)))
    want = layers["out"](merge(attend(q, k, heads(layers["v"](kv), 1))))
    t = torch.arange(20, device=target.device)
    grid = torch.stack([t % 5, t // 5], dim=-1)
    w, b = weights(layers)
    got = cross_attention(
        x,
        kv,
        *w,
        num_heads=1,
        rope=RoPE(axes=2),
        q_positions=grid,
        k_positions=grid,
        path=target.path,
        **b,
    )
    agree(got, want, leaves_of(layers, x, kv))


def test_edgetam_identity_rows(target: Target) -> None:
    """Groups of L keys: the first L - S keep their phase, the last S follow a small grid."""
    layers = linears(target.device, q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64))
    x = torch.randn(1, 16, 64, device=target.device, requires_grad=True)
    kv = torch.randn(1, 2 * 12 + 3, 64, device=target.device, requires_grad=True)
    angle, small = (sam2_angles(s, s, 64, target.device) for s in (4, 2))
    group = torch.cat([small.new_zeros(8, 32), small])
    k_angle = torch.cat([group, group, group.new_zeros(3, 32)])
    q = complex_rotate(heads(layers["q"](x), 1), angle)
    k = heads(layers["k"](kv), 1)
    parts = list(k.split([8, 4, 8, 4, 3], dim=2))
    parts[1], parts[3] = complex_rotate(parts[1], small), complex_rotate(parts[3], small)
    want = layers["out"](merge(attend(q, torch.cat(parts, 2), heads(layers["v"](kv), 1))))
    w, b = weights(layers)
    got = cross_attention(
        x,
        kv,
        *w,
        num_heads=1,
        path=target.path,
        **b,
        rope=tuple(RotaryTable(a.cos(), a.sin()) for a in (angle, k_angle)),
    )
    agree(got, want, leaves_of(layers, x, kv))


def test_full_width_tables_of_the_transformers_port(target: Target) -> None:
    """Each frequency written twice: the same numbers as half-width tables."""
    layers = linears(target.device, q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64))
    x = torch.randn(2, 16, 64, device=target.device, requires_grad=True)
    angle = sam2_angles(4, 4, 32, target.device).repeat_interleave(2, dim=-1)
    q, k = (heads(layers[n](x), 2) for n in ("q", "k"))
    q, k = (t * angle.cos() + j_interleaved(t) * angle.sin() for t in (q, k))
    want = layers["out"](merge(attend(q, k, heads(layers["v"](x), 2))))
    w, b = weights(layers)
    rope = RotaryTable(angle.cos(), angle.sin(), full_width=True)
    got = cross_attention(x, x, *w, num_heads=2, rope=rope, path=target.path, **b)
    agree(got, want, leaves_of(layers, x))
