"""norm_rope's CUDA kernels, whole, on the host: against the definition, in every thread order.

The emulation poisons shared memory with NaN, forbids waiting that cannot end, and runs threads in
a random order. Buffers have NaN on both sides: what a kernel reads there shows in its result, what
it writes there shows in the margin.
"""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ext.build import load_extension
from fused_rope_xattn.config import NORM_LAYER, NORM_NONE, NORM_RMS, NormSpec, RotationSpec
from fused_rope_xattn.norm import apply_norm
from fused_rope_xattn.rope import cos_sin, rotate

DTYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
POSITION_TYPES = {torch.int32: 1, torch.int64: 2, torch.float32: 3, torch.float64: 4}
MARGIN = 64  # elements, a multiple of every alignment
NAN = float("nan")


class Case(NamedTuple):
    batch: int = 2
    tokens: int = 5
    heads: int = 3
    head_dim: int = 32
    spec: RotationSpec = RotationSpec(32)
    norm: NormSpec = NormSpec()
    positions: torch.dtype | None = None  # None with no table: 0..T-1
    table: tuple[int, int] | None = None  # batches and heads of cos and sin
    input: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    params: torch.dtype = torch.float32
    has_bias: bool = False
    has_weight: bool = True
    has_norm_bias: bool = True
    misaligned: bool = False
    num_sms: int = 2
    max_smem: int = 227 * 1024


RMS, RMS_INNER = NormSpec(NORM_RMS), NormSpec(NORM_RMS, inner=True)
LAYER, LAYER_INNER = NormSpec(NORM_LAYER), NormSpec(NORM_LAYER, inner=True)


def half(rotary_dim: int, axes: int = 1, full_width: bool = False) -> RotationSpec:
    return RotationSpec(rotary_dim, False, axes, full_width)


def neighbours(rotary_dim: int, axes: int = 1, full_width: bool = False) -> RotationSpec:
    return RotationSpec(rotary_dim, True, axes, full_width)


CASES = {
    "plain": Case(),
    "one dim a lane": Case(head_dim=8, spec=neighbours(8)),
    "heads wider than a power of two": Case(head_dim=72, spec=half(72)),
    "widest head": Case(1, 9, 1, 256, neighbours(256, 2), positions=torch.float32),
    "partial rotation, half layout": Case(head_dim=88, spec=half(48)),
    "partial rotation inside a vector": Case(head_dim=40, spec=neighbours(6)),
    "axes, half layout": Case(head_dim=64, spec=half(32, 2), positions=torch.int64),
    "halves not of whole vectors": Case(head_dim=24, spec=half(24)),
    "three odd axes": Case(head_dim=128, spec=half(126, 3), positions=torch.float64),
    "head dim off eight": Case(head_dim=20, spec=half(12)),
    "odd head dim": Case(head_dim=7, spec=neighbours(4)),
    "nothing rotates": Case(spec=RotationSpec(), norm=RMS, has_bias=True),
    "neither norm nor rotation": Case(spec=RotationSpec(), has_bias=True),
    "rms over a head": Case(norm=RMS, has_bias=True),
    "layer over a head": Case(head_dim=72, spec=neighbours(16), norm=LAYER),
    "layer over a narrow head": Case(head_dim=10, spec=neighbours(10), norm=LAYER),
    "rms over all heads": Case(norm=RMS_INNER, has_bias=True),
    "layer over all heads": Case(2, 5, 7, 24, neighbours(24), LAYER_INNER),
    "several passes a token": Case(1, 3, 20, 128, half(128), LAYER_INNER, output=torch.bfloat16),
    "inner sums outgrow shared memory": Case(heads=5, norm=LAYER_INNER, max_smem=1536),
    "inner norm, odd head dim": Case(head_dim=7, spec=half(6), norm=LAYER_INNER),
    "norm without parameters": Case(norm=LAYER, has_weight=False, has_norm_bias=False),
    "norm with bias only": Case(norm=RMS_INNER, has_weight=False),
    "table": Case(table=(1, 1)),
    "table a head": Case(table=(1, 3), spec=half(16)),
    "table a sample": Case(9, 1, table=(9, 1)),
    "full table": Case(table=(2, 3), spec=neighbours(32, full_width=True), norm=RMS),
    "full table, half layout": Case(table=(2, 1), spec=half(32, full_width=True)),
    "full table, odd halves": Case(table=(1, 1), head_dim=24, spec=half(12, full_width=True)),
    "bf16 to bf16": Case(input=torch.bfloat16, output=torch.bfloat16, norm=RMS),
    "fp32 to fp16": Case(output=torch.float16, params=torch.float16, norm=LAYER),
    "fp16 to bf16": Case(input=torch.float16, output=torch.bfloat16, params=torch.bfloat16),
    "misaligned parameters": Case(misaligned=True, has_bias=True, norm=RMS),
    "many short sequences": Case(70, 1, heads=2, positions=torch.int32),
    "tiles across samples": Case(9, 3, 1, 16, neighbours(16), num_sms=1),
    "many tiles a block": Case(1, 150, heads=8, num_sms=1, norm=LAYER),
}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension("norm_rope_emulated", request.config, emulates_cuda=True)


