"""Builds one extension, fused_rope_xattn._C, from kernels/. The metadata is in pyproject.toml.

FUSED_ROPE_XATTN_CUDA = auto (default) | require | 0 decides about CUDA; kernels/toolchain.py says
how. CUDA_HOME, CXX, TORCH_CUDA_ARCH_LIST and MAX_JOBS mean what they mean for every torch
extension. torch is imported only in a run that compiles, and nothing is ever downloaded.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "kernels"
sys.path.insert(0, str(KERNELS))
from toolchain import (  # noqa: E402
    Build,
    architectures,
    choose_build,
    default_jobs,
    describe,
    fail,
    gencode_flags,
)

source_hash = runpy.run_path(str(ROOT / "fused_rope_xattn/verify/source_hash.py"))["source_hash"]

PYTHON_FLOOR = "0x030A0000"  # the limited API of CPython 3.10: the wheel's tag promises cp310
TORCH_FLOOR = re.findall(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())[0]
TORCH_TARGET = "0x{:02x}{:02x}000000000000".format(*map(int, TORCH_FLOOR))
CPU_SOURCES = ("bindings.cpp",)  # what compiles without CUDA's headers
SM90_SUFFIX, SM90_ARCH = "_sm90.cu", "9.0a"  # wgmma and TMA: these files compile for sm_90a only
COMPILING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"}


def make_extension(build: Build) -> Extension:
    """The extension with every flag, linked so that one file fits every torch from the floor on."""
    from torch.utils import cpp_extension

    cpp_extension.min_supported_cpython = PYTHON_FLOOR
    common = ["-O3", "-std=c++17", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DTORCH_STABLE_ONLY"]
    cxx = [*common, "-fvisibility=hidden", f'-DFRX_KERNEL_HASH="{source_hash(KERNELS)}"']
    nvcc = [*common, "-DUSE_CUDA", "-Xcompiler=-fvisibility=hidden"]
    nvcc += ["-Xfatbin=-compress-all", "-Xptxas=-v"]
    # Beside a CPU torch, ninja does not track the headers of .cu files. With the headers' hash on
    # the command line, a changed header recompiles them.
    nvcc.append(f"-DFRX_HEADERS_{source_hash(KERNELS, ('.h', '.cuh'))}")
    archs = architectures()
    factory, libraries = "CppExtension", ["c10", "torch_cpu"]
    sources = [KERNELS / name for name in CPU_SOURCES]
    if build.cuda_home:
        cpp_extension.CUDA_HOME = str(build.cuda_home)  # a CPU build of torch leaves it None
        cxx += ["-DUSE_CUDA", f'-DFRX_ARCHS="{";".join(archs)}"']
        factory, libraries = "CUDAExtension", [*libraries, "cudart_static", "rt", "dl", "pthread"]
        sources = [*KERNELS.glob("*.cpp"), *KERNELS.glob("*.cu")]
    extension = getattr(cpp_extension, factory)(
        "fused_rope_xattn._C",
        sorted(str(path.relative_to(ROOT)) for path in sources),
        py_limited_api=True,
        extra_compile_args={
            "cxx": cxx,
            "nvcc": nvcc + gencode_flags(archs),
            "nvcc_sm90": nvcc + gencode_flags([SM90_ARCH]),
        },
        extra_link_args=[
            "-s",
            "-Wl,--exclude-libs,ALL",
            "-Wl,--version-script=kernels/exports.map",
        ],
    )
    # torch's own list would tie the file to one CUDA major: shared cudart, c10_cuda, torch_cuda.
    extension.libraries = libraries
    return extension


def make_build_ext() -> type:
    """torch's build_ext, with separate nvcc flags for the sm_90a files."""
    from torch.utils import cpp_extension

    # With a static cudart and the stable ABI any nvcc serves any torch, so their CUDA majors need
    # not match.
    cpp_extension._check_cuda_version = lambda *_: None

    class BuildKernels(cpp_extension.BuildExtension):
        def build_extension(self, ext: Extension) -> None:
            compile_group = self.compiler.compile

            def compile_by_arch(sources: list[str], extra_postargs: Any, **rest: Any) -> list[str]:
                sm90 = [source for source in sources if source.endswith(SM90_SUFFIX)]
                others = [source for source in sources if source not in sm90]
                objects: list[str] = compile_group(others, extra_postargs=extra_postargs, **rest)
                if sm90:
                    flags = {**extra_postargs, "nvcc": extra_postargs["nvcc_sm90"]}
                    objects += compile_group(sm90, extra_postargs=flags, **rest)
                return objects

            self.compiler.compile = compile_by_arch
            super().build_extension(ext)

    return BuildKernels


def compiled_parts() -> dict[str, Any]:
    """setup()'s arguments for the extension; none where nothing can be compiled."""
    build = choose_build()
    os.environ.setdefault("MAX_JOBS", str(default_jobs()))
    print(describe(build), file=sys.stderr, flush=True)
    if build.kind == "pure Python":
        return {}
    try:
        import torch
    except ImportError as error:
        fail(f"the build needs torch ({error}): pip install torch, or use pip's build isolation")
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < tuple(map(int, TORCH_FLOOR)):
        fail(f"the build needs torch >= {'.'.join(TORCH_FLOOR)}, found {torch.__version__}")
    return {
        "ext_modules": [make_extension(build)],
        "cmdclass": {"build_ext": make_build_ext()},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


if __name__ == "__main__":
    setup(**(compiled_parts() if COMPILING & set(sys.argv) else {}))
