"""Holds the workflows to two rules: actions are pinned, and steps run scripts that run anywhere.

    python .ci/check_workflows.py

A `run:` step is one line that calls make or a script of this repository, so that everything CI does
can be done on any machine.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def problems_of(workflow: Path) -> Iterator[str]:
    text = workflow.read_text(encoding="utf-8")
    for uses in re.findall(r"uses: (.+)$", text, re.MULTILINE):
        if PINNED.fullmatch(uses) is None:
            yield f"uses {uses}, which is not a commit with its version beside it"
    for command in re.findall(r"run: (.+)$", text, re.MULTILINE):
        yield from problems_of_step(command)
    if re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE) is None:
        yield "does not start from read permission alone"
    if "pull_request_target" in text:
        yield "runs the code of strangers with the rights of the repository"


def problems_of_step(command: str) -> Iterator[str]:
    words = [w for w in shlex.split(command) if "=" not in w or w.startswith("-")]
    if words[0] == "make":
        targets = [w for w in words[1:] if not w.startswith("-")]
        yield from (f"no target {t}: {command}" for t in targets if t not in MAKE_TARGETS)
    elif not (words[0].startswith(".ci/") and (ROOT / words[0]).is_file()):
        yield f"has a step that is no script of this repository: {command}"
    if re.search(r"\$\{\{\s*github\.(event|head_ref)", command):
        yield f"puts text of strangers into a shell: {command}"


def main() -> None:
    problems = [f"{path.name} {p}" for path in WORKFLOWS for p in problems_of(path)]
    if problems:
        sys.exit("\n".join(problems))
    print("workflows ok:", ", ".join(path.name for path in WORKFLOWS))


if __name__ == "__main__":
    main()
