"""Swapped attentions under ``torch.compile``: one graph, no break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fused_rope_xattn.swap import Draw, swap_cross_attention
from fused_rope_xattn.swap.registry import find_adapter
from reference_models import CrossAttention, RoPE2D, RoPEAttention
from swap_models import output, package


def _multihead() -> nn.Module:
    return nn.MultiheadAttention(32, 4, batch_first=True)


def _croco() -> nn.Module:
    return CrossAttention(32, RoPE2D(), 2)


def _sam2() -> nn.Module:
    return RoPEAttention(32, 1, kv_in_dim=16, rope_k_repeat=True, feat_sizes=(4, 4))


def _ltx2() -> nn.Module:
    file = package("diffusers.models.transformers.transformer_ltx2")
    return file.LTX2Attention(32, 4, 4, 8, cross_attention_dim=24, apply_gated_attention=True)


def _diffusers() -> nn.Module:
    file = package("diffusers.models.attention_processor")
    return file.Attention(32, 24, heads=4, dim_head=8, qk_norm="rms_norm")


def _xtransformers() -> nn.Module:
    file = package("x_transformers.x_transformers")
    return file.Attention(32, 8, dim_context=24, heads=4, kv_heads=2, num_mem_kv=2)


def _sam2_transformers() -> nn.Module:
    file = package("transformers.models.sam2_video.modeling_sam2_video")
    config = package("transformers").Sam2VideoConfig(memory_attention_hidden_size=32)
    config._attn_implementation = "sdpa"
    return file.Sam2VideoRoPEAttention(config, kv_in_dim=16, rope_k_repeat=True)


FAMILIES = [_multihead, _croco, _sam2, _ltx2, _diffusers, _xtransformers, _sam2_transformers]


@pytest.mark.parametrize(
    "make",
    # Tracing takes many seconds, whatever the sizes.
    [
        pytest.param(f, id=f.__name__[1:], marks=[pytest.mark.slow] * (i > 0))
        for i, f in enumerate(FAMILIES)
    ],
)
def test_one_graph(make: Any) -> None:
    module = make().eval()
    adapter = find_adapter(module)
    assert adapter is not None
    call = adapter.probe(module, Draw(module))
    assert call is not None
    swap_cross_attention(module, paths="*")
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    want, got = (output(m(*call[0], **call[1])) for m in (module, compiled))
    torch.testing.assert_close(got, want)
    got.sum().backward()
