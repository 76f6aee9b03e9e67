"""Docstrings say :func:`name`; a Markdown page wants `name`, linked where the API page has it."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|data|meth|mod):`~?\.?([\w.]+)`")
PUBLIC = {
    "FusedRoPECrossAttention",
    "ProjectedKV",
    "RoPE",
    "RotaryTable",
    "cross_attention",
    "cross_attention_sharded_keys",
    "merge_partial",
    "plan",
    "project_kv",
    "swap_cross_attention",
    "unswap",
    "why_unavailable",
}


def as_markdown(text: str) -> str:
    """``text`` with its roles as links or code, and without the marks of literal blocks."""

    def link(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2]
        return f"[`{name}`](#{anchor(name)})" if name in PUBLIC else f"`{name}`"

    return re.sub(r"^\s*::\n", "", ROLE.sub(link, text), flags=re.MULTILINE)


def anchor(name: str) -> str:
    home = "fused_rope_xattn.swap" if name == "unswap" else "fused_rope_xattn"
    return f"{home}.{name}"


class Roles(griffe.Extension):
    """Rewrites every docstring as it is collected."""

    def on_instance(self, *, node: ast.AST | griffe.ObjectNode, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
