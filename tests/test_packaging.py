"""The source tree builds what it promises, everywhere, and says so when it cannot."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fused_rope_xattn
from fused_rope_xattn.verify.source_hash import source_hash

ROOT = Path(__file__).resolve().parents[1]
TOOLCHAIN = runpy.run_path(str(ROOT / "kernels/toolchain.py"))
CHECK_WHEEL = runpy.run_path(str(ROOT / ".ci/check_wheel.py"))
CALL_THE_PACKAGE = """
import torch, fused_rope_xattn
w, x = torch.ones(8, 8), torch.ones(1, 2, 8)
fused_rope_xattn.cross_attention(x, x, w, w, w, w, num_heads=1)
print(fused_rope_xattn.__file__)
"""
NO_TOOLS = {"CUDA_HOME": "/nonexistent", "CXX": "/nonexistent/c++"}


def setup_py(
    *arguments: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs setup.py as a build front end would, with none of the caller's build variables."""
    unset = ("CIBUILDWHEEL", "CUDA_HOME", "CUDA_PATH", "CXX", TOOLCHAIN["SWITCH"])
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "setup.py", *map(str, arguments)],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, made with a torch that cannot be imported."""
    folder = tmp_path_factory.mktemp("sdist")
    (folder / "torch.py").write_text("raise ImportError('an sdist must not need torch')")
    result = setup_py(
        "-q",
        "egg_info",
        "--egg-base",
        folder,
        "sdist",
        "--dist-dir",
        folder,
        PYTHONPATH=str(folder),
    )
    assert result.returncode == 0, result.stderr
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_sdist_holds_everything_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kernels = {f"kernels/{p.name}" for p in (ROOT / "kernels").iterdir() if p.is_file()}
    assert kernels | {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_metadata_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('metadata must not need torch')")
    arguments = ("-q", "egg_info", "--egg-base", tmp_path, "dist_info", "--output-dir", tmp_path)
    result = setup_py(*arguments, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert "\nRequires-Dist: torch>=2.10\n" in metadata.read_text()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"FUSED_ROPE_XATTN_CUDA": "require", "CUDA_HOME": "/nonexistent"},
            "FUSED_ROPE_XATTN_CUDA=require, but no folder with bin/nvcc",
        ),
        (
            {"FUSED_ROPE_XATTN_CUDA": "require", **NO_TOOLS},
            "FUSED_ROPE_XATTN_CUDA=require, but there is no C++ compiler: '/nonexistent/c++'",
        ),
        ({"CIBUILDWHEEL": "1", "CUDA_HOME": "/nonexistent"}, "FUSED_ROPE_XATTN_CUDA=require, but"),
        ({"FUSED_ROPE_XATTN_CUDA": "yes"}, "must be auto, require or 0, got 'yes'"),
    ],
)
def test_impossible_request_fails_with_one_line(environment: dict[str, str], message: str) -> None:
    result = setup_py("-q", "bdist_wheel", **environment)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_build_without_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken torch')")
    result = setup_py("-q", "bdist_wheel", FUSED_ROPE_XATTN_CUDA="0", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("fused_rope_xattn: the build needs torch")
    assert "Traceback" not in result.stderr


def test_arch_list_becomes_gencode_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    architectures, gencode_flags = TOOLCHAIN["architectures"], TOOLCHAIN["gencode_flags"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX; 9.0a 10.0a")
    assert architectures() == ["8.0+PTX", "9.0a", "10.0a"]
    assert gencode_flags(architectures()) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100a,code=sm_100a",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SystemExit, match="got 'Hopper'"):
        architectures()


def test_a_wrapper_of_nvcc_is_no_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wrapper/bin/nvcc", "toolkit/bin/nvcc", "toolkit/include/cuda_runtime.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(0o755)
    (tmp_path / "linked").symlink_to(tmp_path / "toolkit/bin")
    find = TOOLCHAIN["find_cuda_home"]
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert find() == tmp_path / "toolkit"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "wrapper"))
    assert find() is None
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "wrapper/bin"))
    assert find() != tmp_path / "wrapper"
    (tmp_path / "wrapper/bin/nvcc").unlink()
    (tmp_path / "wrapper/bin/nvcc").symlink_to(tmp_path / "toolkit/bin/nvcc")
    assert find() == tmp_path / "toolkit"


def test_source_hash_sees_names_and_contents(tmp_path: Path) -> None:
    def hash_of(**files: str) -> str:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        for name, text in files.items():
            (tmp_path / f"{name}.cu").write_text(text)
        (tmp_path / "notes.txt").write_text(str(files))
        return source_hash(tmp_path)

    reference = hash_of(a="1", b="2")
    assert hash_of(b="2", a="1") == reference
    others = {hash_of(a="1", b="3"), hash_of(a="1", c="2"), hash_of(a="12", b="")}
    assert reference not in others
    assert len(others) == 3


def test_installed_binary_was_built_from_these_kernels() -> None:
    info = fused_rope_xattn.build_info()
    if not info["binary"]:
        pytest.skip(info["reason"])
    assert info["kernel_hash"] == source_hash(ROOT / "kernels"), "rebuild: pip install -e ."


def test_spills_in_a_build_log_are_found() -> None:
    def log(stores: int) -> str:
        return (
            "ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'\n"
            "  ptxas info    : Function properties for _Z1kv\n"
            f"    8 bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads\n"
        )

    check = CHECK_WHEEL["check_build_log"]
    assert list(check(log(0))) == []
    assert list(check(log(4))) == [
        "shows spills: _Z1kv for sm_90a: 4 bytes spill stores, 0 bytes spill loads"
    ]
    assert list(check("")) == ["shows no kernel: it is not the log of a full build"]


def test_symbols_newer_than_the_tag_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = CHECK_WHEEL["check_glibc"]
    symbols = "U exp2@GLIBC_2.29\nU dlsym@GLIBC_2.34\nU memcpy@GLIBC_2.14\nU f@GLIBCXX_3.4.30\n"
    monkeypatch.setitem(check.__globals__, "run", lambda *command: symbols)

    def problems(tag: str) -> list[str]:
        return list(check(tmp_path / f"p-1-cp310-abi3-{tag}_x86_64.whl", tmp_path / "_C.abi3.so"))

    assert problems("manylinux_2_34") == problems("linux") == []
    assert problems("manylinux_2_28") == ["needs glibc 2.34, newer than its tag says"]
    assert problems("manylinux_2_28_x86_64.manylinux_2_34") != []


def test_steps_of_workflows_are_scripts_and_actions_are_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = runpy.run_path(str(ROOT / ".ci/check_workflows.py"))
    for workflow in checks["WORKFLOWS"]:
        assert list(checks["problems_of"](workflow)) == [], workflow.name
    commit, start = "0" * 40, "permissions:\n  contents: read\n"
    for wrong in (
        "uses: actions/checkout@v7",
        f"uses: actions/checkout@{commit}",
        f"uses: actions/checkout@{commit[:-1]} # v7.0.1",
        "run: pip install torch",
        "run: make no-such-target",
        "run: .ci/no-such-script",
        "run: make test TITLE=${{ github.event.pull_request.title }}",
    ):
        (tmp_path / "w.yml").write_text(f"{start}steps:\n  - {wrong}\n")
        assert list(checks["problems_of"](tmp_path / "w.yml")), wrong
    (tmp_path / "w.yml").write_text(
        f"{start}steps:\n  - uses: a/b@{commit} # v7.0.1\n  - run: make test\n  - run: .ci/run\n"
    )
    assert list(checks["problems_of"](tmp_path / "w.yml")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "tag", "message"),
    [
        ({"CUDA_HOME": "/nonexistent"}, "cp310-abi3-linux", "CPU-only build, because no folder"),
        (NO_TOOLS, "py3-none-any", "pure Python build, because there is no C++ compiler"),
    ],
)
def test_sdist_builds_without_cuda(
    sdist: Path, tmp_path: Path, environment: dict[str, str], tag: str, message: str
) -> None:
    folder = tmp_path / "a path with spaces"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    result = setup_py("-q", "bdist_wheel", "--dist-dir", tmp_path, cwd=source, **environment)
    assert result.returncode == 0, result.stderr
    assert message in result.stderr
    assert "pip install fused-rope-xattn" in result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert tag in wheel.name
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    result = subprocess.run(
        [sys.executable, "-c", CALL_THE_PACKAGE], cwd=site, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(site)
