"""Random resized crops for large images, on whole batches: the draws are made beforehand, applying them draws nothing.

A part of the image is cut out and scaled to the image's own size (bilinear), then perhaps mirrored. Pixels outside the
part do not matter, and there is no edge: a place beyond the part's outermost pixels has their value.

Shapes: B examples, [ch, H, W] one image; ``box`` [B, 4] and ``flip`` [B] are one batch's draws.

Reference: Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = (0.08, 1.0)  # the part's share of the image's area
RATIO = (3 / 4, 4 / 3)  # its width by its height, beside the image's own


def draw(generator: np.random.Generator, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """``count`` boxes [count, 4] in shares of the image, and flips [count].

    A box is (top, left, height, width): height and width are shares of the image's own, top and left of what is left
    over. The area is uniform, the ratio uniform in its logarithm; a side that would be longer than the image is the
    image's.
    """
    area = generator.uniform(*SCALE, count)
    half = generator.uniform(math.log(RATIO[0]) / 2, math.log(RATIO[1]) / 2, count)  # of the ratio's logarithm
    sides = np.sqrt(area)[:, None] * np.exp(np.stack([-half, half], axis=1))
    corner = generator.random((count, 2))
    box = np.concatenate([corner, np.minimum(sides, 1)], axis=1)
    return box.astype(np.float32), generator.random(count) < 0.5


def boxes(box: Tensor, height: int, width: int) -> Tensor:
    """int64 [B, 4], the boxes in whole pixels: top, left, height, width."""
    size = torch.tensor([height, width], device=box.device)
    sides = (box[:, 2:] * size).round().long().clamp(min=1).minimum(size)
    corner = (box[:, :2] * (size - sides + 1)).long().minimum(size - sides)
    return torch.cat([corner, sides], dim=1)


def resized_crop(images: Tensor, box: Tensor, flip: Tensor) -> Tensor:
    """float32 [B, ch, H, W], values 0 to 255: each image's part at its own size, mirrored where ``flip``."""
    height, width = images.shape[2:]
    top, left, tall, wide = boxes(box, height, width).float().unbind(1)
    rows = _places(top, tall, height)  # [B, H]
    columns = _places(left, wide, width)  # [B, W]
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    grid = torch.stack(
        [
            ((2 * columns + 1) / width - 1)[:, None, :].expand(-1, height, -1),
            ((2 * rows + 1) / height - 1)[:, :, None].expand(-1, -1, width),
        ],
        dim=3,
    )
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def _places(start: Tensor, length: Tensor, size: int) -> Tensor:
    """[B, size], where each row or column comes from: between the first and the last of the part."""
    step = (torch.arange(size, device=start.device) + 0.5) / size
    inside = step * length[:, None] - 0.5
    return start[:, None] + inside.clamp(min=0).minimum(length[:, None] - 1)
