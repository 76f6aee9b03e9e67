"""The verification file: its sections come and go by the rules, and pages show what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fused_rope_xattn.__main__ import main
from fused_rope_xattn.commands import _markdown, selftest
from fused_rope_xattn.verify import outcomes, record
from fused_rope_xattn.verify.bench import OURS
from fused_rope_xattn.verify.case import Case

ROOT = Path(__file__).parent.parent


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def pretend(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(record, "kernel_source", lambda: kernels)


def test_sections_gather_while_kernels_and_torch_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, "abc")
    record.merge_section(tmp_path / "new", "fuzz", {"failures": 0, "worst": float("nan")})
    path = record.merge_section(tmp_path / "new", "speed", {"rows": []})
    found = read(path)
    assert path.parent == tmp_path / "new"
    assert found["kernel_source"] == "abc"
    assert found["fuzz"]["result"] == {"failures": 0, "worst": None}
    assert list(found)[-2:] == ["speed", "fuzz"]  # in the order of SECTIONS
    assert "Dropped" not in capsys.readouterr().out

    pretend(monkeypatch, "def")
    assert record.read_section(tmp_path / "new", "fuzz") is None
    found = read(record.merge_section(tmp_path / "new", "speed", {"rows": [1]}))
    assert "fuzz" not in found
    assert found["speed"]["result"] == {"rows": [1]}
    assert "Dropped from it, measured with other kernels or torch: fuzz" in capsys.readouterr().out

    found["environment"]["torch"] = "1.0"
    path.write_text(json.dumps(found))
    found = read(record.merge_section(tmp_path / "new", "fuzz", {}))
    assert "speed" not in found


def test_rows_replace_those_of_their_name(tmp_path: Path) -> None:
    record.merge_rows(tmp_path, "swap", [{"name": "a", "x": 1}, {"name": "b", "x": 2}])
    path = record.merge_rows(tmp_path, "swap", [{"name": "c", "x": 4}, {"name": "a", "x": 3}])
    rows = read(path)["swap"]["result"]["rows"]
    assert [(row["name"], row["x"]) for row in rows] == [("a", 3), ("b", 2), ("c", 4)]


def test_unknown_section_and_interrupted_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="expected one of accuracy, speed"):
        record.merge_section(tmp_path, "speeds", {})
    path = record.merge_section(tmp_path, "speed", {"rows": []})
    before = path.read_text()
    with pytest.raises(TypeError):
        record.merge_section(tmp_path, "fuzz", {"not plain": object()})
    assert path.read_text() == before


SUITE = """
import pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip(reason="no second GPU")
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.fixture
def untidy():
    yield
    raise RuntimeError
def test_clean_up(untidy): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_some.py").write_text(SUITE)
    return tmp_path


