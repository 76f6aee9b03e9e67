"""The builders of real blocks: small ones agree after the swap, full-sized ones have a shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fused_rope_xattn.swap import swap_cross_attention
from fused_rope_xattn.verify.swap_cases import SWAP_CASES, Built
from swap_models import output, package


def build(name: str, device: str, dtype: torch.dtype, **sizes: Any) -> Built:
    case = SWAP_CASES[name]
    if case.needs:
        package(case.needs)
    assert case.missing is None
    return case.build(device, dtype, **sizes)


@pytest.mark.parametrize("name", SWAP_CASES)
def test_small(device: str, name: str) -> None:
    module, args, kwargs = build(name, device, torch.float32, **SWAP_CASES[name].small)
    module.eval()
    swapped = copy.deepcopy(module)
    assert swap_cross_attention(swapped).swapped
    with torch.no_grad():
        want, got = (output(m(*args, **kwargs)) for m in (module, swapped))
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("name", SWAP_CASES)
def test_real_sizes(name: str) -> None:
    module, args, kwargs = build(name, "meta", torch.bfloat16)
    with torch.no_grad():
        y = module(*args, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    assert y.is_meta
    assert y.dtype == torch.bfloat16
    assert y.numel() > 1e6
