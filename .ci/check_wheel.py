"""Checks that a built wheel keeps its promises: one file for every torch, Python and CUDA major.

    python .ci/check_wheel.py dist/*.whl [--build-log build/wheel.log] [--archs "sm_80 ..."]

Needs binutils, abi3audit and torch-abi-audit; neither a GPU nor torch.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

MAX_WHEEL_BYTES = 20 * 2**20
# PTX for everything newer, machine code for Ampere and Hopper. Suffixes as in sm_90a leave no
# trace in the number that a fat binary records.
ARCHS = "compute_80 sm_80 sm_90"
ALLOWED_LIBRARIES = re.compile(
    r"lib(c10|torch_cpu|stdc\+\+|gcc_s|m|c|dl|pthread|rt)\.so[.\d]*|ld-linux-[\w-]+\.so\.\d"
)
MANGLED_TORCH = re.compile(r"_ZNK?(3c10|2at|5torch)")
# Shims that stand in libtorch_cuda, which a CPU build of torch does not have.
CUDA_ONLY_SHIM = re.compile(r"(aoti_)?torch_(?!device_type_)\w*cuda(?!graph)")
FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
FATBIN_KINDS = {1: "compute", 2: "sm"}


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check_links(library: Path) -> Iterator[str]:
    dynamic = run("readelf", "--dynamic", "--wide", library)
    for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if not ALLOWED_LIBRARIES.fullmatch(name):
            yield f"needs {name}, which not every installation has"
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        yield "has a run path, which points into the machine that built it"


def check_symbols(library: Path) -> Iterator[str]:
    imported = run("nm", "--dynamic", "--undefined-only", "--format=just-symbols", library).split()
    for symbol in imported:
        if MANGLED_TORCH.match(symbol):
            yield f"imports {symbol}: C++ of torch, which changes with every release"
        if CUDA_ONLY_SHIM.match(symbol):
            yield f"imports {symbol}, which only libtorch_cuda has: look it up at run time"
    exported = run("nm", "--dynamic", "--defined-only", "--format=just-symbols", library).split()
    if exported != ["PyInit__C"]:
        yield f"exports {exported}, not PyInit__C alone"


def check_glibc(wheel: Path, library: Path) -> Iterator[str]:
    """No symbol is newer than the glibc that a manylinux tag promises."""
    imported = run("nm", "--dynamic", "--undefined-only", "--with-symbol-versions", library)
    needed = {(int(a), int(b)) for a, b in re.findall(r"@GLIBC_(\d+)\.(\d+)", imported)}
    newest = max(needed, default=(0, 0))
    promised = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)]
    print(f"{library.name} needs glibc {newest[0]}.{newest[1]}")
    if promised and newest > min(promised):
        yield f"needs glibc {newest[0]}.{newest[1]}, newer than its tag says"


def fatbin_archs(binary: bytes) -> set[str]:
    """Architectures in every fat binary inside ``binary``, as 'sm_80' or 'compute_80'."""
    archs = set()
    start = binary.find(FATBIN_MAGIC)
    while start >= 0:
        header_bytes, payload_bytes = struct.unpack_from("<HQ", binary, start + 6)
        entry = start + header_bytes
        end = entry + payload_bytes
        while entry < end:
            kind, entry_header_bytes, entry_bytes = struct.unpack_from("<HxxIQ", binary, entry)
            (arch,) = struct.unpack_from("<I", binary, entry + 28)
            archs.add(f"{FATBIN_KINDS[kind]}_{arch}")
            entry += entry_header_bytes + entry_bytes
        start = binary.find(FATBIN_MAGIC, end)
    return archs


def check_wheel(wheel: Path, expected_archs: str) -> Iterator[str]:
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        yield f"is {wheel.stat().st_size / 2**20:.1f} MiB, more than {MAX_WHEEL_BYTES >> 20}"
    if "-cp310-abi3-" not in wheel.name:
        yield "is not tagged cp310-abi3"
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        libraries = sorted(Path(folder).rglob("*.so*"))
        if [library.name for library in libraries] != ["_C.abi3.so"]:
            yield f"holds the libraries {[library.name for library in libraries]}"
        for library in libraries:
            yield from check_links(library)
            yield from check_symbols(library)
            yield from check_glibc(wheel, library)
            archs = fatbin_archs(library.read_bytes())
            if archs != set(expected_archs.split()):
                yield f"holds code for {sorted(archs)}, not for {expected_archs}"
        yield from check_abi(wheel, Path(folder))


def check_abi(wheel: Path, unpacked: Path) -> Iterator[str]:
    scripts = Path(sys.executable).parent
    audits: list[list[str | Path]] = [
        [scripts / "abi3audit", "--strict", "--verbose", wheel],
        [scripts / "torch-abi-audit", "--check", "both", unpacked / "fused_rope_xattn"],
    ]
    for audit in audits:
        result = subprocess.run(audit, capture_output=True, text=True)
        print(result.stdout + result.stderr)
        if result.returncode != 0:
            yield f"fails {audit[0]}"
    metadata = next(unpacked.glob("*.dist-info/METADATA")).read_text()
    promised = re.findall(r"^Requires-Dist: torch>=(\d+)\.(\d+)", metadata, re.MULTILINE)
    needed = re.findall(r"min-torch=(\d+)\.(\d+)", result.stdout)
    if [tuple(map(int, v)) for v in needed] > [tuple(map(int, v)) for v in promised]:
        yield f"needs torch {needed}, but its metadata promises {promised}"


def check_build_log(log: str) -> Iterator[str]:
    """No kernel may spill registers: ptxas reports on each of them in the log of a full build."""
    functions = 0
    function = arch = ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '\S+' for '(\S+)'", line):
            arch = match[1]
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            functions += 1
            if match[1] != "0" or match[2] != "0":
                yield f"shows spills: {function} for {arch}: {match[0]}"
    if functions == 0:
        yield "shows no kernel: it is not the log of a full build"
    print(f"{functions} functions assembled by ptxas")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--build-log", type=Path)
    parser.add_argument("--archs", default=ARCHS)
    options = parser.parse_args()
    problems = [
        f"{wheel.name} {problem}"
        for wheel in options.wheels
        for problem in check_wheel(wheel, options.archs)
    ]
    if options.build_log:
        log = options.build_log.read_text()
        problems += [f"{options.build_log} {problem}" for problem in check_build_log(log)]
    if problems:
        sys.exit("\n".join(problems))
    print("wheel ok:", *(f"{w.name}, {w.stat().st_size / 2**20:.2f} MiB" for w in options.wheels))


if __name__ == "__main__":
    main()
