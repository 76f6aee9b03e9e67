"""Pairs of overlapping crops from the photographs that scikit-image ships."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PATCH = 8
GRID = 8  # patches along a side of a crop
CROP = PATCH * GRID
PIXELS = 3 * PATCH * PATCH  # values of a patch
MAX_SHIFT = 16  # pixels between the two views, along each axis
STEP = PATCH  # shifts are multiples of this: whole patches are quick to learn

# All of them are inside the scikit-image wheel: nothing is downloaded.
TRAINING = (
    "brick", "camera", "coffee", "coins", "grass", "hubble_deep_field", "immunohistochemistry",
    "retina", "rocket", "stereo_motorcycle",
)  # fmt: skip
HELD_OUT = ("astronaut", "chelsea")
TRAINING_SIDES = (112, 144, 192)  # shorter sides that the photographs are scaled to
HELD_OUT_SIDES = (128,)


class Pairs(NamedTuple):
    """Patches of two views and where the second lies in the first one's coordinates.

    Both views are in units of the second, the one that a model sees whole.
    """

    view_1: Tensor  # [B, GRID * GRID, PIXELS]
    view_2: Tensor
    shift: Tensor  # [B, 2], (y, x) in patches
    mean: Tensor  # [B, 1, 1] of view 2, in 0..1
    deviation: Tensor

    def to(self, device: torch.device) -> Pairs:
        return Pairs(*(x.to(device) for x in self))


def load(names: tuple[str, ...], sides: tuple[int, ...]) -> list[Tensor]:
    """Photographs [3, height, width] in 0..1, each at several sizes."""
    from skimage import data, transform

    scaled = []
    for name in names:
        pixels = getattr(data, name)()
        pixels = pixels[0] if isinstance(pixels, tuple) else pixels  # the left eye of a stereo pair
        image = torch.from_numpy(pixels).float() / 255
        image = image.expand(3, -1, -1) if image.dim() == 2 else image.permute(2, 0, 1)
        for side in sides:
            factor = side / min(image.shape[1:])
            size = (3, *(round(length * factor) for length in image.shape[1:]))
            pixels = transform.resize(image.numpy(), size, anti_aliasing=True)
            scaled.append(torch.from_numpy(pixels))
    return scaled


def sample(photographs: list[Tensor], count: int, generator: torch.Generator) -> Pairs:
    """Random pairs, mirrored half of the time."""
    view_1, view_2, shifts = [], [], []
    for _ in range(count):
        image = photographs[_integer(len(photographs), generator)]
        height, width = image.shape[1:]
        room = CROP + 2 * MAX_SHIFT
        y, x = (MAX_SHIFT + _integer(n - room + 1, generator) for n in (height, width))
        steps = MAX_SHIFT // STEP
        dy, dx = (STEP * (_integer(2 * steps + 1, generator) - steps) for _ in range(2))
        first = image[:, y : y + CROP, x : x + CROP]
        second = image[:, y + dy : y + dy + CROP, x + dx : x + dx + CROP]
        if _integer(2, generator):
            first, second, dx = first.flip(2), second.flip(2), -dx
        view_1.append(first)
        view_2.append(second)
        shifts.append((dy / PATCH, dx / PATCH))
    patches_1, patches_2 = to_patches(torch.stack(view_1)), to_patches(torch.stack(view_2))
    mean = patches_2.mean((1, 2), keepdim=True)
    deviation = patches_2.std((1, 2), keepdim=True) + 0.05  # flat crops stay flat
    patches_1, patches_2 = (patches_1 - mean) / deviation, (patches_2 - mean) / deviation
    return Pairs(patches_1, patches_2, torch.tensor(shifts), mean, deviation)


def to_patches(images: Tensor) -> Tensor:  # [B, 3, CROP, CROP] -> [B, GRID * GRID, PIXELS]
    tiles = images.unflatten(3, (GRID, PATCH)).unflatten(2, (GRID, PATCH))
    patches: Tensor = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return patches


def to_images(patches: Tensor) -> Tensor:  # [B, GRID * GRID, PIXELS] -> [B, 3, CROP, CROP]
    tiles = patches.unflatten(2, (3, PATCH, PATCH)).unflatten(1, (GRID, GRID))
    images: Tensor = tiles.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return images


def _integer(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))
