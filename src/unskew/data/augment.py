"""Crops and flips on whole batches: the draws are tensors made beforehand, applying them draws nothing.

Shapes: B examples, [ch, H, W] one image; ``shift`` [B, 2] and ``flip`` [B] are one batch's draws.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PAD = 4  # pixels of reflection on every side, as in the MOON line of work


def draw(generator: np.random.Generator, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """``count`` crops' upper left corners [count, 2] in 0..2·PAD and flips [count]."""
    codes = generator.integers(0, (2 * PAD + 1) ** 2 * 2, count, dtype=np.uint8)
    corner, flip = np.divmod(codes, np.uint8(2))
    shift = np.stack(np.divmod(corner, np.uint8(2 * PAD + 1)), axis=1)
    return shift.astype(np.uint8), flip.astype(bool)


def crop_and_flip(images: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Reflect-pad by PAD, crop to the old size at ``shift``, mirror where ``flip``: one gather for the whole batch."""
    count, channels, height, width = images.shape
    rows, columns = _sources(height, width, images.device)
    top, left = shift.long().unbind(1)
    side = columns.index_select(0, 2 * left + flip)
    source = rows.index_select(0, top)[:, :, None] + side[:, None, :]  # [B, H, W], places in a flat image
    flat = images.reshape(count, channels, height * width)
    taken = torch.gather(flat, 2, source.view(count, 1, -1).expand(-1, channels, -1))
    return taken.view(count, channels, height, width)


@lru_cache(maxsize=4)
def _sources(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each row [2·PAD+1, H] and column [2·(2·PAD+1), W] of a crop comes from; columns plain, then mirrored."""
    corners = torch.arange(2 * PAD + 1)[:, None] - PAD
    rows = _reflected(torch.arange(height) + corners, height) * width
    columns = _reflected(torch.arange(width) + corners, width)
    return rows.to(device), torch.stack((columns, columns.flip(1)), 1).flatten(0, 1).to(device)


def _reflected(place: Tensor, size: int) -> Tensor:
    """Places outside 0..size-1 mirrored back in, without repeating the border; a side of one pixel has only itself."""
    if size == 1:
        return torch.zeros_like(place)
    period = 2 * (size - 1)
    folded = place.remainder(period)
    return torch.where(folded < size, folded, period - folded)
