"""Generative and text blocks of published models, and torch's own, against one call each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_rope_xattn import Norm, RoPE, RotaryTable, cross_attention
from problems import Target
from written_out import (
    agree,
    attend,
    complex_rotate,
    heads,
    j_half,
    j_interleaved,
    leaves_of,
    linears,
    merge,
    sam2_angles,
    weights,
)

# ---- LTX-2: RMS norm over the inner width, a frequency range for each head ----


def rms_inner(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def ltx_angles(times: Tensor, inner: int, num_heads: int) -> Tensor:
    """[B, H, T, D/2]: growing frequencies, dealt to the heads in order."""
    n = inner // 2
    frequency = math.pi / 2 * 1e4 ** (torch.arange(n, device=times.device) / (n - 1))
    angle = (2.0 * times / 20.0 - 1.0)[..., None] * frequency
    return angle.unflatten(-1, (num_heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("split", [True, False])
def test_ltx2(target: Target, split: bool) -> None:
    """SPLIT is the half convention in a head, INTERLEAVED pairs neighbours."""
    num_heads, inner = 4, 32
    layers = linears(target.device, q=(48, inner), k=(24, inner), v=(24, inner), out=(inner, 48))
    x = torch.randn(2, 30, 48, device=target.device, requires_grad=True)
    context = torch.randn(2, 13, 24, device=target.device, requires_grad=True)
    gains = [
        (1 + 0.2 * torch.randn(inner, device=target.device)).requires_grad_() for _ in range(2)
    ]
    tables = [
        ltx_angles(torch.rand(2, t, device=target.device) * 20, inner, num_heads) for t in (30, 13)
    ]

    def rotated(y: Tensor, angle: Tensor) -> Tensor:
        y = heads(y, num_heads)
        if split:
            return y * angle.cos().repeat(1, 1, 1, 2) + j_half(y) * angle.sin().repeat(1, 1, 1, 2)
        wide = angle.repeat_interleave(2, dim=-1)
        return y * wide.cos() + j_interleaved(y) * wide.sin()

    q = rotated(rms_inner(layers["q"](x), gains[0]), tables[0])
    k = rotated(rms_inner(layers["k"](context), gains[1]), tables[1])
    want = layers["out"](merge(attend(q, k, heads(layers["v"](context), num_heads))))
    w, b = weights(layers)
    got = cross_attention(
        x,
        context,
        *w,
        num_heads=num_heads,
        path=target.path,
        **b,
        q_norm=Norm("rms", gains[0], over="inner"),
        k_norm=Norm("rms", gains[1], over="inner"),
        rope=tuple(RotaryTable(a.cos(), a.sin(), interleaved=not split) for a in tables),
    )
    agree(got, want, leaves_of(layers, x, context, *gains))


def test_ltx2_gate_goes_between_attention_and_projection(target: Target) -> None:
    """w_out=None hands back the merged heads, so that a gate can come first."""
    layers = linears(target.device, q=(48, 32), k=(24, 32), v=(24, 32), out=(32, 48), gate=(48, 4))
    x = torch.randn(2, 30, 48, device=target.device, requires_grad=True)
    context = torch.randn(2, 13, 24, device=target.device, requires_grad=True)
    q, k, v = (heads(layers[n](t), 4) for n, t in (("q", x), ("k", context), ("v", context)))
    gate = 2 * layers["gate"](x).sigmoid()
    want = layers["out"](merge(attend(q, k, v) * gate.transpose(1, 2)[..., None]))
    w, b = weights(layers)
    out = {n: b[n] for n in ("b_q", "b_k", "b_v")}
    o = cross_attention(x, context, *w[:3], None, num_heads=4, rope=None, path=target.path, **out)
    got = layers["out"]((o.unflatten(-1, (4, 8)) * gate[..., None]).flatten(2))
    agree(got, want, leaves_of(layers, x, context))


# ---- x-transformers: partial rotary with separate positions, no biases ----


@pytest.mark.parametrize("batched", [False, True])
def test_x_transformers_context_positions(target: Target, batched: bool) -> None:
    rot = 16
    layers = linears(target.device, bias=False, q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64))
    x = torch.randn(2, 11, 64, device=target.device, requires_grad=True)
    context = torch.randn(2, 23, 64, device=target.device, requires_grad=True)
    pos = torch.arange(11, device=target.device)
    shape = (2, 23) if batched else (23,)
    context_pos = torch.randint(0, 60, shape, device=target.device)
    context_mask = torch.rand(2, 23, device=target.device) < 0.7
    frequency = 1e4 ** (-torch.arange(0, rot, 2, device=target.device) / rot)

    def rotated(y: Tensor, positions: Tensor) -> Tensor:
        angle = (positions[..., None] * frequency).repeat_interleave(2, dim=-1)
        angle = angle[:, None] if angle.dim() == 3 else angle
        first, rest = y[..., :rot], y[..., rot:]
        return torch.cat([first * angle.cos() + j_interleaved(first) * angle.sin(), rest], dim=-1)

    q = rotated(heads(layers["q"](x), 2), pos)
    k = rotated(heads(layers["k"](context), 2), context_pos)
    mask = context_mask[:, None, None]
    want = layers["out"](merge(attend(q, k, heads(layers["v"](context), 2), mask)))
    w, _ = weights(layers)
    got = cross_attention(
        x,
        context,
        *w,
        num_heads=2,
        rope=RoPE(rotary_dim=rot),
        k_positions=context_pos,
        kv_keep_mask=context_mask,
        path=target.path,
    )
    agree(got, want, leaves_of(layers, x, context))


@pytest.mark.parametrize("which", ["last", "first"])
def test_some_heads_rotated(target: Target, which: str) -> None:
    """rotate_num_heads: identity rows for the others (the last rotate; F5-TTS: the first)."""
    layers = linears(target.device, bias=False, q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64))
    x, kv = (torch.randn(2, t, 64, device=target.device, requires_grad=True) for t in (11, 23))
    chosen = torch.tensor([0, 0, 0, 1] if which == "last" else [1, 0, 0, 0], device=target.device)
    frequency = 1e4 ** (-torch.arange(0, 16, 2, device=target.device) / 16)
    angles = [
        torch.arange(t, device=target.device)[:, None] * frequency * chosen[:, None, None]
        for t in (11, 23)
    ]
    turned = [
        complex_rotate(heads(layers[n](t), 4), a)
        for n, t, a in (("q", x, angles[0]), ("k", kv, angles[1]))
    ]
    want = layers["out"](merge(attend(*turned, heads(layers["v"](kv), 4))))
    w, _ = weights(layers)
    got = cross_attention(
        x,
        kv,
        *w,
        num_heads=4,
        path=target.path,
        rope=tuple(RotaryTable(a.cos(), a.sin()) for a in angles),
    )
    agree(got, want, leaves_of(layers, x, kv))


def test_xpos_scales_through_full_width_tables(target: Target) -> None:
    """Tables need not be on the unit circle: q is scaled up, k down."""
    layers = linears(target.device, bias=False, q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64))
    x, kv = (torch.randn(2, t, 64, device=target.device, requires_grad=True) for t in (11, 23))
    j = torch.arange(16, device=target.device)
    base_scale = (2 * j + 0.4 * 32) / (1.4 * 32)
    tables, turned = [], []
    for name, source, tokens, sign in (("q", x, 11, 1.0), ("k", kv, 23, -1.0)):
        p = torch.arange(tokens, device=target.device)[:, None]
        angle = p * 1e4 ** (-j / 16)
        scale = base_scale ** (sign * (p - tokens // 2) / 512)
        tables.append(RotaryTable(scale * angle.cos(), scale * angle.sin()))
        turned.append(
            complex_rotate(heads(layers[name](source), 2), angle)
            * scale.repeat_interleave(2, dim=-1)
        )
    want = layers["out"](merge(attend(*turned, heads(layers["v"](kv), 2))))
    w, _ = weights(layers)
    got = cross_attention(x, kv, *w, num_heads=2, rope=tuple(tables), path=target.path)
    agree(got, want, leaves_of(layers, x, kv))


# ---- HunyuanDiT, Lumina: rotated queries against text keys ----


def test_hunyuan_rotates_queries_only(target: Target) -> None:
    """Per-head LayerNorm on q and k, 2-D rotation on q, one kv_proj with k's rows first."""
    layers = linears(target.device, q=(64, 64), kv=(40, 128), out=(64, 64))
    x = torch.randn(2, 24, 64, device=target.device, requires_grad=True)
    text = torch.randn(2, 10, 40, device=target.device, requires_grad=True)
    norms = [nn.LayerNorm(32, eps=1e-6, device=target.device) for _ in range(2)]
    for norm in norms:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    angle = sam2_angles(6, 4, 32, target.device).repeat_interleave(2, dim=-1)
    k, v = layers["kv"](text).chunk(2, dim=-1)
    q, k = norms[0](heads(layers["q"](x), 2)), norms[1](heads(k, 2))
    q = q * angle.cos() + j_interleaved(q) * angle.sin()
    want = layers["out"](merge(attend(q, k, heads(v, 2))))

    w_k, w_v = layers["kv"].weight.chunk(2)
    b_k, b_v = layers["kv"].bias.chunk(2)
    t = torch.arange(24, device=target.device)
    got = cross_attention(
        x,
        text,
        layers["q"].weight,
        w_k,
        w_v,
        layers["out"].weight,
        num_heads=2,
        b_q=layers["q"].bias,
        b_k=b_k,
        b_v=b_v,
        b_out=layers["out"].bias,
        q_norm=Norm("layer", norms[0].weight, norms[0].bias),
        k_norm=Norm("layer", norms[1].weight, norms[1].bias),
        rope=(RoPE(axes=2), None),
        q_positions=torch.stack([t % 6, t // 6], dim=-1),
        path=target.path,
    )
    parameters = [p for n in norms for p in n.parameters()]
    agree(got, want, [*leaves_of(layers, x, text), *parameters])


def test_lumina_full_width_norms_with_grouped_heads(target: Target) -> None:
    layers = linears(target.device, q=(64, 64), k=(40, 32), v=(40, 32), out=(64, 64))
    x = torch.randn(2, 24, 64, device=target.device, requires_grad=True)
    text = torch.randn(2, 10, 40, device=target.device, requires_grad=True)
    norms = [nn.LayerNorm(w, device=target.device) for w in (64, 32)]
    for norm in norms:
        nn.init.normal_(norm.weight)
    angle = torch.arange(24, device=target.device)[:, None] * 1e4 ** (
        -torch.arange(8, device=target.device) / 8
    )
    q = complex_rotate(heads(norms[0](layers["q"](x)), 4), angle)
    k = heads(norms[1](layers["k"](text)), 2).repeat_interleave(2, dim=1)
    v = heads(layers["v"](text), 2).repeat_interleave(2, dim=1)
    want = layers["out"](merge(attend(q, k, v)))
    w, b = weights(layers)
    got = cross_attention(
        x,
        text,
        *w,
        num_heads=4,
        num_kv_heads=2,
        rope=(RoPE(), None),
        path=target.path,
        **b,
        q_norm=Norm("layer", norms[0].weight, norms[0].bias, eps=1e-5, over="inner"),
        k_norm=Norm("layer", norms[1].weight, norms[1].bias, eps=1e-5, over="inner"),
    )
    parameters = [p for n in norms for p in n.parameters()]
    agree(got, want, [*leaves_of(layers, x, text), *parameters])


# ---- torch.nn.MultiheadAttention: no rotation, packed weights, inverted mask ----


def test_multihead_attention(target: Target) -> None:
    theirs = nn.MultiheadAttention(64, 4, kdim=40, vdim=24, batch_first=True, device=target.device)
    nn.init.normal_(theirs.in_proj_bias)
    x = torch.randn(2, 11, 64, device=target.device, requires_grad=True)
    key = torch.randn(2, 23, 40, device=target.device)
    value = torch.randn(2, 23, 24, device=target.device)
    padded = torch.rand(2, 23, device=target.device) < 0.3
    bias = torch.randn(11, 23, device=target.device)
    additive = torch.zeros(2, 23, device=target.device).masked_fill(padded, -torch.inf)
    want, _ = theirs(x, key, value, key_padding_mask=additive, attn_mask=bias)
    b_q, b_k, b_v = theirs.in_proj_bias.chunk(3)
    got = cross_attention(
        x,
        key,
        theirs.q_proj_weight,
        theirs.k_proj_weight,
        theirs.v_proj_weight,
        theirs.out_proj.weight,
        num_heads=4,
        rope=None,
        x_value=value,
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        b_out=theirs.out_proj.bias,
        kv_keep_mask=~padded,
        attn_bias=bias,
        path=target.path,
    )
    agree(got, want, [x, *theirs.parameters()])
    assert F.mse_loss(got, want) < 1e-10
