"""Images in the shape that a network takes: scaled to other sides, grey repeated as colour.

Shapes: B images [B, ch, H, W].
"""

import torch.nn.functional as F
from torch import Tensor


def fitted(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """[B, ch, H, W] -> [B, *shape]: bilinear, with antialiasing where a side becomes shorter."""
    channels, height, width = shape
    if images.shape[2:] != (height, width):
        shorter = height < images.shape[2] or width < images.shape[3]
        images = F.interpolate(images, (height, width), mode="bilinear", align_corners=False, antialias=shorter)
    return images.expand(-1, channels, -1, -1) if images.shape[1] == 1 else images
