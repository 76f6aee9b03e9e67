"""The static half of one call: everything besides tensors that autograd, ops and composite need.

Plain ``NamedTuple``s of Python numbers: hashable, picklable and traceable by ``torch.compile``.
Defaults are whole numbers, and :func:`as_text` keeps the floats of long-lived objects: under
``dynamic=True`` Dynamo makes an input of the graph of every float that it reads, and compiles once
more when it finds that operators want it as an option.
"""

from __future__ import annotations

from typing import NamedTuple

NORM_NONE, NORM_RMS, NORM_LAYER = 0, 1, 2  # NormSpec.kind, and the operators' norm_kind
NORM_KINDS = {"rms": NORM_RMS, "layer": NORM_LAYER}


def as_text(x: float) -> str:
    """``x`` as what ``float()`` reads it from, exactly; Dynamo takes text for a constant."""
    return repr(float(x))


class RotationSpec(NamedTuple):
    """How one side (queries or keys) rotates; ``rotary_dim`` 0 rotates nothing."""

    rotary_dim: int = 0
    interleaved: bool = True
    axes: int = 1
    full_width: bool = False  # tables hold a value a dim, not a value a pair
    base: float = 1


class NormSpec(NamedTuple):
    """Which norm precedes the rotation; the weights travel as tensors of their own."""

    kind: int = NORM_NONE
    inner: bool = False  # over H*D together instead of over each head
    eps: float = 0


class BlockConfig(NamedTuple):
    """Options of one attention block that are not tensors."""

    num_heads: int
    num_kv_heads: int
    q_rotation: RotationSpec
    k_rotation: RotationSpec
    q_norm: NormSpec
    k_norm: NormSpec
    scale: float
    is_causal: bool = False
    dropout_p: float = 0
    tf32: bool = False
    deterministic: bool = False
    fused: bool = False  # the kernels of small problems
