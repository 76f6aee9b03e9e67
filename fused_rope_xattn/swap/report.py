"""What a swap did, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from .install import uninstall


@dataclass
class Entry:
    """One attention of the model."""

    path: str
    kind: str
    swapped: bool
    why: str
    difference: float | None = None  # of a probe: largest difference over largest value
    module: nn.Module | None = field(default=None, repr=False)


@dataclass
class Report:
    """The attentions that a swap met, in the order of ``named_modules()``; prints as a table."""

    entries: list[Entry]

    @property
    def swapped(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.swapped]

    @property
    def left_alone(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.swapped]

    def undo(self) -> None:
        """Give every swapped module its class back; its parameters keep their present values."""
        for entry in self.swapped:
            assert entry.module is not None
            uninstall(entry.module)
            entry.swapped, entry.why = False, "the swap was undone"

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        summary = f"{len(self.swapped)} of {len(self)} attentions run on fused_rope_xattn"
        if not self.entries:
            return summary
        probed = any(entry.difference is not None for entry in self.entries)
        rows = [("module", "kind", "", *(("probe differs by",) if probed else ()), "why")]
        for entry in self.entries:
            found = "" if entry.difference is None else f"{entry.difference:.1e}"
            outcome = "swapped" if entry.swapped else "left alone"
            path = entry.path or "(the model)"
            rows.append((path, entry.kind, outcome, *((found,) if probed else ()), entry.why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in rows]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([summary, "", lines[0].rstrip(), rule, *(x.rstrip() for x in lines[1:])])