class Buffers:
    """Tensors with NaN on both sides, and their addresses."""

    def __init__(self) -> None:
        self.margins: list[Tensor] = []

    def place(self, x: Tensor, shift: int = 0) -> Tensor:
        whole = torch.full((x.numel() + 2 * MARGIN,), NAN, dtype=x.dtype)
        inside = whole[MARGIN + shift : MARGIN + shift + x.numel()].view(x.shape)
        inside.copy_(x)
        self.margins += [whole[: MARGIN + shift], whole[MARGIN + shift + x.numel() :]]
        return inside

    def check(self) -> None:
        assert all(margin.isnan().all() for margin in self.margins)


class Problem:
    """One case's tensors, and the arguments that the kernels take."""

    def __init__(self, case: Case) -> None:
        self.case = case
        b, t, h, d = case.batch, case.tokens, case.heads, case.head_dim
        rotary_dim = case.spec.rotary_dim
        self.buffers = Buffers()
        shift = 1 if case.misaligned else 0
        place = self.buffers.place
        width = h * d if case.norm.inner else d
        self.x = place((torch.randn(b, t, h * d) * 2 + 0.5).to(case.input))
        self.grad = place(torch.randn(b, t, h, d).to(case.output))
        parameter = lambda n: place(torch.randn(n).to(case.params), shift)  # noqa: E731
        has_norm = case.norm.kind != NORM_NONE
        self.bias = parameter(h * d) if case.has_bias else None
        self.weight = parameter(width) if has_norm and case.has_weight else None
        self.norm_bias = parameter(width) if has_norm and case.has_norm_bias else None
        self.positions = self.cos = self.sin = None
        if case.positions is not None:
            values = torch.randint(-4000, 4000, (b, t, case.spec.axes)).to(torch.float64)
            values += 0.25 if case.positions.is_floating_point else 0.0
            self.positions = values.to(case.positions)
        if case.table is not None:
            columns = rotary_dim if case.spec.full_width else rotary_dim // 2
            self.cos = place(torch.randn(*case.table, t, columns))
            self.sin = place(torch.randn(*case.table, t, columns))
        self.width = width

    def fields(self) -> dict[str, Any]:
        case, spec = self.case, self.case.spec
        fields: dict[str, Any] = {
            "batch": case.batch,
            "num_tokens": case.tokens,
            "num_heads": case.heads,
            "head_dim": case.head_dim,
            "input_dtype": DTYPES[case.input],
            "output_dtype": DTYPES[case.output],
            "bias_dtype": DTYPES[case.params],
            "norm_dtype": DTYPES[case.params],
            "norm_kind": case.norm.kind,
            "norm_inner": case.norm.inner,
            "norm_eps": case.norm.eps,
            "rotary_dim": spec.rotary_dim,
            "axes": spec.axes,
            "interleaved": spec.interleaved,
            "full_width": spec.full_width,
            "log2_base": math.log2(spec.base),
        }
        tensors = {"x": self.x, "bias": self.bias, "norm_weight": self.weight}
        tensors |= {"norm_bias": self.norm_bias, "positions": self.positions}
        tensors |= {"cos": self.cos, "sin": self.sin}
        fields |= {name: x.data_ptr() for name, x in tensors.items() if x is not None}
        if self.positions is not None:
            fields["position_type"] = POSITION_TYPES[self.positions.dtype]
            fields["position_batch_stride"] = self.positions.stride(0)
        if self.cos is not None:
            for i, axis in enumerate(("batch", "head", "token")):
                stride = 0 if self.cos.shape[i] == 1 else self.cos.stride(i)
                fields[f"table_{axis}_stride"] = stride
        return fields

    def forward(self, kernels: ModuleType) -> Tensor:
        case = self.case
        shape = (case.batch, case.tokens, case.heads, case.head_dim)
        y = self.buffers.place(torch.full(shape, NAN, dtype=case.output))
        kernels.norm_rope(self.fields() | {"out": y.data_ptr()})
        self.buffers.check()
        return y.clone()

    def backward(self, kernels: ModuleType, partials: int) -> tuple[Tensor, Tensor, Tensor]:
        case, place = self.case, self.buffers.place
        dx = place(torch.full_like(self.x, NAN, dtype=case.output))
        sums = [place(torch.full((partials, self.width), NAN)) for _ in range(2)]
        fields = self.fields() | {"grad": self.grad.data_ptr(), "out": dx.data_ptr()}
        if case.norm.kind == NORM_NONE:
            del fields["x"]
        fields["num_partials"] = partials
        if self.weight is not None:
            fields["dnorm_weight"] = sums[0].data_ptr()
        if self.norm_bias is not None:
            fields["dnorm_bias"] = sums[1].data_ptr()
        kernels.norm_rope_backward(fields)
        self.buffers.check()
        return dx.clone(), sums[0].clone(), sums[1].clone()

    def reference(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """y, dx, dweight and dbias in fp64."""
        case = self.case
        x, weight, bias = (
            None if p is None else p.double().requires_grad_()
            for p in (self.x, self.weight, self.norm_bias)
        )
        assert x is not None
        wide = x if self.bias is None else x + self.bias.double()
        heads = apply_norm(wide.unflatten(-1, (case.heads, case.head_dim)), case.norm, weight, bias)
        y = heads.transpose(1, 2)
        if case.spec.rotary_dim:
            if self.cos is not None and self.sin is not None:
                cos, sin = self.cos.double(), self.sin.double()
            else:
                cos, sin = cos_sin(case.spec, self.positions, case.tokens, x.device, torch.float64)
            y = rotate(y, cos, sin, case.spec)
        y = y.transpose(1, 2)
        leaves = [p for p in (x, weight, bias) if p is not None]
        grads = iter(torch.autograd.grad(y, leaves, self.grad.double()))
        dx = next(grads)
        dweight = None if weight is None else next(grads)
        dbias = None if bias is None else next(grads)
        return y.detach(), dx, dweight, dbias


def assert_close(ours: Tensor, ref: Tensor) -> None:
    """Within fp32 arithmetic of the reference, and one rounding to ours' dtype."""
    assert ours.shape == ref.shape
    slack = 0.0 if ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps
    error = (ours.double() - ref).abs()
    largest = ref.abs().max() if ref.numel() else ref.new_zeros(())
    allowed = slack * 0.5001 * ref.abs() + 4e-6 * largest.clamp(min=1.0)
    assert not ours.isnan().any()
    assert (error <= allowed).all(), f"off by {error.max().item():.3g}"


def assert_matches(kernels: ModuleType, case: Case, seeds: tuple[int, ...] = (0, 1)) -> None:
    problem = Problem(case)
    y_ref, dx_ref, dweight_ref, dbias_ref = problem.reference()
    partials = min(case.batch * case.tokens, 6)
    results = []
    for seed in seeds:
        kernels.set_gpu(case.num_sms, case.max_smem, seed)
        results.append([problem.forward(kernels), *problem.backward(kernels, partials)])
    y, dx, dweight, dbias = results[0]
    assert_close(y, y_ref)
    assert_close(dx, dx_ref)
    for sums, ref in ((dweight, dweight_ref), (dbias, dbias_ref)):
        if ref is not None:
            assert_close(sums.sum(0), ref)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), "the order of threads matters"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_matches_definition(kernels: ModuleType, case: Case) -> None:
    assert_matches(kernels, case)


