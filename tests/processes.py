"""Two processes, over gloo on the CPU or over NCCL on two GPUs, and how tests compare results.

The fixture ``two_processes`` of conftest.py starts them in both ways.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

WORLD = 2
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

TwoProcesses: TypeAlias = Callable[..., None]


def in_two_processes(tmp_path: Path, device: str, work: Callable[..., None], *args: Any) -> None:
    """``work(rank, *args)`` in each of them; what one raises fails the test.

    They are forked off a server that has imported what takes seconds, but has not touched a GPU.
    """
    multiprocessing.set_forkserver_preload(
        ["torch.distributed.tensor.parallel", "fused_rope_xattn"]
    )
    torch.multiprocessing.start_processes(
        _process,
        (str(tmp_path / "store"), device, work, args),
        nprocs=WORLD,
        start_method="forkserver",
    )


def _process(
    rank: int, store: str, device: str, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        BACKENDS[device], init_method=f"file://{store}", rank=rank, world_size=WORLD
    )
    try:
        work(rank, *args)
    finally:
        dist.destroy_process_group()


def here() -> torch.device:
    """Where this process computes: a GPU of its own, or the CPU."""
    if dist.get_backend() == BACKENDS["cuda"]:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def mesh() -> DeviceMesh:
    return init_device_mesh(here().type, (WORLD,))


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same(got: Any, want: Tensor, name: str = "") -> None:
    """Equal but for the order of sums; on a GPU the two may have gone by different kernels."""
    atol = 1e-6
    if want.is_cuda and want.numel():
        atol = max(atol, 64 * torch.finfo(want.dtype).eps * float(want.detach().abs().max()))
    torch.testing.assert_close(whole(got), want, rtol=1e-4, atol=atol, msg=lambda m: f"{name}: {m}")
