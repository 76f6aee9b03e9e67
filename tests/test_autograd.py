"""The split path on the CPU: CrossAttentionFunction and ProjectHeadsFunction called directly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocks import (
    BLOCKS,
    DKV,
    DOUT,
    DQ,
    DV,
    FROZEN,
    HKV,
    INNER,
    INNER_KV,
    TK,
    TQ,
    B,
    Block,
    D,
    H,
    Run,
    assert_same,
    by_composite,
    by_composite_projection,
    by_function,
    freeze,
    make_block,
    make_projection,
    plain_block,
    results,
    with_dropout,
    with_masks,
    with_tables,
    without_w_out,
)
from fused_rope_xattn.autograd import (
    ProjectHeadsFunction,
    attend,
    project_heads,
)
from fused_rope_xattn.config import (
    NORM_LAYER,
    NORM_NONE,
    NormSpec,
)
from fused_rope_xattn.split import Projection
from problems import assert_tensor_near

# -------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", BLOCKS)
def test_function_is_the_composite(name: str, dtype: torch.dtype) -> None:
    assert_same(BLOCKS[name](dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["everything", "shared_x_plain", "projected", "masks"])
def test_half_types(name: str, dtype: torch.dtype) -> None:
    """As near to the fp64 result as the composite is, within SPEC's factor of two."""
    block = BLOCKS[name](dtype)
    wide = block.replace(
        **{n: x.detach().double().requires_grad_() for n, x in block.leaves.items()}
    )
    dy = torch.randn(B, TQ, DOUT, dtype=dtype)
    exact = results(by_composite, wide, dy.double(), None)
    ours, eager = (results(run, block, dy, None) for run in (by_function, by_composite))
    for key, want in exact.items():
        seen = want.isfinite()
        error, allowed = (float((r[key].double() - want)[seen].abs().max()) for r in (ours, eager))
        slack = 4 * torch.finfo(dtype).eps * float(want[seen].abs().max())
        assert error <= 2 * allowed + slack, f"{key}: {error:.2e} against {allowed:.2e}"
        assert ours[key].dtype == eager[key].dtype, key


