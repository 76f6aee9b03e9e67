"""The judges are judged: the reference by torch, Philox by its vectors, the rule by faults."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fused_rope_xattn.verify import reference as judge
from fused_rope_xattn.verify.accuracy import run, tf32, ulp, verdicts
from fused_rope_xattn.verify.cases import (
    BASELINE,
    NAMED,
    ROWS,
    Case,
    draw_inputs,
    make_inputs,
    option_grid,
)
from fused_rope_xattn.verify.reference import reference

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    words = judge.philox4x32_10([np.array([c]) for c in counter], key)
    assert tuple(int(w[0]) for w in words) == answer


def test_dropout_elements_share_calls_but_not_bits() -> None:
    """The halves of one call go to eight different elements: no two elements are one."""
    keep = judge.dropout_keep(7, (2, 3, 48, 48), 0.5).reshape(6, -1)
    columns = keep.reshape(6, 3, 16, 3, 16).transpose(2, 4, 0, 1, 3).reshape(256, -1)
    agreement = (columns[:, None] == columns[None]).mean(-1)
    np.fill_diagonal(agreement, 0.5)
    assert agreement.min() > 0.1 and agreement.max() < 0.9


def test_first_sample_offsets_the_mask() -> None:
    whole = judge.dropout_keep(-3, (4, 2, 9, 20), 0.3)
    part = judge.dropout_keep(-3, (2, 2, 9, 20), 0.3, first_sample=2)
    assert np.array_equal(whole[2:], part)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_complex_multiplication(interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    rope = SimpleNamespace(base=100.0, rotary_dim=None, interleaved=interleaved, axes=1)
    got = judge.rotate(x, rope, torch.tensor([0.0, 1.0, -2.0, 7.5, 1e5]))
    phase = torch.tensor([0.0, 1.0, -2.0, 7.5, 1e5]).double()[:, None] * torch.tensor(
        [100.0 ** (-j / 4) for j in range(4)], dtype=torch.float64
    )
    turn = torch.polar(torch.ones_like(phase), phase)[:, None]
    if interleaved:
        want = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn).flatten(-2)
    else:
        z = torch.complex(x[..., :4], x[..., 4:]) * turn
        want = torch.cat([z.real, z.imag], dim=-1)
    assert torch.allclose(got, want, atol=1e-9)


def test_reference_equals_scaled_dot_product_attention() -> None:
    """Projections, GQA, bias, causality where torch defines the same, and w_out."""
    case = Case(
        "torch",
        2,
        12,
        12,
        H=4,
        Hkv=2,
        D=8,
        Dq=16,
        rope="none",
        biases="qkvo",
        causal=True,
        dtype="fp64",
    )
    inputs = draw_inputs(case)
    leaf = inputs.leaves
    q = F.linear(leaf["x_query"], leaf["w_q"], leaf["b_q"]).view(2, 12, 4, 8).transpose(1, 2)
    k = F.linear(leaf["x_kv"], leaf["w_k"], leaf["b_k"]).view(2, 12, 2, 8).transpose(1, 2)
    v = F.linear(leaf["x_kv"], leaf["w_v"], leaf["b_v"]).view(2, 12, 2, 8).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    want = F.linear(o.transpose(1, 2).flatten(2), leaf["w_out"], leaf["b_out"])
    assert torch.allclose(run(reference, inputs)["y"], want, atol=1e-12)


def test_reference_norms_equal_torch() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    weight, bias = torch.randn(24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    precision = judge._Precision(torch.float64, None)
    layer = SimpleNamespace(kind="layer", weight=weight, bias=bias, eps=1e-5, over="inner")
    want = F.layer_norm(x.flatten(2), (24,), weight, bias, 1e-5).view_as(x)
    assert torch.allclose(judge.normed(x, layer, precision), want)
    rms = SimpleNamespace(kind="rms", weight=weight[:8], bias=None, eps=1e-6, over="head")
    assert torch.allclose(judge.normed(x, rms, precision), F.rms_norm(x, (8,), weight[:8], 1e-6))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large problems are judged sample by sample; dropout and gradients must not notice."""
    case = replace(NAMED["dropout_all"], B=5, bias="b1qk", dtype="fp64")
    whole = run(reference, draw_inputs(case))
    monkeypatch.setattr(judge, "_MAX_SCORES", 2 * case.H * case.Tq * case.Tk)
    parts = run(reference, draw_inputs(case))
    for name, want in whole.items():
        assert torch.allclose(parts[name], want, atol=1e-12), name


