"""The problems that tests, benchmarks and the self-test run: one enumerator for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .case import DTYPES, Case, Inputs, draw_inputs

__all__ = [
    "BASELINE",
    "DTYPES",
    "FULL_HEAD_ROPES",
    "NAMED",
    "OPTIONS",
    "ROWS",
    "Case",
    "Inputs",
    "draw_inputs",
    "kernels_must_cover",
    "make_inputs",
    "normalised",
    "option_grid",
]

BASELINE = Case("baseline", 4, 64, 128, H=8, D=32, Dq=256)

# The rows whose speed counts, by name.
ROWS: dict[str, Case] = {
    case.name: case
    for case in (
        replace(BASELINE, name="seed_fp32", dtype="fp32"),
        replace(BASELINE, name="seed_tf32", dtype="tf32"),
        replace(BASELINE, name="seed_bf16", dtype="bf16"),
        Case("mast3r_bf16", 2, 768, 768, H=12, D=64, Dq=768, dtype="bf16"),
        Case("mast3r_tf32", 2, 768, 768, H=12, D=64, Dq=768, dtype="tf32"),
        Case("sam2_bf16", 1, 4096, 28736, H=1, D=256, Dq=256, Dkv=64, dtype="bf16"),
        Case("decode_bf16", 8, 1, 1500, H=16, D=64, Dq=1024, dtype="bf16"),
        Case("decode_cached_bf16", 8, 1, 1500, H=16, D=64, Dq=1024, dtype="bf16", projected=True),
        Case("large_bf16", 4, 4096, 4096, H=16, D=128, Dq=2048, dtype="bf16"),
        Case("large64_bf16", 4, 4096, 4096, H=32, D=64, Dq=2048, dtype="bf16"),
    )
}

# Single features at odd sizes, and the combinations that models use.
NAMED: dict[str, Case] = {
    case.name: case
    for case in (
        Case("odd_sizes", 3, 37, 71, H=3, D=24, Dq=40, Dkv=56, biases="qkvo", lse=True),
        Case("one_query", 5, 1, 131, H=4, D=64, Dq=64, lse=True, lengths="ragged"),
        Case("two_keys", 4, 65, 2, H=2, D=16, Dq=32, biases="qo"),
        Case("head_dim_8", 2, 33, 40, H=8, D=8, Dq=64, mask="rows", rope="half"),
        Case("head_dim_15", 2, 19, 23, H=4, D=15, Dq=48, rope="partial", biases="qkvo"),
        Case("head_dim_30", 2, 19, 23, H=4, D=30, Dq=48, rope="half", causal=True),
        Case("head_dim_72", 2, 48, 50, H=4, D=72, Dq=96, rope="axial_half", positions="batch"),
        Case("head_dim_88", 2, 48, 50, H=4, D=88, Dq=96, rope="table_full", k_norm="rms"),
        Case("head_dim_132", 2, 17, 50, H=2, D=132, Dq=64, rope="axial", positions="negative"),
        Case("head_dim_256", 2, 70, 90, H=1, D=256, Dq=128, Dkv=64, Dv=48, biases="qkvo"),
        Case("grouped", 2, 40, 77, H=6, Hkv=2, D=32, Dq=64, q_norm="rms", k_norm="rms"),
        Case("multi_query", 2, 40, 77, H=8, Hkv=1, D=32, Dq=64, bias="hqk", lse=True),
        Case("causal_short", 2, 30, 97, H=2, D=32, Dq=64, causal=True),
        Case("causal_long", 2, 97, 30, H=2, D=32, Dq=64, causal=True, biases="o", lse=True),
        Case("causal_ragged", 3, 50, 60, H=2, D=32, Dq=64, causal=True, lengths="ragged"),
        Case(
            "causal_mask_bias",
            3,
            50,
            60,
            H=4,
            Hkv=2,
            D=32,
            Dq=64,
            causal=True,
            lengths="zero",
            mask="full",
            bias="bhqk-inf",
            lse=True,
            biases="qkvo",
        ),
        Case("negative_scale", 2, 20, 33, H=2, D=32, Dq=64, scale=-0.3),
        Case("zero_scale", 2, 20, 33, H=2, D=32, Dq=64, scale=0.0, bias="qk"),
        Case("no_out", 2, 33, 65, H=4, D=32, Dq=64, Dout=0, biases="qkv", lse=True),
        Case("wide_out", 2, 33, 65, H=2, D=32, Dq=48, Dkv=80, Dout=112, biases="qkvo"),
        Case("dropout", 3, 45, 70, H=4, D=32, Dq=64, dropout_p=0.25, biases="qkvo"),
        Case(
            "dropout_all",
            2,
            40,
            61,
            H=4,
            Hkv=2,
            D=64,
            Dq=64,
            dropout_p=0.1,
            causal=True,
            lengths="ragged",
            mask="heads",
            bias="h11",
            lse=True,
        ),
        Case(
            "cached",
            3,
            21,
            90,
            H=4,
            Hkv=2,
            D=64,
            Dq=64,
            projected=True,
            lengths="ragged",
            positions="batch",
            biases="qo",
        ),
        Case(
            "cached_inner_norm",
            2,
            21,
            40,
            H=4,
            D=16,
            Dq=64,
            projected=True,
            q_norm="layer_inner",
            mask="keys",
            dropout_p=0.5,
        ),
        Case(
            "geometry",
            2,
            64,
            65,
            H=4,
            D=32,
            Dq=128,
            rope="axial_half",
            positions="negative",
            biases="qkvo",
        ),
        Case(
            "video_memory",
            2,
            48,
            200,
            H=1,
            D=64,
            Dq=64,
            Dkv=16,
            Dv=16,
            rope="table",
            biases="qkvo",
            dropout_p=0.1,
        ),
        Case(
            "audio_video",
            2,
            50,
            31,
            H=4,
            D=32,
            Dq=128,
            Dkv=96,
            rope="table_batch_heads",
            q_norm="rms_inner",
            k_norm="rms_inner",
            biases="qkvo",
        ),
        Case(
            "text_to_image",
            2,
            64,
            33,
            H=4,
            D=64,
            Dq=64,
            Dkv=48,
            rope="q_only",
            q_norm="layer",
            k_norm="layer",
            biases="qkvo",
            mask="keys",
        ),
        Case(
            "policy",
            2,
            16,
            150,
            H=8,
            D=32,
            Dq=64,
            rope="k_only",
            positions="float",
            bias="b1qk-inf",
        ),
        Case(
            "perceiver",
            2,
            70,
            33,
            H=4,
            D=32,
            Dq=64,
            rope="partial_half",
            positions="float_batch",
            causal=True,
        ),
        Case("far_positions", 2, 40, 50, H=2, D=64, Dq=64, positions="huge"),
    )
}

# The axes of the option grid and of the random problems.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "sizes": ((1, 17, 33), (2, 5, 130), (3, 64, 64), (2, 129, 48), (4, 1, 70), (1, 70, 9)),
    "heads": ((1, None), (2, None), (4, 2), (6, 1)),
    "D": (8, 16, 32, 64, 96, 128),
    "widths": ((64, None, None), (40, 72, None), (32, 48, 24)),
    "Dout": (None, 0, 56),
    "biases": ("", "qkvo", "kv", "qo"),
    "rope": (
        "interleaved",
        "half",
        "base",
        "partial",
        "partial_half",
        "axial",
        "axial_half",
        "axial3_partial",
        "none",
        "q_only",
        "k_only",
        "two_kinds",
        "table",
        "table_half",
        "table_batch",
        "table_heads",
        "table_batch_heads",
        "table_full",
        "table_full_half",
        "table_and_rope",
    ),
    "positions": ("default", "int", "int32", "batch", "negative", "huge", "float", "float_batch"),
    "q_norm": ("none", "rms", "rms_bare", "rms_inner", "layer", "layer_inner"),
    "k_norm": ("none", "rms", "rms_bare", "rms_inner", "layer", "layer_inner"),
    "lengths": ("none", "ragged", "zero"),
    "mask": ("none", "keys", "keys4", "heads", "rows", "full"),
    "bias": ("none", "qk", "k", "h11", "1hqk", "b11k-inf", "b1qk-inf", "bhq1", "bhqk"),
    "causal": (False, True),
    "dropout_p": (0.0, 0.0, 0.3),
    "scale": (None, 0.37),
    "lse": (False, True),
    "projected": (False, False, True),
}

# Descriptions that rotate all of a head, which an odd head dim cannot be.
FULL_HEAD_ROPES = (
    "interleaved",
    "half",
    "base",
    "two_kinds",
    "q_only",
    "k_only",
    "table_and_rope",
)


def normalised(choice: dict[str, Any], name: str) -> Case:
    """The case of one value for each option, with the few impossible combinations mended."""
    choice = dict(choice)
    batch, num_queries, num_keys = choice.pop("sizes")
    heads, kv_heads = choice.pop("heads")
    width, kv_width, value_width = choice.pop("widths")
    if choice["projected"]:
        kv_width = value_width = None
        choice["k_norm"] = "none"
    if choice["rope"].startswith("axial") and choice["positions"] == "default":
        choice["positions"] = "batch"
    if choice["D"] % 2 and choice["rope"] in FULL_HEAD_ROPES:
        choice["rope"] = "partial"
    return Case(
        name,
        batch,
        num_queries,
        num_keys,
        H=heads,
        Hkv=kv_heads,
        Dq=width,
        Dkv=kv_width,
        Dv=value_width,
        **choice,
    )


def option_grid(count: int = 40, seed: int = 0) -> Iterator[Case]:
    """Mixed options: each case is the one of 40 random draws that adds most unseen value pairs."""
    chooser = random.Random(seed)
    seen: set[Any] = set()
    for index in range(count):
        draws = [{k: chooser.choice(v) for k, v in OPTIONS.items()} for _ in range(40)]
        pairs = [set(combinations(draw.items(), 2)) - seen for draw in draws]
        best = max(range(len(draws)), key=lambda i: len(pairs[i]))
        seen |= pairs[best]
        yield normalised(draws[best], f"grid{index:02d}")


def kernels_must_cover(case: Case) -> bool:
    """Whether a supported GPU has to run this case without the composite path."""
    return case.D % 8 == 0 and case.D <= 256 and case.dtype != "fp64"


def make_inputs(
    case: Case,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
    """(args, kwargs, tensors that require grad) of cross_attention with fresh random data."""
    if dtype is not None:
        names = {v: k for k, v in DTYPES.items() if k != "tf32"}
        case = case.at(dtype if isinstance(dtype, str) else names[dtype])
    inputs = draw_inputs(case, device, seed)
    for leaf in inputs.leaves.values():
        leaf.requires_grad_()
    return inputs.args, inputs.kwargs, list(inputs.leaves.values())
