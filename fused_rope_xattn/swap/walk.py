"""Walks over a model, decides for each attention, and tells."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from . import families  # noqa: F401  registers the adapters of this package
from .adapter import Adapter, Place, Refused, qualified_name
from .children import change_of_children
from .install import install, is_swapped, uninstall
from .probe import probe
from .registry import check_class, find_adapter
from .report import Entry, Report

_SELF = "self-attention"
_UNKNOWN = "neither its widths nor its name tell whether it is cross-attention; name it in paths"
_PROJECTION = re.compile(
    r"(to_|proj_?|w_?)?(q|k|v|qkv|kv|query|key|value)(_?(proj|lin|linear|layer|weight))?"
    r"|in_proj(_weight)?",
    re.IGNORECASE,
)


def swap_cross_attention(
    model: nn.Module,
    *,
    paths: str | Iterable[str] | None = None,
    self_attention: bool = False,
    attention_weights: bool = True,
    verify: bool = False,
    tolerance: float | None = None,
) -> Report:
    """Let the cross-attention that is recognised in ``model`` run on this block, in place.

    The model computes the same as before. Modules keep their identity, parameters and parameter
    names, so optimizers, checkpoints and references go on working; ``report.undo()`` or
    :func:`unswap` takes the swap back. A module that this block does not reproduce exactly is left
    alone, and a call that it does not reproduce runs the module's own code, with one warning.

    Args:
        model: any module; an attention itself, too.
        paths: patterns (as for file names) of the modules to consider, by their names in
            ``named_modules()``. What they name counts as cross-attention. Default: all modules.
        self_attention: also swap attentions known, or suspected, to be self-attention.
        attention_weights: False promises that nobody reads the attention weights which
            ``nn.MultiheadAttention`` computes unless it is called with ``need_weights=False``;
            it returns None in their place then. By default such calls run its own code.
        verify: run a copy of every module on a small random input, by its own code and by this
            block, in fp32 at least. The report has the largest difference over the largest value.
        tolerance: the largest such difference with which a module is swapped; default 3e-5, or
            0.01 where fp32 may be multiplied in TF32. Where only the structure of a class, not its
            code, is known (CroCo, SAM 2), or the code changes often (x-transformers), the probe
            always runs.

    Returns:
        A :class:`Report` with an entry for each attention. ``print(report)`` shows a table.
    """
    patterns = None if paths is None else [paths] if isinstance(paths, str) else list(paths)
    unused = set(patterns or ())
    entries = []
    for place, module in _places(model, attention_weights):
        if patterns is not None:
            matching = {p for p in patterns if fnmatchcase(place.path, p)}
            if not matching:
                continue
            place = place._replace(named=True)
        entry = _consider(module, place, self_attention, verify, tolerance)
        if entry is not None:
            entries.append(entry)
            if patterns is not None:
                unused -= matching
    if unused:
        raise ValueError(f"paths: no attention found at {', '.join(sorted(unused))}")
    return Report(entries)


def unswap(model: nn.Module) -> int:
    """Take back every swap in ``model``, also in a copy of a swapped model; says how many."""
    found = [module for module in model.modules() if is_swapped(module)]
    for module in found:
        uninstall(module)
    return len(found)


def _places(model: nn.Module, attention_weights: bool) -> Iterable[tuple[Place, nn.Module]]:
    named = dict(model.named_modules(remove_duplicate=False))
    seen: set[int] = set()
    for path, module in named.items():
        if id(module) in seen:
            continue
        seen.add(id(module))
        parts = path.split(".") if path else []
        above = [".".join(parts[:i]) for i in range(len(parts))]
        parents = tuple((name, named[name]) for name in above)
        yield Place(path, parents, attention_weights), module


def _consider(
    module: nn.Module, place: Place, self_attention: bool, verify: bool, tolerance: float | None
) -> Entry | None:
    """The entry of a module, swapped if it may be; None for what is no attention."""
    if is_swapped(module):
        adapter = type(module)._swap_adapter  # type: ignore[attr-defined]
        return Entry(place.path, adapter.kind, False, "it is swapped already")
    adapter = find_adapter(module)
    if adapter is None:
        if not _looks_like_attention(module):
            return None
        kind = qualified_name(type(module))
        return Entry(place.path, kind, False, "no adapter for its class")
    entry = Entry(place.path, adapter.kind, False, "", module=module)
    try:
        if not place.named and not self_attention:
            role = adapter.role(module, place)
            if role != "cross":
                raise Refused(_SELF if role == "self" else _UNKNOWN)
        _swap(module, adapter, place, entry, verify or adapter.must_probe, tolerance)
    except Refused as refusal:
        entry.why = str(refusal)
    return entry


def _swap(
    module: nn.Module,
    adapter: Adapter,
    place: Place,
    entry: Entry,
    verify: bool,
    tolerance: float | None,
) -> None:
    _check_module(module, adapter)
    state: Any = adapter.examine(module, place)
    if verify:
        entry.difference = probe(module, adapter, state, tolerance)
    install(module, adapter, state)
    entry.swapped, entry.why = True, "the same formula"


def _check_module(module: nn.Module, adapter: Adapter) -> None:
    """Refuse what someone did to the module or to the children that the adapter reads."""
    if "forward" in module.__dict__:
        raise Refused("its forward was replaced on the instance")
    if hasattr(module, "parametrizations"):
        raise Refused("it is parametrised")
    check_class(module, adapter)
    change = change_of_children(module, adapter.children)
    if change is not None:
        raise Refused(change)


def _looks_like_attention(module: nn.Module) -> bool:
    """At least two of its own children or parameters are named like projections."""
    names = [*module._modules, *module._parameters]
    return sum(1 for name in names if _PROJECTION.fullmatch(name)) >= 2
