"""Real blocks at real sizes, before they are swapped: what a swap is timed and judged on.

Nothing but torch is imported here; a case that needs another package says which one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .blocks import croco, sam2

Device = torch.device | str


class Built(NamedTuple):
    """A module and one call of it; tokens come first among the arguments."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class SwapCase:
    """A block of a model, by the function that builds it."""

    name: str
    build: Callable[..., Built]  # (device, dtype, **sizes)
    small: dict[str, Any]  # sizes that a CPU gets through
    needs: str = ""  # the package it comes from, where that is not torch
    dtype: torch.dtype = torch.bfloat16

    @property
    def missing(self) -> str | None:
        """The package that is not installed, if any."""
        if not self.needs or importlib.util.find_spec(self.needs) is not None:
            return None
        return self.needs


def sam2_attention(
    device: Device,
    dtype: torch.dtype,
    *,
    side: int = 64,
    memories: int = 7,
    pointers: int = 64,
    width: int = 256,
    memory_width: int = 64,
) -> Built:
    """Cross-attention from a frame to the memories of others, and to object pointers."""
    with torch.device(device):
        module = sam2.RoPEAttention(
            width, 1, 1, 0.1, memory_width, rope_k_repeat=True, feat_sizes=(side, side)
        )
        keys = side * side * memories + pointers
        tokens = [torch.randn(1, n, c) for n, c in ((side * side, width), (keys, memory_width))]
        values = torch.randn_like(tokens[1])
    return _built(module, dtype, *tokens, values, num_k_exclude_rope=pointers)


def sam2_layer(
    device: Device,
    dtype: torch.dtype,
    *,
    side: int = 64,
    memories: int = 7,
    pointers: int = 64,
    width: int = 256,
    memory_width: int = 64,
) -> Built:
    """The whole layer of SAM 2's memory attention."""
    with torch.device(device):
        module = sam2.MemoryAttentionLayer(width, memory_width, feat_sizes=(side, side))
        keys = side * side * memories + pointers
        frame, memory = torch.randn(1, side * side, width), torch.randn(1, keys, memory_width)
        places = torch.randn_like(memory)
    return _built(module, dtype, frame, memory, places, num_k_exclude_rope=pointers)


def mast3r_block(
    device: Device,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    height: int = 24,
    width: int = 32,
    dim: int = 768,
    heads: int = 12,
    sdpa: bool = False,
) -> Built:
    """A decoder block of MASt3R on a pair of 512 x 384 images; scores written out, as it does."""
    with torch.device(device):
        module = croco.DecoderBlock(dim, heads, rope=croco.RoPE2D(100.0), sdpa=sdpa)
        x, y = (torch.randn(batch, height * width, dim) for _ in range(2))
        grid = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        positions = grid.expand(batch, -1, -1)
    return _built(module, dtype, x, y, positions, positions)


def mast3r_block_sdpa(device: Device, dtype: torch.dtype, **sizes: int) -> Built:
    """The same with PyTorch's fused attention, as its descendants have it."""
    return mast3r_block(device, dtype, sdpa=True, **sizes)


def decoder_layer(
    device: Device,
    dtype: torch.dtype,
    *,
    batch: int = 8,
    queries: int = 256,
    keys: int = 1500,
    dim: int = 1024,
    heads: int = 16,
) -> Built:
    """``nn.TransformerDecoderLayer`` at the size of a speech decoder."""
    with torch.device(device):
        module = nn.TransformerDecoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True)
        tgt, memory = torch.randn(batch, queries, dim), torch.randn(batch, keys, dim)
    return _built(module, dtype, tgt, memory)


