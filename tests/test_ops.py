"""The operators: registration by opcheck, CPU kernels against plain formulas, fakes and strides."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from formulas import plain_attention, plain_norm_rope
from fused_rope_xattn import ops
from fused_rope_xattn.config import NORM_LAYER, NORM_NONE, NORM_RMS, NormSpec, RotationSpec
from fused_rope_xattn.dropout import keep_mask as dropout_keep_mask
from fused_rope_xattn.ops import ScoreOptions
from problems import assert_tensor_near

OPS = torch.ops.fused_rope_xattn

B, T, TQ, TK, H, HKV, D = 2, 5, 6, 7, 4, 2, 8

NORMS = {
    "none": NormSpec(),
    "rms": NormSpec(NORM_RMS, False, 1e-6),
    "layer": NormSpec(NORM_LAYER, False, 1e-5),
    "rms_inner": NormSpec(NORM_RMS, True, 1e-6),
    "layer_inner": NormSpec(NORM_LAYER, True, 1e-3),
}
ROTATIONS = {
    "none": RotationSpec(),
    "interleaved": RotationSpec(D),
    "half_partial": RotationSpec(4, False, base=50.0),
    "axial": RotationSpec(D, True, axes=2, base=100.0),
    "axial_half": RotationSpec(D, False, axes=2, base=100.0),
    "table": RotationSpec(D, False),
    "table_full": RotationSpec(4, True, full_width=True),
    "table_full_half": RotationSpec(D, False, full_width=True),
}


def rotation_tensors(name: str, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """positions, cos, sin for one of ROTATIONS."""
    spec = ROTATIONS[name]
    if name.startswith("table"):
        width = spec.rotary_dim if spec.full_width else spec.rotary_dim // 2
        cos, sin = torch.randn(2, B, 1, T, width, dtype=dtype)
        return None, cos, sin
    if spec.axes == 2:
        return torch.randint(-9, 9, (B, T, 2)), None, None
    if name == "half_partial":
        return torch.randn(1, T, 1) * 5, None, None
    return None, None, None


def norm_tensors(name: str, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    width = H * D if NORMS[name].inner else D
    if name == "none":
        return None, None
    return torch.randn(width, dtype=dtype), None if name == "rms" else torch.randn(width).to(dtype)


# ------------------------------------------------------------------------------------- norm_rope


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_norm_rope_is_the_plain_formula(norm: str, rotation: str) -> None:
    x, bias = torch.randn(B, T, H * D).double(), torch.randn(H * D).double()
    weight, norm_bias = norm_tensors(norm, torch.float64)
    tensors = rotation_tensors(rotation, torch.float64)
    leaves = [t for t in (x, bias, weight, norm_bias) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    spec = {"num_heads": H, "norm": NORMS[norm], "rotation": ROTATIONS[rotation]}
    want = plain_norm_rope(x, H, bias, NORMS[norm], weight, norm_bias, ROTATIONS[rotation], tensors)
    grad = torch.randn_like(want)
    with torch.no_grad():
        got = ops.norm_rope(x, bias, weight, norm_bias, *tensors, **spec, dtype=torch.float64)
        dx, dweight, dbias = ops.norm_rope_backward(
            grad, x, bias, weight, norm_bias, *tensors, **spec
        )
    assert_tensor_near(got, want.detach())
    want_dx, want_db, *want_norm = torch.autograd.grad(want, leaves, grad)
    assert_tensor_near(dx, want_dx, name="dx")
    assert_tensor_near(dx.sum((0, 1)), want_db, 256, name="db")
    for parts, want_parts, param in zip(
        (dweight, dbias), [*want_norm, None, None], (weight, norm_bias), strict=False
    ):
        assert parts.shape[0] == (0 if param is None else B * T)
        if param is not None and want_parts is not None:
            assert_tensor_near(parts.sum(0), want_parts, 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_rope_rounds_once(dtype: torch.dtype) -> None:
    """fp32 in, half out: nearest to the fp64 result, whatever happens in between."""
    x = torch.randn(B, T, H * D)
    norm, spec = NORMS["rms"], ROTATIONS["interleaved"]
    weight = torch.randn(D, dtype=dtype)
    want = plain_norm_rope(x.double(), H, None, norm, weight.double(), None, spec, (None,) * 3)
    got = ops.norm_rope(
        x,
        None,
        weight,
        None,
        None,
        None,
        None,
        num_heads=H,
        norm=norm,
        rotation=spec,
        dtype=dtype,
    )
    assert got.dtype == dtype
    half_ulp = torch.finfo(dtype).eps / 2
    assert bool(((got.double() - want).abs() <= half_ulp * want.abs() * 1.001 + 1e-7).all())


def test_partial_sums_add_up_beyond_their_largest_number() -> None:
    tokens = ops.MAX_NORM_PARTIALS + 100
    x, grad = torch.randn(1, tokens, D), torch.randn(1, tokens, 1, D)
    weight = torch.ones(D)
    _, dweight, dbias = ops.norm_rope_backward(
        grad,
        x,
        None,
        weight,
        None,
        None,
        None,
        None,
        num_heads=1,
        norm=NORMS["rms"],
        rotation=RotationSpec(),
    )
    assert dweight.shape == (ops.MAX_NORM_PARTIALS, D) and dbias.shape == (0, D)
    normed = torch.nn.functional.rms_norm(x, (D,), None, NORMS["rms"].eps)
    assert_tensor_near(dweight.sum(0), (grad[:, :, 0] * normed).sum((0, 1)), 256)


# ------------------------------------------------------------------------------------- attention

SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"kv_lengths": torch.tensor([TK, 3], dtype=torch.int32)},
    "causal_lengths": {"kv_lengths": torch.tensor([4, 0], dtype=torch.int32), "is_causal": True},
    "keys": {"key_keep": torch.arange(B * TK).view(B, TK) % 3 > 0},
    "mask": {"keep_mask": torch.arange(B * TQ * TK).view(B, 1, TQ, TK) % 4 > 0},
    "head_mask": {"keep_mask": torch.arange(H * TK).view(1, H, 1, TK) % 5 > 0},
    "bias": {"attn_bias": (1, H, 1, TK)},
    "full_bias": {"attn_bias": (B, H, TQ, TK), "scale": 0.0},
    "dropout": {"dropout_p": 0.4},
    "all": {
        "attn_bias": (B, 1, TQ, 1),
        "keep_mask": torch.arange(B * TK).view(B, 1, 1, TK) % 4 > 0,
        "key_keep": torch.arange(TK).expand(B, TK) != 2,
        "kv_lengths": torch.tensor([TK, 5], dtype=torch.int32),
        "is_causal": True,
        "dropout_p": 0.25,
    },
}


def score_options(name: str, dtype: torch.dtype = torch.float64) -> ScoreOptions:
    options = dict.fromkeys(("attn_bias", "keep_mask", "key_keep", "kv_lengths"))
    options |= {"scale": 0.3, "is_causal": False, "dropout_p": 0.0, "tf32": False}
    options |= {"seed": torch.tensor([0x1234_5678_9ABC_DEF0])} | SCORES[name]
    if options["attn_bias"] is not None:
        options["attn_bias"] = torch.randn(options["attn_bias"], dtype=dtype)
    return ScoreOptions(**options)


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v"""
    shapes = (B, TQ, H, D), (B, TK, HKV, D), (B, TK, HKV, D)
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("name", SCORES)
def test_attention_is_the_plain_formula(name: str) -> None:
    options = score_options(name)
    q, k, v = (x.requires_grad_() for x in heads())
    leaves = [q, k, v]
    if options.attn_bias is not None:
        leaves.append(options.attn_bias.requires_grad_())
    dropped = None
    if options.dropout_p > 0 and options.seed is not None:
        dropped = dropout_keep_mask(options.seed, options.dropout_p, B, H, TQ, TK).double()
    want = plain_attention(q, k, v, options, dropped)
    o, lse = ops.attention_forward(q, k, v, options)
    assert_tensor_near(o.detach(), want[0].detach(), name="o")
    assert_tensor_near(lse.detach(), want[1].detach(), name="lse")

    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    seen = lse > -math.inf
    loss = (want[0] * dout).sum() + (want[1] * dlse)[seen].sum()
    want_grads = torch.autograd.grad(loss, leaves)
    got = ops.attention_backward(
        dout,
        dlse,
        q,
        k,
        v,
        o,
        lse,
        options,
        need_dq=True,
        need_dkv=True,
        need_dbias=options.attn_bias is not None,
    )
    for name, a, b in zip(("dq", "dk", "dv", "dbias"), got, want_grads, strict=False):
        assert_tensor_near(a, b, 256, name)
    blind = ~seen.transpose(1, 2)
    assert bool((got[0][blind] == 0).all())


