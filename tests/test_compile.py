"""torch.compile, export, functional transforms, and CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fused_rope_xattn import (
    FusedRoPECrossAttention,
    RoPE,
    cross_attention,
    project_kv,
)
from problems import assert_near, assert_tensor_near, forward, gradients, small

CPU_BACKEND, GPU_BACKEND = ("cpu", "aot_eager"), ("cuda", "inductor")
BACKENDS = [
    pytest.param(*CPU_BACKEND, id="cpu"),
    pytest.param(*GPU_BACKEND, id="cuda", marks=pytest.mark.gpu),
]


def everywhere(options: dict[str, dict[str, Any]], quick: int = 1, gpu: int = 1) -> list[Any]:
    """(device, backend, options): all on a CPU, of which some are quick, and some on a GPU.

    Tracing takes many seconds, whatever the sizes.
    """
    params = []
    for index, (name, values) in enumerate(options.items()):
        marks = [] if index < quick else [pytest.mark.slow]
        params.append(pytest.param(*CPU_BACKEND, values, id=f"cpu-{name}", marks=marks))
        if index < gpu:
            params.append(
                pytest.param(*GPU_BACKEND, values, id=f"cuda-{name}", marks=pytest.mark.gpu)
            )
    return params


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _tokens(device: str, num_queries: int, num_keys: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(batch, num_queries, 64, device=device, requires_grad=True),
        torch.randn(batch, num_keys, 64, device=device, requires_grad=True),
    )


def _lengths(device: str, num_keys: int) -> Tensor:
    return torch.tensor([num_keys, num_keys // 2], device=device)


MODULES: dict[str, dict[str, Any]] = {
    "plain": {"rope_base": 100.5},
    "module_options": {"qk_norm": "rms", "bias": True, "num_kv_heads": 2},
    "axial": {"rope": RoPE(axes=2, interleaved=False), "scale": 0.3},
}


@pytest.mark.parametrize("device, backend, options", everywhere(MODULES, gpu=2))
def test_one_graph_for_all_lengths(device: str, backend: str, options: dict[str, Any]) -> None:
    """fullgraph, forward and backward, and nothing is compiled again for another length."""
    module = FusedRoPECrossAttention(64, 4, device=device, **options)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    axial, compilations = "rope" in options, 0
    # Dynamo makes an input of a float that it reads, such as the eps of torch's own norm, and may
    # have to start again when an operator wants it as an option.
    most = 2 if "qk_norm" in options else 1
    for num_queries, num_keys in ((17, 33), (40, 64), (9, 130), (128, 50)):
        x, kv = _tokens(device, num_queries, num_keys)
        extra: dict[str, Any] = {"kv_lengths": _lengths(device, num_keys)}
        if axial:
            extra |= {
                "q_positions": torch.randint(0, 9, (num_queries, 2), device=device),
                "k_positions": torch.randint(0, 9, (num_keys, 2), device=device),
            }
        leaves = [x, kv, *module.parameters()]
        got, want = compiled(x, kv, **extra), module(x, kv, **extra)
        grad = torch.randn_like(want)
        got_grads = torch.autograd.grad(got, leaves, grad)
        want_grads = torch.autograd.grad(want, leaves, grad)
        assert_tensor_near(got, want)
        for a, b in zip(got_grads, want_grads):
            assert_tensor_near(a, b, 256)
        compilations = compilations or counter.frame_count
        assert counter.frame_count == compilations <= most


@pytest.mark.slow
def test_dropout_takes_one_graph_for_all_lengths() -> None:
    """The composite's mask does not depend on how lengths divide by the tiles of its kernels."""
    module = FusedRoPECrossAttention(64, 4, dropout=0.3)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for num_queries, num_keys in ((17, 33), (40, 64), (9, 130)):
        x, kv = _tokens("cpu", num_queries, num_keys)
        torch.manual_seed(5)
        got = compiled(x, kv)
        torch.manual_seed(5)
        want = module(x, kv)
        assert_tensor_near(got, want)
        grad = torch.randn_like(want)
        for a, b in zip(*(torch.autograd.grad(y, (x, kv), grad) for y in (got, want))):
            assert_tensor_near(a, b, 256)
        assert counter.frame_count == 1


CALLS: dict[str, dict[str, Any]] = {
    "masks": {"mask": "full", "bias": "b1qk", "causal": True, "lse": True},
    "tables": {"rope": "table_batch_heads", "k_norm": "rms_inner"},
    "full_tables": {"rope": "table_full", "Dv": 24, "Dout": 0},
    "cached": {"projected": True, "positions": "float"},
}


