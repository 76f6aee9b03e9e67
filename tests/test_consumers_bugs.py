"""Ways in which users of other implementations got wrong numbers, each by its trigger.

The page docs/compatibility.md lists all of them; here are those that no other file tests.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import ProjectedKV, RoPE, RotaryTable
from modules import build, data
from problems import Target, assert_near, assert_tensor_near, forward, gradients, small


@pytest.mark.parametrize("heads", [1, 4])
def test_keys_whose_memory_is_tokens_first(target: Target, heads: int) -> None:
    """[B, H, T, D] that is a transposed [B, T, H, D], with strides of 1 where H = 1
    (yyfz/Pi3#53, naver/croco#45)."""
    inputs = small(target.device, projected=True, H=heads, D=16)
    want = gradients(inputs, target.path)
    for name in ("k", "v"):
        tokens_first = inputs.leaves[name].detach().transpose(1, 2).contiguous().transpose(1, 2)
        inputs.leaves[name] = tokens_first.requires_grad_()
    assert_near(gradients(inputs, target.path), want, 16)


@pytest.mark.parametrize("start", [-1, -50, -(10**6)])
def test_positions_below_zero(target: Target, start: int) -> None:
    """A pose token at -1, or all positions negative: no table is indexed by them
    (CUT3R/CUT3R#1, #26, #89)."""
    inputs = small(target.device, rope="half")
    k = torch.arange(50, device=target.device)
    q = torch.arange(33, device=target.device)
    near = forward(inputs, target.path, q_positions=q, k_positions=k)
    moved = forward(inputs, target.path, q_positions=q + start, k_positions=k + start)
    assert float((near - moved).detach().abs().max()) < 1e-4


def test_one_table_for_queries_and_keys_of_other_lengths(target: Target) -> None:
    """Refused by name, never cut or switched off in silence (lucidrains/x-transformers#247)."""
    inputs = small(target.device)
    angle = torch.randn(33, 16, device=target.device)
    table = RotaryTable(angle.cos(), angle.sin())
    with pytest.raises(ValueError, match=r"rope.*50|50.*rope"):
        forward(inputs, target.path, rope=table)


@pytest.mark.parametrize("side", [0, 1])
def test_tokens_cut_to_a_share_with_the_whole_table(target: Target, side: int) -> None:
    """Context parallelism that shards tokens but not their table (huggingface/diffusers#14316)."""
    inputs = small(target.device)
    angles = [torch.randn(t, 16, device=target.device) for t in (33, 50)]
    angles[side] = torch.randn(2 * angles[side].shape[0], 16, device=target.device)
    rope = tuple(RotaryTable(a.cos(), a.sin()) for a in angles)
    with pytest.raises(ValueError, match="rope"):
        forward(inputs, target.path, rope=rope)


def test_one_query_and_a_sample_without_keys(target: Target) -> None:
    """A decoding step in which one sequence is empty (Dao-AILab/flash-attention#1537)."""
    inputs = small(target.device, Tq=1, B=3, lse=True)
    lengths = torch.tensor([50, 0, 7], device=target.device)
    got = gradients(inputs, target.path, kv_lengths=lengths)
    b_out = inputs.leaves["b_out"].detach()
    assert torch.equal(got["y"][1, 0], b_out)
    assert bool((got["lse"][1] == -torch.inf).all())
    assert bool(got["lse"][[0, 2]].isfinite().all())
    assert not bool(got["x_query"][1].any()) and not bool(got["x_kv"][1].any())
    assert all(bool(got[n].isfinite().all()) for n in got if n != "lse")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_of_numbers_is_no_mask(target: Target, dtype: torch.dtype) -> None:
    """0 and 1 might mean keep, drop or add (NVIDIA/TransformerEngine#614)."""
    inputs = small(target.device)
    mask = torch.ones(2, 50, dtype=dtype, device=target.device)
    with pytest.raises(TypeError, match="kv_keep_mask"):
        forward(inputs, target.path, kv_keep_mask=mask)


def test_a_call_leaves_nothing_in_the_module(target: Target) -> None:
    """No table is cached as an attribute, which graphs would overwrite and copies would carry
    (huggingface/transformers#30775, huggingface/diffusers#13792)."""
    module = build(target.device, qk_norm="rms", dropout=0.1)
    before = {name: copy.copy(child.__dict__) for name, child in module.named_modules()}
    x, kv = data(target.device)
    module(x, kv).sum().backward()
    module(x, module.project_kv(kv))
    for name, child in module.named_modules():
        assert child.__dict__.keys() == before[name].keys()
        changed = [k for k, v in child.__dict__.items() if v is not before[name][k]]
        assert not changed
    assert not list(module.buffers())


def test_the_same_length_at_another_offset(target: Target) -> None:
    """A cache of tables that is keyed by length alone (lucidrains/rotary-embedding-torch#11)."""
    inputs = small(target.device)
    first, again = (
        forward(inputs, target.path, k_positions=torch.arange(s, s + 50, device=target.device))
        for s in (0, 7)
    )
    assert float((first - again).detach().abs().max()) > 1e-3
    want = forward(inputs, target.path)
    assert torch.equal(first, want)


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_positions_that_half_precision_cannot_tell_apart(target: Target, base: float) -> None:
    """256 and 257 are one number in bf16 (huggingface/transformers#29285): the module's dtype has
    no say in its angles."""
    module = build(target.device, rope=RoPE(base)).to(torch.bfloat16)
    x, kv = (t.bfloat16() for t in data(target.device))
    near, far = (torch.arange(s, s + 29, device=target.device) for s in (0, 256))
    q = torch.arange(17, device=target.device)

    def block(q: Tensor, k: Tensor) -> Tensor:
        y: Tensor = module(x, kv, q_positions=q, k_positions=k)
        return y

    assert_tensor_near(block(q + 256, far), block(q, near), 4)
    assert float((block(q, far) - block(q + 1, far)).detach().abs().max()) > 1e-3


def test_projected_keys_are_not_rotated_twice(target: Target) -> None:
    """Positions beside finished keys are refused, instead of turning them again."""
    inputs: Any = small(target.device, projected=True)
    k = torch.arange(50, device=target.device)
    assert isinstance(inputs.args[1], ProjectedKV)
    with pytest.raises(ValueError, match="k_positions"):
        forward(inputs, target.path, k_positions=k)
