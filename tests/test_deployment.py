"""Models that hold the block, taken out of Python: exported, compiled ahead of time, as ONNX."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_rope_xattn import FusedRoPECrossAttention
from problems import assert_tensor_near

TOKENS, KEYS = torch.export.Dim("Tq", min=2, max=512), torch.export.Dim("Tk", min=2, max=512)


class Decoder(nn.Module):
    """A block among others, with options that leave their marks in a graph."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, device=device)
        self.attention = FusedRoPECrossAttention(
            32, 4, kv_dim=24, bias=True, qk_norm="rms", device=device
        )
        self.head = nn.Linear(32, 8, device=device)

    def forward(self, x: Tensor, kv: Tensor, kv_lengths: Tensor) -> Tensor:
        return self.head(x + self.attention(self.norm(x), kv, kv_lengths=kv_lengths))


def model_and_calls(device: str = "cpu") -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """The first call is for tracing, the second has other lengths."""
    torch.manual_seed(0)
    model = Decoder(device).eval()
    calls = []
    for tokens, keys in ((9, 13), (17, 40)):
        x, kv = (torch.randn(2, t, w, device=device) for t, w in ((tokens, 32), (keys, 24)))
        calls.append((x, kv, torch.tensor([keys, keys // 2], device=device)))
    return model, calls


def exported(model: nn.Module, call: tuple[Tensor, ...]) -> Any:
    return torch.export.export(model, call, dynamic_shapes=({1: TOKENS}, {1: KEYS}, None))


def test_a_saved_export_loads_and_runs(tmp_path: Path, device: str) -> None:
    model, calls = model_and_calls(device)
    torch.export.save(exported(model, calls[0]), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for call in calls:
        assert_tensor_near(loaded(*call), model(*call))


# A process of its own: torch 2.11 has been seen to crash while it loads a library for CUDA.
PLAIN_LINEAR = """
import sys, torch
model, x = torch.nn.Linear(8, 8, device="cuda"), torch.randn(2, 8, device="cuda")
with torch.no_grad():
    program = torch.export.export(model, (x,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    torch._inductor.aoti_load_package(package)(x)
"""


def skip_without_aot_inductor(package: Path) -> None:
    """Skips where torch cannot load a plain ``nn.Linear`` that it compiled ahead of time."""
    command = [sys.executable, "-c", PLAIN_LINEAR, str(package)]
    code = subprocess.run(command, capture_output=True, check=False).returncode
    if code != 0:
        pytest.skip(f"torch {torch.__version__} fails to load a plain nn.Linear compiled for CUDA")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_ahead_of_time(tmp_path: Path, device: str) -> None:
    """One library for all lengths; needs a C++ compiler."""
    if device == "cuda":
        skip_without_aot_inductor(tmp_path / "linear.pt2")
    model, calls = model_and_calls(device)
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            exported(model, calls[0]), package_path=str(tmp_path / "model.pt2")
        )
        compiled = torch._inductor.aoti_load_package(package)
        for call in calls:
            assert_tensor_near(compiled(*call), model(*call), 256)


@pytest.mark.slow
def test_onnx(tmp_path: Path) -> None:
    """Real numbers throughout, and the same results in another runtime at other lengths."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import onnx
    import onnxruntime

    model, calls = model_and_calls()
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            calls[0],
            path,
            dynamo=True,
            dynamic_shapes=({1: TOKENS}, {1: KEYS}, None),
            verbose=False,
        )
    graph = onnx.load(path).graph
    assert {node.domain for node in graph.node} <= {"", "pkg.onnxscript.torch_lib"}
    complex_types = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
    kinds = [v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)]
    kinds += [tensor.data_type for tensor in graph.initializer]
    assert kinds
    assert not set(kinds) & set(complex_types)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    for call in calls:
        (got,) = session.run(None, {n: t.numpy() for n, t in zip(names, call)})
        assert_tensor_near(torch.from_numpy(got), model(*call), 256)
