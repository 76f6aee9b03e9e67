"""Which adapter serves which class; users add theirs. Classes are known by name, so that no library
is imported for a model that does not come from it."""

from __future__ import annotations

import inspect
from typing import TypeVar

from torch import nn

from .adapter import Adapter, Refused, qualified_name

AdapterType = TypeVar("AdapterType", bound="Adapter | type[Adapter]")

_by_class: dict[str, Adapter] = {}
_by_structure: list[Adapter] = []
_by_kind: dict[str, Adapter] = {}

# What a subclass may define without changing what its base computes.
_HARMLESS = {
    "__init__",
    "__doc__",
    "__module__",
    "__qualname__",
    "__annotations__",
    "__firstlineno__",
}
_HARMLESS |= {"__static_attributes__", "__dict__", "__weakref__", "__annotate_func__", "extra_repr"}


def register_adapter(adapter: AdapterType) -> AdapterType:
    """Make an :class:`Adapter` known, the class or an instance; also a class decorator.

    A later adapter replaces an earlier one for the same classes.
    """
    instance = adapter() if isinstance(adapter, type) else adapter
    if not instance.kind:
        raise ValueError("adapter: expected a kind, the name that reports show, got ''")
    if not instance.classes and not instance.by_structure:
        raise ValueError(f"adapter {instance.kind!r}: expected classes that it serves, got none")
    for cls in instance.classes:
        _by_class[qualified_name(cls) if isinstance(cls, type) else cls] = instance
    if instance.by_structure:
        _by_structure.insert(0, instance)
    _by_kind[instance.kind] = instance
    return adapter


def adapter_of_kind(kind: str) -> Adapter:
    try:
        return _by_kind[kind]
    except KeyError:
        raise RuntimeError(
            f"no adapter of kind {kind!r} is registered; register it before loading this model"
        ) from None


def find_adapter(module: nn.Module) -> Adapter | None:
    """The adapter for the module's class or a base of it, else for its structure."""
    for cls in type(module).__mro__:
        adapter = _by_class.get(qualified_name(cls))
        if adapter is not None:
            return adapter
    return next((adapter for adapter in _by_structure if adapter.matches(module)), None)


def check_class(module: nn.Module, adapter: Adapter) -> None:
    """Raise :class:`Refused` where the module's class is not quite what the adapter knows."""
    known = next((c for c in type(module).__mro__ if _by_class.get(qualified_name(c))), None)
    changed: set[str] = set()
    for cls in type(module).__mro__:
        if cls is known or known is None:
            break
        changed |= vars(cls).keys() & dir(known)
    changed -= _HARMLESS
    if changed:
        raise Refused(f"its subclass {type(module).__name__} redefines {_listed(changed)}")
    ours = inspect.signature(adapter.forward).parameters
    theirs = inspect.signature(type(module).forward).parameters
    unknown = [name for name in list(theirs)[1:] if name not in ours]
    if unknown:
        raise Refused(f"its forward has arguments of another version: {_listed(unknown)}")


def _listed(names: set[str] | list[str]) -> str:
    return ", ".join(sorted(names))
