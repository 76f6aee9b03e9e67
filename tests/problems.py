"""Small problems that tests share, and the comparisons they make."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import cross_attention, plan
from fused_rope_xattn.verify.cases import Case, Inputs, draw_inputs, kernels_must_cover


class Sizes(NamedTuple):
    """Of attention, as the kernels take them."""

    B: int
    Tq: int
    Tk: int
    H: int
    Hkv: int
    D: int


class Target(NamedTuple):
    """A device and the path that is forced on it."""

    device: str
    path: str


SMALL = Case("small", 2, 33, 50, H=4, D=32, Dq=48, Dkv=40, biases="qkvo", dtype="fp32")


def forward(inputs: Inputs, path: str = "auto", **changes: Any) -> Any:
    """cross_attention on the inputs with some keyword arguments replaced."""
    args, kwargs = inputs.call()
    return cross_attention(*args, **{**kwargs, "path": path, **changes})


def with_grad(inputs: Inputs) -> Inputs:
    for leaf in inputs.leaves.values():
        leaf.requires_grad_()
    return inputs


def gradients(inputs: Inputs, path: str = "auto", **changes: Any) -> dict[str, Tensor]:
    """y, lse and the gradient of each leaf that requires grad, by name."""
    returned = forward(inputs, path, **changes)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    wanted = {name: leaf for name, leaf in inputs.leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(
        outputs, list(wanted.values()), [inputs.grads[n] for n in ("y", "lse")[: len(outputs)]]
    )
    return dict(zip(("y", "lse"), outputs)) | dict(zip(wanted, grads))


def small(device: str, seed: int = 0, **fields: Any) -> Inputs:
    """Inputs of SMALL with some fields changed, all leaves requiring grad."""
    return with_grad(draw_inputs(replace(SMALL, **fields), device, seed))


def assert_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Same names, shapes and bits; NaN equals NaN."""
    assert got.keys() == want.keys()
    for name in want:
        same = torch.equal(got[name].nan_to_num(nan=1e30), want[name].nan_to_num(nan=1e30))
        assert same, f"{name} differs by {(got[name] - want[name]).abs().max():.3e}"


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], ulps: float = 64.0) -> None:
    """Equal up to ``ulps`` of the largest value: two orders of the same sums.

    The ulp is that of the coarsest dtype among them: lse is fp32, but of rounded q and k.
    """
    assert got.keys() == want.keys()
    eps = max(torch.finfo(t.dtype).eps for t in got.values())
    for name in want:
        assert_tensor_near(got[name], want[name], ulps, name, eps)


def assert_tensor_near(
    got: Tensor, want: Tensor, ulps: float = 64.0, name: str = "tensor", eps: float | None = None
) -> None:
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    finite = want.isfinite()
    assert torch.equal(got[~finite].double(), want[~finite].double()), f"{name}: non-finite values"
    assert bool(got[finite].isfinite().all()), f"{name}: non-finite values"
    if not want[finite].numel():
        return
    error = float((got[finite].double() - want[finite].double()).abs().max())
    scale = float(want[finite].double().abs().max())
    bound = ulps * (eps or torch.finfo(got.dtype).eps) * max(scale, 2.0**-10)
    assert error <= bound, f"{name}: max error {error:.3e} > {bound:.3e}"


def path_for(case: Case, target: Target) -> str:
    """The target's path where the kernels must cover the case, else the automatic choice."""
    return target.path if target.device == "cpu" or kernels_must_cover(case) else "auto"


def paths_for(case: Case, target: Target) -> list[str]:
    """The path to judge, and on a GPU that of small problems beside it where it takes the case."""
    paths = [path_for(case, target)]
    if target.path == "split":
        args, kwargs = draw_inputs(case, target.device).call()
        with contextlib.suppress(ValueError):
            paths.append(plan(*args, **kwargs, path="fused").path)
    return paths


def spread(cases: Iterable[Case], exact: bool) -> list[Any]:
    """(case, target) parameters: on a CPU one low dtype each, in turn, and fp64 where ``exact``; on
    a GPU all of them."""
    cpu, gpu = Target("cpu", "composite"), Target("cuda", "split")
    params = []
    for index, case in enumerate(cases):
        names = [("fp32", "bf16", "fp16")[index % 3]] + ["fp64"] * exact
        params += [pytest.param(case.at(d), cpu, id=f"{case.name}-{d}-cpu") for d in names]
        params += [
            pytest.param(case.at(d), gpu, id=f"{case.name}-{d}-cuda", marks=pytest.mark.gpu)
            for d in ("fp32", "tf32", "fp16", "bf16")
        ]
    return params


def yardstick(target: Target) -> str:
    """On a CPU the composite path is what is judged, so the reference's eager lines judge it."""
    return "eager" if target.path == "composite" else "composite"
