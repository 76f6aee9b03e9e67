"""Where tests run, and what each of them may not leave behind."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

# cuBLAS reads it once, at its first call; deterministic backwards need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import pytest
import torch

from problems import Target
from processes import WORLD, TwoProcesses, in_two_processes

HAS_GPU = torch.cuda.is_available()
CPU = pytest.param(Target("cpu", "composite"), id="cpu-composite")
CUDA = [
    pytest.param(Target("cuda", path), id=f"cuda-{path}", marks=pytest.mark.gpu)
    for path in ("split", "auto")  # small problems take "fused" in "auto"
]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fused_rope_xattn")
    group.addoption("--require-gpu", action="store_true", help="a missing GPU fails GPU tests")
    group.addoption("--fuzz", type=int, default=24, metavar="N", help="random problems a test")


def pytest_configure(config: pytest.Config) -> None:
    # The problems are too small to share, and waiting threads stall a busy machine.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_GPU or config.getoption("--require-gpu"):
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "gpu" in item.keywords and not HAS_GPU:
        pytest.fail("--require-gpu was given and there is no CUDA device")


@pytest.fixture(autouse=True)
def _random_state() -> Iterator[None]:
    """Every test starts from the same generators and leaves them as it found them."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if HAS_GPU else []
    torch.manual_seed(0)
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if HAS_GPU:
        torch.cuda.set_rng_state_all(cuda)


@pytest.fixture(autouse=True)
def _numeric_switches() -> Iterator[None]:
    """TF32 off, nondeterminism allowed, default dtype fp32, before and after every test."""

    def pin() -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)

    pin()
    yield
    pin()


@pytest.fixture(params=[CPU, *CUDA])
def target(request: pytest.FixtureRequest) -> Target:
    """The same test body runs on the CPU and, where there is one, through the GPU's kernels."""
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def two_processes(request: pytest.FixtureRequest, tmp_path: Path) -> TwoProcesses:
    """``two_processes(work, *args)``: over gloo, and over NCCL where each can have a GPU."""
    if request.param == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"{torch.cuda.device_count()} CUDA device(s): NCCL needs one for each process")
    return partial(in_two_processes, tmp_path, request.param)


@pytest.fixture
def fuzz_examples(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fuzz"))
