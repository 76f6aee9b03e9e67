"""Keys spread over two processes: results and gradients are those of all keys in one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_rope_xattn import (
    ProjectedKV,
    RoPE,
    RotaryTable,
    cross_attention,
    cross_attention_sharded_keys,
    merge_partial,
)
from fused_rope_xattn.verify.cases import Case, Inputs, draw_inputs
from problems import SMALL, assert_tensor_near
from processes import TwoProcesses, here

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"lse": True, "biases": "qkvo", "Hkv": 2},
    "norms": {"q_norm": "layer", "k_norm": "rms_inner", "Dv": 24, "positions": "batch"},
    "masks": {"mask": "full", "bias": "bhqk-inf", "lengths": "zero", "lse": True},
    "row_bias": {"bias": "1hq1", "mask": "keys"},
    "tables": {"rope": "table_batch_heads", "lse": True},
    "axial": {"rope": "axial_half", "positions": "float_batch", "dtype": "fp64"},
    "cached": {"projected": True, "lengths": "ragged", "lse": True},
    "no_out": {"Dout": 0, "rope": "q_only", "dtype": "bf16", "lse": True},
}
# Keys of the first process; the others are the second one's.
BORDERS = (17, 0)


def with_key_axis(name: str, x: Tensor) -> int | None:
    """The axis of keys of a leaf or a fixed argument."""
    if name in ("x_kv", "x_value"):
        return 1
    if name in ("k", "v"):
        return 2
    if name in ("attn_bias", "kv_keep_mask"):
        return x.dim() - 1 if x.shape[-1] > 1 else None
    return None


def slice_of(inputs: Inputs, start: int, stop: int) -> Inputs:
    """What a process holds that has the keys from ``start`` to ``stop``."""

    def cut(name: str, x: Tensor) -> Tensor:
        axis = with_key_axis(name, x)
        return x if axis is None else x.narrow(axis, start, stop - start)

    leaves = {n: cut(n, x.detach()).clone() for n, x in inputs.leaves.items()}
    fixed = {n: cut(n, x) if isinstance(x, Tensor) else x for n, x in inputs.fixed.items()}
    if "kv_lengths" in fixed:
        fixed["kv_lengths"] = (fixed["kv_lengths"] - start).clamp(0, stop - start)
    rope = fixed["rope"]
    k_rope = rope[1] if isinstance(rope, tuple) else rope
    if isinstance(k_rope, RotaryTable):
        tables = (t[..., start:stop, :] for t in (k_rope.cos, k_rope.sin))
        fixed["rope"] = (rope[0], RotaryTable(*tables, interleaved=k_rope.interleaved))
    if isinstance(k_rope, RoPE) and not inputs.case.projected:
        default = torch.arange(inputs.case.Tk, device=here())
        positions = inputs.fixed.get("k_positions", default)
        axis = positions.dim() - 1 - (k_rope.axes > 1)
        fixed["k_positions"] = positions.narrow(axis, start, stop - start)
    return Inputs(inputs.case, inputs.seed, leaves, fixed, inputs.grads)


def results(fn: Any, inputs: Inputs) -> dict[str, Tensor]:
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.leaves.items()}
    args, kwargs = inputs.call(leaves)
    returned = fn(*args, **kwargs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    grads = torch.autograd.grad(
        outputs, list(leaves.values()), [inputs.grads[n] for n in ("y", "lse")[: len(outputs)]]
    )
    return dict(zip(("y", "lse"), outputs)) | {f"d{n}": g for n, g in zip(leaves, grads)}


def _compare(case: Case, rank: int, border: int) -> None:
    inputs = draw_inputs(case, here(), seed=3)
    want = results(cross_attention, inputs)
    start, stop = ((0, border), (border, case.Tk))[rank]
    got = results(cross_attention_sharded_keys, slice_of(inputs, start, stop))
    assert got.keys() == want.keys()
    eps = torch.finfo(case.storage).eps
    for name, whole in want.items():
        axis = with_key_axis(name[1:], whole) if name.startswith("d") else None
        mine = whole if axis is None else whole.narrow(axis, start, stop - start)
        if name == "dattn_bias" and axis is None:  # of the slice's keys, like all of the bias
            continue
        assert_tensor_near(got[name], mine, 256, f"{case.name}, {name}", eps)


def _compare_all(rank: int) -> None:
    for border in BORDERS:
        for name, options in CASES.items():
            _compare(replace(SMALL, name=name, **options), rank, border)


def _partial_results(rank: int) -> None:
    """merge_partial alone, on what a call without w_out returns; nothing travels backward."""
    inputs = draw_inputs(replace(SMALL, Dout=0, lse=True, rope="none"), here(), seed=5)
    want = results(cross_attention, inputs)
    start, stop = ((0, 20), (20, 50))[rank]

    def merged(*args: Any, **kwargs: Any) -> Any:
        return merge_partial(*cross_attention(*args, **kwargs), group=dist.group.WORLD)

    got = results(merged, slice_of(inputs, start, stop))
    assert_tensor_near(got["y"], want["y"])
    assert_tensor_near(got["lse"], want["lse"])
    assert_tensor_near(got["dx_kv"], want["dx_kv"][:, start:stop])
    total = got["dw_q"].clone()
    dist.all_reduce(total)
    assert_tensor_near(total, want["dw_q"], 256)


def _everything(rank: int) -> None:
    _compare_all(rank)
    _partial_results(rank)


@pytest.mark.slow
def test_two_processes_compute_what_one_does(two_processes: TwoProcesses) -> None:
    """Outputs, lse and every gradient; slices of unequal length, one of them empty."""
    two_processes(_everything)


@pytest.fixture
def _alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", CASES)
def test_one_process_is_the_plain_call(name: str) -> None:
    _compare(replace(SMALL, name=name, **CASES[name]), 0, SMALL.Tk)


@pytest.mark.usefixtures("_alone")
def test_dropout_drops_the_weights_of_the_slice() -> None:
    inputs = draw_inputs(replace(SMALL, dropout_p=0.3), seed=3)
    outputs = []
    for fn in (cross_attention, cross_attention_sharded_keys):
        torch.manual_seed(4)
        args, kwargs = slice_of(inputs, 0, 50).call()
        outputs.append(fn(*args, **kwargs))
    assert_tensor_near(outputs[1], outputs[0])


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"is_causal": True}, "is_causal"),
        ({}, "k_positions"),
        ({"rope": (None, RoPE())}, "k_positions"),
        ({"rope": None, "w_out": None, "b_out": torch.ones(8)}, "b_out"),
    ],
    ids=["causal", "positions", "k_side", "bias_of_nothing"],
)
def test_what_would_be_wrong_in_silence_is_refused(changes: dict[str, Any], argument: str) -> None:
    """A causal diagonal and default positions would both start anew in every slice."""
    w = [torch.randn(8, 8) for _ in range(3)]
    w_out = changes.pop("w_out", torch.randn(8, 8))
    x = torch.randn(1, 2, 8)
    with pytest.raises(ValueError, match=f"^{argument}: "):
        cross_attention_sharded_keys(x, x, *w, w_out, num_heads=2, **changes)


def test_finished_keys_need_no_positions() -> None:
    """They are rotated; what is missing here is the group of processes."""
    kv = ProjectedKV(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    x, w = torch.randn(1, 2, 8), torch.randn(16, 8)
    with pytest.raises(ValueError, match="process group"):
        cross_attention_sharded_keys(x, kv, w, None, None, None, num_heads=2)
