"""What is said about the binary, loaded or not."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from fused_rope_xattn import _loader, build_info, is_available, why_unavailable


@pytest.fixture(autouse=True)
def _no_cached_answers() -> Any:
    def forget() -> None:
        _loader._binary_problem.cache_clear()
        _loader._device_problem.cache_clear()

    forget()
    yield
    forget()


def pretend(monkeypatch: pytest.MonkeyPatch, error: Exception | None, **facts: Any) -> None:
    """A binary that did not load for that reason, or one with those facts about it."""
    monkeypatch.setattr(_loader, "_load_error", error)
    told = {"cuda": 12090, "archs": "8.0;9.0a;12.0+PTX", "torch_target": 0x020A, "kernel_hash": "1"}
    told |= facts
    monkeypatch.setattr(torch.ops.fused_rope_xattn, "build_info", lambda: json.dumps(told))
    monkeypatch.setattr(_loader.ops, "has_cuda_kernels", lambda: told["cuda"] > 0)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")


def test_the_answers_agree() -> None:
    assert is_available() == (why_unavailable() is None)
    info = build_info()
    assert info["binary"] == (_loader.load_error() is None)
    assert info["binary"] or info["reason"] == why_unavailable()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("no", name="fused_rope_xattn._C"), "without compiled kernels"),
        (ImportError("undefined symbol: _ZN3c10"), "undefined symbol: _ZN3c10"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "No module named 'x'"),
    ],
)
def test_a_binary_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    pretend(monkeypatch, error)
    reason = why_unavailable()
    assert reason is not None and words in reason and "pip install" in reason
    assert _loader.load_error() is error
    assert not is_available()
    assert build_info() == {"binary": False, "reason": reason}


def test_an_older_torch_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.setattr(importlib, "import_module", lambda *args: pytest.fail("imported"))
    error = _loader._load()
    assert error is not None and "2.9.1" in str(error) and "2.10" in str(error)


def test_errors_other_than_of_import_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        _loader._load()


def test_build_info_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert build_info() == {
        "binary": True,
        "cuda": "12.9",
        "archs": ["8.0", "9.0a", "12.0+PTX"],
        "torch_target": "2.10",
        "kernel_hash": "1",
    }
    pretend(monkeypatch, None, cuda=0, archs="")
    assert build_info()["cuda"] is None and build_info()["archs"] == []


def test_a_binary_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None, cuda=0, archs="")
    assert "without nvcc" in str(why_unavailable())


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(why_unavailable())


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in str(why_unavailable())


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((9, 0), "9.0a", True),
        ((10, 0), "9.0a", False),
        ((8, 6), "8.0;9.0a", True),
        ((8, 0), "8.6", False),
        ((12, 0), "8.0+PTX;9.0a", True),
        ((12, 0), "8.0;9.0a", False),
        ((10, 3), "10.0f", True),
        ((7, 5), "7.5", False),
        ((8, 0), "9.0+PTX", False),
    ],
)
def test_devices_that_the_binary_covers(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], archs: str, runs: bool
) -> None:
    pretend(monkeypatch, None, archs=archs)
    pretend_gpu(monkeypatch, capability)
    assert is_available() == runs == is_available(torch.device("cuda", 1)) == is_available(0)
    if not runs:
        reason = why_unavailable()
        assert reason is not None
        assert "Some GPU" in reason and f"{capability[0]}.{capability[1]}" in reason
