"""Crops and flips of batches: the random draws are tensors made beforehand.

Shapes: B examples, [ch, H, W] one image; ``shift`` [B, 2] and ``flip`` [B] are one batch's draws.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.types import ImageSet

PAD = 4  # pixels of reflection on every side, as in MOON and its successors


def draw(generator: np.random.Generator, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Draw the upper left corners of crops, [count, 2] in 0..2·PAD, and flips [count]."""
    codes = generator.integers(0, (2 * PAD + 1) ** 2 * 2, count, dtype=np.uint8)
    corner, flip = np.divmod(codes, np.uint8(2))
    shift = np.stack(np.divmod(corner, np.uint8(2 * PAD + 1)), axis=1)
    return shift.astype(np.uint8), flip.astype(bool)


def crop_and_flip(images: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Reflect-pad by PAD, crop to the old size at ``shift``, mirror where ``flip``: one gather per batch."""
    count, channels, height, width = images.shape
    rows, columns = _sources(height, width, images.device)
    top, left = shift.long().unbind(1)
    side = columns.index_select(0, 2 * left + flip)
    source = rows.index_select(0, top)[:, :, None] + side[:, None, :]  # [B, H, W], indices into a flat image
    flat = images.reshape(count, channels, height * width)
    pixels = torch.gather(flat, 2, source.view(count, 1, -1).expand(-1, channels, -1))
    return pixels.view(count, channels, height, width)


@lru_cache(maxsize=4)
def _sources(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The source of each row [2·PAD+1, H] and column [2·(2·PAD+1), W] of a crop; columns plain, then mirrored."""
    padded = (np.pad(np.arange(size), PAD, mode="reflect") for size in (height, width))  # the border is not repeated
    windows = map(np.lib.stride_tricks.sliding_window_view, padded, (height, width))  # [2·PAD+1, size] each
    rows, columns = (torch.from_numpy(window.copy()) for window in windows)
    return (rows * width).to(device), torch.stack((columns, columns.flip(1)), 1).flatten(0, 1).to(device)


SCALE = (0.08, 1.0)  # the crop's share of the image's area
RATIO = (3 / 4, 4 / 3)  # its width divided by its height


def draw_crops(generator: np.random.Generator, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Draw boxes [count, 4] and flips [count] (Szegedy et al. 2015).

    A box is (top, left, height, width): height and width in units of √(H·W), top and left as fractions of the free
    space. The area is uniform, the ratio log-uniform.
    """
    area = generator.uniform(*SCALE, count)
    half = generator.uniform(math.log(RATIO[0]) / 2, math.log(RATIO[1]) / 2, count)  # half the ratio's logarithm
    sides = np.sqrt(area)[:, None] * np.exp(np.stack([-half, half], axis=1))
    box = np.concatenate([generator.random((count, 2)), sides], axis=1)
    return box.astype(np.float32), generator.random(count) < 0.5


def boxes(box: Tensor, height: int, width: int) -> Tensor:
    """int64 [B, 4], the boxes in pixels of an image of that size: top, left, height, width.

    A side longer than the image's is shortened to it; the other is then limited to the widest ratio.
    """
    size = torch.tensor([height, width], device=box.device)
    sides = (box[:, 2:] * math.sqrt(height * width)).round().long().clamp(min=1).minimum(size)
    if height != width:
        sides = sides.minimum((sides.flip(1) * RATIO[1]).round().long().clamp(min=1))
    corner = (box[:, :2] * (size - sides + 1)).long().minimum(size - sides)
    return torch.cat([corner, sides], dim=1)


def resized_crop(images: Tensor, box: Tensor, flip: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """float32 [B, ch, *size], values 0 to 255: crop, mirror where ``flip`` and resize, by default to the old size."""
    height, width = images.shape[2:]
    tall_out, wide_out = size or (height, width)
    top, left, tall, wide = boxes(box, height, width).float().unbind(1)
    rows = _sample_points(top, tall, tall_out)  # [B, tall_out]
    columns = _sample_points(left, wide, wide_out)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    across = ((2 * columns + 1) / width - 1)[:, None, :].expand(-1, tall_out, -1)
    down = ((2 * rows + 1) / height - 1)[:, :, None].expand(-1, -1, wide_out)
    grid = torch.stack([across, down], dim=3)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def _sample_points(start: Tensor, length: Tensor, size: int) -> Tensor:
    """[B, size], the source of each row or column, inside the crop."""
    step = (torch.arange(size, device=start.device) + 0.5) / size
    inside = step * length[:, None] - 0.5
    return start[:, None] + inside.clamp(min=0).minimum(length[:, None] - 1)


def resize_images(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """[B, ch, H, W] -> [B, *shape]: bilinear, with antialiasing if a side becomes shorter."""
    channels, height, width = shape
    if images.shape[2:] != (height, width):
        shorter = height < images.shape[2] or width < images.shape[3]
        images = F.interpolate(images, (height, width), mode="bilinear", align_corners=False, antialias=shorter)
    return images.expand(-1, channels, -1, -1) if images.shape[1] == 1 else images


DATA, HALF = "data", "half"
NORMALISED: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {  # mean and std of pixels in 0..1
    HALF: ((0.5,), (0.5,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # torchvision's networks
    "lite": ((127 / 255,) * 3, (128 / 255,) * 3),  # EfficientNet-Lite's: (x − 127) / 128
}
NAMES = (DATA, *NORMALISED)


def set_normalisation(images: ImageSet, name: str, channels: int) -> ImageSet:
    """The image set with the mean and std of that name, for a network with ``channels`` input channels."""
    mean, std = (images.mean, images.std) if name == DATA else NORMALISED[name]
    if len(mean) == 1:
        return replace(images, mean=mean * channels, std=std * channels)
    if name != DATA and channels != len(mean):
        raise UserError(f"--normalise {name} is for color images; these have {channels} channel; use --normalise data")
    return replace(images, mean=mean, std=std)
