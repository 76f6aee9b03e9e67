"""``Attention`` of x-transformers with a context, in the installed library's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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

C, H, TQ, TK = 32, 4, 9, 7


class Attender(nn.Module):
    """Layers that look at a context; ``context_pos`` makes them rotate."""

    def __init__(self, kind: str = "CrossAttender", **options: Any) -> None:
        super().__init__()
        library = package("x_transformers")
        torch.manual_seed(0)
        settings = {"dim": C, "depth": 2, "heads": H, "attn_dim_head": 32, "rotary_pos_emb": True}
        self.layers = getattr(library, kind)(**settings, **options)

    def forward(self, x: Tensor, context: Tensor, **given: Any) -> Tensor:
        return self.layers(x, context=context, **given)


def call(**given: Any) -> Call:
    torch.manual_seed(1)
    return Call((torch.randn(2, TQ, C), torch.randn(2, TK, C)), given)


def positions() -> Tensor:
    return torch.arange(TK) + 3


def masks() -> dict[str, Tensor]:
    mask, context_mask = torch.ones(2, TQ).bool(), torch.ones(2, TK).bool()
    mask[0, 6:], context_mask[1, 3:] = False, False
    return {"mask": mask, "context_mask": context_mask}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "grouped": {"attn_kv_heads": 2},
    "one_kv_head": {"attn_one_kv_head": True},
    "memories": {"attn_num_mem_kv": 3},
    "grouped_memories": {"attn_kv_heads": 2, "attn_num_mem_kv": 3},
    "last_heads_rotate": {"attn_rotate_num_heads": 1},
    "cosine": {"attn_qk_norm": True, "attn_num_mem_kv": 2},
    "partial_rotary": {"rotary_emb_dim": 16},
    "interpolated": {"rotary_interpolation_factor": 2.0},
    "rescaled": {"rotary_base_rescale_factor": 4.0},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options(device: str, options: str) -> None:
    made = call(context_pos=positions(), **masks())
    report = check_fp32(Attender(**OPTIONS[options]), made, device, swaps=2)
    assert {e.kind for e in report} == {"x-transformers Attention"}


@pytest.mark.parametrize("given", ["nothing", "positions", "sample_positions", "masks"])
def test_calls(device: str, given: str) -> None:
    """Without ``context_pos`` nothing rotates; positions may differ by sample."""
    torch.manual_seed(2)
    made = {
        "nothing": {},
        "positions": {"context_pos": positions(), "pos": torch.arange(TQ) - 4},
        "sample_positions": {"context_pos": torch.randint(0, 50, (2, TK))},
        "masks": masks(),
    }[given]
    check_fp32(Attender(), call(**made), device, swaps=2)


@pytest.mark.parametrize("options", [{}, {"rotary_xpos": True}, {"attn_kv_heads": 2}])
def test_decoder(device: str, options: dict[str, Any]) -> None:
    """Its causal self-attentions stay; xPos scales reach the cross-attentions as well."""
    made = call(context_pos=positions())
    report = check_fp32(Attender("Decoder", cross_attend=True, **options), made, device, swaps=2)
    assert [e.why for e in report.left_alone] == ["self-attention"] * 2


def test_bf16(device: str) -> None:
    where = torch.arange(30)

    def draw() -> Call:
        tokens = torch.randn(4, 40, C), torch.randn(4, 30, C)
        return Call(tokens, {"context_pos": where})

    check_bf16(Attender(), draw, device)


def test_training(device: str) -> None:
    made = call(context_pos=positions())
    check_training(Attender(attn_num_mem_kv=2, attn_kv_heads=2), made, device)


def test_undo(device: str) -> None:
    check_undo(Attender(), call(context_pos=positions()), device)


def attention(**options: Any) -> Any:
    file = package("x_transformers.x_transformers")
    torch.manual_seed(0)
    return file.Attention(C, 8, dim_context=24, heads=H, **options)


@pytest.mark.parametrize("kv_heads", [H, 2])
def test_masks_and_biases_by_head(device: str, kv_heads: int) -> None:
    """Head h of a mask stays head h, though grouped heads are dealt in another order."""
    tokens = torch.randn(2, TQ, C), torch.randn(2, TK, 24)
    mask = torch.rand(H, TQ, TK) < 0.6
    mask[..., 0] = True
    given = {"attn_mask": mask, "attn_bias": torch.randn(H, TQ, TK)}
    check_fp32(attention(kv_heads=kv_heads), Call(tokens, given), device, swaps=1)


def test_intermediates(device: str) -> None:
    """What generation and value residuals read is there when it is asked for."""
    module = attention().to(device)
    x, kv = torch.randn(2, TQ, C, device=device), torch.randn(2, TK, 24, device=device)
    _, want = module(x, kv, return_intermediates=True)
    swap_cross_attention(module)
    with counted_calls() as calls:
        _, got = module(x, kv, return_intermediates=True)
    assert len(calls) == 1
    torch.testing.assert_close(got.values, want.values)
    torch.testing.assert_close(got.cached_kv, want.cached_kv)
    assert got.to_tuple() == (None, None, None)


def test_dropout_only_in_training() -> None:
    module = attention(dropout=0.2)
    swap_cross_attention(module)
    x, kv = torch.randn(2, TQ, C), torch.randn(2, TK, 24)
    with counted_calls() as calls:
        module(x, kv)
        module.eval()(x, kv)
    assert [c.dropout_p for c in calls] == [0.2, 0.0]


def test_calls_that_run_its_own_code() -> None:
    module = attention()
    x, kv = torch.randn(2, TQ, C), torch.randn(2, TK, 24)
    given = {"k_delta": torch.randn(2, TK, 32)}
    want = module(x, kv, **given)
    swap_cross_attention(module)
    with counted_calls() as calls, pytest.warns(RuntimeWarning, match="arguments k_delta"):
        assert torch.equal(module(x, kv, **given), want)
    assert not calls


@pytest.mark.parametrize(
    "options, why",
    [
        ({"qk_rmsnorm": True}, "it uses q_rmsnorm, k_rmsnorm"),
        ({"gate_values": True}, "it uses to_v_gate"),
        ({"pre_talking_heads": True}, "it uses attend.pre_softmax_talking_heads"),
        ({"sigmoid": True}, "no softmax"),
        ({"hard": True}, "no softmax"),
        ({"l2_distance": True}, "it uses attend.l2_distance"),
        ({"value_dim_head": 4}, "another head dim"),
        ({"on_attn": True}, "it uses attn_on_attn"),
        ({"qk_norm": True, "qk_norm_groups": 2}, "qk_norm has groups"),
        ({"head_scale": True}, "it uses head_scale"),
        ({"add_zero_kv": True}, "it uses attend.add_zero_kv"),
        ({"softclamp_logits": True}, "it uses attend.softclamp_logits"),
        ({"max_attend_past": 3}, "it uses max_attend_past"),
    ],
)
def test_refused_options(options: dict[str, Any], why: str) -> None:
    (entry,) = swap_cross_attention(attention(**options))
    assert not entry.swapped
    assert why in entry.why


def test_scores_handed_from_layer_to_layer_are_refused() -> None:
    model = Attender(cross_residual_attn=True)
    report = swap_cross_attention(model)
    assert {e.why for e in report} == {"cross_residual_attn hands scores from layer to layer"}
