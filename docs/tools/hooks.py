"""What mkdocs runs while it builds: tables and figures from the record and from the planner."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import figures
import record

TABLES = (
    ("tables", record.tables),
    ("sweep", record.sweep),
    ("errors by tensor", record.errors_by_tensor),
    ("problems", record.problems),
)
FIGURES = {
    "figures/speed.svg": figures.speed,
    "figures/roofline.svg": figures.roofline,
    "figures/sweep.svg": figures.sweep,
    "figures/paths-map.svg": figures.paths_map,
}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for path, draw in FIGURES.items():
        files.append(File.generated(config, path, content=draw()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return unlinked_brackets(record.replace_markers(markdown, TABLES))


def unlinked_brackets(markdown: str) -> str:
    """Array shapes like [stage][row], outside code, are text: no page has links by reference."""
    return re.sub(r"(`[^`]*`)|\]\[", lambda m: m[1] or "]\\[", markdown)