class AudioVideoPair(nn.Module):
    """Both directions of LTX-2: video looks at audio, audio looks at video."""

    def __init__(self, video_dim: int, audio_dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_ltx2 import LTX2Attention

        shared: dict[str, Any] = {"heads": heads, "kv_heads": heads, "dim_head": head_dim}
        shared["rope_type"] = "split"
        self.audio_to_video_attn = LTX2Attention(video_dim, cross_attention_dim=audio_dim, **shared)
        self.video_to_audio_attn = LTX2Attention(audio_dim, cross_attention_dim=video_dim, **shared)

    def forward(self, video: Tensor, audio: Tensor, tables: dict[str, Any]) -> Tensor:
        seen = self.audio_to_video_attn(
            video, audio, query_rotary_emb=tables["video"], key_rotary_emb=tables["audio"]
        )
        heard = self.video_to_audio_attn(
            audio, video, query_rotary_emb=tables["audio"], key_rotary_emb=tables["video"]
        )
        return torch.cat([seen.flatten(1), heard.flatten(1)], dim=1)


def ltx2_pair(
    device: Device,
    dtype: torch.dtype,
    *,
    video: int = 6144,
    audio: int = 126,
    video_dim: int = 4096,
    audio_dim: int = 2048,
    heads: int = 32,
    head_dim: int = 64,
) -> Built:
    """Five seconds of 768 x 512 and their sound; tables in fp32, one for each head."""
    with torch.device(device):
        module = AudioVideoPair(video_dim, audio_dim, heads, head_dim)
        tokens = torch.randn(1, video, video_dim), torch.randn(1, audio, audio_dim)
        angles = {
            n: torch.randn(1, heads, t, head_dim // 2)
            for n, t in (("video", video), ("audio", audio))
        }
        tables = {name: (angle.cos(), angle.sin()) for name, angle in angles.items()}
    return _built(module, dtype, *tokens, tables)


def sam2_transformers(
    device: Device, dtype: torch.dtype, *, side: int = 64, memories: int = 7, pointers: int = 64
) -> Built:
    """``sam2_attention`` as transformers has it."""
    from transformers import Sam2VideoConfig
    from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoRoPEAttention

    config = Sam2VideoConfig(memory_attention_rope_feat_sizes=[side, side])
    config._attn_implementation = "sdpa"
    with torch.device(device):
        module = Sam2VideoRoPEAttention(config, kv_in_dim=64, rope_k_repeat=True)
        keys = side * side * memories + pointers
        query, key = torch.randn(1, 1, side * side, 256), torch.randn(1, 1, keys, 64)
        table = sam2.compute_axial_cis(256, side, side)[None].repeat_interleave(2, -1)
        table = table.to(device)
    tables = table.real.contiguous(), table.imag.contiguous()
    return _built(
        module, dtype, query, key, torch.randn_like(key), tables, num_k_exclude_rope=pointers
    )


def _built(module: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Built:
    """Module and tokens in ``dtype``; positions and tables stay as they are."""
    cast = tuple(x.to(dtype) if _is_tokens(x) else x for x in args)
    return Built(module.to(dtype), cast, kwargs)


def _is_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


_SMALL_SAM2 = {"side": 4, "memories": 2, "pointers": 3}
_SMALL_CROCO = {"height": 3, "width": 4, "dim": 32, "heads": 2}
_SMALL_DECODER = {"batch": 2, "queries": 5, "keys": 7, "dim": 32, "heads": 4}
_SMALL_LTX2 = {"video": 12, "audio": 5, "video_dim": 32, "audio_dim": 16, "heads": 4, "head_dim": 8}
_NARROW = {"width": 32, "memory_width": 16}

SWAP_CASES: dict[str, SwapCase] = {
    case.name: case
    for case in (
        SwapCase("sam2_attention", sam2_attention, _SMALL_SAM2 | _NARROW),
        SwapCase("sam2_layer", sam2_layer, _SMALL_SAM2 | _NARROW),
        SwapCase("mast3r_block", mast3r_block, _SMALL_CROCO),
        SwapCase("mast3r_block_sdpa", mast3r_block_sdpa, _SMALL_CROCO),
        SwapCase("decoder_layer", decoder_layer, _SMALL_DECODER),
        SwapCase("ltx2_pair", ltx2_pair, _SMALL_LTX2, "diffusers"),
        SwapCase("sam2_transformers", sam2_transformers, _SMALL_SAM2, "transformers"),
    )
}