@pytest.mark.parametrize("device, backend, options", everywhere(CALLS))
def test_options_compile(device: str, backend: str, options: dict[str, Any]) -> None:
    want = gradients(small(device, **options))
    inputs = small(device, **options)
    names = list(inputs.leaves)

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def block(leaves: list[Tensor]) -> Any:
        args, kwargs = inputs.call(dict(zip(names, leaves)))
        return cross_attention(*args, **kwargs)

    leaves = list(inputs.leaves.values())
    out = block(leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(
        outputs, leaves, [inputs.grads[n] for n in ("y", "lse")[: len(outputs)]]
    )
    assert_near(dict(zip(("y", "lse"), outputs)) | dict(zip(names, grads)), want, 256)


@pytest.mark.slow
def test_project_kv_compiles() -> None:
    inputs = small("cpu")
    args, kwargs = inputs.call()
    b_k, b_v = kwargs.pop("b_k"), kwargs.pop("b_v")

    def block(x: Tensor, kv: Tensor) -> Tensor:
        projected = project_kv(kv, args[3], args[4], num_heads=4, b_k=b_k, b_v=b_v)
        return cross_attention(x, projected, args[2], None, None, args[5], **kwargs)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_tensor_near(compiled(args[0], args[1]), block(args[0], args[1]))


@pytest.mark.parametrize("device, backend", BACKENDS)
def test_dropout_compiles_and_draws_anew(device: str, backend: str) -> None:
    module = FusedRoPECrossAttention(64, 4, dropout=0.4, device=device)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x, kv = _tokens(device, 17, 33)
    torch.manual_seed(3)
    first, second = compiled(x, kv), compiled(x, kv)
    torch.manual_seed(3)
    third = compiled(x, kv)
    assert torch.equal(first, third) and not torch.equal(first, second)
    # The backward's mask is the forward's: sum(dv) counts the kept weights of the same draw.
    grad = torch.randn_like(first)
    torch.manual_seed(3)
    want = torch.autograd.grad(module(x, kv), kv, grad)[0]
    if backend != "inductor":  # inductor draws seeds from its own stream of random numbers
        assert_tensor_near(torch.autograd.grad(first, kv, grad)[0], want, 256)


@pytest.mark.slow
def test_autocast_compiles() -> None:
    module = FusedRoPECrossAttention(64, 4, bias=True)
    x, kv = _tokens("cpu", 17, 33)

    def block(x: Tensor, kv: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x, kv)

    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x, kv)
    assert got.dtype == torch.bfloat16
    assert_tensor_near(got, block(x, kv), 4)


@pytest.mark.slow
def test_compile_is_right_as_the_first_call() -> None:
    """Nothing that an eager call would have set up is missing."""
    import subprocess
    import sys

    program = (
        "import torch, fused_rope_xattn as f\n"
        "m = f.FusedRoPECrossAttention(32, 2)\n"
        "c = torch.compile(m, fullgraph=True, dynamic=True, backend='aot_eager')\n"
        "x = torch.randn(2, 5, 32, requires_grad=True)\n"
        "y = c(x, torch.randn(2, 7, 32)); y.sum().backward()\n"
        "assert x.grad.isfinite().all()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_export(device: str) -> None:
    module = FusedRoPECrossAttention(64, 4, device=device, bias=True).eval()
    length, keys = torch.export.Dim("Tq", min=2, max=512), torch.export.Dim("Tk", min=2, max=512)
    x, kv = (t.detach() for t in _tokens(device, 17, 33))
    program = torch.export.export(module, (x, kv), dynamic_shapes=({1: length}, {1: keys}))
    x, kv = (t.detach() for t in _tokens(device, 41, 70))
    assert_tensor_near(program.module()(x, kv), module(x, kv))


# ---- functional transforms, which the composite path carries ----


def _small_call(device: str) -> tuple[Callable[..., Tensor], tuple[Tensor, Tensor]]:
    inputs = small(device, D=16)
    args, kwargs = inputs.call({n: t.detach() for n, t in inputs.leaves.items()})

    def block(x: Tensor, kv: Tensor) -> Tensor:
        return cross_attention(x, kv, *args[2:], **kwargs)

    return block, (args[0], args[1])


def test_func_grad(device: str) -> None:
    block, (x, kv) = _small_call(device)
    got = torch.func.grad(lambda x: block(x, kv).square().sum())(x)
    x = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(block(x, kv).square().sum(), x)
    assert_tensor_near(got, want, 128)


def test_vmap(device: str) -> None:
    block, (x, kv) = _small_call(device)
    xs, kvs = torch.stack([x, -x, x * 0.3]), torch.stack([kv, kv + 1.0, kv])
    got = torch.func.vmap(block)(xs, kvs)
    for i in range(3):
        assert_tensor_near(got[i], block(xs[i], kvs[i]))


def test_forward_mode(device: str) -> None:
    block, (x, kv) = _small_call(device)
    tangent = torch.randn_like(x)
    y, dy = torch.func.jvp(lambda x: block(x, kv), (x,), (tangent,))
    assert_tensor_near(y, block(x, kv), 128)
    step = 1e-2
    numeric = (block(x + step * tangent, kv) - block(x - step * tangent, kv)) / (2 * step)
    assert float((dy - numeric).abs().max()) < 2e-3 * float(dy.abs().max())


def test_per_sample_gradients(device: str) -> None:
    inputs = small(device, D=16)
    args, kwargs = inputs.call({n: t.detach() for n, t in inputs.leaves.items()})

    def loss(w: Tensor, x: Tensor, kv: Tensor) -> Tensor:
        y = cross_attention(x[None], kv[None], w, *args[3:], **kwargs)
        return y.square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(args[2], args[0], args[1])
    for b in range(2):
        w = args[2].clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(w, args[0][b], args[1][b]), w)
        assert_tensor_near(got[b], want, 256)


