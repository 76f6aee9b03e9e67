"""Memory attention of SAM 2 as Meta wrote it, written out from its formulas."""

from __future__ import annotations

import pytest
import torch

from fused_rope_xattn.swap import swap_cross_attention
from reference_models import MemoryAttention, RoPEAttention
from swap_models import (
    Call,
    check_bf16,
    check_fp32,
    check_training,
    check_undo,
    counted_calls,
    output,
)

C, CM = 32, 16


def call(queries: int = 16, memories: int = 3, pointers: int = 5) -> Call:
    torch.manual_seed(1)
    keys = queries * memories + pointers
    tokens = torch.randn(2, queries, C), torch.randn(2, keys, CM), torch.randn(2, keys, CM)
    return Call(tokens, {"pointers": pointers})


def cross(feat_sizes: tuple[int, int] = (4, 4), **options: object) -> RoPEAttention:
    settings = {"kv_in_dim": CM, "rope_k_repeat": True, "feat_sizes": feat_sizes, **options}
    return RoPEAttention(C, 1, **settings)  # type: ignore[arg-type]


def attention_call(queries: int, memories: int, pointers: int) -> Call:
    args, _ = call(queries, memories, pointers)
    return Call(args, {"num_k_exclude_rope": pointers})


@pytest.mark.parametrize("memories, pointers", [(3, 5), (1, 0), (0, 4)])
def test_memory_attention(device: str, memories: int, pointers: int) -> None:
    """Tiled tables with an unrotated tail; also nothing but the tail."""
    report = check_fp32(MemoryAttention(C), call(16, memories, pointers), device, swaps=2)
    assert [e.why for e in report.left_alone] == ["self-attention"] * 2


def test_bf16(device: str) -> None:
    torch.manual_seed(0)

    def draw() -> Call:
        args = torch.randn(2, 64, C), torch.randn(2, 133, CM), torch.randn(2, 133, CM)
        return Call(args, {"pointers": 5})

    check_bf16(MemoryAttention(C), draw, device)


def test_training(device: str) -> None:
    check_training(MemoryAttention(C), call(), device)


def test_undo(device: str) -> None:
    check_undo(MemoryAttention(C), call(), device)


def test_grid_that_is_no_square(device: str) -> None:
    module = cross((6, 3))
    check_fp32(module, attention_call(18, 2, 3), device, swaps=1)
    assert module.swap_state[1:] == (6, 3)


def test_frame_of_another_size(device: str) -> None:
    """Queries that are not its grid count as a square."""
    check_fp32(cross((4, 4)), attention_call(25, 2, 3), device, swaps=1)


def test_theta_heads_and_downsampling(device: str) -> None:
    settings = {"downsample_rate": 2, "kv_in_dim": CM, "rope_theta": 50.0, "rope_k_repeat": True}
    module = RoPEAttention(C, 2, feat_sizes=(4, 4), **settings)  # type: ignore[arg-type]
    check_fp32(module, attention_call(16, 2, 3), device, swaps=1)


def test_its_table_is_not_touched() -> None:
    module = cross()
    table = module.freqs_cis
    swap_cross_attention(module)
    arguments = attention_call(25, 2, 3)
    module(*arguments.args, **arguments.kwargs)
    assert module.freqs_cis is table


def test_dropout_only_in_training() -> None:
    module = cross(dropout=0.1)
    swap_cross_attention(module)
    arguments = attention_call(16, 2, 3)
    with counted_calls() as calls:
        module(*arguments.args, **arguments.kwargs)
        module.eval()(*arguments.args, **arguments.kwargs)
    assert [c.dropout_p for c in calls] == [0.1, 0.0]


@pytest.mark.parametrize(
    "arguments, why",
    [
        (attention_call(15, 2, 3), "15 queries are no square"),
        (Call((*call(16, 2, 3).args,), {"num_k_exclude_rope": 4}), "no multiple of 16"),
    ],
)
def test_calls_that_run_its_own_code(arguments: Call, why: str) -> None:
    module = cross()
    swap_cross_attention(module)
    with pytest.warns(RuntimeWarning, match=why), pytest.raises((RuntimeError, AssertionError)):
        output(module(*arguments.args, **arguments.kwargs))


def test_table_of_another_formula_is_refused() -> None:
    module = cross()
    module.freqs_cis = module.freqs_cis.conj_physical()
    (entry,) = swap_cross_attention(module)
    assert "table is not that of a grid" in entry.why
