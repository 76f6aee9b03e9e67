"""Numbers that Python and the kernels both need, and that no compiler compares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fused_rope_xattn import grouped, ops

KERNELS = Path(__file__).resolve().parents[1] / "kernels"


@pytest.mark.parametrize(
    "source, name, value",
    [
        ("bindings_cuda.cpp", "kMaxNormPartials", ops.MAX_NORM_PARTIALS),
        ("plan.h", "kMaxRowSumKeys", ops.MAX_ROW_SUM_KEYS),
        ("attention_sm90.cpp", "kMinQueries", grouped.FEWEST_TF32_QUERIES),
        ("attention_sm90.cpp", "kMinFlops", grouped.LEAST_TF32_FLOPS),
    ],
)
def test_they_are_the_same(source: str, name: str, value: float) -> None:
    text = (KERNELS / source).read_text(encoding="utf-8")
    (written,) = re.findall(rf"constexpr \w+ {name} = ([^;]+);", text)
    assert float(written) == value
