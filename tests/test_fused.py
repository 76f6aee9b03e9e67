"""The path of small problems: when it is taken, its operator, and what it computes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_rope_xattn import cross_attention, ops, plan
from fused_rope_xattn.arguments import Arguments
from fused_rope_xattn.autograd import CrossAttentionFunction
from fused_rope_xattn.fused import HEAD_DIMS, pays
from fused_rope_xattn.planner import GPU
from fused_rope_xattn.prepare import Prepared, prepare
from fused_rope_xattn.split import BlockTensors
from fused_rope_xattn.verify.accuracy import assert_accurate
from fused_rope_xattn.verify.cases import BASELINE, NAMED, ROWS, Case, draw_inputs, option_grid
from problems import assert_bits, assert_near, forward, gradients, small

H200 = GPU("NVIDIA H200", (9, 0), 132)
AMPERE = GPU("NVIDIA A100", (8, 0), 108)

COVERED = [
    replace(case, q_norm="none", k_norm="none", dropout_p=0.0)
    for case in (*NAMED.values(), *option_grid())
    if case.D in HEAD_DIMS
]


def prepared(case: Case, device: str = "cpu", **leaves: Tensor) -> Prepared:
    inputs = draw_inputs(case, device)
    args, kwargs = inputs.call({**inputs.leaves, **leaves})
    bound = inspect.signature(cross_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    return prepare(Arguments(**bound.arguments))


def planned(case: Case, path: str = "auto", gpu: GPU = H200) -> Any:
    args, kwargs = draw_inputs(case).call()
    return plan(*args, **kwargs, path=path, gpu=gpu)


# ---- the choice ----


@pytest.mark.parametrize("gpu", [H200, AMPERE], ids=lambda g: g.name)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_baseline_takes_three_kernels(gpu: GPU, dtype: str) -> None:
    chosen = planned(BASELINE.at(dtype), gpu=gpu)
    assert chosen.path == "fused" and chosen.kernels == (
        "block_projection q k v",
        "block_attention",
        "block_projection out",
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_many_samples_of_few_tokens_are_small(dtype: str) -> None:
    """Tiles count as the kernels cut them, in steps that such samples fill."""
    case = replace(BASELINE.at(dtype), B=64, Tq=16, Tk=16)
    assert planned(case).path == "fused"
    assert planned(replace(case, B=256)).path == "split"


@pytest.mark.parametrize(
    "changes",
    [
        {"Tq": 8192},
        {"Tk": 4096, "Dkv": 8},
        {"Dq": 2048, "B": 8, "dtype": "bf16"},
        {"Dq": 4096, "B": 16},
        {"B": 64},
    ],
    ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()),
)
def test_large_problems_are_split(changes: dict[str, int]) -> None:
    chosen = planned(replace(BASELINE, **changes))
    assert chosen.path == "split" and "attention_forward" in chosen.kernels
    assert planned(replace(BASELINE, **changes), "fused").path == "fused"


@pytest.mark.parametrize(
    "changes, dtype, training",
    [
        ({}, "bf16", "fused"),
        ({"Tq": 256, "Tk": 256}, "bf16", "split"),
        ({"Tq": 256, "Tk": 256}, "fp32", "fused"),
    ],
)
def test_a_forward_goes_the_way_of_its_backward(
    changes: dict[str, int], dtype: str, training: str
) -> None:
    """In half types, whose split backward wants more of its forward than the small one keeps."""
    args, kwargs = draw_inputs(replace(BASELINE, **changes).at(dtype)).call()
    assert plan(*args, **kwargs, gpu=H200).path == "fused"
    args[0].requires_grad_()
    assert plan(*args, **kwargs, gpu=H200).path == training
    with torch.no_grad():
        assert plan(*args, **kwargs, gpu=H200).path == "fused"


def test_tf32_has_its_own_limits() -> None:
    """Its split path has Hopper's tensor cores, that of fp32 has not."""
    case = replace(BASELINE, Tq=512, Tk=512)  # 256 tiles
    taken = []
    for tf32 in (False, True):
        problem, config, tensors = prepared(case)
        taken.append(pays(problem, config._replace(tf32=tf32), tensors))
    assert taken == [True, False]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dropout_p": 0.1}, "dropout"),
        ({"q_norm": "rms"}, "norm"),
        ({"k_norm": "layer"}, "norm"),
        ({"D": 24}, "head dims of 16, 32, 64 and 128, not 24"),
        ({"D": 256}, "head dims"),
        ({"Dq": 36}, "Dq=36"),
        ({"Dkv": 20}, "Dkv=20"),
        ({"Dv": 12}, "Dv=12"),
        ({"Dout": 30}, "Dout=30"),
        ({"D": 15}, "head dims"),
        ({"D": 16, "H": 3, "rope": "table_heads"}, "in pairs, not H=3"),
        ({"D": 16, "H": 6, "Hkv": 3, "rope": "table_batch_heads"}, "in pairs, not Hkv=3"),
    ],
    ids=str,
)
def test_what_one_launch_cannot_take_is_named(changes: dict[str, Any], reason: str) -> None:
    case = replace(BASELINE, B=2, Tq=9, Tk=11, **{"rope": "none"} | changes)
    assert planned(case).path != "fused"
    with pytest.raises(ValueError, match=f"'fused' cannot be taken: .*{reason}"):
        planned(case, "fused")


