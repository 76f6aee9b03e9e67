"""What the page on troubleshooting quotes is what the code says, each message once."""

from __future__ import annotations

import json
import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fused_rope_xattn import (
    CrossAttentionFunction,
    FusedRoPECrossAttention,
    ProjectedKV,
    RoPE,
    RotaryTable,
    _loader,
    cross_attention,
    functional,
    plan,
    planner,
    swap_cross_attention,
)
from fused_rope_xattn.arguments import Arguments
from fused_rope_xattn.module_rules import check_shares, heads_of
from fused_rope_xattn.prepare import prepare, without_removed_tokens

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/troubleshooting.md"
TOOLCHAIN = runpy.run_path(str(ROOT / "kernels/toolchain.py"))
QUOTES = re.findall(r"^```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)

X = torch.zeros(2, 5, 64)
KV = torch.zeros(2, 7, 48)
TABLE = RotaryTable(torch.ones(5, 8), torch.zeros(5, 8))
CACHE = ProjectedKV(torch.zeros(2, 4, 7, 16), torch.zeros(2, 4, 7, 16))
NO_NVCC = {"CUDA_HOME": "/nonexistent"}
NO_COMPILER = {**NO_NVCC, "CXX": "/nonexistent/c++"}
REQUIRE = {"FUSED_ROPE_XATTN_CUDA": "require"}


def call(**options: Any) -> Any:
    """A right call but for the options."""
    weights: dict[str, Any] = {
        "w_q": torch.zeros(64, 64),
        "w_k": torch.zeros(64, 48),
        "w_v": torch.zeros(64, 48),
        "w_out": torch.zeros(64, 64),
    }
    return cross_attention(**{"x_query": X, "x_kv": KV, "num_heads": 4, **weights, **options})


def cached(**options: Any) -> Any:
    return call(x_kv=CACHE, w_k=None, w_v=None, **options)


def on_a_gpu(head_dim: int, **options: Any) -> Any:
    """What a call on a GPU would do."""
    x, w = torch.empty(2, 8, 80, device="meta"), torch.empty(4 * head_dim, 80, device="meta")
    return plan(x, x, w, w, w, None, num_heads=4, gpu=planner.GPU("H200", (9, 0), 132), **options)


def without_gpu(patch: pytest.MonkeyPatch) -> None:
    """A call whose kernels are missing warns; the reason stands in for that of a CUDA device."""
    reason = "torch sees no CUDA device. Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
    patch.setattr(planner, "kernels_missing", lambda device: reason)
    functional._warn_of_missing_kernels(torch.device("cuda"), reason)


def with_hook() -> None:
    block = FusedRoPECrossAttention(64, 4, kv_dim=48)
    block.q_proj.register_forward_hook(lambda *_: None)
    block(X, KV)


def swapped() -> None:
    attention = nn.MultiheadAttention(64, 4, kdim=48, vdim=48, batch_first=True)
    swap_cross_attention(attention)
    attention(X, KV, KV)


def loader(
    patch: pytest.MonkeyPatch,
    error: Exception | None = None,
    cuda: int = 12090,
    torch_cuda: str | None = "13.0",
    capability: tuple[int, int] | None = None,
) -> str | None:
    """What is said of a binary that failed to load or has these facts, and of a device."""
    told = {"cuda": cuda, "archs": "8.0+PTX;9.0a", "torch_target": 0x020A, "kernel_hash": "1"}
    patch.setattr(_loader, "_load_error", error)
    patch.setattr(torch.ops.fused_rope_xattn, "build_info", lambda: json.dumps(told))
    patch.setattr(_loader.ops, "has_cuda_kernels", lambda: cuda > 0)
    patch.setattr(torch, "__version__", "2.13.0+cpu")
    patch.setattr(torch.version, "cuda", torch_cuda)
    patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    patch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    return _loader.why_unavailable()


def build(patch: pytest.MonkeyPatch, **environment: str) -> str:
    """What setup.py says about a machine with these variables: the first line in the box."""
    for name in ("CIBUILDWHEEL", "CUDA_HOME", "CUDA_PATH", "CXX", TOOLCHAIN["SWITCH"]):
        patch.delenv(name, raising=False)
    for name, value in environment.items():
        patch.setenv(name, value)
    patch.setitem(TOOLCHAIN["find_cuda_home"].__globals__, "shutil", FakeShutil)
    return str(TOOLCHAIN["describe"](TOOLCHAIN["choose_build"]()).split("\n")[2])


class FakeShutil:
    """A PATH with a compiler on it, whatever this machine has."""

    @staticmethod
    def which(name: str) -> str | None:
        return None if name.startswith("/nonexistent") else f"/usr/bin/{name}"


def architectures(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    TOOLCHAIN["architectures"]()


def direct() -> None:
    """The autograd function itself, given a table that requires grad."""
    cos, sin = TABLE.cos.clone().requires_grad_(), TABLE.sin
    weights = [torch.zeros(64, 64), torch.zeros(64, 48), torch.zeros(64, 48), None]
    rope = (RotaryTable(cos, sin), None)
    prepared = prepare(Arguments(X, KV, *weights, rope=rope, num_heads=4))
    y, _ = CrossAttentionFunction.apply(prepared.config, *prepared.tensors)
    y.sum().backward()


def as_dtensor(x: torch.Tensor) -> torch.Tensor:
    """What is told from a DTensor by nobody who goes by names; a true one takes processes."""
    return x.as_subclass(type("DTensor", (torch.Tensor,), {}))


Maker = Callable[[pytest.MonkeyPatch], Any]


def at_call(**options: Any) -> Maker:
    return lambda patch: call(**options)


MAKERS: tuple[Maker, ...] = (
    at_call(x_query=X[0]),
    at_call(w_k=torch.zeros(48, 64)),
    at_call(num_heads=6),
    at_call(num_kv_heads=3),
    at_call(x_kv=KV.bfloat16()),
    lambda patch: on_a_gpu(16, kv_lengths=torch.zeros(2, dtype=torch.int64)),
    lambda patch: call(x_kv=torch.nested.nested_tensor([KV[0], KV[1, :3]])),
    at_call(kv_keep_mask=torch.zeros(2, 7)),
    at_call(attn_bias=torch.zeros(5, 7, dtype=torch.bool)),
    at_call(kv_keep_mask=torch.zeros(5, 7, dtype=torch.bool)),
    at_call(attn_bias=torch.zeros(2, 5, 7)),
    lambda patch: on_a_gpu(18, rope=RoPE(axes=2)),
    at_call(rope=RoPE(axes=2)),
    at_call(rope=(TABLE, None), q_positions=torch.arange(5)),
    lambda patch: FusedRoPECrossAttention(64, 4, rope=TABLE),
    lambda patch: RoPE(rotary_dim=6, axes=2),
    lambda patch: cached(k_positions=torch.arange(7)),
    at_call(w_out=None, b_out=torch.zeros(64)),
    at_call(x_query=as_dtensor(X)),
    lambda patch: without_removed_tokens(
        Arguments(X, as_dtensor(KV), kv_lengths=torch.zeros(2, dtype=torch.int64))
    ),
    lambda patch: heads_of("q_proj", as_dtensor(X), 16),
    lambda patch: heads_of("k_proj", KV[..., :8], 16),
    lambda patch: check_shares(2, 2, 4, 2),
    at_call(path="split"),
    lambda patch: on_a_gpu(20, path="split"),
    lambda patch: on_a_gpu(16, path="fused", dropout_p=0.1),
    lambda patch: direct(),
    without_gpu,
    lambda patch: with_hook(),
    lambda patch: swapped(),
    lambda patch: loader(patch, ModuleNotFoundError("no", name="fused_rope_xattn._C")),
    lambda patch: loader(patch, cuda=0),
    lambda patch: loader(patch, ImportError("libstdc++.so.6: version `GLIBCXX_3.4.30' not found")),
    lambda patch: loader(patch, torch_cuda=None),
    loader,
    lambda patch: loader(patch, capability=(7, 5)),
    lambda patch: build(patch, **NO_NVCC, **REQUIRE),
    lambda patch: build(patch, **NO_COMPILER, **REQUIRE),
    lambda patch: build(patch, **NO_NVCC),
    lambda patch: build(patch, **NO_COMPILER),
    architectures,
)


def message_of(make: Maker) -> str:
    """The error, the one warning, or the text that ``make`` comes to."""
    planner._told.clear()
    _loader._binary_problem.cache_clear()
    _loader._device_problem.cache_clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            returned = make(patch)
        except (Exception, SystemExit) as error:
            return str(error)
    if isinstance(returned, str):
        return returned
    ours = [str(warning.message) for warning in told if warning.category is RuntimeWarning]
    return ours[0] if ours else "nothing was said"


@pytest.fixture
def _no_cached_answers() -> Any:
    yield
    planner._told.clear()
    _loader._binary_problem.cache_clear()
    _loader._device_problem.cache_clear()


@pytest.mark.parametrize("index", range(len(MAKERS)))
@pytest.mark.usefixtures("_no_cached_answers")
def test_what_the_page_quotes_is_what_is_said(index: int) -> None:
    assert len(QUOTES) == len(MAKERS)
    assert message_of(MAKERS[index]) == QUOTES[index]
