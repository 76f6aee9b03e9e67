"""What the swap has to know about one class of attention: its adapter."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

Role = Literal["cross", "self", "unknown"]


class Refused(Exception):
    """Why a module cannot be swapped; raised by :meth:`Adapter.examine`."""


class Unserved(NamedTuple):
    """Why one call is left to the module's own forward; returned by :meth:`Adapter.forward`."""

    reason: str


class Place(NamedTuple):
    """Where a module sits, and what the caller of the swap said about it."""

    path: str
    parents: tuple[tuple[str, nn.Module], ...] = ()  # (path, module) from the root down
    attention_weights: bool = True  # False: nobody reads them
    named: bool = False  # the caller named it in ``paths``

    @property
    def name(self) -> str:
        """The last part of the path that is not a number."""
        parts = [part for part in self.path.split(".") if not part.isdigit()]
        return parts[-1] if parts else ""

    @property
    def parent(self) -> nn.Module | None:
        return self.parents[-1][1] if self.parents else None


class Draw:
    """Random inputs of a probe, in the dtype and on the device of a module's parameters."""

    def __init__(self, module: nn.Module, seed: int = 0) -> None:
        parameter = next(module.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Tokens, large enough that scores differ and a wrong rotation shows."""
        return 2.0 * torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def angles(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of random angles, in fp32."""
        angle = 3.0 * torch.randn(shape, generator=self.generator).to(self.device)
        return angle.cos(), angle.sin()


class Adapter:
    """How one class of attention runs on this block.

    An adapter holds no state of any module. Whatever it can neither express nor be sure of it must
    decline: a whole module in :meth:`examine`, one call in :meth:`forward`.
    """

    kind: ClassVar[str] = ""  # what reports call it
    classes: ClassVar[tuple[type | str, ...]] = ()  # or their qualified names: "package.file.Class"
    # Linears and norms whose weights ``forward`` uses without calling them. A module with one that
    # was hooked, wrapped, quantised or parametrised is not swapped; if that happens later, its own
    # forward runs.
    children: ClassVar[tuple[str, ...]] = ()
    # Whether modules are also known by their structure, whatever the code of their class.
    by_structure: ClassVar[bool] = False
    must_probe: ClassVar[bool] = False  # a module stays swapped only if a probe agrees

    def matches(self, module: nn.Module) -> bool:
        """Whether a module of an unregistered class is of this kind; only with ``by_structure``."""
        return False

    def role(self, module: Any, place: Place) -> Role:
        """Whether it attends to another sequence. What nothing tells is "unknown"."""
        return "cross"

    def examine(self, module: Any, place: Place) -> Any:
        """Plain data that :meth:`forward` needs and finds as ``module.swap_state``.

        Raises :class:`Refused` for what this adapter does not reproduce exactly.
        """
        return None

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What ``module``'s own forward returns, or :class:`Unserved` before computing anything.

        Its parameters carry the names of the module's own.
        """
        raise NotImplementedError

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Arguments of a small call that uses what matters; None if there is no such call."""
        return None


_CROSS = re.compile(
    r"cross|multihead_attn|enc(oder)?_(dec(oder)?_)?att|src_att|xattn|^attn2$|_attn2$"
    r"|(^|_)ca(_|$)|context|mem(ory)?_att",
    re.IGNORECASE,
)
_SELF = re.compile(r"self|^attn1$|_attn1$|(^|_)sa(_|$)", re.IGNORECASE)


def role_of_name(place: Place) -> Role:
    """What the module's attribute, else the class that holds it, is called."""
    holder = type(place.parent).__name__ if place.parent is not None else ""
    for name in (place.name, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", holder)):
        if _SELF.search(name):
            return "self"
        if _CROSS.search(name):
            return "cross"
    return "unknown"


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