def test_ulp() -> None:
    assert ulp(1.0, torch.float32) == 2.0**-23
    assert ulp(1.9, torch.bfloat16) == 2.0**-7
    assert ulp(0.5, torch.float16) == 2.0**-11


# Ways in which a path could be wrong: the rule has to notice each.
FAULTS: dict[str, Any] = {
    "one value off": lambda y: y.index_put((torch.tensor(0),) * 3, y[0, 0, 0] + 0.05),
    "all a little off": lambda y: y + 2.0**-9,
    "nan": lambda y: y.index_put((torch.tensor(1),) * 3, torch.tensor(float("nan"))),
    "inf": lambda y: y.index_put((torch.tensor(1),) * 3, torch.tensor(float("inf"))),
    "shape": lambda y: y[:, :-1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_rule_rejects(fault: str) -> None:
    case = replace(BASELINE, B=2, Tq=9, Tk=12, Dq=64)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return FAULTS[fault](reference(*args, **kwargs, storage=torch.float32))

    options = {"yardstick": "eager", "backward": False}
    found = verdicts(case, fn=faulty, **options)[0]
    assert not found.ok
    if fault == "one value off":
        assert "worst at (0, 0, 0)" in found.message
    if fault in ("nan", "inf"):
        assert f"worst at (1, 1, 1): got {fault}" in found.message
    sound = partial(reference, storage=torch.float32)
    assert verdicts(case, fn=sound, **options)[0].ok


def test_the_rule_rejects_half_a_bit() -> None:
    """fp32 inputs through bf16 arithmetic are far outside fp32's budget, in every gradient."""
    case = replace(NAMED["odd_sizes"], dtype="fp32")
    bad = [
        v
        for v in verdicts(case, fn=partial(reference, storage=torch.bfloat16), yardstick="eager")
        if not v.ok
    ]
    assert {v.tensor for v in bad} >= {"y", "dx_query", "dx_kv", "dw_q", "dw_k", "dw_v", "dw_out"}


def test_tf32_switch_is_restored() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with tf32(not before):
        assert torch.backends.cuda.matmul.allow_tf32 is not before
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_rows_are_the_published_ones() -> None:
    assert list(ROWS) == [
        "seed_fp32",
        "seed_tf32",
        "seed_bf16",
        "mast3r_bf16",
        "mast3r_tf32",
        "sam2_bf16",
        "decode_bf16",
        "decode_cached_bf16",
        "large_bf16",
        "large64_bf16",
    ]
    assert ROWS["sam2_bf16"].Tk == 28736 and ROWS["large64_bf16"].H == 32


def test_the_grid_mixes_options_and_repeats() -> None:
    grid = list(option_grid())
    assert grid == list(option_grid())
    for name in ("rope", "mask", "bias", "q_norm", "positions"):
        assert len({getattr(case, name) for case in grid}) >= 5, name


def test_make_inputs_gives_fresh_data_that_requires_grad() -> None:
    args, kwargs, leaves = make_inputs(BASELINE, "cpu", torch.bfloat16, seed=3)
    assert args[0].dtype == torch.bfloat16 and kwargs["num_heads"] == 8
    assert len(leaves) == 6 and all(leaf.requires_grad for leaf in leaves)
    other = make_inputs(BASELINE, "cpu", torch.bfloat16, seed=4)[0]
    assert not torch.equal(args[0], other[0])
