"""Cross-attention of CroCo, DUSt3R, MASt3R and CUT3R, in decoders written out from the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fused_rope_xattn.swap import swap_cross_attention
from reference_models import CrocoDecoder, CrossAttention, RoPE2D
from swap_models import (
    Call,
    check_bf16,
    check_fp32,
    check_training,
    check_undo,
    counted_calls,
    results,
)

C = 32


def grid(height: int, width: int) -> Tensor:
    return torch.cartesian_prod(torch.arange(height), torch.arange(width))


def call() -> Call:
    """One sample portrait, one landscape; the second view has a pose token at (-1, -1)."""
    torch.manual_seed(1)
    xpos = torch.stack([grid(3, 4), grid(4, 3)])
    ypos = torch.cat([torch.full((2, 1, 2), -1), xpos.flip(0)], dim=1)
    return Call((torch.randn(2, 12, C), torch.randn(2, 13, C), xpos, ypos))


@pytest.mark.parametrize("factor", [1.0, 224 / 512])
def test_decoder(device: str, factor: float) -> None:
    report = check_fp32(CrocoDecoder(C, F0=factor), call(), device, swaps=4)
    assert {e.kind for e in report} == {"CroCo CrossAttention"}


def test_bf16(device: str) -> None:
    torch.manual_seed(0)
    positions = grid(6, 8).expand(2, -1, -1)

    def draw() -> Call:
        return Call((torch.randn(2, 48, C), torch.randn(2, 48, C), positions, positions))

    check_bf16(CrocoDecoder(C), draw, device)


def test_training(device: str) -> None:
    check_training(CrocoDecoder(C), call(), device)


def test_undo(device: str) -> None:
    check_undo(CrocoDecoder(C), call(), device)


def test_state_dict_holds_its_names_alone() -> None:
    module = CrossAttention(C, RoPE2D(), 2)
    swap_cross_attention(module)
    linears = ("projq", "projk", "projv", "proj")
    assert {*module.state_dict()} == {f"{n}.{p}" for n in linears for p in ("weight", "bias")}


@pytest.mark.parametrize("missing", ["qpos", "kpos", "both"])
def test_sides_without_positions_do_not_rotate(device: str, missing: str) -> None:
    xpos, ypos = call().args[2:]
    positions = [None if missing in ("qpos", "both") else xpos]
    positions += [None if missing in ("kpos", "both") else ypos]
    x, y = call().args[:2]
    check_fp32(CrossAttention(C, RoPE2D(), 2), Call((x, y, y, *positions)), device, swaps=1)


def test_without_rotation_and_with_other_values(device: str) -> None:
    x, y, xpos, ypos = call().args
    check_fp32(CrossAttention(C, None, 2), Call((x, y, y.flip(0), xpos, ypos)), device, swaps=1)


def test_scale_of_its_own(device: str) -> None:
    module = CrossAttention(C, RoPE2D(50.0), 2)
    module.scale = 0.7
    x, y, xpos, ypos = call().args
    check_fp32(module, Call((x, y, y, xpos, ypos)), device, swaps=1)


def test_dropouts() -> None:
    module = CrossAttention(C, RoPE2D(), 2, attn_drop=0.3, proj_drop=0.5)
    swap_cross_attention(module)
    x, y, xpos, ypos = call().args
    with counted_calls() as calls:
        dropped = module(x, y, y, xpos, ypos)
        module.eval()(x, y, y, xpos, ypos)
    assert [c.dropout_p for c in calls] == [0.3, 0.0]
    assert 0.3 < float((dropped == 0).float().mean()) < 0.7


# ----------------------------------------------------------- what only looks like it is left alone


class Doubled(CrossAttention):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, qpos: Tensor | None, kpos: Tensor | None
    ) -> Tensor:
        return 2.0 * super().forward(query, key, value, qpos, kpos)


class Masked(CrossAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return super().forward(query, key, value, None, None)


class Learned(nn.Module):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return tokens


def _named_like_it(cls: type) -> type:
    cls.__name__ = "CrossAttention"
    return cls


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: _named_like_it(Doubled)(C, RoPE2D(), 2), "the probe differs by 5.0e-01"),
        (lambda: _named_like_it(Masked)(C, RoPE2D(), 2), "arguments of another version: mask"),
        (lambda: CrossAttention(C, Learned(), 2), "its rotation is a Learned"),
        (lambda: CrossAttention(20, RoPE2D(), 2), "head dim is not a multiple of 4"),
        (lambda: CrossAttention(C, RoPE2D(), 2).to("meta"), "meta device"),
    ],
)
def test_refused(make: object, why: str) -> None:
    module = make()  # type: ignore[operator]
    (entry,) = swap_cross_attention(module)
    assert not entry.swapped
    assert why in entry.why


def test_refused_child() -> None:
    module = CrossAttention(C, RoPE2D(), 2)
    module.q_norm = nn.LayerNorm(C)
    (entry,) = swap_cross_attention(module)
    assert entry.why == "it has further children: q_norm"


def test_probe_leaves_everything_as_it_was() -> None:
    module = CrossAttention(C, RoPE2D(), 2)
    seen: list[int] = []
    module.register_forward_hook(lambda *_: seen.append(1))
    state, rng = dict(module.__dict__), torch.get_rng_state()
    swap_cross_attention(module)
    assert not seen
    assert torch.equal(torch.get_rng_state(), rng)
    assert {k: v for k, v in module.__dict__.items() if k != "swap_state"} == state
    x, y, xpos, ypos = call().args
    results(module, Call((x, y, y, xpos, ypos)))
    assert seen == [1]
