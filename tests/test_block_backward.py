"""The small block's backward: when it is taken, that its operator is well formed, what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from fused_rope_xattn import cross_attention, fused, split
from fused_rope_xattn.autograd import CrossAttentionFunction
from fused_rope_xattn.block_ops import BlockNeeds
from fused_rope_xattn.config import BlockConfig
from fused_rope_xattn.split import Activations, BlockTensors, Grads, Needs, ProjectionNeeds
from fused_rope_xattn.verify.accuracy import verdicts
from fused_rope_xattn.verify.cases import BASELINE, NAMED, ROWS, Case
from problems import assert_bits, assert_near, gradients, small
from test_fused import COVERED, DTYPES, prepared

TINY = Case("tiny", 2, 5, 7, H=4, D=8, Dq=16, biases="qkvo", dtype="fp32")


class Problem:
    """A block after its forward, ready for either backward."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        _, config, t = prepared(case, device)
        self.config: BlockConfig = config._replace(fused=True)
        self.t: BlockTensors = t
        y, self.saved = split.forward(config, t, keep_rest=True)
        self.dy = torch.randn_like(y)
        self.dlse = torch.randn_like(self.saved.lse) if case.lse else None

    def needs(self) -> Needs:
        """Everything that this block has."""
        t, all_of = self.t, ProjectionNeeds(True, True, True, False, False)
        k = all_of if t.w_k is not None else ProjectionNeeds(True, False, False, False, False)
        return Needs(
            q=all_of._replace(bias=t.b_q is not None),
            k=k._replace(bias=t.b_k is not None),
            v=k._replace(bias=t.b_v is not None),
            attn_bias=False,
            w_out=t.w_out is not None,
            b_out=t.b_out is not None,
        )

    def backward(self, how: Callable[..., Grads], needs: Needs) -> dict[str, Tensor]:
        t, saved = split.needed(self.t, self.saved, needs)
        return named(how(self.config, t, saved, needs, self.dy, self.dlse))


def named(grads: Grads) -> dict[str, Tensor]:
    """The gradients that are there."""
    parts = {f"{s}.{n}": g for s in "qkv" for n, g in getattr(grads, s)._asdict().items()}
    parts |= {"w_out": grads.w_out, "b_out": grads.b_out}
    return {name: g for name, g in parts.items() if g is not None}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_out": {"Dout": 0, "biases": "qkv"},
    "cached": {"projected": True, "biases": "o"},
    "no_keys": {"Tk": 0},
    "no_queries": {"Tq": 0},
    "no_batch": {"B": 0},
    "tables": {"rope": "table_full", "bias": "h11", "mask": "full", "lengths": "zero", "Dv": 24},
    "axial": {"rope": "axial_half", "positions": "float", "Hkv": 2, "causal": True, "lse": True},
    "unrotated_keys": {"rope": "q_only", "mask": "keys"},
    "bf16": {"dtype": "bf16", "rope": "table_full_half", "Dv": 8, "lengths": "ragged"},
}


# ---- the choice ----


def test_what_is_taken() -> None:
    problem = Problem(TINY)
    config, saved, needs = problem.config, problem.saved, problem.needs()
    assert fused.takes_backward(config, saved, needs)
    assert not fused.takes_backward(config._replace(fused=False), saved, needs)
    assert not fused.takes_backward(config, saved, needs._replace(attn_bias=True))
    nothing = ProjectionNeeds(False, False, False, False, False)
    assert not fused.takes_backward(
        config, saved, Needs(nothing, nothing, nothing, False, True, True)
    )
    long = torch.empty(64, 512, 16, 128, device="meta")
    assert not fused.takes_backward(config, Activations(long, long, long, long, long), needs)


def test_half_types_stop_at_two_tiles_a_multiprocessor() -> None:
    problem = Problem(TINY)
    for batch, taken in (8, True), (16, False):
        heads = torch.empty(batch, 64, 8, 32, device="meta", dtype=torch.bfloat16)
        saved = Activations(heads, heads, heads, heads, heads)
        assert fused.takes_backward(problem.config, saved, problem.needs()) is taken


