"""The module under autocast, checkpointing and an optimiser."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from modules import build, data, grads_of
from pretence import Operators, kernels_everywhere
from problems import Target, assert_near, assert_tensor_near


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"qk_norm": "rms"}, {"qk_norm": "layer", "bias": True}],
    ids=["plain", "rms", "layer"],
)
def test_autocast_casts_once(target: Target, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """An fp32 module in autocast is the low-precision module; gradients come back in fp32."""
    module = build(target.device, **options)
    x, kv = data(target.device)
    with torch.autocast(target.device, dtype):
        got = module(x, kv)
    want = copy.deepcopy(module).to(dtype)(x.to(dtype), kv.to(dtype))
    assert got.dtype == dtype
    assert_tensor_near(got, want, 4)
    assert all(g.dtype == torch.float32 for g in grads_of(module, got).values())


MIXES = {
    "query low": ("x",),
    "memory low": ("kv",),
    "weights low": ("module",),
    "all low": ("x", "kv", "module"),
    "all fp32": (),
}


@pytest.mark.parametrize("mix", MIXES)
def test_autocast_takes_any_mix(target: Target, mix: str) -> None:
    module = build(target.device, bias=True, qk_norm="rms")
    x, kv = data(target.device)
    low = MIXES[mix]
    x = x.bfloat16() if "x" in low else x
    kv = kv.bfloat16() if "kv" in low else kv
    module = module.bfloat16() if "module" in low else module
    bias = torch.randn(4, 17, 29, device=target.device)
    with torch.autocast(target.device, torch.bfloat16):
        y = module(x, kv, attn_bias=bias)
        cached = module(x, module.project_kv(kv), attn_bias=bias)
    assert y.dtype == torch.bfloat16
    assert_tensor_near(cached, y, 4)
    grads_of(module, y)


def test_no_autocast_inside_disabled_regions(target: Target) -> None:
    module = build(target.device)
    x, kv = data(target.device)
    with (
        torch.autocast(target.device, torch.bfloat16),
        torch.autocast(target.device, enabled=False),
    ):
        got = module(x, kv)
    assert torch.equal(got, module(x, kv)) and got.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_recomputes_the_same(target: Target, reentrant: bool, autocast: bool) -> None:
    """Dropout included: the recompute draws the mask of the first run."""
    results = []
    for checkpointed in (False, True):
        module = build(target.device, dropout=0.3, qk_norm="rms")
        x, kv = (t.requires_grad_() for t in data(target.device))
        torch.manual_seed(6)
        with torch.autocast(target.device, torch.bfloat16, enabled=autocast):
            if checkpointed:
                y = checkpoint(module, x, kv, use_reentrant=reentrant)
            else:
                y = module(x, kv)
        results.append(grads_of(module, y) | {"x": x.grad, "kv": kv.grad})
    assert_near(results[1], results[0], 4)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from kernels_everywhere(monkeypatch)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("saved", [False, True])
def test_selective_checkpointing_computes_again_what_it_is_told(saved: bool) -> None:
    """The operators are what a policy sees; dropout is drawn once."""
    attention = torch.ops.fused_rope_xattn.attention_forward.default
    contexts = partial(create_selective_checkpoint_contexts, [attention] if saved else [])
    results, runs = [], []
    for checkpointed in (False, True):
        module = build(dropout=0.3, qk_norm="rms")
        x, kv = (t.requires_grad_() for t in data())
        torch.manual_seed(6)
        with Operators() as operators:
            if checkpointed:
                y = checkpoint(module, x, kv, use_reentrant=False, context_fn=contexts)
            else:
                y = module(x, kv)
            results.append(grads_of(module, y) | {"x": x.grad, "kv": kv.grad})
        runs.append(sum(name.startswith("attention_forward") for name in operators.names))
    assert_near(results[1], results[0], 4)
    assert runs == [1, 1 if saved else 2]


def test_training_lowers_a_loss(target: Target) -> None:
    module = build(target.device, dropout=0.1, bias=True)
    x, kv = data(target.device)
    goal = torch.randn_like(x)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = (module(x, kv) - goal).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
