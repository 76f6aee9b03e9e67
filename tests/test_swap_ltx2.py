"""The audio-video cross-attention of LTX-2, in the installed model itself."""

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

TEXT = 6
KINDS = ("attn2", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


def model(rope_type: str = "split", **options: Any) -> nn.Module:
    """Two blocks, four heads of 8 for video and of 4 for audio."""
    diffusers = package("diffusers")
    torch.manual_seed(0)
    made = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=4,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
        rope_type=rope_type,
        **options,
    )
    return Answered(made)


class Answered(nn.Module):
    """The model, returning both of its results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        noise = torch.tensor([500.0, 300.0], device=inputs["hidden_states"].device)
        found = self.inner(timestep=noise, sigma=noise / 1000, **inputs)
        return found.sample, found.audio_sample


def call(frames: int = 3, side: int = 2, audio: int = 5, seed: int | None = 1) -> Call:
    if seed is not None:
        torch.manual_seed(seed)
    keep = torch.tensor([[1] * 4 + [0] * 2, [1] * TEXT])
    tokens = {
        "hidden_states": torch.randn(2, frames * side * side, 4),
        "audio_hidden_states": torch.randn(2, audio, 4),
        "encoder_hidden_states": torch.randn(2, TEXT, 16),
        "audio_encoder_hidden_states": torch.randn(2, TEXT, 16),
        "encoder_attention_mask": keep,
        "audio_encoder_attention_mask": keep,
    }
    sizes = {"num_frames": frames, "height": side, "width": side, "audio_num_frames": audio}
    return Call((), {**tokens, **sizes})


@pytest.mark.parametrize("rope_type", ["split", "interleaved"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_elementwise_affine": True},
        {"gated_attn": True, "audio_gated_attn": True, "perturbed_attn": True},
        {"attention_bias": False, "attention_out_bias": False},
    ],
    ids=["plain", "norm_weights", "gated", "no_bias"],
)
def test_model(device: str, rope_type: str, options: dict[str, Any]) -> None:
    report = check_fp32(model(rope_type, **options), call(), device, swaps=8)
    assert sorted({e.path.rpartition(".")[2] for e in report.swapped}) == sorted(KINDS)
    assert {e.why for e in report.left_alone} == {"self-attention"}


@pytest.mark.parametrize("rope_type", ["split", "interleaved"])
def test_self_attention_too(device: str, rope_type: str) -> None:
    """Tables of three axes, padded in front with rows that do not rotate."""
    check_fp32(model(rope_type), call(), device, 12, self_attention=True)


def test_bf16(device: str) -> None:
    check_bf16(model(), lambda: call(6, 5, 60, seed=None), device)


def test_training(device: str) -> None:
    check_training(model(gated_attn=True, audio_gated_attn=True), call(), device)


def test_undo(device: str) -> None:
    check_undo(model(), call(), device)


def attention(**options: Any) -> nn.Module:
    file = package("diffusers.models.transformers.transformer_ltx2")
    return file.LTX2Attention(32, 4, 4, 8, cross_attention_dim=24, **options)


def test_one_table_serves_both_sides(device: str) -> None:
    x, kv = torch.randn(2, 7, 32), torch.randn(2, 7, 24)
    angle = torch.randn(2, 7, 16).repeat_interleave(2, -1)
    given = {"query_rotary_emb": (angle.cos(), angle.sin())}
    check_fp32(attention(), Call((x, kv), given), device, swaps=1)


def test_table_of_the_keys_alone_rotates_nothing(device: str) -> None:
    x, kv = torch.randn(2, 7, 32), torch.randn(2, 9, 24)
    angle = torch.randn(2, 9, 32)
    given = {"key_rotary_emb": (angle.cos(), angle.sin())}
    check_fp32(attention(), Call((x, kv), given), device, swaps=1)


def test_perturbed_calls_run_its_own_code(device: str) -> None:
    file = package("diffusers.models.transformers.transformer_ltx2")
    module = attention(processor=file.LTX2PerturbedAttnProcessor()).to(device)
    x, kv = torch.randn(2, 7, 32, device=device), torch.randn(2, 7, 24, device=device)
    given = {"perturbation_mask": torch.rand(2, 7, 1, device=device)}
    want = module(x, kv, **given)
    swap_cross_attention(module)
    with counted_calls() as calls:
        with pytest.warns(RuntimeWarning, match="arguments perturbation_mask"):
            assert torch.equal(module(x, kv, **given), want)
        assert not calls
        module(x, kv)
    assert len(calls) == 1


def test_another_processor_is_honoured_later(device: str) -> None:
    module = attention().to(device)
    x, kv = torch.randn(2, 7, 32, device=device), torch.randn(2, 9, 24, device=device)
    swap_cross_attention(module)

    class Halving(type(module.processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return 0.5 * super().__call__(*args, **kwargs)

    whole = module(x, kv)
    module.set_processor(Halving())
    with pytest.warns(RuntimeWarning, match="its processor is"):
        torch.testing.assert_close(module(x, kv), 0.5 * whole)


def test_refused_processor_and_backend() -> None:
    module = attention()
    module.processor._attention_backend = "flash"
    (entry,) = swap_cross_attention(module)
    assert "attention backend" in entry.why
    module.processor = object()
    (entry,) = swap_cross_attention(module)
    assert entry.why == "its processor is builtins.object"
