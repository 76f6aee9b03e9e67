"""Two processes over gloo on the CPU, and how tests compare what they hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

WORLD = 2


def in_two_processes(work: Callable[..., None], tmp_path: Path, *args: Any) -> None:
    """``work(rank, *args)`` in each of them; what one raises fails the test."""
    torch.multiprocessing.spawn(
        _process, (str(tmp_path / "store"), work, args), nprocs=WORLD, join=True
    )


def _process(rank: int, store: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        work(rank, *args)
    finally:
        dist.destroy_process_group()


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same(got: Any, want: Tensor, name: str = "") -> None:
    torch.testing.assert_close(whole(got), want, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")
