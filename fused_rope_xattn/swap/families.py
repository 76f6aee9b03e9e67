"""The adapters of this package, registered."""

from .croco import CrocoCrossAttention
from .diffusers_attention import DiffusersAttention
from .ltx2 import LTX2Attention
from .multihead import MultiheadAttention
from .registry import register_adapter
from .sam2 import Sam2RoPEAttention
from .sam2_transformers import EdgeTamCrossAttention, Sam2VideoAttention
from .xtransformers import XTransformersAttention

for _adapter in (
    MultiheadAttention,
    CrocoCrossAttention,
    Sam2RoPEAttention,
    Sam2VideoAttention,
    EdgeTamCrossAttention,
    LTX2Attention,
    DiffusersAttention,
    XTransformersAttention,
):
    register_adapter(_adapter)