def random_case(rng: random.Random) -> Case:
    head_dim = rng.choice([8, 16, 24, 32, 40, 64, 72, 88, 96, 128, 256, 6, 9, 20, 33])
    full_width = rng.random() < 0.3
    table = rng.choice([(1, 1), (1, 0), (0, 0), (0, 1)])  # 0: as many as the problem has
    has_table = full_width or rng.random() < 0.5
    axes = 1 if has_table else rng.choice([1, 1, 2, 3])
    rotary_dim = rng.randrange(0, head_dim + 1) // (2 * axes) * 2 * axes
    has_table, full_width = has_table and rotary_dim > 0, full_width and rotary_dim > 0
    batch, tokens = rng.choice([1, 2, 5]), rng.choice([1, 2, 9, 17])
    heads = rng.choice([1, 2, 5, 12])
    position_types = [*POSITION_TYPES, *([None] if axes == 1 else [])]
    output = rng.choice([*DTYPES])
    return Case(
        batch,
        tokens,
        heads,
        head_dim,
        RotationSpec(rotary_dim, rng.random() < 0.5, axes, full_width, rng.choice([10000.0, 77.0])),
        NormSpec(rng.choice([NORM_NONE, NORM_RMS, NORM_LAYER]), rng.random() < 0.4, 1e-5),
        positions=rng.choice(position_types) if rotary_dim and not has_table else None,
        table=(table[0] or batch, table[1] or heads) if has_table else None,
        input=rng.choice([torch.float32, output]),
        output=output,
        params=rng.choice([*DTYPES]),
        has_bias=rng.random() < 0.7,
        has_weight=rng.random() < 0.7,
        has_norm_bias=rng.random() < 0.7,
        misaligned=rng.random() < 0.1,
        num_sms=rng.choice([1, 4, 40]),
    )


