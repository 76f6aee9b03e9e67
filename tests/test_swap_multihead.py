"""``torch.nn.MultiheadAttention`` runs on this block: every layout of weights and every mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_rope_xattn.swap import swap_cross_attention
from swap_models import (
    Call,
    assert_close,
    check_bf16,
    check_fp32,
    check_training,
    check_undo,
    counted_calls,
    results,
)

E, H, TQ, TK = 32, 4, 5, 7
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "separate": {"kdim": 24, "vdim": 16},
    "no_bias": {"bias": False},
    "separate_no_bias": {"kdim": 24, "vdim": 16, "bias": False},
}


class One(nn.Module):
    """A model of one attention, called with what a test wants to see."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cross_attn = nn.MultiheadAttention(E, H, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.cross_attn(*args, **{"need_weights": False, **kwargs})[0]


def decoder(**options: Any) -> nn.Module:
    layer = nn.TransformerDecoderLayer(E, H, 48, dropout=0.0, **options)
    return nn.TransformerDecoder(layer, 2)


def tokens(batch_first: bool = True, kdim: int = E, vdim: int = E, **_: Any) -> list[Tensor]:
    torch.manual_seed(1)
    made = [torch.randn(2, n, c) for n, c in ((TQ, E), (TK, kdim), (TK, vdim))]
    return made if batch_first else [x.transpose(0, 1).contiguous() for x in made]


def masks() -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(2)
    padding = torch.zeros(2, TK, dtype=torch.bool)
    padding[0, 4:] = True
    banned = torch.rand(TQ, TK) < 0.4
    banned[:, 0] = False
    per_head = torch.rand(2 * H, TQ, TK) < 0.4
    per_head[..., 0] = False
    removed = torch.randn(TQ, TK).masked_fill(banned, -torch.inf)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "padding_added": {"key_padding_mask": torch.randn(2, TK)},
        "banned": {"attn_mask": banned},
        "banned_per_head": {"attn_mask": per_head},
        "added": {"attn_mask": torch.randn(TQ, TK)},
        "added_per_head": {"attn_mask": torch.randn(2 * H, TQ, TK)},
        "added_infinities": {"attn_mask": removed},
        "both": {"key_padding_mask": padding, "attn_mask": banned},
        "both_per_head": {"key_padding_mask": padding, "attn_mask": per_head},
        "both_added": {"key_padding_mask": torch.randn(2, TK), "attn_mask": removed},
    }


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_weights(device: str, layout: str, batch_first: bool) -> None:
    options = {**LAYOUTS[layout], "batch_first": batch_first}
    check_fp32(One(**options), Call(tuple(tokens(**options))), device, swaps=1)


@pytest.mark.parametrize("mask", masks())
def test_masks(device: str, mask: str) -> None:
    call = Call(tuple(tokens()), masks()[mask])
    check_fp32(One(batch_first=True), call, device, swaps=1)


def test_values_that_are_the_keys() -> None:
    query, key, _ = tokens()
    model = One(batch_first=True)
    swap_cross_attention(model)
    with counted_calls() as calls:
        model(query, key, key)
    assert calls[0].x_value is None


@pytest.mark.parametrize("mask", ["padding", "banned", "banned_per_head"])
def test_unbatched_tokens(device: str, mask: str) -> None:
    query, key, value = (x[0] for x in tokens())
    given = {
        "padding": {"key_padding_mask": masks()["padding"]["key_padding_mask"][0]},
        "banned": masks()["banned"],
        "banned_per_head": {"attn_mask": masks()["banned_per_head"]["attn_mask"][:H]},
    }[mask]
    check_fp32(One(), Call((query, key, value), given), device, swaps=1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder(device: str, batch_first: bool) -> None:
    tgt, memory, _ = tokens(batch_first)
    given = {"memory_key_padding_mask": masks()["padding"]["key_padding_mask"]}
    given["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(TQ)
    report = check_fp32(decoder(batch_first=batch_first), Call((tgt, memory), given), device, 2)
    assert [e.why for e in report.left_alone] == ["self-attention"] * 2


def test_self_attention_too(device: str) -> None:
    tgt, memory, _ = tokens()
    given = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(TQ), "tgt_is_causal": True}
    call = Call((tgt, memory), given)
    check_fp32(decoder(batch_first=True), call, device, 4, self_attention=True)


def test_whole_transformer(device: str) -> None:
    """Its encoder reads weights off its attentions by name, which a swap must not disturb."""
    model = nn.Transformer(E, H, 1, 1, 48, dropout=0.0, batch_first=True).eval()
    src, tgt = tokens()[1], tokens()[0]
    check_fp32(model, Call((src, tgt)), device, 3, self_attention=True)


def test_bf16(device: str) -> None:
    torch.manual_seed(0)
    made = [(4, 30, E), (4, 50, E)]
    check_bf16(decoder(batch_first=True), lambda: Call(tuple(torch.randn(s) for s in made)), device)


def test_training(device: str) -> None:
    check_training(decoder(batch_first=True), Call(tuple(tokens()[:2])), device)


def test_undo(device: str) -> None:
    check_undo(decoder(batch_first=True), Call(tuple(tokens()[:2])), device)


def test_calls_for_weights_run_its_own_code(device: str) -> None:
    model = One(batch_first=True).to(device)
    call = Call(tuple(tokens()), {"need_weights": True}).to(device)
    want = model.cross_attn(*call.args)
    swap_cross_attention(model)
    with counted_calls() as calls, pytest.warns(RuntimeWarning, match="need_weights=True"):
        got = model.cross_attn(*call.args)
    assert not calls
    assert all(map(torch.equal, got, want))


def test_weights_that_nobody_reads(device: str) -> None:
    model = One(batch_first=True).to(device)
    call = Call(tuple(tokens()), {"need_weights": True}).to(device)
    want = results(model, call)
    swap_cross_attention(model, attention_weights=False)
    with counted_calls() as calls:
        assert_close(results(model, call), want)
        assert model.cross_attn(*call.args)[1] is None
    assert len(calls) == 2


def test_dropout_only_in_training() -> None:
    model = One(batch_first=True, dropout=0.25)
    swap_cross_attention(model)
    with counted_calls() as calls:
        model(*tokens())
        model.eval()(*tokens())
    assert [c.dropout_p for c in calls] == [0.25, 0.0]


def test_a_sample_without_keys(device: str) -> None:
    model = One(batch_first=True)
    padding = torch.zeros(2, TK, dtype=torch.bool)
    padding[1] = True
    call = Call(tuple(tokens()), {"key_padding_mask": padding})
    check_fp32(model, call, device, swaps=1)
    want = model.cross_attn.out_proj.bias.expand(TQ, E)
    assert torch.equal(results(model, call.to(device))["output"][1], want)


@pytest.mark.parametrize(
    "options, why",
    [({"add_bias_kv": True}, "add_bias_kv"), ({"add_zero_attn": True}, "add_zero_attn")],
)
def test_refused_options(options: dict[str, Any], why: str) -> None:
    (entry,) = swap_cross_attention(One(**options))
    assert not entry.swapped
    assert why in entry.why


def test_unknown_role_is_left_alone() -> None:
    model = nn.Sequential(nn.MultiheadAttention(E, H), nn.MultiheadAttention(E, H, kdim=8, vdim=8))
    unknown, told_by_widths = swap_cross_attention(model)
    assert "name it in paths" in unknown.why
    assert told_by_widths.swapped
    assert [e.path for e in swap_cross_attention(model, paths="0").swapped] == ["0"]
