"""Runs one attention on a small random input, by its own code and by this block, and compares.

Both run a copy in evaluation mode and at least fp32, where two ways of one formula differ by little
and anything else shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..prepare import allows_tf32
from .adapter import Adapter, Draw, Refused, Unserved

_TOLERANCE = 3e-5
_TF32_TOLERANCE = 0.01


def probe(
    module: nn.Module, adapter: Adapter, state: Any, tolerance: float | None = None
) -> float | None:
    """Largest difference over largest value; :class:`Refused` if it is too large.

    None where the adapter has no probe, or the module no memory and its adapter trusts it.
    """
    if any(p.is_meta for p in module.parameters()):
        if adapter.must_probe:
            raise Refused("it is on the meta device, and only a probe could tell what it computes")
        return None
    twin = _twin(module)
    call = adapter.probe(twin, Draw(twin))
    if call is None:
        return None
    before = _run("its own code", twin, *call)
    twin.__dict__["swap_state"] = state
    after = _run("this block", lambda *a, **k: adapter.forward(twin, *a, **k), *call)
    if before.shape != after.shape:
        raise Refused(f"the probe returns {list(after.shape)} instead of {list(before.shape)}")
    scale = before.abs().max().double().clamp_min(torch.finfo(torch.float32).tiny)
    difference = float((after.double() - before.double()).abs().max() / scale)
    if tolerance is None:
        tolerance = _TF32_TOLERANCE if allows_tf32(after.device.type) else _TOLERANCE
    if not difference <= tolerance:
        raise Refused(f"the probe differs by {difference:.1e}, more than {tolerance:.1e}")
    return difference


def _twin(module: nn.Module) -> nn.Module:
    """A copy without the hooks of the module itself, which would see the probe."""
    twin = copy.deepcopy(module).eval()
    for name, value in twin.__dict__.items():
        if name.endswith("_hooks"):
            twin.__dict__[name] = type(value)()
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in twin.parameters())
    return twin.float() if half else twin


def _run(
    who: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    device = next(x for x in args if isinstance(x, Tensor)).device.type
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            result = compute(*args, **kwargs)
    except Exception as error:
        message = str(error).strip().split("\n", 1)[0]
        raise Refused(f"{who} fails on the probe: {message}") from error
    if isinstance(result, Unserved):
        raise Refused(f"the probe is not served: {result.reason}")
    while isinstance(result, (tuple, list)):
        result = result[0]
    assert isinstance(result, Tensor)
    return result