def test_backward_returns_only_what_is_needed() -> None:
    options, (q, k, v) = score_options("bias"), heads()
    o, lse = ops.attention_forward(q, k, v, options)
    for need in itertools.product((False, True), repeat=3):
        got = ops.attention_backward(
            o,
            None,
            q,
            k,
            v,
            o,
            lse,
            options,
            need_dq=need[0],
            need_dkv=need[1],
            need_dbias=need[2],
        )
        wanted = (need[0], need[1], need[1], need[2])
        likes = (q, k, v, options.attn_bias)
        for grad, is_wanted, like in zip(got, wanted, likes, strict=True):
            assert like is not None
            assert grad.shape == (like.shape if is_wanted else (0,))


def test_keys_that_no_query_keeps_are_never_read() -> None:
    options = score_options("all")
    q, k, v = heads()
    o, lse = ops.attention_forward(q, k, v, options)
    clean = ops.attention_backward(
        o, lse, q, k, v, o, lse, options, need_dq=True, need_dkv=True, need_dbias=True
    )
    removed = torch.zeros(B, TK, dtype=torch.bool)
    removed[:, 2], removed[1, 5:] = True, True
    k[removed], v[removed] = math.nan, math.inf
    assert torch.equal(ops.attention_forward(q, k, v, options)[0], o)
    got = ops.attention_backward(
        o, lse, q, k, v, o, lse, options, need_dq=True, need_dkv=True, need_dbias=True
    )
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert bool((got[1][removed] == 0).all() and (got[2][removed] == 0).all())


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_sizes(sizes: tuple[int, int, int]) -> None:
    batch, queries, keys = sizes
    q, k = torch.randn(batch, queries, H, D), torch.randn(batch, keys, HKV, D)
    options = score_options("plain")
    o, lse = ops.attention_forward(q, k, k, options)
    assert bool((o == 0).all() and (lse == -math.inf).all())
    grads = ops.attention_backward(
        o, None, q, k, k, o, lse, options, need_dq=True, need_dkv=True, need_dbias=False
    )
    for grad, like in zip(grads, (q, k, k), strict=False):
        assert grad.shape == like.shape and bool((grad == 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_attention_accumulates_in_fp32(dtype: torch.dtype) -> None:
    options, (q, k, v) = score_options("all", torch.float32), heads(dtype)
    o, lse = ops.attention_forward(q, k, v, options)
    wide = [x.double() for x in (q, k, v)]
    exact = options._replace(attn_bias=options.attn_bias.double())
    want, want_lse = ops.attention_forward(*wide, exact)
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert_tensor_near(o, want.to(dtype), 1.0)
    assert_tensor_near(lse, want_lse.float(), 4.0)


# ---------------------------------------------------------------------- registration and layouts


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "heads_first":  # a view of [B, H, T, D]
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "last_stride":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "odd_rows":  # rows that start at any element
        return torch.nn.functional.pad(x, (0, 1))[..., :-1]
    if layout == "packed":  # a slice of a packed projection
        return torch.cat([x, x], dim=2)[:, :, x.shape[2] :]
    return x


LAYOUTS = ["plain", "heads_first", "last_stride", "odd_rows", "packed"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout: str) -> None:
    options, qkv = score_options("all", torch.float32), heads(torch.float32)
    o, lse = ops.attention_forward(*qkv, options)
    dout = torch.randn_like(o)
    needs = {"need_dq": True, "need_dkv": True, "need_dbias": True}
    want = ops.attention_backward(dout, lse, *qkv, o, lse, options, **needs)
    others = [strided(x, layout) for x in qkv]
    got = ops.attention_forward(*others, options)
    assert torch.equal(got[0], o) and torch.equal(got[1], lse)
    grads = ops.attention_backward(
        strided(dout, layout),
        lse.mT.contiguous().mT,
        *others,
        strided(o, layout),
        lse,
        options,
        **needs,
    )
    for a, b in zip(grads, want, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_readable_copies_only_what_it_must() -> None:
    x = torch.randn(2, 3, 4, 8, dtype=torch.bfloat16)
    for layout in ("plain", "heads_first", "packed"):
        y = strided(x, layout)
        assert ops.readable(y) is y
    for layout in ("last_stride", "odd_rows"):
        y = ops.readable(strided(x, layout))
        assert y.is_contiguous() and torch.equal(y, x)
    expanded = x[:, :1].expand(2, 3, 4, 8)
    assert ops.readable(expanded) is expanded


def wishing(x: Tensor | None, requires_grad: bool) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return x
    return x.detach().clone().requires_grad_(requires_grad)


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("norm", "rotation"),
    [("none", "interleaved"), ("rms", "axial"), ("layer_inner", "table_full"), ("layer", "none")],
)
def test_opcheck_norm_rope(norm: str, rotation: str, requires_grad: bool) -> None:
    weight, norm_bias = norm_tensors(norm, torch.float32)
    positions, cos, sin = rotation_tensors(rotation, torch.float32)
    spec = ROTATIONS[rotation]
    tensors = [torch.randn(H * D), weight, norm_bias, positions, cos, sin]
    tail = [
        *(wishing(x, requires_grad) for x in tensors),
        *(H, *NORMS[norm]),
        *(spec.rotary_dim, spec.interleaved, spec.axes, spec.base, spec.full_width),
    ]
    x = wishing(torch.randn(B, T, H * D), requires_grad)
    torch.library.opcheck(OPS.norm_rope.default, (x, *tail, torch.bfloat16))
    grad = wishing(torch.randn(B, T, H, D), requires_grad)
    saved = None if NORMS[norm].kind == NORM_NONE else x
    torch.library.opcheck(OPS.norm_rope_backward.default, (grad, saved, *tail))


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["plain", "bias", "dropout", "all"])
def test_opcheck_attention(name: str, requires_grad: bool) -> None:
    options = score_options(name, torch.float32)
    q, k, v = (wishing(x, requires_grad) for x in heads(torch.float32))
    bias = wishing(options.attn_bias, requires_grad)
    options = options._replace(attn_bias=bias)
    torch.library.opcheck(OPS.attention_forward.default, (q, k, v, *options))
    transposed = torch.zeros(B, HKV, D, ops.padded_tokens(k.shape[1]))
    torch.library.opcheck(OPS.attention_forward.default, (q, k, v, *options, transposed))
    with torch.no_grad():
        o, lse = ops.attention_forward(q, k, v, options)
    dlse = None if name == "plain" else torch.randn_like(lse)
    needs = (name != "dropout", True, bias is not None)  # need_dq, need_dkv, need_dbias
    args = (torch.randn_like(o), dlse, q, k, v, o, lse, *options, *needs, True)
    torch.library.opcheck(OPS.attention_backward.default, args)


def test_fakes_tell_shapes_strides_and_dtypes() -> None:
    """For layouts that opcheck's own inputs do not have: results are contiguous all the same."""
    options = score_options("all", torch.bfloat16)
    qkv = [strided(x, "heads_first") for x in heads(torch.bfloat16)]
    o, lse = ops.attention_forward(*qkv, options)
    needs = {"need_dq": True, "need_dkv": True, "need_dbias": True}
    real = [o, lse, *ops.attention_backward(o, lse, *qkv, o, lse, options, **needs)]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        o, lse = ops.attention_forward(*qkv, options)
        fake = [o, lse, *ops.attention_backward(o, lse, *qkv, o, lse, options, **needs)]
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert b.is_contiguous()


def test_results_never_alias_arguments() -> None:
    x = torch.randn(B, T, H * D)
    none = (None,) * 6
    plain = {"num_heads": H, "norm": NormSpec(), "rotation": RotationSpec()}
    y = ops.norm_rope(x, *none, **plain, dtype=torch.float32)
    assert torch.equal(y.flatten(2), x) and y.data_ptr() != x.data_ptr()
    dx, _, _ = ops.norm_rope_backward(y, None, *none, **plain)
    assert torch.equal(dx, x) and dx.data_ptr() != y.data_ptr()
