"""What the tests of the swap share: a whole model before and after, and what must agree."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_rope_xattn import functional
from fused_rope_xattn.swap import Report, swap_cross_attention
from fused_rope_xattn.verify.accuracy import MEAN_FACTOR, Tally, Verdict, add_draw

RELATIVE = 1e-5
# Gradients below this share of the largest one are sums of other terms that cancel.
CANCELS = 1e-2
DRAWS = 8  # of the inputs, where errors are judged
CONFIRMATION = 4  # times the draws before a gradient is found out of its budget


class Call(NamedTuple):
    """One call of a model; its floating tensors require grad, in containers too."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        return Call(_map(self.args, change), _map(self.kwargs, change))

    def to(self, device: str, dtype: torch.dtype | None = None) -> Call:
        def move(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() else None)

        return self.mapped(move)

    @property
    def leaves(self) -> list[Tensor]:
        found: list[Tensor] = []
        self.mapped(lambda x: found.append(x) or x if x.requires_grad else x)
        return found


def _map(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        return {name: _map(value, change) for name, value in x.items()}
    if type(x) in (tuple, list):
        return type(x)(_map(value, change) for value in x)
    return x


def package(name: str) -> Any:
    """An installed package of models; skips the test where it is missing."""
    root = name.partition(".")[0]
    hint = f"{root} is not installed: pip install 'fused-rope-xattn[swap-tests]'"
    pytest.importorskip(root, reason=hint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def filled(model: nn.Module) -> nn.Module:
    """Biases and norm weights that are neither 0 nor 1."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.5, 0.3)
    return model


def results(model: nn.Module, call: Call) -> dict[str, Tensor]:
    """The output, and the gradients of all parameters and of the call's leaves."""
    leaves = call.mapped(lambda x: x.detach().requires_grad_() if x.is_floating_point() else x)
    y = output(model(*leaves.args, **leaves.kwargs))
    generator = torch.Generator().manual_seed(9)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    named |= {f"input {i}": x for i, x in enumerate(leaves.leaves)}
    grads = torch.autograd.grad(y, list(named.values()), grad, allow_unused=True)
    found = {name: g for name, g in zip(named, grads) if g is not None}
    return {"output": y.detach(), **found}


def output(returned: Any) -> Tensor:
    """One tensor of everything a model returns."""
    if isinstance(returned, Tensor):
        return returned
    values = returned.values() if isinstance(returned, dict) else returned
    parts = [output(part) for part in values if part is not None]
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])


@contextmanager
def counted_calls() -> Iterator[list[Any]]:
    """The calls of cross_attention that happen in here."""
    calls: list[Any] = []
    inner = functional.attend

    def attend(arguments: Any, *rest: Any) -> Any:
        calls.append(arguments)
        return inner(arguments, *rest)

    functional.attend = attend
    try:
        yield calls
    finally:
        functional.attend = inner


def assert_close(
    got: dict[str, Tensor], want: dict[str, Tensor], relative: float = RELATIVE
) -> None:
    assert got.keys() >= want.keys()  # a mask may get a gradient that a hint spared it before
    top = max((float(want[n].abs().max()) for n in want if n != "output"), default=0.0)
    for name in want:
        error = float((got[name].double() - want[name].double()).abs().max())
        scale = max(float(want[name].abs().max()), CANCELS * top)
        assert error <= relative * scale, f"{name}: {error / scale:.2e}"


def check_fp32(
    model: nn.Module, call: Call, device: str, swaps: int, served: int | None = None, **options: Any
) -> Report:
    """Output and all gradients before and after; ``served`` calls of the block in one forward."""
    model, call = filled(model).to(device), call.to(device)
    want = results(model, call)
    report = swap_cross_attention(model, verify=True, **options)
    assert len(report.swapped) == swaps, str(report)
    with counted_calls() as calls:
        got = results(model, call)
    assert len(calls) == (swaps if served is None else served)
    assert_close(got, want)
    assert all((e.difference or 0.0) < RELATIVE for e in report.swapped), str(report)
    return report


def check_bf16(model: nn.Module, make_call: Callable[[], Call], device: str) -> None:
    """Against the model in fp64, the swapped one may err as the accuracy rule allows."""
    model = filled(model).to(device, torch.bfloat16)
    wide, swapped = copy.deepcopy(model).double(), copy.deepcopy(model)
    assert swap_cross_attention(swapped).swapped
    tallies: dict[str, Tally] = {}

    def draw(number: int) -> None:
        call = make_call().to(device, torch.bfloat16)
        truth = results(wide, call.to(device, torch.float64))
        with _written_out():  # for what is not swapped, too
            eager, ours = results(model, call), results(swapped, call)
        add_draw(tallies, number, ours, eager, truth)

    def judge() -> list[Verdict]:
        return [tally.judge(MEAN_FACTOR["bf16"]) for tally in tallies.values()]

    # A whole model has many gradients, each a sum whose elements err together: one of them is out
    # of its budget by luck now and then, but not on many draws.
    for number in range(DRAWS):
        draw(number)
    verdicts = judge()
    if not all(v.ok for v in verdicts):
        for number in range(DRAWS, CONFIRMATION * DRAWS):
            draw(number)
        verdicts = judge()
    failures = [f"{v.tensor}: {v.message}" for v in verdicts if not v.ok]
    assert not failures, "\n".join(failures)


@contextmanager
def _written_out() -> Iterator[None]:
    """Eager attention as the accuracy rule means it: PyTorch's own keeps its scores in fp32."""
    own = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert not (dropout_p or is_causal or enable_gqa)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (query @ key.transpose(-2, -1)).float() * scale
        if attn_mask is not None:
            assert attn_mask.dtype != torch.bool
            scores = scores + attn_mask
        return scores.softmax(-1).to(value.dtype) @ value

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def check_training(model: nn.Module, call: Call, device: str) -> None:
    """Ten steps, the swap after the fifth, under an optimizer that was made before it."""
    model, call = filled(model).to(device).train(), call.to(device)
    twin = copy.deepcopy(model)
    losses = [_losses(twin, call, 10, _optimizer(twin)), []]
    optimizer = _optimizer(model)
    losses[1] += _losses(model, call, 5, optimizer)
    report = swap_cross_attention(model)
    assert report.swapped
    losses[1] += _losses(model, call, 5, optimizer)
    want, got = map(torch.tensor, losses)
    assert float(want[-1]) < float(want[0])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _losses(
    model: nn.Module, call: Call, steps: int, optimizer: torch.optim.Optimizer
) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = output(model(*call.args, **call.kwargs)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def check_undo(model: nn.Module, call: Call, device: str) -> None:
    """Nothing but the code changes: names, identity, modes; and undoing brings the code back."""
    model, call = filled(model).to(device).eval(), call.to(device)
    next(model.parameters()).requires_grad_(False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    flags = {name: p.requires_grad for name, p in parameters.items()}
    classes = {name: type(m) for name, m in model.named_modules()}
    state = {name: x.clone() for name, x in model.state_dict().items()}
    before = output(model(*call.args, **call.kwargs))
    report = swap_cross_attention(model)
    assert report.swapped
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in after)
    assert {name: p.requires_grad for name, p in after.items()} == flags
    assert not any(m.training for m in model.modules())
    assert model.state_dict().keys() == state.keys()
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    report.undo()
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert torch.equal(output(model(*call.args, **call.kwargs)), before)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all("swap_state" not in m.__dict__ for m in model.modules())