def test_random_cases(kernels: ModuleType, fuzz_examples: int) -> None:
    rng = random.Random(5)
    for _ in range(fuzz_examples):
        case = random_case(rng)
        try:
            assert_matches(kernels, case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


# --------------------------------------------------------------------- two sides in one launch


def assert_turns_back(kernels: ModuleType, cases: list[Case], seed: int) -> None:
    """Each side in place of its gradient, which is NaN until a thread has waited."""
    problems = [Problem(case) for case in cases]
    wants = [problem.reference()[1] for problem in problems]
    dx = [p.buffers.place(torch.full_like(p.grad, NAN).flatten(2)) for p in problems]
    fields = [
        p.fields() | {"written": p.grad.data_ptr(), "grad": x.data_ptr(), "out": x.data_ptr()}
        for p, x in zip(problems, dx, strict=True)
    ]
    for side in fields:
        del side["x"]
    kernels.set_gpu(cases[0].num_sms, cases[0].max_smem, seed)
    kernels.rope_backward(fields)
    for problem, got, want in zip(problems, dx, wants, strict=True):
        problem.buffers.check()
        assert_close(got, want)


SIDES = {
    "alike": [Case(), Case()],
    "one": [Case(head_dim=64, spec=half(32, 2), positions=torch.int64)],
    "other lengths and heads": [Case(2, 37, 12, 64, half(64)), Case(2, 9, 2, 64, neighbours(64))],
    "a short side first": [Case(1, 2, 1), Case(3, 70, 5, num_sms=1)],
    "positions beside a table": [Case(positions=torch.float64), Case(table=(1, 3))],
    "vectors beside single dims": [
        Case(head_dim=24, spec=half(16)),
        Case(head_dim=24, spec=half(24)),
    ],
    "neither of vectors": [Case(head_dim=9, spec=half(8)), Case(2, 8, 1, 9, neighbours(4))],
    "no queries": [Case(tokens=0), Case()],
    "no keys": [Case(), Case(batch=0)],
    "bf16": [Case(output=torch.bfloat16), Case(7, 3, output=torch.bfloat16)],
    "many tiles a block": [Case(1, 150, heads=8, num_sms=1), Case(1, 40, heads=8)],
}


@pytest.mark.parametrize("cases", SIDES.values(), ids=SIDES.keys())
def test_sides_turn_back_together(kernels: ModuleType, cases: list[Case]) -> None:
    for seed in (0, 1):
        assert_turns_back(kernels, cases, seed)


def test_random_sides(kernels: ModuleType, fuzz_examples: int) -> None:
    """Drawn one by one, with the head dim, the dtype and the GPU in common."""
    rng = random.Random(7)
    for _ in range(fuzz_examples):
        first, other = (random_case(rng)._replace(norm=NormSpec(), has_bias=False) for _ in "qk")
        while other.head_dim != first.head_dim:
            other = random_case(rng)._replace(norm=NormSpec(), has_bias=False)
        cases = [first, other._replace(output=first.output, num_sms=first.num_sms)]
        try:
            assert_turns_back(kernels, cases, rng.randrange(9))
        except AssertionError as error:
            raise AssertionError(f"{cases}: {error}") from error


# ----------------------------------------------------------------------------------- odd sizes


def test_no_tokens(kernels: ModuleType) -> None:
    for case in (Case(batch=0), Case(tokens=0, norm=NormSpec(NORM_RMS))):
        assert_matches(kernels, case)


def test_idle_blocks_write_zeros(kernels: ModuleType) -> None:
    for inner in (False, True):
        problem = Problem(Case(batch=1, tokens=2, norm=NormSpec(NORM_LAYER, inner)))
        kernels.set_gpu(2, 227 * 1024, 0)
        _, dweight, dbias = problem.backward(kernels, partials=9)
        assert dweight[2:].eq(0).all()
        assert dbias[2:].eq(0).all()


def test_which_cases_move_vectors(kernels: ModuleType) -> None:
    """Every head dim that is a multiple of 8 takes the fast kernel, whatever common RoPE it has."""
    wide = lambda **options: kernels.is_wide(Problem(Case(**options)).fields())  # noqa: E731
    for head_dim in range(8, 257, 8):
        assert wide(head_dim=head_dim, spec=neighbours(head_dim))
        assert wide(head_dim=head_dim, spec=half(head_dim // 16 * 16, 2))
    assert not wide(head_dim=20, spec=neighbours(20))
    assert not wide(misaligned=True, has_bias=True)
