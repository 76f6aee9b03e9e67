"""What commands show while they run and in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=120)  # a file has room


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar that moves on each time it is told what comes next."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("", total=total + 1)
        yield lambda what: bar.update(task, advance=1, description=what)


def us(value: float | None) -> str:
    """Microseconds, without digits that nobody can measure."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
