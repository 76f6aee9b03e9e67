"""Builds the test extensions: the kernels' own sources, compiled for the host by a C++ compiler."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas"]  # the kernels' "#pragma unroll"
# A GPU traps where an address is not aligned; a host would not. hopper.h handles what this finds.
HOPPER_FLAGS = ["-fsanitize=alignment"]


def load_extension(
    name: str,
    config: pytest.Config,
    *,
    emulates_cuda: bool = False,
    emulation: str | tuple[str, ...] = "emulation",
) -> ModuleType:
    """Compile ``tests/ext/<name>.cpp`` if its sources changed, and import it.

    ``emulates_cuda`` puts the headers in the folders ``emulation`` in place of the CUDA toolkit's
    and of the kernels' own ``launch.h``, so that whole kernels run on the host.
    """
    pybind11 = pytest.importorskip("pybind11")
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no C++ compiler: {compiler[0]!r} is not on PATH")
    emulations = (emulation,) if isinstance(emulation, str) else emulation
    folders = [*(HERE / e for e in emulations), KERNELS] if emulates_cuda else [KERNELS]
    flags = [*FLAGS, *(HOPPER_FLAGS if "emulation_sm90" in emulations else [])]
    text = "\0".join([*compiler, *flags, *_sources(HERE / f"{name}.cpp", folders).values()])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert config.cache is not None
    folder = config.cache.mkdir(f"{name}-{digest}")
    library = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not library.exists():
        kernels = _emulated(folder / "kernels", emulations) if emulates_cuda else KERNELS
        includes = [kernels, pybind11.get_include(), sysconfig.get_paths()["include"]]
        command = [*compiler, *flags, *(f"-I{path}" for path in includes), f"{HERE / name}.cpp"]
        unfinished = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.replace(library)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sources(path: Path, folders: list[Path]) -> dict[str, str]:
    """The text of ``path`` and of everything that it includes from ``folders``, by file name."""
    texts: dict[str, str] = {}
    pending = [path]
    while pending:
        file = pending.pop()
        texts[file.name] = file.read_text()
        for included in re.findall(r'^#include ["<](.+?)[">]', texts[file.name], re.MULTILINE):
            found = [f / included for f in folders if (f / included).is_file()]
            if found and included not in texts:
                pending.append(found[0])
    return texts


def _emulated(folder: Path, emulations: tuple[str, ...]) -> Path:
    """A copy of the kernels with the emulations' headers laid over it."""
    shutil.copytree(KERNELS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py"))
    for emulation in emulations:
        shutil.copytree(HERE / emulation, folder, dirs_exist_ok=True)
    return folder
