"""Adapters and quantised linears from packages that models get them from: honoured, not bypassed.

Each test needs its package; what the packages do is imitated without them in
test_module_children.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules import PROJECTIONS, build, data
from problems import Target, assert_tensor_near
from test_module_children import honoured


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Block(nn.Module):
    """A model around one block, as adapters want it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.attention = build(device)

    def forward(self, x: Tensor, kv: Tensor) -> Tensor:
        return x + self.attention(x, kv)


def _with_lora(device: str, names: list[str]) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(
        Block(device), peft.LoraConfig(r=4, lora_alpha=8, target_modules=names)
    )
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # peft starts from no change at all
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["q_proj", "v_proj"], list(PROJECTIONS)], ids=["query_value", "all"]
)
def test_lora_trains_and_merges(target: Target, names: list[str]) -> None:
    """Forward, gradients of the adapters alone, and what is left when they are merged."""
    model = _with_lora(target.device, names)
    block = model.base_model.model.attention
    x, kv = data(target.device)
    plain = Block(target.device)(x, kv)
    got, want = model(x, kv), x + honoured(block, x, kv)
    assert float((got - plain).abs().max()) > 1e-2
    assert_tensor_near(got, want)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(names)
    assert all("lora_" in n for n in trained)
    grad = torch.randn_like(got)
    grads = [torch.autograd.grad(y, list(trained.values()), grad) for y in (got, want)]
    for name, a, b in zip(trained, *grads):
        assert_tensor_near(a, b, 128, name)
    merged = model.merge_and_unload()
    assert not merged.attention._changed_children()
    assert_tensor_near(merged(x, kv), want, 256)


@pytest.mark.slow
def test_lora_learns() -> None:
    model = _with_lora("cpu", ["q_proj", "k_proj", "v_proj"])
    x, kv = data()
    goal = torch.randn_like(x)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = (model(x, kv) - goal).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("names", [list(PROJECTIONS), ["k_proj"]], ids=["all", "keys"])
def test_int8_weights(target: Target, names: list[str]) -> None:
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed, or not for this torch"
    )
    module = build(target.device)
    x, kv = data(target.device)
    plain = module(x, kv)
    quantization.quantize_(
        module,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda child, name: isinstance(child, nn.Linear) and name in names,
    )
    assert set(module._changed_children()) == set(names)
    with torch.no_grad():
        got = module(x, kv)
        assert_tensor_near(got, honoured(module, x, kv))
        cached = module(x, module.project_kv(kv))
    assert_tensor_near(cached, got)
    difference = float((got - plain).norm() / plain.norm())
    assert 1e-4 < difference < 5e-2  # int8 has been at work, and not more than it does