@pytest.mark.parametrize("name", ["everything", "projected", "dropout", "no_w_out", "masks"])
def test_gradcheck(name: str) -> None:
    """Numerical derivatives of the function itself; no composite involved."""
    block = BLOCKS[name](tq=2, tk=3) if name != "masks" else BLOCKS[name](tq=3, tk=5)
    names = list(block.leaves)

    def f(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        y, lse = by_function(block.replace(**dict(zip(names, leaves, strict=True))))
        return y, lse.masked_fill(lse == -math.inf, 0.0)

    leaves = tuple(block.leaves.values())
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_double_backward(name: str) -> None:
    block = BLOCKS[name]()
    leaves = list(block.leaves.values())
    y, lse = by_composite(block)
    dy = torch.randn_like(y).requires_grad_()
    dlse = torch.randn_like(lse).masked_fill(lse == -math.inf, 0.0).requires_grad_()

    def second(run: Run) -> list[Tensor]:
        y, lse = run(block)
        grads = torch.autograd.grad(
            [y.sin(), lse], leaves, [dy, dlse], create_graph=True, allow_unused=True
        )
        penalty = sum(g.square().sum() for g in grads if g is not None)
        assert isinstance(penalty, Tensor)
        got = torch.autograd.grad(penalty, [*leaves, dy, dlse], allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in got]

    for got, want in zip(second(by_function), second(by_composite), strict=True):
        assert_tensor_near(got, want, 2**15)


@pytest.mark.parametrize("name", ["everything", "shared_x"])
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_subsets(frozen: str, name: str) -> None:
    assert_same(freeze(BLOCKS[name](), FROZEN[frozen]), lse_too=False)


@pytest.mark.parametrize("frozen", FROZEN)
def test_double_backward_of_frozen_subsets(frozen: str) -> None:
    block = freeze(make_block(), FROZEN[frozen])
    leaves = list(block.leaves.values())
    dy = torch.randn(B, TQ, DOUT, dtype=torch.float64, requires_grad=True)

    def second(run: Run) -> Tensor:
        grads = torch.autograd.grad(run(block)[0], leaves, dy, create_graph=True)
        (got,) = torch.autograd.grad(sum(g.square().sum() for g in grads), dy)
        return got

    assert_tensor_near(second(by_function), second(by_composite), 2**15)


@pytest.mark.parametrize("only", make_block().leaves)
def test_each_gradient_alone(only: str) -> None:
    block = make_block()
    assert_same(freeze(block, tuple(n for n in block.leaves if n != only)), lse_too=False)


@pytest.mark.parametrize("norm", [NormSpec(), NormSpec(NORM_LAYER, False, 1e-5)])
def test_a_shift_of_all_keys_has_no_gradient_but_through_lse(norm: NormSpec) -> None:
    block = plain_block()
    block = Block(block.config._replace(k_norm=norm), block.tensors)
    name = "b_k" if norm.kind == NORM_NONE else "k_norm_bias"
    width = INNER_KV if name == "b_k" else D
    block = block.replace(**{name: torch.randn(width, dtype=torch.float64, requires_grad=True)})
    assert_same(block)
    got = results(by_function, block, torch.randn(B, TQ, DOUT).double(), None)
    want = results(by_composite, block, torch.randn(B, TQ, DOUT).double(), None)
    assert not got[name].any()
    assert float(want[name].abs().max()) < 1e-12


def test_gradient_of_lse_alone() -> None:
    block = make_block()
    dlse = torch.randn(B, H, TQ, dtype=torch.float64)

    def grads(run: Run) -> tuple[Tensor | None, ...]:
        leaves = list(block.leaves.values())
        return torch.autograd.grad(run(block)[1], leaves, dlse, allow_unused=True)

    for name, got, want in zip(block.leaves, grads(by_function), grads(by_composite), strict=True):
        if name in ("w_out", "b_out", "x_value", "w_v", "b_v"):
            assert want is None and (got is None or not got.any()), name
        else:
            assert_tensor_near(got, want, 256, name)


def test_expanded_and_transposed_gradients() -> None:
    for block in (make_block(), without_w_out(make_block())):
        y, lse = by_function(block)
        for dy in (
            torch.ones((), dtype=y.dtype).expand_as(y),
            torch.randn_like(y.permute(2, 1, 0).contiguous()).permute(2, 1, 0),
            torch.randn_like(y.transpose(0, 1).contiguous()).transpose(0, 1),
        ):
            dlse = torch.randn_like(lse.mT.contiguous()).mT
            got = results(by_function, block, dy, dlse)
            want = results(by_composite, block, dy, dlse)
            for name in want:
                assert_tensor_near(got[name], want[name], 256, name)


def test_the_same_tensor_in_several_places() -> None:
    """Self-attention, values from the keys' tensor, one weight for two projections."""
    x = torch.randn(B, TQ, DQ, dtype=torch.float64, requires_grad=True)
    w = torch.randn(INNER, DQ, dtype=torch.float64, requires_grad=True)
    block = plain_block(tk=TQ)
    config = block.config._replace(num_kv_heads=H)
    block = Block(config, block.tensors).replace(
        x_query=x, x_kv=x, x_value=x, w_q=w, w_k=w, w_v=w, b_k=None, b_v=None
    )
    dy = torch.randn(B, TQ, DOUT, dtype=torch.float64)
    for create_graph in (False, True):
        got, want = (
            torch.autograd.grad(run(block)[0], (x, w), dy, create_graph=create_graph)
            for run in (by_function, by_composite)
        )
        for a, b in zip(got, want, strict=True):
            assert_tensor_near(a.detach(), b.detach(), 256)


def test_double_backward_when_one_argument_comes_from_another() -> None:
    """No share of a gradient is counted twice."""
    block = plain_block(tk=TQ)
    x = torch.randn(B, TQ, DQ, dtype=torch.float64, requires_grad=True)
    mix = torch.randn(DQ, DKV, dtype=torch.float64, requires_grad=True)

    def grads(run: Run) -> list[Tensor]:
        kv = (x @ mix).tanh()
        y, _ = run(block.replace(x_query=x, x_kv=kv, x_value=kv[..., :DV]))
        first = torch.autograd.grad(y.square().sum(), (x, mix), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, mix))
        return [*(g.detach() for g in first), *second]

    for got, want in zip(grads(by_function), grads(by_composite), strict=True):
        assert_tensor_near(got, want, 2**15)


# --------------------------------------------------------------------- removed tokens, empty sizes


@pytest.mark.parametrize("name", ["everything", "shared_x", "plain", "shared_x_plain", "tables"])
@pytest.mark.parametrize("frozen", [(), ("w_k",), ("w_v",), ("w_k", "w_v")])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_removed_tokens_reach_nothing(name: str, frozen: tuple[str, ...], poison: float) -> None:
    block = freeze(BLOCKS[name](), frozen).replace(
        kv_lengths=torch.tensor([TK, 4], dtype=torch.int32),
        key_keep=torch.arange(TK).expand(B, TK) != 2,
    )
    removed = torch.zeros(B, TK, dtype=torch.bool)
    removed[:, 2], removed[1, 4:] = True, True

    def filled(value: float) -> dict[str, Tensor]:
        tokens = {
            n: getattr(block.tensors, n).detach().masked_fill(removed[..., None], value)
            for n in ("x_kv", "x_value")
            if getattr(block.tensors, n) is not None
        }
        changed = block.replace(**{n: x.requires_grad_() for n, x in tokens.items()})
        dy, dlse = torch.ones(B, TQ, DOUT).double(), torch.ones(B, H, TQ).double()
        return results(by_function, changed, dy, dlse)

    clean, poisoned = filled(0.0), filled(poison)
    for key in clean:
        assert torch.equal(clean[key], poisoned[key]), key
    assert not poisoned["x_kv"][removed].any()


