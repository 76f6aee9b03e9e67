"""How a rule for arguments is written down, and what is said where one is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """``argument`` must be what ``wanted`` says; both texts are formatted with the subject."""

    argument: str
    error: type[Exception]
    holds: Callable[[Any], bool]
    wanted: str
    got: str = ""  # default: the argument itself


def apply_rules(rules: Iterable[Rule], subject: Any) -> None:
    """Raise what the first broken rule says."""
    for rule in rules:
        if not rule.holds(subject):
            name, wanted = rule.argument.format(subject), rule.wanted.format(subject)
            if rule.got:
                got = rule.got.format(subject)
            else:
                got = show(getattr(subject, name), with_type=rule.error is TypeError)
            raise rule.error(f"{name}: expected {wanted}, got {got}")


def kind_rule(argument: str, is_kind: Callable[[Any], bool], wanted: str) -> Rule:
    """A rule about the type of one argument."""
    return Rule(argument, TypeError, lambda a: is_kind(getattr(a, argument)), wanted)


def count_rules(argument: str, optional: bool = False) -> tuple[Rule, Rule]:
    """An int of at least 1, or None where ``optional``."""

    def is_kind(x: Any) -> bool:
        return is_count(x) or (optional and x is None)

    def is_positive(a: Any) -> bool:
        x = getattr(a, argument)
        return x is None or bool(x >= 1)

    wanted = "an int or None" if optional else "an int"
    return (
        kind_rule(argument, is_kind, wanted),
        Rule(argument, ValueError, is_positive, "at least 1"),
    )


def probability_rules(argument: str) -> tuple[Rule, Rule]:
    def holds(a: Any) -> bool:
        return bool(0 <= getattr(a, argument) <= 1)

    return (
        kind_rule(argument, is_number, "a number"),
        Rule(argument, ValueError, holds, "a probability within [0, 1]"),
    )


def show(x: Any, with_type: bool = True) -> str:
    """A value that is short, else its type."""
    if x is None:
        return "None"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}: {', '.join(map(show, x))}"
    if isinstance(x, (int, float, str)):
        return f"{type(x).__name__} {x!r}" if with_type else repr(x)
    return f"a {type(x).__name__}"


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def is_bool(x: Any) -> bool:
    return isinstance(x, bool)


def is_dtensor(x: Any) -> bool:
    return type(x).__name__ == "DTensor"  # the module that defines it takes long to import


def check_is_local(name: str, x: Any, hint: str = "give x.to_local()") -> None:
    """DTensors go to children that are sharded themselves, and no further."""
    if is_dtensor(x):
        raise TypeError(f"{name}: expected a tensor of this process, got a DTensor ({hint})")
