"""Trainable fused cross-attention with rotary position embeddings."""

from importlib.metadata import PackageNotFoundError, version

from ._loader import build_info, is_available, why_unavailable
from .autograd import CrossAttentionFunction
from .functional import cross_attention, project_kv
from .kv import ProjectedKV
from .module import FusedRoPECrossAttention
from .norm import Norm
from .planner import Plan, plan
from .rope import RoPE, RotaryTable
from .sharded_keys import cross_attention_sharded_keys, merge_partial
from .swap import swap_cross_attention

try:
    __version__ = version("fused-rope-xattn")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0"

__all__ = [
    "CrossAttentionFunction",
    "FusedRoPECrossAttention",
    "Norm",
    "Plan",
    "ProjectedKV",
    "RoPE",
    "RotaryTable",
    "__version__",
    "build_info",
    "cross_attention",
    "cross_attention_sharded_keys",
    "is_available",
    "merge_partial",
    "plan",
    "project_kv",
    "swap_cross_attention",
    "why_unavailable",
]