@pytest.mark.parametrize("fused_forward", [True, False])
def test_autograd_takes_it(fused_forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for module in (fused, split):
        original = module.backward

        def recorded(*args: Any, module: Any = module, original: Any = original) -> Grads:
            taken.append(module.__name__)
            grads: Grads = original(*args)
            return grads

        monkeypatch.setattr(module, "backward", recorded)
    _, config, t = prepared(TINY)
    t = t._replace(x_query=t.x_query.requires_grad_())
    y, _ = CrossAttentionFunction.apply(config._replace(fused=fused_forward), *t)
    y.sum().backward()
    assert taken == [(fused if fused_forward else split).__name__]


# ---- the operator ----


def operator_arguments(case: Case, needs: BlockNeeds) -> list[Any]:
    problem = Problem(case)
    config, t = problem.config, problem.t
    rotations = [
        value
        for r in (config.q_rotation, config.k_rotation)
        for value in (r.rotary_dim, r.interleaved, r.axes, r.base, r.full_width)
    ]
    return [
        *(problem.dy, problem.dlse, t.x_query, t.x_kv, t.x_value),
        *(t.w_q, t.w_k, t.w_v, t.w_out, *problem.saved[:5]),
        *(t.q_positions, t.q_cos, t.q_sin, t.k_positions, t.k_cos, t.k_sin),
        *(t.attn_bias, t.keep_mask, t.key_keep, t.kv_lengths),
        *(*rotations, config.scale, config.is_causal, config.tf32, *needs),
    ]


@pytest.mark.parametrize("name", VARIANTS)
def test_opcheck(name: str) -> None:
    case = replace(TINY, **VARIANTS[name])
    has_weights = not case.projected
    needs = BlockNeeds(
        x_query=True,
        x_kv=True,
        x_value=case.Dv is not None or case.projected,
        w_q=True,
        w_k=has_weights,
        w_v=has_weights,
        w_out=case.Dout != 0,
        b_q="q" in case.biases,
        b_k="k" in case.biases and has_weights,
        b_v="v" in case.biases and has_weights,
        b_out="o" in case.biases,
    )
    arguments = operator_arguments(case, needs)
    torch.library.opcheck(torch.ops.fused_rope_xattn.block_backward.default, arguments)
    for result in torch.ops.fused_rope_xattn.block_backward.default(*arguments):
        assert result.is_contiguous()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_backwards_agree(name: str, device: str) -> None:
    problem = Problem(replace(TINY, **VARIANTS[name]), device)
    needs = problem.needs()
    assert_near(problem.backward(fused.backward, needs), problem.backward(split.backward, needs))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("Dv", [None, 24])
@pytest.mark.parametrize("lse", [False, True])
def test_any_one_gradient_alone(device: str, Dv: int | None, lse: bool) -> None:
    """What is wanted comes out as it does beside all others, and nothing else does."""
    problem = Problem(replace(TINY, Dv=Dv, lse=lse, rope="q_only", lengths="ragged"), device)
    everything = problem.backward(fused.backward, problem.needs())
    nothing = ProjectionNeeds(False, False, False, False, False)
    none = Needs(nothing, nothing, nothing, False, False, False)
    for side in "qkv":
        for field in ("x", "weight", "bias"):
            if field == "x" and Dv is None and side != "q":
                continue  # of an x that keys and values share
            needs = none._replace(**{side: nothing._replace(**{field: True})})
            alone = problem.backward(fused.backward, needs)
            assert_bits(alone, {f"{side}.{field}": everything[f"{side}.{field}"]})
    for name in ("w_out", "b_out"):
        needs = none._replace(**{name: True}, q=nothing._replace(x=True))
        alone = problem.backward(fused.backward, needs)
        assert_bits(alone, {n: everything[n] for n in ("q.x", name)})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_graph_for_all_lengths(device: str) -> None:
    torch._dynamo.reset()
    _, config, t = prepared(replace(TINY, dtype="fp32"), device)
    config = config._replace(fused=True)

    def step(x_query: Tensor, x_kv: Tensor) -> Tensor:
        changed = t._replace(x_query=x_query, x_kv=x_kv)
        y, _ = CrossAttentionFunction.apply(config, *changed)
        return y

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    graphs = set()
    for queries, keys in ((5, 7), (9, 20), (33, 6)):
        xs = [torch.randn(2, n, 16, device=device).requires_grad_() for n in (queries, keys)]
        results = []
        for function in (compiled, step):
            y = function(*xs)
            results.append(torch.autograd.grad(y.square().sum(), xs))
        names = ("x_query", "x_kv")
        assert_near(dict(zip(names, results[0])), dict(zip(names, results[1])))
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


# ---- the kernels ----


def without_bias_gradient(*args: Any, **kwargs: Any) -> Any:
    """cross_attention by the small block's path, attn_bias being a constant."""
    bias = kwargs.pop("attn_bias", None)
    if bias is not None:
        kwargs["attn_bias"] = bias.detach()
    return cross_attention(*args, **kwargs, path="fused")


def assert_gradients_accurate(case: Case) -> None:
    found = verdicts(case, fn=without_bias_gradient, device="cuda")
    failures = [v for v in found if not v.ok and v.tensor != "dattn_bias"]
    lines = "\n".join(f"  {v.tensor}: {v.message}" for v in failures)
    assert not failures, f"{case.name} ({case.dtype}):\n{lines}\n  {case}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", COVERED, ids=lambda c: c.name)