@pytest.mark.parametrize(
    "changes", [{"H": 4, "rope": "table_heads"}, {"H": 3, "rope": "table"}], ids=str
)
def test_other_narrow_heads_have_one_launch(changes: dict[str, Any]) -> None:
    assert planned(replace(BASELINE, D=16, **changes), "fused").path == "fused"


def test_widths_of_finished_keys_do_not_matter() -> None:
    assert planned(replace(BASELINE, projected=True), "fused").path == "fused"


def test_fp64_and_old_gpus_are_refused() -> None:
    for case, gpu in ((BASELINE.at("fp64"), H200), (BASELINE, GPU("V100", (7, 0), 80))):
        with pytest.raises(ValueError, match="'fused' cannot be taken"):
            planned(case, "fused", gpu)


# ---- the operator ----


def operator_arguments(case: Case) -> list[Any]:
    """What the path of small problems hands to the dispatcher."""
    _, config, t = prepared(case)
    options = (config.scale, config.is_causal, config.tf32)
    rotations = [
        value
        for r in (config.q_rotation, config.k_rotation)
        for value in (r.rotary_dim, r.interleaved, r.axes, r.base, r.full_width)
    ]
    return [
        *(t.x_query, t.x_kv, t.x_value, t.w_q, t.w_k, t.w_v, t.w_out),
        *(t.b_q, t.b_k, t.b_v, t.b_out, t.q_positions, t.q_cos, t.q_sin),
        *(t.k_positions, t.k_cos, t.k_sin, t.attn_bias, t.keep_mask, t.key_keep, t.kv_lengths),
        *(config.num_heads, config.num_kv_heads, *rotations, *options),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"Dout": 0, "biases": "qkv"},
        {"projected": True, "biases": "o"},
        {"Tk": 0},
        {"Tq": 0},
        {"rope": "table_full", "bias": "h11", "mask": "full", "lengths": "zero", "Dv": 24},
        {"rope": "axial_half", "positions": "float", "Hkv": 2, "causal": True, "dtype": "bf16"},
    ],
    ids=["plain", "no_out", "cached", "no_keys", "no_queries", "tables", "axial"],
)
def test_opcheck(changes: dict[str, Any]) -> None:
    case = replace(Case("small", 2, 5, 7, H=4, D=8, Dq=16, dtype="fp32"), **changes)
    arguments = operator_arguments(case)
    torch.library.opcheck(torch.ops.fused_rope_xattn.block_forward.default, arguments)
    results = torch.ops.fused_rope_xattn.block_forward.default(*arguments)
    assert all(result.is_contiguous() for result in results)