def test_outcomes_of_pytest_are_counted_and_recorded(
    suite: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("record")
    argv = ["selftest", "--only", "tests", "--tests", str(suite), "--record", str(directory)]
    assert main(argv) == 1
    result = read(record.record_path(directory))["tests"]["result"]
    (row,) = result["rows"]
    assert row["name"] == "test_some.py"
    assert [row[kind] for kind in outcomes.KINDS] == [1, 2, 1, 1]
    assert row["failures"] == ["test_some.py::test_bad", "test_some.py::test_clean_up"]
    assert row["skip_reasons"] == {"no second GPU": 1}
    assert result["unfinished"] == []
    counts = outcomes.totals(result["rows"])
    assert (counts["passed"], counts["failed"], counts["xfailed"]) == (1, 2, 1)


def test_rows_of_the_speed_part_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(cases: list[Case], *_: Any, **__: Any) -> list[dict[str, Any]]:
        return [{"name": case.name, "passes": {}} for case in cases]

    monkeypatch.setattr(selftest, "measure_all", measured)
    monkeypatch.setattr(selftest, "speed_table", lambda lines: str(list(lines)))
    argv = ["selftest", "--only", "speed", "--record", str(tmp_path), "--rows"]
    assert main([*argv, "decode_bf16", "seed_bf16"]) == main([*argv, "sam2_bf16"]) == 0
    rows = read(record.record_path(tmp_path))["speed"]["result"]["rows"]
    assert [row["name"] for row in rows] == ["decode_bf16", "seed_bf16", "sam2_bf16"]


def test_rows_are_taken_without_a_record_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(cases: list[Case], *_: Any, **__: Any) -> list[dict[str, Any]]:
        asked.extend(case.name for case in cases)
        return []

    monkeypatch.setattr(selftest, "measure_all", measured)
    assert main(["selftest", "--only", "speed", "--rows", "decode_bf16"]) == 0
    assert asked == ["decode_bf16"]


@pytest.mark.parametrize("limit, stops", [(0.0, True), (60.0, False), (None, False)])
def test_no_test_starts_when_the_time_is_up(
    tmp_path: Path, limit: float | None, stops: bool
) -> None:
    writer = outcomes.Writer(tmp_path / "outcomes.jsonl", limit)
    items = [SimpleNamespace(nodeid="test_a.py::test_1"), SimpleNamespace(nodeid="test_a.py::x")]
    session: Any = SimpleNamespace(items=items, shouldstop=False)
    writer.pytest_collection_finish(session)
    writer.pytest_runtest_logfinish()
    assert bool(session.shouldstop) is stops
    assert outcomes.summary(writer.file) == ([], ["test_a.py"])


def test_outcomes_of_a_process_that_died(tmp_path: Path) -> None:
    """What it finished counts; a file that could not even be read counts as failed."""
    lines = [
        {"test": "test_broken.py", "outcome": "failed", "seconds": 0.0},
        {"collected": {"test_a.py": 1, "test_b.py": 2}},
        {"test": "test_a.py::test", "outcome": "passed", "seconds": 1.0},
        {"test": "test_b.py::test_1", "outcome": "passed", "seconds": 1.0},
    ]
    file = tmp_path / "outcomes.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    rows, unfinished = outcomes.summary(file)
    assert [(row["name"], row["passed"], row["failed"]) for row in rows] == [
        ("test_broken.py", 0, 1),
        ("test_a.py", 1, 0),
    ]
    assert unfinished == ["test_b.py"]


def timing(us: float, wall_us: float) -> dict[str, Any]:
    return {"us": us, "wall_us": wall_us, "peak_mib": 7.0}


ERRORS = [{"ok": True, "max_error": 3.0, "max_budget": 4.0, "mean_error": 1.0, "mean_budget": None}]
SPEED = {
    "name": "seed_bf16",
    "passes": {
        "forward": {
            OURS: timing(5.0, 20.0),
            "eager default": timing(30.0, 100.0),
            "compile flash": timing(25.0, 60.0),
        }
    },
    "accuracy": ERRORS,
}
TESTS = {
    "name": "tests/test_x.py", "passed": 3, "failed": 1, "xfailed": 1, "skipped": 2,
    "skip_reasons": {"no second GPU": 2}, "seconds": 9.0, "failures": ["one"],
}  # fmt: skip
VARIANT = {
    "forward": timing(200.0, 210.0),
    "training": timing(500.0, 500.0),
    "error": {"y": 2e-3, "gradients": 3e-3},
}
SWAPS = [
    {
        "name": "some_block",
        "variants": {
            "original": VARIANT,
            "original compiled": {"why": "the time was up"},
            "swapped": VARIANT | {"forward": timing(50.0, 60.0)},
        },
    },
    {"name": "other_block", "why": "diffusers is not installed"},
]


def section(result: Any) -> dict[str, Any]:
    return {"date": "2030-01-02T03:04:05+00:00", "result": result}


RECORD = {
    "device": "NVIDIA X",
    "kernel_source": "abc",
    "environment": {"driver": "1.2", "torch": "2.99"},
    "accuracy": section(
        {"checks": [{"case": "one", "dtype": "bf16", "path": "split", "errors": ERRORS}]}
    ),
    "speed": section({"rows": [SPEED]}),
    "tests": section({"rows": [TESTS], "unfinished": ["tests/test_y.py"]}),
    "swap": section({"rows": SWAPS}),
    "fuzz": section({"problems": 1000, "failed": 1, "seed": 7}),
}


def test_page_comes_from_the_file(tmp_path: Path) -> None:
    source, page = tmp_path / "x.json", tmp_path / "README.md"
    source.write_text(json.dumps(RECORD))
    (begin, end), (begin_2, end_2) = map(_markdown.markers, ("verification", "swap"))
    begin_3, end_3 = _markdown.markers("speed")
    page.write_text(
        f"before\n{begin}\nold\n{end}\nbetween\n{begin_2}\n{end_2}\n{begin_3}\n{end_3}\nafter\n"
    )
    assert main(["bench", "--render", str(source), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert f"{end}\nbetween\n{begin_2}" in text
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| seed_bf16 | fwd | 5.0 | 25.0 | compile flash | 5.00x | 20.0 | 100 |" in text
    assert "| bf16 | split | 1 | 0.75 | one |" in text
    assert "NVIDIA X" in text
    assert "Of 1,000 random problems over all options (`fuzz --seed 7`), 999 passed" in text
    assert "3 tests passed, 1 failed, 1 failed as expected, 2 skipped (2: no second GPU)" in text
    assert "not finished: tests/test_y.py" in text
    numbers = "50.0 | 4.00x | 7.0 | 2.0e-03 | 500 | 1.00x | 7.0 | 3.0e-03"
    assert f"| some_block | swapped | {numbers} |" in text
    assert "Not measured, the time was up: some_block (original compiled)." in text
    assert "Not measured, diffusers is not installed: other_block." in text


def test_page_without_its_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = _markdown.markers("swap")
    for text in ("nothing", f"{end} {begin}", f"{begin} {begin} {end}"):
        page.write_text(text)
        with pytest.raises(SystemExit):
            _markdown.write_between_markers(page, {"swap": "new"})
        assert page.read_text() == text


def test_record_in_this_tree_can_be_rendered_into_its_pages(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("speed", "verification", "swap"):
        assert all(text.count(marker) == 1 for marker in _markdown.markers(name))
    readme = tmp_path / "README.md"
    readme.write_text(text, encoding="utf-8")
    for source in (ROOT / "docs/verification").glob("*.json"):
        _markdown.write_between_markers(readme, _markdown.sections(read(source)))
        assert read(source)["device"] in readme.read_text(encoding="utf-8")
