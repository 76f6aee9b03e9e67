"""The picture that shows what a model completed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ZOOM = 3
GAP = 12
HEADER = 34
PAPER, INK = (255, 255, 255), (20, 20, 20)


def write_grid(path: Path, titles: Sequence[str], columns: Sequence[Tensor]) -> None:
    """Write a PNG of ``columns`` [rows, 3, height, width], values 0..1, under their titles."""
    from PIL import Image, ImageDraw, ImageFont

    rows, _, height, width = columns[0].shape
    tile_height, tile_width = height * ZOOM, width * ZOOM
    size = (
        GAP + (tile_width + GAP) * len(columns),
        HEADER + GAP + (tile_height + GAP) * rows,
    )
    page = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=15)
    for i, (title, images) in enumerate(zip(titles, columns, strict=True)):
        left = GAP + i * (tile_width + GAP)
        draw.text((left + tile_width / 2, HEADER / 2 + 4), title, fill=INK, font=font, anchor="mm")
        for row, image in enumerate(images):
            pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
            tile = Image.fromarray(pixels.numpy()).resize(
                (tile_width, tile_height), Image.Resampling.NEAREST
            )
            page.paste(tile, (left, HEADER + GAP + row * (tile_height + GAP)))
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)
