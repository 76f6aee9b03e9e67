"""The command line: what it prints, what it refuses, and that tables show what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_rope_xattn.__main__ import main
from fused_rope_xattn.commands import _speed
from fused_rope_xattn.demo import photographs
from fused_rope_xattn.demo.model import CompletionModel, completion_loss, random_visible
from fused_rope_xattn.verify.bench import OURS, error_share, lines_of
from fused_rope_xattn.verify.cases import BASELINE, NAMED, ROWS
from fused_rope_xattn.verify.peers import peers_of
from fused_rope_xattn.verify.timing import LONG_CALLS, call_time

CPU = torch.device("cpu")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_info_names_versions_and_paths(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "info")
    assert torch.__version__ in text
    facts = json.loads(run(capsys, "info", "--json"))
    assert facts["paths"]["composite"] is None
    assert set(facts["paths"]) == {"fused", "split", "composite"}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ([], "fused"),
        (["--dropout", "0.1"], "split"),
        (["--capability", "7.5"], "composite"),
        (["--head-dim", "30"], "composite"),
        (["--dtype", "fp64"], "composite"),
        (["--projected-kv", "--bias", "--kv-heads", "2", "--causal"], "fused"),
    ],
)
def test_plan_says_path(capsys: pytest.CaptureFixture[str], options: list[str], path: str) -> None:
    assert f": {path}: " in run(capsys, "plan", "--capability", "9.0", *options)


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--dim", "100", "--heads", "8"],
        ["plan", "--head-dim", "30", "--path", "split"],
        ["plan", "--capability", "hopper"],
        ["bench", "no_such_row"],
    ],
)
def test_wrong_arguments_end_with_a_message(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert isinstance(caught.value.code, str)


def timing(us: float, wall_us: float) -> dict[str, Any]:
    return {"us": us, "wall_us": wall_us}


ROW = {
    "name": "seed_bf16",
    "passes": {
        "forward": {
            OURS: timing(5.0, 20.0),
            "eager default": timing(30.0, 100.0),
            "eager cudnn": {"error": "No available kernel"},
            "compile flash": timing(25.0, 60.0),
        }
    },
    "accuracy": [
        {"ok": True, "max_error": 1.0, "max_budget": 2.0, "mean_error": 1.0, "mean_budget": None},
        {"ok": True, "max_error": 1.0, "max_budget": 4.0, "mean_error": 3.0, "mean_budget": 4.0},
    ],
}


def test_line_compares_with_the_best_peer() -> None:
    (line,) = lines_of(ROW)
    assert (line.best_peer, line.best, line.speed_up) == ("compile flash", 25.0, 5.0)
    assert line.wall_speed_up == 5.0
    assert line.error_share == 0.75


def test_broken_rule_never_looks_fine() -> None:
    wrong_shape = {
        "ok": False, "max_error": 0.0, "max_budget": 0.0, "mean_error": 0.0, "mean_budget": None,
    }  # fmt: skip
    assert error_share([wrong_shape]) > 1


def test_long_calls_are_repeated_less_and_medians_are_of_a_call() -> None:
    x = torch.randn(1200, 1200)
    time = call_time(lambda: x @ x @ x @ x, CPU)
    assert time.method == "wall"
    assert time.calls == LONG_CALLS
    assert time.low_us <= time.us <= time.high_us


def test_rows_for_a_cpu_are_few_and_peers_are_comparable() -> None:
    names = [case.name for case in _speed.rows_for(CPU)]
    assert "seed_fp32" in names
    assert "large_bf16" not in names
    assert {peer.name for peer in peers_of(BASELINE, compile=True)} >= {
        "eager default", "eager flash", "compile cudnn", "compile math",
    }  # fmt: skip
    assert not any("math" in peer.name for peer in peers_of(ROWS["large_bf16"], compile=True))
    assert peers_of(NAMED["odd_sizes"], compile=True) == []  # nobody else returns lse


def test_bench_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    file = tmp_path / "bench.json"
    sizes = "--batch 1 --tq 8 --tk 8 --dim 16 --heads 2 --dtype fp32 --device cpu --compile none"
    assert "own sizes" in run(capsys, "bench", "own", *sizes.split(), "--json", str(file))
    (row,) = json.loads(file.read_text())["bench"]
    assert set(row["passes"]) == {"forward", "forward+backward"}
    assert row["passes"]["forward"]["eager math"]["us"] > 0
    assert all(tensor["ok"] for tensor in row["accuracy"])


def test_demo_patches_and_shift() -> None:
    images = torch.rand(2, 3, photographs.CROP, photographs.CROP)
    assert torch.equal(photographs.to_images(photographs.to_patches(images)), images)
    # A ramp along y: a view that lies lower by n pixels is brighter by n steps.
    ramp = torch.arange(200.0)[:, None].expand(3, 200, 200) / 1000
    pairs = photographs.sample([ramp], 8, torch.Generator().manual_seed(0))
    view_1, view_2 = (v * pairs.deviation + pairs.mean for v in (pairs.view_1, pairs.view_2))
    brighter = (view_2 - view_1).mean((1, 2)) * 1000
    torch.testing.assert_close(brighter, pairs.shift[:, 0] * photographs.PATCH, atol=1e-2, rtol=0)


def test_demo_model_needs_the_second_view_only_with_cross_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = photographs.sample([torch.rand(3, 128, 128)], 2, generator)
    visible = random_visible(2, 0.75, generator)
    other = pairs._replace(view_2=torch.zeros_like(pairs.view_2))
    for sees in (True, False):
        torch.manual_seed(0)
        model = CompletionModel(sees_second_view=sees)
        assert torch.equal(model(pairs, visible), model(other, visible)) is not sees
        completion_loss(model(pairs, visible), pairs.view_1, visible).backward()
        grad = model.decoder[0].cross_attention.k_proj.weight.grad
        assert (grad is not None) is sees
