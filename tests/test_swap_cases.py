"""The builders of real blocks: small ones agree after the swap, full-sized ones have a shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fused_rope_xattn.swap import swap_cross_attention
from fused_rope_xattn.verify.swap_cases import SWAP_CASES, Built
from swap_models import output, package

SAM2 = {"side": 4, "memories": 2, "pointers": 3}
SMALL: dict[str, dict[str, Any]] = {
    "sam2_attention": {**SAM2, "width": 32, "memory_width": 16},
    "sam2_layer": {**SAM2, "width": 32, "memory_width": 16},
    "mast3r_block": {"height": 3, "width": 4, "dim": 32, "heads": 2},
    "mast3r_block_sdpa": {"height": 3, "width": 4, "dim": 32, "heads": 2},
    "decoder_layer": {"batch": 2, "queries": 5, "keys": 7, "dim": 32, "heads": 4},
    "ltx2_pair": {
        "video": 12,
        "audio": 5,
        "video_dim": 32,
        "audio_dim": 16,
        "heads": 4,
        "head_dim": 8,
    },
    "sam2_transformers": SAM2,
}


def build(name: str, device: str, dtype: torch.dtype, **sizes: Any) -> Built:
    case = SWAP_CASES[name]
    if case.needs:
        package(case.needs)
    assert case.missing is None
    return case.build(device, dtype, **sizes)


def test_every_case_is_here() -> None:
    assert SMALL.keys() == SWAP_CASES.keys()


@pytest.mark.parametrize("name", SMALL)
def test_small(device: str, name: str) -> None:
    module, args, kwargs = build(name, device, torch.float32, **SMALL[name])
    module.eval()
    swapped = copy.deepcopy(module)
    assert swap_cross_attention(swapped).swapped
    with torch.no_grad():
        want, got = (output(m(*args, **kwargs)) for m in (module, swapped))
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("name", SMALL)
def test_real_sizes(name: str) -> None:
    module, args, kwargs = build(name, "meta", torch.bfloat16)
    with torch.no_grad():
        y = module(*args, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    assert y.is_meta
    assert y.dtype == torch.bfloat16
    assert y.numel() > 1e6
