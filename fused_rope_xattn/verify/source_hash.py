"""Fingerprint of the kernel sources: ties a binary, and what was measured with it, to a tree.

setup.py runs this file by its path, before the package can be imported: standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".map")


def source_hash(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> str:
    """First 16 hex digits of the sha256 over the names and contents of ``folder``'s sources."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in suffixes:
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