# ---- CUDA graphs ----


def _warm(work: Callable[[], Any]) -> torch.cuda.Stream:
    """Runs the work on a side stream, as capture wants."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    return stream


GRAPHS = {
    "plain": {},
    "masks": {"mask": "full", "bias": "b1qk", "lengths": "ragged", "causal": True},
    "norms": {"q_norm": "rms", "k_norm": "layer_inner", "Hkv": 2},
    "cached": {"projected": True},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["auto", "split"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS.keys())
def test_a_graph_replays_forward_and_backward(
    options: dict[str, Any], dtype: str, path: str
) -> None:
    """New data in the static inputs gives the new results, gradients included."""
    inputs = small("cuda", dtype=dtype, lse=True, **options)
    _warm(lambda: gradients(inputs, path))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = gradients(inputs, path)
    if "dropout_p" not in options:
        other = small("cuda", seed=77, dtype=dtype, lse=True, **options)
        want = gradients(other, path)
        with torch.no_grad():
            for name, leaf in inputs.leaves.items():
                leaf.copy_(other.leaves[name])
            for name, grad in inputs.grads.items():
                grad.copy_(other.grads[name])
            for name, value in inputs.fixed.items():
                if isinstance(value, Tensor):
                    value.copy_(other.fixed[name])
        graph.replay()
        assert_near(static, want, 16)
        return
    graph.replay()
    first = {n: t.clone() for n, t in static.items()}
    graph.replay()
    assert not torch.equal(first["y"], static["y"]), "a replay drew the same mask"
    torch.manual_seed(31)
    graph.replay()
    first = {n: t.clone() for n, t in static.items()}
    torch.manual_seed(31)
    graph.replay()
    assert torch.equal(first["y"], static["y"]), "manual_seed does not reach replays"
    torch.manual_seed(31)
    assert_near(first, gradients(inputs, path), 16)


@pytest.mark.gpu
def test_a_module_step_in_a_graph_trains() -> None:
    torch.manual_seed(0)
    module = FusedRoPECrossAttention(64, 4, dropout=0.1, device="cuda")
    x, kv = (t.detach() for t in _tokens("cuda", 33, 50))
    goal = torch.randn_like(x)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2, capturable=True)

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = (module(x, kv) - goal).square().mean()
        loss.backward()
        optimiser.step()
        return loss

    _warm(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    start = float(loss)
    for _ in range(40):
        graph.replay()
    assert float(loss) < 0.9 * start


@pytest.mark.gpu
def test_make_graphed_callables() -> None:
    module = FusedRoPECrossAttention(64, 4, device="cuda")
    x, kv = _tokens("cuda", 33, 50)
    # Leaves of its own: a graph that is alive ties them to the default stream, which a capture of
    # the backward may not wait for.
    eager = copy.deepcopy(module)
    eager_x, eager_kv = (t.detach().clone().requires_grad_() for t in (x, kv))
    want = eager(eager_x, eager_kv)
    want_grads = torch.autograd.grad(want.sum(), [eager_x, eager_kv, *eager.parameters()])
    graphed = torch.cuda.make_graphed_callables(module, (x, kv))
    got = graphed(x, kv)
    assert_tensor_near(got, want, 16)
    for a, b in zip(torch.autograd.grad(got.sum(), [x, kv, *module.parameters()]), want_grads):
        assert_tensor_near(a, b, 16)


@pytest.mark.gpu
def test_reduce_overhead_mode() -> None:
    """Inductor's own CUDA graphs around the ops."""
    module = FusedRoPECrossAttention(64, 4, device="cuda")
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        x, kv = _tokens("cuda", 33, 50)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(x, kv)
        grads = [g.clone() for g in torch.autograd.grad(got.sum(), [x, kv])]
        want = module(x, kv)
        assert_tensor_near(got, want, 16)
        for a, b in zip(grads, torch.autograd.grad(want.sum(), [x, kv])):
            assert_tensor_near(a, b, 64)


def test_forward_leaves_no_graph_without_grad(device: str) -> None:
    inputs = small(device)
    with torch.no_grad():
        assert forward(inputs).grad_fn is None
