"""Dropout: which weights fall, how many, and that everybody draws the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import cross_attention, dropout
from fused_rope_xattn.verify.case import Case
from fused_rope_xattn.verify.cases import draw_inputs
from fused_rope_xattn.verify.reference import draw_seed, dropout_keep
from problems import Target, assert_near, assert_tensor_near, forward, gradients, small


def kept_weights(
    device: str, path: str, p: float, seed: int, sizes: tuple[int, int, int, int] = (2, 3, 37, 64)
) -> tuple[Tensor, int]:
    """The dropped-out weights [B, H, Tq, Tk] of uniform attention times Tk, and the seed drawn.

    Values are the unit vectors, so that output channel j is the weight of key j.
    """
    batch, heads, num_queries, num_keys = sizes
    case = Case(
        "mask",
        batch,
        num_queries,
        num_keys,
        H=heads,
        D=num_keys,
        Dq=8,
        Dkv=num_keys,
        Dout=0,
        rope="none",
        dropout_p=p,
    )
    inputs = draw_inputs(case, device)
    inputs.leaves["x_kv"] = torch.eye(num_keys, device=device).expand(batch, -1, -1)
    inputs.leaves["w_v"] = torch.eye(num_keys, device=device).repeat(heads, 1)
    torch.manual_seed(seed)
    drawn = draw_seed(torch.device(device))
    torch.manual_seed(seed)
    y = forward(inputs, path, scale=0.0)
    return y.unflatten(2, (heads, num_keys)).transpose(1, 2) * num_keys, drawn


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_mask_is_the_published_function_of_the_seed(target: Target, p: float) -> None:
    for seed in (0, 1, 2**40 + 5):
        weights, drawn = kept_weights(target.device, target.path, p, seed)
        keep = torch.from_numpy(dropout_keep(drawn, (2, 3, 37, 64), p)).to(target.device)
        assert torch.equal(weights != 0, keep)
        assert_tensor_near(weights, keep / (1 - p))


def test_all_and_nothing(target: Target) -> None:
    everything, _ = kept_weights(target.device, target.path, 1.0, 0)
    assert not bool(everything.any()) and bool(everything.isfinite().all())
    inputs = small(target.device)
    state = torch.get_rng_state() if target.device == "cpu" else torch.cuda.get_rng_state()
    torch.equal(forward(inputs, target.path, dropout_p=0.0), forward(inputs, target.path))
    after = torch.get_rng_state() if target.device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, after), "dropout_p = 0 drew from the generator"


def test_gradients_of_total_dropout_are_zero(target: Target) -> None:
    inputs = small(target.device, dropout_p=1.0, lse=False)
    got = gradients(inputs, target.path)
    assert torch.equal(got["y"], inputs.leaves["b_out"].expand_as(got["y"]))
    for name in ("x_query", "x_kv", "w_q", "w_k", "w_v", "w_out"):
        assert not bool(got[name].any()), name


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_rates_are_right_along_every_axis(target: Target, p: float) -> None:
    """Means over rows, columns, heads and samples within 5 standard deviations."""
    sizes = (4, 4, 96, 128)
    weights, _ = kept_weights(target.device, target.path, p, 11, sizes)
    kept = (weights != 0).double()
    for axis in range(4):
        rest = [a for a in range(4) if a != axis]
        count = kept.numel() / sizes[axis]
        deviation = (p * (1 - p) / count) ** 0.5
        assert float((kept.mean(rest) - (1 - p)).abs().max()) < 5 * deviation, f"axis {axis}"
    for lag in (1, 2, 8, 16):  # neighbours in a Philox word, call and tile are independent
        for axis in (2, 3):
            a, b = (
                kept.narrow(axis, 0, sizes[axis] - lag),
                kept.narrow(axis, lag, sizes[axis] - lag),
            )
            covariance = float(((a - (1 - p)) * (b - (1 - p))).mean())
            assert abs(covariance) < 5 * p * (1 - p) / a.numel() ** 0.5, f"lag {lag}, axis {axis}"


def test_the_threshold_has_sixteen_bits(target: Target) -> None:
    """An 8-bit threshold would keep 0.8984 at p = 0.1."""
    weights, _ = kept_weights(target.device, target.path, 0.1, 5, (8, 4, 128, 128))
    rate = float((weights != 0).double().mean())
    assert abs(rate - 0.9) < 4 * (0.09 / weights.numel()) ** 0.5


def test_calls_draw_anew_and_seeds_repeat(target: Target) -> None:
    inputs = small(target.device, dropout_p=0.4)
    torch.manual_seed(1)
    first, second = forward(inputs, target.path), forward(inputs, target.path)
    torch.manual_seed(1)
    third = forward(inputs, target.path)
    assert torch.equal(first, third) and not torch.equal(first, second)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"Hkv": 2, "causal": True, "lengths": "ragged"},
        {"mask": "full", "bias": "b1qk"},
        {"projected": True, "D": 64},
    ],
    ids=["plain", "causal", "masks", "cached"],
)
@pytest.mark.parametrize("path", ["auto", "split"])
@pytest.mark.gpu
def test_paths_draw_the_same_mask(options: dict[str, Any], path: str) -> None:
    """A mask that differs in one element would show far above rounding."""
    options = {"dropout_p": 0.3, "lse": True, **options}
    results = []
    for which in ("composite", path):
        torch.manual_seed(21)
        results.append(gradients(small("cuda", **options), which))
    assert_near(results[1], results[0], 256)


def test_expectation_is_the_undropped_output(target: Target) -> None:
    inputs = small(target.device, B=1, Dout=0)
    want = forward(inputs, target.path)
    args, kwargs = inputs.call({**inputs.leaves, "x_query": inputs.leaves["x_query"].detach()})
    draws = torch.stack(
        [
            cross_attention(*args, **{**kwargs, "dropout_p": 0.2}, path=target.path).detach()
            for _ in range(200)
        ]
    ).double()
    # Six standard errors of the mean, as the draws themselves show them, on every element.
    error = (draws.mean(0) - want).abs()
    assert bool((error <= 6 * draws.std(0) / len(draws) ** 0.5 + 1e-3).all()), error.max()


@pytest.mark.parametrize("shape", [(2, 3, 33, 50), (1, 1, 1, 1), (3, 2, 16, 15), (2, 2, 0, 4)])
def test_compiled_code_draws_the_same_mask(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int]
) -> None:
    """By another arrangement of the same calls."""
    seed = torch.tensor([-(2**40) - 5])
    want = dropout.keep_mask(seed, 0.3, *shape)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(dropout.keep_mask(seed, 0.3, *shape), want)
