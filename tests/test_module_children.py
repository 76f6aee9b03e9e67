"""What others hang on the module's linears and norms is honoured, never bypassed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_rope_xattn import cross_attention, planner
from modules import PROJECTIONS, build, data, grads_of
from pretence import Operators, kernels_everywhere
from problems import Target, assert_near, assert_tensor_near


class Lora(nn.Module):
    """A wrapper that adds a low-rank product, as adapters do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, device=base.weight.device)
        self.up = nn.Linear(4, base.out_features, bias=False, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


class Scaled(nn.Linear):
    """A subclass with a forward of its own, as quantised linears have."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def _lora(module: Any, name: str) -> None:
    setattr(module, name, Lora(getattr(module, name)))


def _forward_hook(module: Any, name: str) -> None:
    getattr(module, name).register_forward_hook(lambda m, args, out: out * 2.0)


def _forward_pre_hook(module: Any, name: str) -> None:
    getattr(module, name).register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))


def _parametrized(module: Any, name: str) -> None:
    nn.utils.parametrize.register_parametrization(getattr(module, name), "weight", Doubled())


def _subclass(module: Any, name: str) -> None:
    old = getattr(module, name)
    new = Scaled(old.in_features, old.out_features, bias=False, device=old.weight.device)
    new.load_state_dict(old.state_dict())
    setattr(module, name, new)


def _patched(module: Any, name: str) -> None:
    linear = getattr(module, name)
    linear.forward = lambda x: 2.0 * nn.functional.linear(x, linear.weight)


def _spectral(module: Any, name: str) -> None:
    nn.utils.parametrizations.weight_norm(getattr(module, name))
    with torch.no_grad():
        getattr(module, name).parametrizations.weight.original0.mul_(2.0)


CHANGES = {
    f.__name__.strip("_"): f
    for f in (
        _lora,
        _forward_hook,
        _forward_pre_hook,
        _parametrized,
        _subclass,
        _patched,
        _spectral,
    )
}


def honoured(module: Any, x: Tensor, kv: Tensor, p: float = 0.0) -> Tensor:
    """The block with every child called."""
    linears = [getattr(module, n) for n in PROJECTIONS]
    eye = torch.eye(64, device=x.device)
    q, k, v = (linear(t) for linear, t in zip(linears, (x, kv, kv)))
    o = cross_attention(
        q, k, eye, eye, eye, None, num_heads=4, x_value=v, dropout_p=p, path="composite"
    )
    return linears[3](o)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_linears_are_honoured(target: Target, change: str, name: str) -> None:
    module = build(target.device)
    x, kv = data(target.device)
    plain = module(x, kv)
    CHANGES[change](module, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = module(x, kv)
    want = honoured(module, x, kv)
    assert float((got - plain).abs().max()) > 1e-3
    assert_tensor_near(got, want)
    assert_near(grads_of(module, got), grads_of(module, want))


def test_one_warning_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, however many blocks there are."""
    monkeypatch.setattr(planner, "_told", set())
    blocks = [build(), build()]
    for block in blocks:
        _forward_hook(block, "q_proj")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for block in (*blocks, *blocks):
            block(*data())
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "q_proj has hooks" in str(caught[0].message)


def test_changed_linears_in_project_kv(target: Target) -> None:
    module = build(target.device)
    x, kv = data(target.device)
    _lora(module, "k_proj")
    _forward_hook(module, "v_proj")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_tensor_near(module(x, module.project_kv(kv)), honoured(module, x, kv))


def test_dropped_masks_agree_with_changed_linears(target: Target) -> None:
    module = build(target.device, dropout=0.4)
    x, kv = data(target.device)
    _lora(module, "q_proj")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(8)
        got = module(x, kv)
    torch.manual_seed(8)
    assert_tensor_near(got, honoured(module, x, kv, 0.4))


@pytest.mark.parametrize("child", ["q_norm", "k_norm"])
def test_changed_norms_are_honoured(target: Target, child: str) -> None:
    module = build(target.device, qk_norm="rms")
    x, kv = data(target.device)
    plain = module(x, kv)
    getattr(module, child).register_forward_hook(lambda m, args, out: out * 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooked = module(x, kv)
    with torch.no_grad():
        getattr(module, child)._forward_hooks.clear()
        getattr(module, child).weight.mul_(2.0)
    assert float((hooked - plain).abs().max()) > 1e-3
    assert_tensor_near(hooked, module(x, kv))


def test_global_hooks_are_honoured(target: Target) -> None:
    """Those of torch.nn.modules.module reach every module, children included."""
    module, seen = build(target.device), []
    x, kv = data(target.device)
    want = module(x, kv)
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(type(m)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = module(x, kv)
    finally:
        handle.remove()
    assert seen == [nn.Linear] * 4 + [type(module)]
    assert_tensor_near(got, want)
    assert torch.equal(module(x, kv), want) and len(seen) == 5


def test_weights_that_are_no_parameters_are_honoured(target: Target) -> None:
    module = build(target.device)
    x, kv = data(target.device)
    want = module(x, kv)
    weight = module.q_proj.weight.detach()
    del module.q_proj.weight
    module.q_proj.weight = weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_tensor_near(module(x, kv), want)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from kernels_everywhere(monkeypatch)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("change", ["lora", "forward_hook", "parametrized", "subclass"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_attention_between_changed_children_keeps_its_kernel(name: str, change: str) -> None:
    """A hook or an adapter costs its projection's kernels, never a matrix of scores."""
    module = build()
    x, kv = data()
    CHANGES[change](module, name)
    want = honoured(module, x, kv)
    with warnings.catch_warnings(), Operators() as operators:
        warnings.simplefilter("ignore")
        got = module(x, kv)
        got.sum().backward()
    assert_tensor_near(got, want)
    for attention in ("attention_forward", "attention_backward"):
        assert sum(n.startswith(attention) for n in operators.names) == 1, operators.names
    assert not [shape for shape in operators.shapes if shape[-2:] == (17, 29)]


def test_hooks_on_the_block_itself_run(target: Target) -> None:
    module, seen = build(target.device), []
    module.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    module.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].shape))
    x, kv = data(target.device)
    module(x.requires_grad_(), kv).sum().backward()
    assert seen == [(2, 17, 64), (2, 17, 64)]


def test_parameter_hooks_run(target: Target) -> None:
    module, seen = build(target.device), []
    module.k_proj.weight.register_hook(lambda g: seen.append(g.shape))
    module.v_proj.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    module(*data(target.device)).sum().backward()
    assert sorted(seen) == [(64, 64), (64, 64)]


@pytest.mark.parametrize("changed", [(), ("q_proj",), ("k_proj",)], ids=["none", "q", "k"])
def test_project_kv_and_forward_are_one_graph(changed: tuple[str, ...]) -> None:
    module = build(num_kv_heads=2)
    for name in changed:
        _lora(module, name)

    def both(x: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        return module(x, kv), module(x, module.project_kv(kv))

    compiled = torch.compile(both, backend="eager", fullgraph=True, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for got, want in zip(compiled(*data()), both(*data())):
            assert_tensor_near(got, want)
