"""Packages that only some commands need."""

from __future__ import annotations

import importlib.util


def need(extra: str, *modules: str) -> None:
    """Exit with the command to run if any of these modules is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"This command needs {', '.join(missing)}: pip install 'fused-rope-xattn[{extra}]'"
        )
