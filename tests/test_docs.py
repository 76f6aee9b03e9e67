"""The pages' code runs, as a reader would run it: on a CPU, a page from top to bottom."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest
import torch

from fused_rope_xattn import fused
from fused_rope_xattn.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Fenced as `python`, code runs; as `py`, it wants what a test has not: processes, models, names.
# These pages' first lines load a model from the network.
NEEDS_A_MODEL = ("croco", "diffusers", "ltx2", "sam2", "x-transformers")
TESTED_ELSEWHERE = ("adapters", "index")  # test_swap_report.py; a fragment of a page above


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def runs(page: Path) -> bool:
    is_swap = page.parent.name == "swap"
    return not (is_swap and page.stem in NEEDS_A_MODEL + TESTED_ELSEWHERE)


RUNNABLE = [p for p in (ROOT / "README.md", *PAGES) if blocks(p, "python") and runs(p)]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda p: p.stem)
def test_code_runs(page: Path) -> None:
    code = "\n".join(blocks(page, "python"))
    if page.name == "README.md":
        code = code.split("from fused_rope_xattn import swap_cross_attention")[0]  # needs a model
    names: dict[str, object] = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        exec(compile(code, page.name, "exec"), names)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "py(thon)?")], ids=lambda p: p.stem)
def test_code_is_python(page: Path) -> None:
    for language in ("python", "py"):
        for block in blocks(page, language):
            compile(block, page.name, "exec")


def test_pages_that_do_not_run_need_a_model() -> None:
    for name in NEEDS_A_MODEL:
        code = "\n".join(blocks(ROOT / "docs/swap" / f"{name}.md", "python"))
        assert re.search(r"from_pretrained|build_sam2|CrossAttender", code), name


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"[\w/-]+\.md", nav))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


def test_quoted_limits_are_those_of_the_code() -> None:
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    names = (
        "tiles of 16 queries",
        "keys",
        "multiplications of all projections",
        "multiplications of q k^T",
        "tiles of 16 queries, for its backward",
    )
    for name, wanted in zip(names, zip(*fused.LIMITS.values(), strict=True), strict=True):
        cells = r" \| (\S+)" * len(fused.LIMITS)
        found = re.search(rf"^\| {re.escape(name)}[^|]*{cells[1:]} \|$", text, re.M)
        assert found is not None, name
        assert tuple(_number(cell) for cell in found.groups()) == wanted, name


def test_every_command_is_on_the_first_page() -> None:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `python -m fused_rope_xattn (\w+)", text, re.M)) == set(COMMANDS)


def _number(text: str) -> int:
    base, _, power = text.partition("^")
    return int(base) ** int(power or 1)
