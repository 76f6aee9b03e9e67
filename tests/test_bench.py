"""``bench`` in all its forms, on a CPU: what is measured, compared, drawn and refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_rope_xattn.__main__ import main
from fused_rope_xattn.commands import _lengths, _speed
from fused_rope_xattn.verify import bench, cores, figures, roofline, swap_bench, sweep, timing
from fused_rope_xattn.verify.case import Case, draw_inputs
from fused_rope_xattn.verify.cases import BASELINE, NAMED, ROWS
from fused_rope_xattn.verify.peers import Peer, eager_block, peers_of
from fused_rope_xattn.verify.swap_cases import SWAP_CASES

CPU = torch.device("cpu")


@pytest.fixture
def calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timing runs its call once and says a microsecond."""

    def once(call: Callable[[], Any], device: torch.device, **options: Any) -> timing.Timing:
        call()
        return timing.Timing(1.0, 0.9, 1.2, 1, 1, "wall")

    for module in (bench, roofline, swap_bench, sweep):
        monkeypatch.setattr(module, "call_time", once)


# Whatever option SDPA code can have: the peers compute the same as the package.
@pytest.mark.parametrize(
    "name",
    ["causal_short", "causal_mask_bias", "grouped", "text_to_image", "audio_video", "policy",
     "cached", "head_dim_88", "perceiver"],
)  # fmt: skip
def test_eager_block_computes_the_same(name: str) -> None:
    case = NAMED[name].at("fp32")
    inputs = draw_inputs(case)
    got = eager_block(inputs)(inputs.leaves)
    want = bench.our_block(inputs)(inputs.leaves)
    assert got.shape == want.shape
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.slow
def test_compiled_peers_run_their_own_backend() -> None:
    """Two peers have the same code, and torch.compile's caches on disk know it by that."""
    inputs = draw_inputs(Case("own", 1, 64, 64, H=2, D=32, Dq=64, dtype="fp32"))
    calls = []
    for backend in ("flash", "math"):
        peer = Peer(backend, compiled=True)
        with peer.active(), torch.no_grad():
            block = peer.prepare(inputs)
            block(inputs.leaves)
            with torch.profiler.profile() as profile:
                block(inputs.leaves)
        calls.append({event.key for event in profile.key_averages()})
    flash, math = (any("flash_attention" in key for key in keys) for keys in calls)
    assert flash
    assert not math


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """[B, T, H, D], as the packages have it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


class FakeEngine(torch.nn.Module):
    def __init__(self, heads: int, head_dim: int, **options: Any) -> None:
        super().__init__()
        assert options["qkv_format"] == "bshd"
        self.scale, self.mask = options["softmax_scale"], options["attn_mask_type"]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = self.mask == "causal_bottom_right"
        return sdpa(q, k, v, scale=self.scale, is_causal=causal).flatten(2)


def fake_flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    scale, causal = options["softmax_scale"], options["causal"]
    return sdpa(q, k, v, scale=scale, is_causal=causal)


def fake_memory_efficient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    causal = options["attn_bias"] is not None
    return sdpa(q, k, v, scale=options["scale"], is_causal=causal)


MASKS = SimpleNamespace(LowerTriangularFromBottomRightMask=object)
FAKES = {
    "flash-attn": SimpleNamespace(flash_attn_func=fake_flash),
    "flash-attn-3": SimpleNamespace(flash_attn_func=lambda *a, **k: (fake_flash(*a, **k), None)),
    "xformers": SimpleNamespace(
        memory_efficient_attention=fake_memory_efficient, fmha=SimpleNamespace(attn_bias=MASKS)
    ),
    "TransformerEngine": SimpleNamespace(DotProductAttention=FakeEngine),
}


@pytest.mark.parametrize("name", cores.CORES)
@pytest.mark.parametrize("causal", [False, True])
def test_cores_of_other_packages_take_the_place_of_sdpa(
    monkeypatch: pytest.MonkeyPatch, name: str, causal: bool
) -> None:
    core = cores.CORES[name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda top: core.module.startswith(top))
    monkeypatch.setattr(cores.importlib, "import_module", lambda module: FAKES[name])
    case = Case("own", 2, 9, 9, H=4, D=16, Dq=32, dtype="bf16", causal=causal, scale=0.4)
    assert Peer(name, False) in peers_of(case, compile=False)
    inputs = draw_inputs(case)
    got = Peer(name, False).prepare(inputs)(inputs.leaves).float()
    want = bench.our_block(inputs)(inputs.leaves).float()
    assert float((got - want).norm() / want.norm()) < bench.SAME


def test_cores_are_left_out_where_they_do_not_fit() -> None:
    flash, three, xformers, engine = (cores.CORES[name] for name in FAKES)
    assert not flash.installed
    plain, grouped = Case("own", 2, 9, 9, H=4, D=16, Dq=32, dtype="bf16"), NAMED["grouped"]
    assert all(core.covers(plain) for core in (flash, three, xformers, engine))
    assert not flash.covers(plain.at("fp32"))
    assert xformers.covers(plain.at("fp32"))
    assert not xformers.covers(grouped.at("bf16"))
    assert not three.covers(NAMED["dropout"].at("bf16"))
    assert not engine.covers(NAMED["policy"].at("bf16"))


@pytest.mark.usefixtures("calls_once")
def test_own_series_is_drawn_over_its_roofline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot, data = tmp_path / "new/time.svg", tmp_path / "time.json"
    options = "--batch 1 --tq 4 --tk 8 --dim 32 --heads 2 --dtype fp32 --compile none"
    options += " --q-norm rms_bare --rope half --kv-lengths ragged --lengths 16,8"
    argv = ["bench", "own", *options.split(), "--plot", str(plot), "--json", str(data)]
    assert main([*argv, "--device", "cpu"]) == 0
    rows = json.loads(data.read_text())["bench"]
    assert [(r["case"]["Tq"], r["case"]["Tk"]) for r in rows] == [(8, 16), (16, 32)]
    assert rows[0]["case"]["q_norm"] == "rms_bare"
    text = capsys.readouterr().out
    assert "random inputs; L2 cache as the call before left it" in text
    assert "eager math" in text
    drawing = plot.read_text()
    assert "roofline" in drawing
    assert bench.OURS in drawing


def test_lengths_of_a_series() -> None:
    assert _lengths.cases(BASELINE, None, series=False) == [BASELINE]
    series = _lengths.cases(BASELINE, None, series=True)
    assert [(c.Tq, c.Tk) for c in series] == [(16, 32), (32, 64), (64, 128), (128, 256), (256, 512)]


def test_floor_is_the_slower_of_multiplying_and_moving() -> None:
    case = Case("own", 1, 10, 20, H=1, D=8, Dq=8)
    projections, scores = 2 * 10 * 8 * 8 + 2 * 20 * 8 * 8, 2 * 10 * 20 * 8
    assert roofline.multiplications(case) == projections + scores
    least = 4 * (2 * 10 * 8 + 20 * 8 + 4 * 8 * 8)
    assert roofline.floor_us(case, "forward", roofline.Rates(1e6, 1e12)) == projections + scores
    assert roofline.floor_us(case, "forward", roofline.Rates(1e12, 1e6)) == least


@pytest.mark.usefixtures("calls_once")
def test_sweep_times_what_runs_and_says_why_not(tmp_path: Path) -> None:
    data = tmp_path / "sweep.json"
    assert main(["bench", "sweep", "--small", "--device", "cpu", "--json", str(data)]) == 0
    rows = json.loads(data.read_text())["bench"]
    chosen = [p["chosen"] for row in rows for p in row["passes"].values()]
    assert chosen == ["composite"] * 2 * len(sweep.grid(small=True))
    assert set(rows[0]["passes"]) == {"forward", "forward+backward"}
    found = rows[0]["passes"]["forward"]
    assert found["paths"] == {"composite": 1.0}
    assert found["peers"] == {"eager default": 1.0}
    assert found["refused"]["fused"].startswith("the tensors are on cpu")


def sweep_row(name: str, chosen: str, fused: float, split: float) -> dict[str, Any]:
    case = {**vars(BASELINE.at("bf16")), "name": name, "B": int(name)}
    paths, peers = {"fused": fused, "split": split}, {"eager default": 20.0}
    found = {"chosen": chosen, "paths": paths, "peers": peers}
    return {"name": name, "case": case, "passes": {"forward": found}}


SWEPT = [
    sweep_row("1", "fused", 10.0, 12.0),
    sweep_row("2", "fused", 10.4, 10.0),  # within the tolerance
    sweep_row("4", "fused", 25.0, 20.0),
    sweep_row("8", "split", 30.0, 16.0),
]


def test_sweep_finds_wrong_choices_and_the_worst_ratio() -> None:
    text = sweep.summary(SWEPT)
    assert "4 problems, worst ratio to the best peer 0.80x (4)" in text
    assert "wrong by more than 5% in 1 of 4 choices (4 took fused, 1.25x)" in text
    broken = [*SWEPT, {**SWEPT[0], "passes": {"forward": {"failed": "out of memory"}}}]
    assert sweep.failures(broken) == ["1 forward: out of memory"]
    assert len(sweep.points(broken, "forward")) == 4


def test_sweep_of_a_record_is_tabled_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    source, plot = tmp_path / "x.json", tmp_path / "sweep.svg"
    record = {
        "device": "NVIDIA X",
        "kernel_source": "abc",
        "environment": {"driver": "1.2", "torch": "2.99"},
        "sweep": {"date": "2030-01-02T03:04:05+00:00", "result": {"rows": SWEPT}},
    }
    source.write_text(json.dumps(record))
    assert main(["bench", "--render", str(source)]) == 0
    text = capsys.readouterr().out
    assert "| bf16 | fwd | fused | 4 | 64 | 256 | 32 | 25.0 | 20.0 | 20.0 | 0.80x | 1.25 |" in text
    assert main(["bench", "--render", str(source), "--plot", str(plot)]) == 0
    assert "NVIDIA X" in plot.read_text()


def test_switch_is_where_both_are_chosen() -> None:
    assert figures._switch([(1.0, "fused"), (4.0, "split")]) == (1.0, 4.0)
    assert figures._switch([(1.0, "fused"), (3.0, "split"), (5.0, "fused")]) == (3.0, 5.0)
    assert figures._switch([(1.0, "fused")]) is None


def test_grid_is_within_its_bounds_and_has_no_doubles() -> None:
    cases = sweep.grid()
    assert len({case.name for case in cases}) == len(cases)
    assert 60 <= len(cases) <= 100
    assert {case.dtype for case in cases} == {"fp32", "tf32", "bf16", "fp16"}
    for size, values in (("B", (1, 64)), ("Tq", (16, 1024)), ("Dq", (128, 1024)), ("D", (16, 128))):
        found = {getattr(case, size) for case in cases}
        assert (min(found), max(found)) == values


@pytest.mark.usefixtures("calls_once")
def test_swap_measures_both_and_their_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "swap.json"
    missing = swap_bench.SwapCase("absent", lambda: None, {}, "no_package_of_that_name")  # type: ignore[arg-type,return-value]
    monkeypatch.setitem(SWAP_CASES, "absent", missing)
    argv = ["bench", "swap", "decoder_layer", "absent", "--device", "cpu", "--compile", "none"]
    assert main([*argv, "--json", str(data)]) == 0
    row, absent = json.loads(data.read_text())["bench"]
    assert [a["swapped"] for a in row["attentions"]] == [False, True]
    for variant in ("original", "swapped"):
        found = row["variants"][variant]
        assert 0 < found["error"]["y"] < 0.02
        assert 0 < found["error"]["gradients"] < 0.1
        assert found["forward"]["us"] == found["training"]["us"] == 1.0
    assert absent["why"] == "no_package_of_that_name is not installed"
    assert "no_package_of_that_name is not installed" in capsys.readouterr().out


@pytest.mark.usefixtures("calls_once")
def test_swap_stops_compiling_when_the_time_is_nearly_up() -> None:
    cases = [SWAP_CASES["mast3r_block"], SWAP_CASES["decoder_layer"]]
    options: dict[str, Any] = {"small": True, "seed": 1, "report": lambda what: None}
    near = timing.Deadline(swap_bench.COMPILE_S - 1)
    rows = swap_bench.measure_swaps(cases[:1], CPU, compile=True, deadline=near, **options)
    assert "forward" in rows[0]["variants"]["swapped"]
    assert rows[0]["variants"]["swapped compiled"] == {"why": swap_bench.LATE}
    over = timing.Deadline(0.0)
    rows = swap_bench.measure_swaps(cases, CPU, compile=True, deadline=over, **options)
    assert rows == [{"name": case.name, "why": swap_bench.LATE} for case in cases]


def test_deadline() -> None:
    assert not timing.Deadline(None).passed
    assert timing.Deadline(0.0).passed
    assert 0 < timing.Deadline(60.0).left <= 60
    interrupted = timing.Deadline(None)
    with interrupted.until_interrupted():
        raise KeyboardInterrupt
    assert interrupted.passed


def test_what_was_measured_before_ctrl_c_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(case: Case, *_: Any, **__: Any) -> dict[str, Any]:
        if case.name == "seed_bf16":
            raise KeyboardInterrupt
        return {"name": case.name}

    monkeypatch.setattr(_speed, "measure", measure)
    names = ("seed_fp32", "seed_bf16", "large_bf16")
    rows = _speed.measure_all(
        [ROWS[name] for name in names],
        CPU,
        protocol=bench.Protocol(),
        seed=1,
        deadline=timing.Deadline(None),
    )
    assert rows == [{"name": "seed_fp32"}]
    assert "the time was up: seed_bf16, large_bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "swap", "no_such_block"],
        ["bench", "swap", "--device", "cpu", "--record", "x"],
        ["bench", "sweep", "seed_bf16"],
        ["bench", "own", "--record", "x"],
        ["bench", "seed_bf16", "--lengths", "4,8"],
        ["bench", "own", "--rope", "axial"],
        ["selftest", "--only", "tests"],
    ],
)
def test_what_makes_no_sense_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert isinstance(caught.value.code, str)
