"""Memory attention of SAM 2 and EdgeTAM as transformers has it: the installed models themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fused_rope_xattn.swap import swap_cross_attention
from swap_models import (
    Call,
    check_bf16,
    check_fp32,
    check_training,
    check_undo,
    counted_calls,
    package,
)

C, CM = 32, 64  # the width of memories is fixed there
SIZES = {
    "memory_attention_hidden_size": C,
    "memory_attention_num_layers": 2,
    "memory_attention_rope_feat_sizes": [4, 4],
    "memory_attention_dropout": 0.0,
}


def sam2(implementation: str = "sdpa", **options: Any) -> nn.Module:
    transformers = package("transformers")
    settings = {**SIZES, "memory_attention_feed_forward_hidden_size": 48}
    settings |= {"memory_attention_rope_dropout": 0.0, **options}
    config = transformers.Sam2VideoConfig(**settings)
    config._attn_implementation = implementation
    file = package("transformers.models.sam2_video.modeling_sam2_video")
    return file.Sam2VideoMemoryAttention(config)


def edgetam() -> nn.Module:
    transformers = package("transformers")
    settings = {**SIZES, "memory_attention_mlp_hidden_size": 48}
    settings |= {"memory_attention_rope_dropout": 0.0, "memory_attention_rope_k_sizes": [2, 2]}
    config = transformers.EdgeTamVideoConfig(**settings)
    config._attn_implementation = "sdpa"
    file = package("transformers.models.edgetam_video.modeling_edgetam_video")
    return file.EdgeTamVideoMemoryAttention(config)


def call(memories: int = 3, pointers: int = 5, batch: int = 2) -> Call:
    """Tokens come first there, then the batch."""
    keys = 16 * memories + pointers
    shapes = (16, batch, C), (keys, batch, CM), (16, batch, C), (keys, batch, CM)
    torch.manual_seed(1)
    return Call((*map(torch.randn, shapes), pointers))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("memories, pointers", [(3, 5), (1, 0), (0, 4)])
def test_memory_attention(device: str, memories: int, pointers: int, implementation: str) -> None:
    report = check_fp32(sam2(implementation), call(memories, pointers), device, swaps=2)
    assert {e.kind for e in report} == {"transformers Sam2VideoRoPEAttention"}
    assert [e.why for e in report.left_alone] == ["self-attention"] * 2


def test_two_heads(device: str) -> None:
    check_fp32(sam2(memory_attention_num_attention_heads=2), call(), device, swaps=2)


def test_self_attention_too(device: str) -> None:
    check_fp32(sam2(), call(), device, 4, self_attention=True)


def test_edgetam(device: str) -> None:
    """Two groups of 3 latents and a 2 x 2 grid, and pointers: identity rows in the table."""
    keys = 2 * (3 + 4) + 5
    shapes = (16, 2, C), (keys, 2, CM), (16, 2, C), (keys, 2, CM)
    arguments = Call((*map(torch.randn, shapes), 5), {"num_spatial_memory_tokens": 2})
    report = check_fp32(edgetam(), arguments, device, swaps=2)
    assert {e.kind for e in report.swapped} == {"transformers EdgeTamVideoRoPECrossAttention"}


def test_sam3_has_the_same_attention() -> None:
    package("transformers")
    file = package("transformers.models.sam3_tracker_video.modeling_sam3_tracker_video")
    configuration = package(
        "transformers.models.sam3_tracker_video.configuration_sam3_tracker_video"
    )
    config = configuration.Sam3TrackerVideoConfig(**SIZES)
    config._attn_implementation = "sdpa"
    module = file.Sam3TrackerVideoRoPEAttention(config, kv_in_dim=CM, rope_k_repeat=True)
    (entry,) = swap_cross_attention(module, verify=True)
    assert entry.swapped
    assert entry.difference is not None


def test_bf16(device: str) -> None:
    model = sam2()
    shapes = (16, 4, C), (53, 4, CM), (16, 4, C), (53, 4, CM)
    check_bf16(model, lambda: Call((*map(torch.randn, shapes), 5)), device)


def test_training(device: str) -> None:
    check_training(sam2(), call(), device)


def test_undo(device: str) -> None:
    check_undo(sam2(), call(), device)


def test_dropout_only_in_training() -> None:
    model, arguments = sam2(memory_attention_rope_dropout=0.1), call()
    swap_cross_attention(model)
    with counted_calls() as calls:
        model.train()(*arguments.args)
        model.eval()(*arguments.args)
    assert [c.dropout_p for c in calls] == [0.1, 0.1, 0.0, 0.0]
