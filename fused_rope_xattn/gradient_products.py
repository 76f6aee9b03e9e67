"""The products of matrices that a backward ends in: which go as one launch, and the call.

One by one, those of a medium problem fill a part of the GPU each. They do not wait for each other,
so that on Hopper one launch has tiles for all of it. Elsewhere, and where the launch would gain
nothing, they go through torch.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import ops
from .grouped import CAPABILITY, DTYPES, WIDTH_MULTIPLE

TILE = 128  # rows and columns of a result that a block of the kernel computes
DEPTH = 64  # of the common dimension, a step of a block
MOST_TERMS = 8  # of a launch
# A block alone takes 0.3 us a step, and launches of their own 4 us a product.
FEW_STEPS = 48  # with more, and few tiles, blocks share the depth: see gradient_splits() in C++
FEW_STEPS_ALONE = 12  # the most that was measured to gain
LARGEST = 2**36  # multiplications; beyond, each product fills the GPU by itself


class Product(NamedTuple):
    """The sum of ``left @ right`` over the terms; of ``left.T @ right`` in a product over tokens.

    The former is the gradient of tokens, the latter that of a weight. The tokens of an operand may
    have several axes, which count as one, N.
    """

    terms: tuple[tuple[Tensor, Tensor], ...]  # [N, I] and [I, C], or [N, C] over tokens
    over_tokens: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and depth, the latter of all terms."""
        left, right = self.terms[0]
        rows = left.shape[-1] if self.over_tokens else _num_tokens(left)
        return rows, right.shape[-1], sum(_num_tokens(y) for _, y in self.terms)

    @property
    def tiles(self) -> int:
        rows, columns, _ = self.sizes
        return -(-rows // TILE) * -(-columns // TILE)

    @property
    def steps(self) -> int:
        """How long a block works at a tile."""
        return sum(-(-_num_tokens(y) // DEPTH) for _, y in self.terms)

    def is_shared(self, num_sms: int) -> bool:
        """Whether several blocks share a tile's depth, if that is more than a few steps."""
        return self.over_tokens and 4 * self.tiles <= num_sms


def _num_tokens(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def of_tokens(grad: Tensor, weight: Tensor) -> Product:  # [N, I], [I, C]
    """The gradient of x [N, C], where ``grad`` is that of ``x @ weight.T``."""
    return Product(((grad, weight),), over_tokens=False)


def of_weight(grad: Tensor, x: Tensor) -> Product:  # [N, I], [N, C]
    """The gradient of a weight [I, C], where ``grad`` is that of ``x @ weight.T``."""
    return Product(((grad, x),), over_tokens=True)


def added(a: Product, b: Product) -> Product:
    """One product for both, which have results of one shape."""
    return Product(a.terms + b.terms, a.over_tokens)


def obstacle(products: list[Product], num_sms: int, tf32: bool = False) -> str | None:
    """Why one launch should not compute these on a Hopper, None if it should."""
    if len(products) < 2 and not (tf32 and _is_worth_it_alone(products[0], num_sms)):
        return "there are not two of them"
    operands = [x for p in products for term in p.terms for x in term]
    if len(operands) > 2 * MOST_TERMS:
        return f"there are more than {MOST_TERMS} terms"
    dtype = operands[0].dtype
    is_right = dtype in DTYPES or (dtype == torch.float32 and tf32)
    if not is_right or any(x.dtype != dtype for x in operands):
        return "they are not of one half type, nor of fp32 where TF32 is allowed"
    if any(x.shape[-1] % WIDTH_MULTIPLE for x in operands):
        return f"a width is no multiple of {WIDTH_MULTIPLE}"
    if not all(x.is_contiguous() for x in operands):
        return "an operand is not contiguous"
    if sum(math.prod(p.sizes) for p in products) > LARGEST:
        return "each fills the GPU by itself"
    # Where blocks do not share a tile, none may take long, and longer than all together. Compared
    # one by one, since a maximum would tie a compiled graph to the order of the lengths. In TF32
    # long operands are copied first, which torch does without: there none counts as shared.
    work = sum(p.steps * p.tiles for p in products)
    alone = [p for p in products if tf32 or not p.is_shared(num_sms)]
    if any(p.steps > FEW_STEPS and p.steps * num_sms > work for p in alone):
        return "the deepest has too few tiles for the GPU"
    return None


def _is_worth_it_alone(p: Product, num_sms: int) -> bool:
    """In TF32 cuBLAS is slow with the order of the weight in a gradient of tokens. But a launch of
    its own needs tiles for half of the GPU, which take long where they are deep."""
    return not p.over_tokens and 2 * p.tiles > num_sms and p.steps <= FEW_STEPS_ALONE


def is_taken(products: list[Product], tf32: bool = False) -> bool:
    """Whether one launch computes these."""
    device = products[0].terms[0][0].device
    if device.type != "cuda":
        return False
    num_sms = _hopper_sms(device.index)
    return num_sms > 0 and obstacle(products, num_sms, tf32) is None


def compute(*wanted: Product | None, tf32: bool = False) -> list[Tensor | None]:
    """The results; None where there is no product."""
    products = [p for p in wanted if p is not None]
    if products and is_taken(products, tf32):
        results = iter(_together(products))
    else:
        results = map(_alone, products)
    return [None if p is None else next(results) for p in wanted]


def _together(products: list[Product]) -> list[Tensor]:
    left, right = zip(*(term for p in products for term in p.terms), strict=True)
    num_terms, over_tokens = zip(*((len(p.terms), p.over_tokens) for p in products), strict=True)
    return ops.gradient_products(
        list(map(_rows, left)), list(map(_rows, right)), list(num_terms), list(over_tokens)
    )


def _alone(p: Product) -> Tensor:
    result: Tensor | None = None
    for left, right in p.terms:
        x = _rows(left).t() if p.over_tokens else _rows(left)
        # In place: out of place, addmm first copies what it adds to.
        result = x @ _rows(right) if result is None else result.addmm_(x, _rows(right))
    assert result is not None
    return result


def _rows(x: Tensor) -> Tensor:  # [N, C]
    return x.flatten(0, -2)


def _hopper_sms(index: int | None) -> int:
    """Multiprocessors of a Hopper, 0 for any other GPU."""
    found: int = _constant_hopper_sms(index)
    return found


@torch.compiler.assume_constant_result
def _constant_hopper_sms(index: int | None) -> int:
    return _cached_hopper_sms(index)


@functools.cache
def _cached_hopper_sms(index: int | None) -> int:
    found = torch.cuda.get_device_properties(index)
    return found.multi_processor_count if (found.major, found.minor) == CAPABILITY else 0
