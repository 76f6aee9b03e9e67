"""Calls of cross_attention that a planner can look at."""

from __future__ import annotations

from typing import Any

from torch._subclasses import FakeTensorMode

from ..verify.cases import Case, draw_inputs


def planned_call(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a problem given by sizes and options, on tensors without storage."""
    with FakeTensorMode():
        return draw_inputs(case).call()