def test_rows_without_keys_have_no_gradient() -> None:
    block = with_masks(make_block()).replace(b_out=None)
    dy = torch.randn(B, TQ, DOUT, dtype=torch.float64)
    got = results(by_function, block, dy, None)
    assert bool((got["y"][1] == 0).all() and (got["lse"][1] == -math.inf).all())
    for name in ("x_query", "x_kv", "x_value"):
        assert not got[name][1].any(), name


@pytest.mark.parametrize("name", [n for n in BLOCKS if n not in ("masks", "most")])
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"tq": 0}, {"tk": 0}])
def test_empty_sizes(name: str, sizes: dict[str, int]) -> None:
    block = BLOCKS[name](**sizes)
    assert_same(block)
    grads = results(by_function, block, torch.ones_like(by_composite(block)[0]), None)
    assert all(bool(g.isfinite().all()) for n, g in grads.items() if n != "lse")


# ------------------------------------------------------------------------- what must not happen


def test_nothing_is_written_to() -> None:
    block = with_masks(make_block())
    before = [x if x is None else x.detach().clone() for x in block.tensors]
    y, lse = by_function(block)
    dy, dlse = torch.randn_like(y), torch.zeros_like(lse)
    given = dy.clone()
    torch.autograd.grad([y, lse], list(block.leaves.values()), [dy, dlse])
    assert torch.equal(dy, given)
    for old, new in zip(before, block.tensors, strict=True):
        assert (old is None) == (new is None)
        assert old is None or torch.equal(old, new.detach())


def test_tables_that_require_grad_are_refused() -> None:
    block = with_tables(make_block())
    with pytest.raises(ValueError, match="cos and sin"):
        by_function(block.replace(q_cos=block.tensors.q_cos.requires_grad_()))


@pytest.mark.parametrize("where", ["forward", "backward", "double"])
def test_autocast_changes_nothing(where: str) -> None:
    """Casts were done before; inside, fp32 stays fp32."""
    block = make_block(torch.float32)
    leaves = list(block.leaves.values())

    def run(on: set[str]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled="forward" in on):
            y, _ = by_function(block)
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(on)):
            grads = torch.autograd.grad(y, leaves, torch.ones_like(y), create_graph="double" in on)
        return [y.detach(), *(g.detach() for g in grads)]

    got, want = run({where}), run(set())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert_tensor_near(a, b, 256)


# -------------------------------------------------------------------------------------- dropout


def test_dropout_of_everything() -> None:
    block = with_dropout(make_block())
    block = Block(block.config._replace(dropout_p=1.0), block.tensors)
    got = results(by_function, block, torch.ones(B, TQ, DOUT).double(), None)
    assert torch.equal(got["y"], block.tensors.b_out.detach().expand_as(got["y"]))
    assert not got["x_query"].any() and not got["x_kv"].any() and not got["w_out"].any()


def test_each_seed_has_its_mask() -> None:
    block = with_dropout(make_block())
    first, again = by_function(block)[0], by_function(block)[0]
    other = by_function(block.replace(seed=torch.tensor([5])))[0]
    assert torch.equal(first, again) and not torch.equal(first, other)


# ------------------------------------------------------------------------------- one projection


@pytest.mark.parametrize("name", ["norm", "no_norm", "table"])
def test_projection_and_both_of_its_derivatives(name: str) -> None:
    p = make_projection(name)
    leaves = [x for x in p[:5] if x is not None]
    dy = torch.randn(B, TK, HKV, D, dtype=torch.float64, requires_grad=True)

    def run(f: Callable[[Projection], Tensor]) -> list[Tensor]:
        heads = f(p)
        plain = torch.autograd.grad(heads, leaves, dy.detach(), retain_graph=True)
        first = torch.autograd.grad(heads.sin(), leaves, dy, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [*leaves, dy])
        return [heads.detach(), *plain, *second]

    got, want = run(lambda p: ProjectHeadsFunction.apply(*p)), run(by_composite_projection)
    for a, b in zip(got, want, strict=True):
        assert_tensor_near(a, b, 2**15)


# ----------------------------------------------------------------------------------- the callers


def test_without_gradients_nothing_is_saved() -> None:
    block = make_block()
    want = by_function(block)
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        y, lse = attend(*block)
        k = project_heads(make_projection("norm"))
    assert torch.equal(y, want[0]) and torch.equal(lse, want[1])
    assert not y.requires_grad and not k.requires_grad
    with torch.inference_mode():
        assert torch.equal(attend(*block)[0], want[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    block = with_dropout(make_block())
    names = list(block.leaves)

    def run(*leaves: Tensor) -> Tensor:
        return by_function(block.replace(**dict(zip(names, leaves, strict=True))))[0]

    leaves = tuple(block.leaves.values())
    dy = torch.randn(B, TQ, DOUT, dtype=torch.float64)
    want = torch.autograd.grad(run(*leaves), leaves, dy)
    y = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=use_reentrant)
    y.backward(dy)
    for leaf, grad in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, grad)
