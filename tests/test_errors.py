"""Wrong arguments: each is refused before any launch, by name, with what was given and wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from fused_rope_xattn import (
    FusedRoPECrossAttention,
    Norm,
    ProjectedKV,
    RoPE,
    RotaryTable,
    cross_attention,
    project_kv,
)

B, TQ, TK, H, D, DQ, DKV, DOUT = 2, 5, 7, 4, 8, 24, 40, 48
NAMES = ("x_query", "x_kv", "w_q", "w_k", "w_v", "w_out")


def call(**changes: Any) -> Any:
    """A valid call with some arguments replaced; ``del_NAME`` drops one."""
    arguments: dict[str, Any] = {
        "x_query": torch.randn(B, TQ, DQ),
        "x_kv": torch.randn(B, TK, DKV),
        "w_q": torch.randn(H * D, DQ),
        "w_k": torch.randn(H * D, DKV),
        "w_v": torch.randn(H * D, DKV),
        "w_out": torch.randn(DOUT, H * D),
        "num_heads": H,
    }
    arguments |= changes
    tensors = [arguments.pop(name) for name in NAMES]
    return cross_attention(*tensors, **arguments)


def cached(**changes: Any) -> Any:
    """A valid call on a ProjectedKV with some arguments replaced."""
    kv = ProjectedKV(torch.randn(B, H, TK, D), torch.randn(B, H, TK, D))
    return call(**{"x_kv": kv, "w_k": None, "w_v": None, **changes})


class Wrong(NamedTuple):
    """A call that must be refused: the argument to blame and something of what it was given."""

    argument: str  # alternatives are separated by |
    changes: dict[str, Any]
    got: str = ""  # a fragment of the message that shows what was given
    call: Callable[..., Any] = call


R = torch.randn
meta = torch.device("meta")
bools = torch.ones(B, TK, dtype=torch.bool)


def table(*shape: int, **options: Any) -> RotaryTable:
    return RotaryTable(torch.ones(shape), torch.zeros(shape), **options)


WRONG: dict[str, Wrong] = {
    # tensors: kind, rank, width
    "query no tensor": Wrong("x_query", {"x_query": [[1.0]]}, "list"),
    "query none": Wrong("x_query", {"x_query": None}, "None"),
    "query rank 2": Wrong("x_query", {"x_query": R(TQ, DQ)}, "5, 24"),
    "query rank 4": Wrong("x_query", {"x_query": R(1, B, TQ, DQ)}, "1, 2, 5, 24"),
    "kv rank 2": Wrong("x_kv", {"x_kv": R(TK, DKV)}, "7, 40"),
    "kv none": Wrong("x_kv", {"x_kv": None}, "None"),
    "kv batch": Wrong("x_kv", {"x_kv": R(3, TK, DKV)}, "3"),
    "value rank": Wrong("x_value", {"x_value": R(TK, DKV)}, "7, 40"),
    "value length": Wrong("x_value", {"x_value": R(B, TK + 1, DKV)}, "8"),
    "value batch": Wrong("x_value", {"x_value": R(1, TK, DKV)}, "1"),
    "value width": Wrong("w_v", {"x_value": R(B, TK, 12)}, "40"),
    "w_q width": Wrong("w_q", {"w_q": R(H * D, DQ + 1)}, "25"),
    "w_q rank": Wrong("w_q", {"w_q": R(H * D)}, "32"),
    "w_q none": Wrong("w_q", {"w_q": None}, "None"),
    "w_q rows": Wrong("w_q", {"w_q": R(30, DQ)}, "30"),
    "w_q transposed": Wrong("w_q", {"w_q": R(DQ, H * D)}, "24, 32"),
    "w_k width": Wrong("w_k", {"w_k": R(H * D, DKV - 1)}, "39"),
    "w_k rows": Wrong("w_k", {"w_k": R(2 * H * D, DKV)}, "64"),
    "w_k none": Wrong("w_k", {"w_k": None}, "None"),
    "w_v rows": Wrong("w_v", {"w_v": R(D, DKV)}, "8"),
    "w_v none": Wrong("w_v", {"w_v": None}, "None"),
    "w_out width": Wrong("w_out", {"w_out": R(DOUT, H * D + 8)}, "40"),
    "w_out rank": Wrong("w_out", {"w_out": R(DOUT, H, D)}, "48, 4, 8"),
    "b_q size": Wrong("b_q", {"b_q": R(H * D + 1)}, "33"),
    "b_q rank": Wrong("b_q", {"b_q": R(1, H * D)}, "1, 32"),
    "b_k size": Wrong("b_k", {"b_k": R(D)}, "8"),
    "b_v size": Wrong("b_v", {"b_v": R(1)}, "1"),
    "b_out size": Wrong("b_out", {"b_out": R(H * D)}, "32"),
    "b_out without w_out": Wrong("b_out", {"w_out": None, "b_out": R(DOUT)}),
    # dtypes and devices
    "int query": Wrong("x_query", {"x_query": torch.ones(B, TQ, DQ, dtype=torch.int64)}, "int64"),
    "complex query": Wrong("x_query", {"x_query": R(B, TQ, DQ, dtype=torch.complex64)}, "complex"),
    "mixed kv": Wrong("x_kv", {"x_kv": R(B, TK, DKV).half()}, "float16"),
    "mixed value": Wrong("x_value", {"x_value": R(B, TK, DKV).double()}, "float64"),
    "mixed w_q": Wrong("w_q", {"w_q": R(H * D, DQ).bfloat16()}, "bfloat16"),
    "mixed w_k": Wrong("w_k", {"w_k": R(H * D, DKV).double()}, "float64"),
    "mixed w_v": Wrong("w_v", {"w_v": R(H * D, DKV).half()}, "float16"),
    "mixed w_out": Wrong("w_out", {"w_out": R(DOUT, H * D).half()}, "float16"),
    "mixed b_q": Wrong("b_q", {"b_q": R(H * D).half()}, "float16"),
    "mixed b_out": Wrong("b_out", {"b_out": R(DOUT).double()}, "float64"),
    "kv device": Wrong("x_kv", {"x_kv": R(B, TK, DKV, device=meta)}, "meta"),
    "weight device": Wrong("w_v", {"w_v": R(H * D, DKV, device=meta)}, "meta"),
    "bias device": Wrong("b_k", {"b_k": R(H * D, device=meta)}, "meta"),
    "mask device": Wrong("kv_keep_mask", {"kv_keep_mask": bools.to(meta)}, "meta"),
    "lengths device": Wrong("kv_lengths", {"kv_lengths": torch.ones(B, device=meta).int()}, "meta"),
    "attn_bias device": Wrong("attn_bias", {"attn_bias": R(TQ, TK, device=meta)}, "meta"),
    "positions device": Wrong(
        "q_positions", {"q_positions": torch.arange(TQ, device=meta)}, "meta"
    ),
    # heads
    "no heads": Wrong("num_heads", {"num_heads": 0}, "0"),
    "negative heads": Wrong("num_heads", {"num_heads": -4}, "-4"),
    "float heads": Wrong("num_heads", {"num_heads": 4.0}, "4.0"),
    "heads do not divide": Wrong("num_heads|w_q", {"num_heads": 5}, "5"),
    "kv heads do not divide": Wrong(
        "num_kv_heads", {"num_kv_heads": 3, "w_k": R(3 * D, DKV), "w_v": R(3 * D, DKV)}, "3"
    ),
    "no kv heads": Wrong("num_kv_heads", {"num_kv_heads": 0}, "0"),
    "more kv heads": Wrong(
        "num_kv_heads", {"num_kv_heads": 8, "w_k": R(8 * D, DKV), "w_v": R(8 * D, DKV)}, "8"
    ),
    "kv heads against w_k": Wrong("w_k", {"num_kv_heads": 2}, "32"),
    # rotations
    "rope of no kind": Wrong("rope", {"rope": 10000.0}, "10000.0"),
    "rope triple": Wrong("rope", {"rope": (RoPE(), RoPE(), RoPE())}, "tuple"),
    "rope pair of no kind": Wrong("rope", {"rope": (RoPE(), "half")}, "tuple"),
    "rotary dim above head dim": Wrong("rope", {"rope": RoPE(rotary_dim=D + 2)}, "10"),
    "head dim not divisible by axes": Wrong(
        "rope",
        {"rope": RoPE(axes=3), "q_positions": torch.ones(TQ, 3), "k_positions": torch.ones(TK, 3)},
        "8",
    ),
    "q positions length": Wrong("q_positions", {"q_positions": torch.arange(TQ + 1)}, "6"),
    "k positions length": Wrong("k_positions", {"k_positions": torch.arange(TQ)}, "5"),
    "positions batch": Wrong("q_positions", {"q_positions": torch.ones(3, TQ)}, "3"),
    "positions rank": Wrong("q_positions", {"q_positions": torch.ones(B, TQ, 1, 1)}),
    "positions bool": Wrong("k_positions", {"k_positions": torch.ones(TK).bool()}, "bool"),
    "positions complex": Wrong("k_positions", {"k_positions": torch.ones(TK) * 1j}, "complex"),
    "positions list": Wrong("k_positions", {"k_positions": list(range(TK))}, "list"),
    "positions without axes": Wrong(
        "q_positions",
        {"rope": RoPE(axes=2), "q_positions": torch.arange(TQ), "k_positions": torch.ones(TK, 2)},
        "5",
    ),
    "positions of three axes": Wrong(
        "k_positions",
        {"rope": RoPE(axes=2), "q_positions": torch.ones(TQ, 2), "k_positions": torch.ones(TK, 3)},
        "7, 3",
    ),
    "no axial positions": Wrong("q_positions", {"rope": RoPE(axes=2)}),
    "table length": Wrong("cos", {"rope": (table(TQ + 1, D // 2), None)}, "6"),
    "k table length": Wrong("cos", {"rope": (None, table(TQ, D // 2))}, "5"),
    "one table for two lengths": Wrong("cos", {"rope": table(TQ, D // 2)}, "5"),
    "table one token": Wrong("cos", {"rope": (table(1, D // 2), None)}, "1"),
    "table batch": Wrong("cos", {"rope": (table(3, 1, TQ, D // 2), None)}, "3"),
    "table heads": Wrong("cos", {"rope": (table(3, TQ, D // 2), None)}, "3"),
    "k table of query heads": Wrong(
        "cos",
        {
            "rope": (None, table(H, TK, D // 2)),
            "num_kv_heads": 2,
            "w_k": R(2 * D, DKV),
            "w_v": R(2 * D, DKV),
        },
        "4",
    ),
    "table too wide": Wrong("cos|rope", {"rope": (table(TQ, D), None)}, "8"),
    "full table odd": Wrong("cos|rope", {"rope": (table(TQ, 5, full_width=True), None)}, "5"),
    "full table too wide": Wrong(
        "cos|rope", {"rope": (table(TQ, D + 2, full_width=True), None)}, "10"
    ),
    "table device": Wrong(
        "cos", {"rope": (RotaryTable(R(TQ, 4, device=meta), R(TQ, 4, device=meta)), None)}, "meta"
    ),
    # norms
    "norm of no kind": Wrong("q_norm", {"q_norm": torch.nn.LayerNorm(D)}, "LayerNorm"),
    "norm weight size": Wrong("q_norm", {"q_norm": Norm("rms", R(D + 1))}, "9"),
    "norm weight rank": Wrong("k_norm", {"k_norm": Norm("rms", R(1, D))}, "1, 8"),
    "norm over inner": Wrong("q_norm", {"q_norm": Norm("rms", R(D), over="inner")}, "8"),
    "norm bias size": Wrong("k_norm", {"k_norm": Norm("layer", R(D), R(D - 1))}, "7"),
    "norm weight device": Wrong("q_norm", {"q_norm": Norm("rms", R(D, device=meta))}, "meta"),
    # masks
    "lengths rank": Wrong("kv_lengths", {"kv_lengths": torch.ones(B, 1).int()}, "2, 1"),
    "lengths size": Wrong("kv_lengths", {"kv_lengths": torch.ones(3).int()}, "3"),
    "lengths float": Wrong("kv_lengths", {"kv_lengths": torch.ones(B)}, "float32"),
    "lengths bool": Wrong("kv_lengths", {"kv_lengths": torch.ones(B).bool()}, "bool"),
    "lengths list": Wrong("kv_lengths", {"kv_lengths": [7, 7]}, "list"),
    "mask float": Wrong("kv_keep_mask", {"kv_keep_mask": torch.ones(B, TK)}, "float32"),
    "mask int": Wrong("kv_keep_mask", {"kv_keep_mask": bools.int()}, "int32"),
    "mask uint8": Wrong("kv_keep_mask", {"kv_keep_mask": bools.byte()}, "uint8"),
    "mask rank 3": Wrong("kv_keep_mask", {"kv_keep_mask": bools[:, None]}, "2, 1, 7"),
    "mask keys": Wrong("kv_keep_mask", {"kv_keep_mask": bools[:, 1:]}, "6"),
    "mask batch": Wrong("kv_keep_mask", {"kv_keep_mask": bools[:1].repeat(3, 1)}, "3"),
    "mask heads": Wrong("kv_keep_mask", {"kv_keep_mask": torch.ones(B, 2, TQ, TK).bool()}, "2"),
    "mask queries": Wrong(
        "kv_keep_mask", {"kv_keep_mask": torch.ones(B, 1, TQ - 1, TK).bool()}, "4"
    ),
    "attn_bias bool": Wrong("attn_bias", {"attn_bias": torch.ones(TQ, TK).bool()}, "bool"),
    "attn_bias int": Wrong("attn_bias", {"attn_bias": torch.ones(TQ, TK).long()}, "int64"),
    "attn_bias size": Wrong("attn_bias", {"attn_bias": R(TQ, TK + 1)}, "8"),
    "attn_bias heads": Wrong("attn_bias", {"attn_bias": R(B, 3, TQ, TK)}, "3"),
    "attn_bias rank 5": Wrong("attn_bias", {"attn_bias": R(1, B, H, TQ, TK)}),
    "attn_bias of heads alone": Wrong("attn_bias", {"attn_bias": R(B * H, TQ, TK)}, "8"),
    # numbers and words
    "dropout negative": Wrong("dropout_p", {"dropout_p": -0.1}, "-0.1"),
    "dropout above 1": Wrong("dropout_p", {"dropout_p": 1.5}, "1.5"),
    "dropout nan": Wrong("dropout_p", {"dropout_p": float("nan")}, "nan"),
    "dropout word": Wrong("dropout_p", {"dropout_p": "0.1"}, "'0.1'"),
    "scale nan": Wrong("scale", {"scale": float("nan")}, "nan"),
    "scale inf": Wrong("scale", {"scale": float("inf")}, "inf"),
    "scale word": Wrong("scale", {"scale": "auto"}, "'auto'"),
    "causal int": Wrong("is_causal", {"is_causal": 3}, "3"),
    "path unknown": Wrong("path", {"path": "fastest"}, "fastest"),
    "path none": Wrong("path", {"path": None}, "None"),
    # ProjectedKV
    "cached with w_k": Wrong("w_k", {"w_k": R(H * D, DKV)}, call=cached),
    "cached with w_v": Wrong("w_v", {"w_v": R(H * D, DKV)}, call=cached),
    "cached with b_k": Wrong("b_k", {"b_k": R(H * D)}, call=cached),
    "cached with b_v": Wrong("b_v", {"b_v": R(H * D)}, call=cached),
    "cached with x_value": Wrong("x_value", {"x_value": R(B, TK, DKV)}, call=cached),
    "cached with k_positions": Wrong("k_positions", {"k_positions": torch.arange(TK)}, call=cached),
    "cached with k_norm": Wrong("k_norm", {"k_norm": Norm("rms", R(D))}, call=cached),
    "cached heads": Wrong(
        "k|num_kv_heads",
        {"x_kv": ProjectedKV(R(B, 2, TK, D), R(B, 2, TK, D)), "num_kv_heads": 4},
        "2",
        cached,
    ),
    "cached heads do not divide": Wrong(
        "k|num_kv_heads", {"x_kv": ProjectedKV(R(B, 3, TK, D), R(B, 3, TK, D))}, "3", cached
    ),
    "cached head dim": Wrong(
        "k", {"x_kv": ProjectedKV(R(B, H, TK, D + 2), R(B, H, TK, D + 2))}, "10", cached
    ),
    "cached lengths differ": Wrong(
        "v", {"x_kv": ProjectedKV(R(B, H, TK, D), R(B, H, TK + 1, D))}, "8", cached
    ),
    "cached rank": Wrong("k", {"x_kv": ProjectedKV(R(B, TK, D), R(B, TK, D))}, "2, 7, 8", cached),
    "cached dtype": Wrong(
        "k", {"x_kv": ProjectedKV(R(B, H, TK, D).half(), R(B, H, TK, D).half())}, "float16", cached
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    wrong = WRONG[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        wrong.call(**wrong.changes)
    message = str(caught.value)
    assert any(name in message for name in wrong.argument.split("|")), message
    assert wrong.got in message, message


def test_the_calls_they_spoil_are_right() -> None:
    assert call().shape == (B, TQ, DOUT) and cached().shape == (B, TQ, DOUT)


@pytest.mark.parametrize(
    "build",
    [
        lambda: RoPE(base=0.0),
        lambda: RoPE(base=-1.0),
        lambda: RoPE(base=float("nan")),
        lambda: RoPE(rotary_dim=7),
        lambda: RoPE(rotary_dim=-2),
        lambda: RoPE(axes=0),
        lambda: RoPE(rotary_dim=6, axes=2),
        lambda: Norm("batch"),
        lambda: Norm("rms", over="all"),
        lambda: Norm("rms", eps=-1.0),
    ],
    ids=[
        "base0",
        "base<0",
        "base nan",
        "odd",
        "negative",
        "no axes",
        "6 by 2",
        "kind",
        "over",
        "eps",
    ],
)
def test_wrong_descriptions_are_refused(build: Callable[[], Any]) -> None:
    """At the latest when they are used."""

    def use() -> None:
        built = build()
        if isinstance(built, Norm):
            call(q_norm=built)
        else:
            call(
                rope=built,
                q_positions=torch.ones(TQ, max(1, built.axes)),
                k_positions=torch.ones(TK, max(1, built.axes)),
            )

    with pytest.raises((ValueError, TypeError)):
        use()


def test_table_sides_must_match() -> None:
    with pytest.raises((ValueError, TypeError), match="sin"):
        call(rope=(RotaryTable(torch.ones(TQ, 4), torch.zeros(TQ, 3)), None))


@pytest.mark.parametrize(
    "changes, argument",
    [
        ({"num_heads": 5}, "num_heads|w_k"),
        ({"x_kv": R(TK, DKV)}, "x_kv"),
        ({"w_k": R(H * D, DKV + 1)}, "w_k"),
        ({"b_v": R(3)}, "b_v"),
        ({"k_positions": torch.arange(TK + 2)}, "k_positions"),
        ({"k_norm": Norm("rms", R(3))}, "k_norm"),
        ({"x_value": R(B, TK + 1, DKV)}, "x_value"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_project_kv_names_its_arguments(changes: dict[str, Any], argument: str) -> None:
    arguments: dict[str, Any] = {
        "x_kv": R(B, TK, DKV),
        "w_k": R(H * D, DKV),
        "w_v": R(H * D, DKV),
        "num_heads": H,
        **changes,
    }
    with pytest.raises((ValueError, TypeError), match=argument):
        project_kv(**arguments)


@pytest.mark.parametrize(
    "arguments, word",
    [
        ({"dim": 30, "num_heads": 4}, "30"),
        ({"dim": 0, "num_heads": 1}, "dim|inner width"),
        ({"dim": 32, "num_heads": 0}, "num_heads"),
        ({"dim": 32, "num_heads": 4, "dropout": 1.2}, "1.2"),
        ({"dim": 32, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
        ({"dim": 32, "num_heads": 4, "qk_norm": "batch"}, "qk_norm"),
        ({"dim": 32, "num_heads": 4, "rope": 3}, "rope"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_module_cannot_be_built_wrong(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises((ValueError, TypeError), match=word):
        FusedRoPECrossAttention(**arguments)


@pytest.mark.parametrize("path", ["split", "fused"])
@pytest.mark.parametrize("dtype, reason", [(torch.float64, "fp64|float64"), (torch.float32, "cpu")])
def test_a_forced_path_says_why_it_cannot_be_taken(
    path: str, dtype: torch.dtype, reason: str
) -> None:
    shapes = {
        "x_query": (B, TQ, DQ),
        "x_kv": (B, TK, DKV),
        "w_q": (H * D, DQ),
        "w_k": (H * D, DKV),
        "w_v": (H * D, DKV),
        "w_out": (DOUT, H * D),
    }
    with pytest.raises(ValueError, match=rf"(?s){path}.*({reason})"):
        call(path=path, **{n: R(*s, dtype=dtype) for n, s in shapes.items()})


@pytest.mark.gpu
def test_mixed_devices_are_named() -> None:
    for name in ("x_query", "x_kv", "w_q", "w_out"):
        arguments: dict[str, Any] = {
            "x_query": R(B, TQ, DQ),
            "x_kv": R(B, TK, DKV),
            "w_q": R(H * D, DQ),
            "w_k": R(H * D, DKV),
            "w_v": R(H * D, DKV),
            "w_out": R(DOUT, H * D),
        }
        arguments = {n: t if n == name else t.cuda() for n, t in arguments.items()}
        with pytest.raises((ValueError, TypeError), match=r"(?s)cpu.*cuda|cuda.*cpu"):
            call(**arguments)


@pytest.mark.gpu
def test_the_context_survives_every_refusal() -> None:
    for wrong in WRONG.values():
        changes = {
            n: t.cuda() if isinstance(t, torch.Tensor) and t.device != meta else t
            for n, t in wrong.changes.items()
        }
        with torch.device("cuda"), pytest.raises((ValueError, TypeError)):
            wrong.call(**changes)
    torch.cuda.synchronize()
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
