"""``Attention`` of diffusers in cross mode: the installed class, its options and its masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fused_rope_xattn.swap import swap_cross_attention
from swap_models import Call, check_bf16, check_fp32, check_training, check_undo, package

C, CKV, H, TQ, TK = 32, 24, 4, 12, 7


def attention(processor: str = "AttnProcessor2_0", **options: Any) -> Any:
    file = package("diffusers.models.attention_processor")
    torch.manual_seed(0)
    made = file.Attention(C, CKV, heads=H, dim_head=8, **options)
    if processor == "FusedAttnProcessor2_0":
        made.fuse_projections()
    made.set_processor(getattr(file, processor)())
    return made


def block(**options: Any) -> nn.Module:
    file = package("diffusers.models.attention")
    return file.BasicTransformerBlock(C, H, 8, cross_attention_dim=CKV, **options)


def call(**given: Any) -> Call:
    torch.manual_seed(1)
    return Call((torch.randn(2, TQ, C), torch.randn(2, TK, CKV)), given)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "no_out_bias": {"out_bias": False},
    "layer_norm": {"qk_norm": "layer_norm"},
    "rms_norm": {"qk_norm": "rms_norm", "bias": True},
    "bare_rms_norm": {"qk_norm": "rms_norm", "elementwise_affine": False},
    "fp32_layer_norm": {"qk_norm": "fp32_layer_norm"},
    "norm_cross": {"cross_attention_norm": "layer_norm"},
    "norm_cross_groups": {
        "cross_attention_norm": "group_norm",
        "cross_attention_norm_num_groups": 4,
    },
    "residual": {"residual_connection": True, "rescale_output_factor": 2.0, "norm_num_groups": 4},
    "first_processor": {"processor": "AttnProcessor"},
    "unscaled": {"processor": "AttnProcessor", "scale_qk": False},
    "fused": {"processor": "FusedAttnProcessor2_0", "bias": True},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options(device: str, options: str) -> None:
    check_fp32(attention(**OPTIONS[options]), call(), device, swaps=1)


@pytest.mark.parametrize("options", ["plain", "residual"])
def test_images(device: str, options: str) -> None:
    made = Call((torch.randn(2, C, 3, 4), torch.randn(2, TK, CKV)))
    check_fp32(attention(**OPTIONS[options]), made, device, swaps=1)


@pytest.mark.parametrize("processor", ["AttnProcessor", "AttnProcessor2_0"])
@pytest.mark.parametrize("shape", [(2, 1, TK), (2, TQ, TK), (2 * H, 1, TK), (2 * H, TQ, TK)])
def test_added_masks(device: str, shape: tuple[int, ...], processor: str) -> None:
    mask = torch.randn(shape)
    check_fp32(attention(processor), call(attention_mask=mask), device, swaps=1)


@pytest.mark.parametrize("shape", [(2, TK), (2, 1, TK), (2 * H, TQ, TK)])
def test_boolean_masks(device: str, shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    check_fp32(attention(), call(attention_mask=mask), device, swaps=1)


def test_transformer_block(device: str) -> None:
    x, context = call().args
    given = {"encoder_hidden_states": context, "encoder_attention_mask": torch.randn(2, 1, TK)}
    report = check_fp32(block(), Call((x,), given), device, swaps=1)
    assert [(e.path, e.swapped) for e in report] == [("attn1", False), ("attn2", True)]


def test_unet(device: str) -> None:
    """A whole model: its cross-attentions swap, its self-attentions stay."""
    diffusers = package("diffusers")
    torch.manual_seed(0)
    model = Sample(
        diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            layers_per_block=1,
            block_out_channels=(32, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=CKV,
            attention_head_dim=4,
            norm_num_groups=8,
        )
    )
    made = Call((torch.randn(2, 4, 8, 8),), {"encoder_hidden_states": torch.randn(2, TK, CKV)})
    report = check_fp32(model, made, device, swaps=4)
    assert all(e.path.endswith("attn2") for e in report.swapped)


class Sample(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return self.inner(x, timestep=7, **given).sample


def test_bf16(device: str) -> None:
    def draw() -> Call:
        given = {"encoder_hidden_states": torch.randn(4, 20, CKV)}
        return Call((torch.randn(4, 40, C),), given)

    check_bf16(block(), draw, device)


def test_training(device: str) -> None:
    x, context = call().args
    check_training(block(), Call((x,), {"encoder_hidden_states": context}), device)


def test_undo(device: str) -> None:
    x, context = call().args
    check_undo(block(), Call((x,), {"encoder_hidden_states": context}), device)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"added_kv_proj_dim": 8}, "it has a add_k_proj"),
        ({"spatial_norm_dim": 8}, "it has a spatial_norm"),
        ({"kv_heads": 2}, "fewer key heads"),
        ({"qk_norm": "l2"}, "its norm is a LpNorm"),
        ({"qk_norm": "rms_norm_across_heads", "kv_heads": H}, "has shape [32]"),
        ({"qk_norm": "rms_norm", "processor": "AttnProcessor"}, "ignores its norms"),
        ({"processor": "XFormersAttnProcessor"}, "its processor is"),
    ],
)
def test_refused_options(options: dict[str, Any], why: str) -> None:
    (entry,) = swap_cross_attention(attention(**options))
    assert not entry.swapped
    assert why in entry.why


def test_lora_is_refused() -> None:
    """As adapters wrap a projection: another class in its place."""
    made = attention()
    made.to_q = nn.Sequential(made.to_q)
    (entry,) = swap_cross_attention(made)
    assert entry.why == "to_q is a Sequential"