def test_gradients_meet_the_budget(case: Case, dtype: str) -> None:
    assert_gradients_accurate(case.at(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", fused.HEAD_DIMS)
@pytest.mark.parametrize("sizes", [(4, 64, 128), (1, 300, 17), (16, 7, 300), (3, 129, 257)])
def test_every_head_dim_at_many_sizes(dtype: str, D: int, sizes: tuple[int, int, int]) -> None:
    """More keys than the warps hold at once, depths that are no whole stage, dout both ways."""
    for width in (40, 1032):
        case = Case("sizes", *sizes, H=4, Hkv=2, D=D, Dq=200, Dkv=328, Dout=width, lse=True)
        assert_gradients_accurate(replace(case, biases="qkvo", rope="half").at(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["seed_fp32", "seed_tf32", "seed_bf16"])
def test_published_rows(name: str) -> None:
    assert_gradients_accurate(ROWS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_call_gives_the_same_bits(dtype: str) -> None:
    case = replace(BASELINE, biases="qkvo", lse=True, bias="qk").at(dtype)
    problem = Problem(case, "cuda")
    first = problem.backward(fused.backward, problem.needs())
    for _ in range(20):
        assert_bits(problem.backward(fused.backward, problem.needs()), first)


@pytest.mark.gpu
def test_three_kernels_are_launched() -> None:
    problem = Problem(replace(BASELINE, dtype="bf16", biases="qkvo"), "cuda")
    problem.backward(fused.backward, problem.needs())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        problem.backward(fused.backward, problem.needs())
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(events) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("Dv", [None, 24])
def test_removed_tokens_may_hold_nan(Dv: int | None) -> None:
    inputs = small("cuda", lse=True, lengths="ragged", mask="keys", Dv=Dv)
    want = gradients(inputs, "fused")
    lengths, keep = inputs.fixed["kv_lengths"], inputs.fixed["kv_keep_mask"]
    keep = keep & (torch.arange(keep.shape[1], device="cuda") < lengths[:, None])
    with torch.no_grad():
        for name in ("x_kv", "x_value"):
            if name in inputs.leaves:
                inputs.leaves[name].masked_fill_(~keep[..., None], float("nan"))
    assert_bits(gradients(inputs, "fused"), want)


@pytest.mark.gpu
def test_a_graph_replays_it() -> None:
    problem = Problem(replace(NAMED["wide_out"], dtype="fp32"), "cuda")
    needs = problem.needs()
    for _ in range(2):
        want = problem.backward(fused.backward, needs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # each overlaps the end of the one before
            got = problem.backward(fused.backward, needs)
    graph.replay()
    assert_bits(got, want)
