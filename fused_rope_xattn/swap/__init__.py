"""Models of other libraries on this block: swap their cross-attention in place, and take it back.

    report = swap_cross_attention(model)   # the model computes the same, through this package
    print(report)                          # module by module: what was swapped, what was not, why
    report.undo()                          # or unswap(model)

``walk.py`` finds attentions and decides, an adapter a family (``multihead.py``, ``croco.py``, ...)
knows what it computes, ``install.py`` puts the adapter into a module's class.
"""

from .adapter import Adapter, Draw, Place, Refused, Unserved
from .layout import head_rows, pair_rows, select_rows
from .registry import register_adapter
from .report import Entry, Report
from .walk import swap_cross_attention, unswap

__all__ = [
    "Adapter",
    "Draw",
    "Entry",
    "Place",
    "Refused",
    "Report",
    "Unserved",
    "head_rows",
    "pair_rows",
    "register_adapter",
    "select_rows",
    "swap_cross_attention",
    "unswap",
]