@pytest.mark.parametrize(
    "name",
    [
        "one_query",
        "multi_query",
        "causal_mask_bias",
        "no_out",
        "wide_out",
        "cached",
        "geometry",
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_paths_agree_on_the_cpu(name: str, dtype: str) -> None:
    """Outputs and every gradient, by the operators' CPU kernels."""
    case = NAMED[name].at(dtype)
    results = []
    for fused in (True, False):
        inputs = draw_inputs(case)
        leaves = {n: x.requires_grad_() for n, x in inputs.leaves.items()}
        _, config, t = prepared(case, **leaves)
        outputs = CrossAttentionFunction.apply(config._replace(fused=fused), *t)
        grads = torch.autograd.grad(
            outputs,
            list(leaves.values()),
            [inputs.grads["y"], inputs.grads.get("lse", torch.zeros_like(outputs[1]))],
        )
        results.append(dict(zip(("y", "lse", *leaves), (*outputs, *grads))))
    assert_near(*results)


def test_strided_arguments_are_read_right() -> None:
    _, config, t = prepared(replace(NAMED["wide_out"], dtype="fp32"))
    want = CrossAttentionFunction.apply(config._replace(fused=True), *t)

    def strided(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point() or x.dim() < 2:
            return x
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    strange = BlockTensors(*map(strided, t))  # type: ignore[arg-type]
    got = CrossAttentionFunction.apply(config._replace(fused=True), *strange)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- the kernel ----

DTYPES = ("fp32", "tf32", "fp16", "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", COVERED, ids=lambda c: c.name)
def test_outputs_meet_the_budget(case: Case, dtype: str) -> None:
    assert_accurate(
        case.at(dtype), device="cuda", path="fused", yardstick="composite", backward=False
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("sizes", [(4, 64, 128), (1, 300, 17), (16, 7, 700), (3, 129, 257)])
def test_every_head_dim_at_many_sizes(dtype: str, D: int, sizes: tuple[int, int, int]) -> None:
    """More tiles than blocks, depths that are no whole stage, both tile heights."""
    case = Case("sizes", *sizes, H=5, D=D, Dq=200, Dkv=328, biases="qkvo", lse=True, rope="half")
    assert_accurate(case.at(dtype), device="cuda", path="fused", backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["seed_fp32", "seed_tf32", "seed_bf16"])
def test_published_rows_train_in_one_launch(name: str) -> None:
    assert_accurate(ROWS[name], device="cuda", path="fused")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_call_gives_the_same_bits(dtype: str) -> None:
    inputs = draw_inputs(replace(BASELINE, dtype=dtype, biases="qkvo", lse=True), "cuda")
    first = dict(zip(("y", "lse"), forward(inputs, "fused")))
    for _ in range(20):
        assert_bits(dict(zip(("y", "lse"), forward(inputs, "fused"))), first)


@pytest.mark.gpu
def test_starts_of_rows_need_no_alignment() -> None:
    inputs = draw_inputs(replace(BASELINE, dtype="bf16", lse=True), "cuda")
    want = forward(inputs, "fused")
    for name, leaf in list(inputs.leaves.items()):
        shifted = torch.empty(leaf.numel() + 1, device="cuda", dtype=leaf.dtype)[1:]
        inputs.leaves[name] = shifted.copy_(leaf.flatten()).view(leaf.shape)
    got = forward(inputs, "fused")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    inputs = draw_inputs(replace(BASELINE, dtype="fp32"), "cuda")
    for _ in range(2):
        want = forward(inputs, "fused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(inputs, "fused")
    inputs.leaves["x_query"].neg_()
    graph.replay()
    assert torch.equal(got, forward(inputs, "fused")) and not torch.equal(got, want)


@pytest.mark.gpu
def test_three_kernels_are_launched() -> None:
    inputs = draw_inputs(replace(BASELINE, dtype="bf16", biases="qkvo"), "cuda")
    forward(inputs, "fused")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward(inputs, "fused")
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: event.time_range.start)
    names = ("block_projection", "block_attention", "block_projection")
    assert len(kernels) == len(names)
    assert all(name in kernel.name for name, kernel in zip(names, kernels, strict=True))


@pytest.mark.gpu
def test_removed_tokens_may_hold_nan() -> None:
    inputs = small("cuda", lse=True, lengths="ragged", mask="keys")
    want = gradients(inputs, "fused")
    lengths, keep = inputs.fixed["kv_lengths"], inputs.fixed["kv_keep_mask"]
    keep = keep & (torch.arange(keep.shape[1], device="cuda") < lengths[:, None])
    with torch.no_grad():
        inputs.leaves["x_kv"].masked_fill_(~keep[..., None], float("nan"))
    assert_bits(gradients(inputs, "fused"), want)


def test_the_operator_is_defined_without_a_binary() -> None:
    assert any(schema.startswith("block_forward(") for schema in ops.SCHEMAS)
