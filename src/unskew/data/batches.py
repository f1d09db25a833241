"""A visit's batches, made before any training: which examples in which order, and what augmentation does to them.

Every engine sees the same plan, since it is drawn from the visit's key alone.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.images import StoredImages
from unskew.core.key import Key
from unskew.core.machine import physical_memory
from unskew.core.types import ImageSet, Local
from unskew.core.units import format_bytes
from unskew.data import augment, augment_crop

AUGMENTATIONS = (AUTO := "auto", SHIFT := "shift", RESIZED_CROP := "resized-crop")
LARGE = 64  # pixels: images of a table with sides of this length or more are cropped and resized
BOX = 4  # numbers in the draws of a resized crop


@dataclass(frozen=True)
class Plan:
    """``index`` [steps, B] holds example ids, −1 past the end of a short batch; draws as in augment, or None.

    ``shift`` has a crop's corner, or a box with four numbers as in augment_crop.
    """

    index: Tensor  # int64 [steps, batch]
    counts: tuple[int, ...]  # examples in each step
    shift: Tensor | None = None  # uint8 [steps, batch, 2], or float32 [steps, batch, 4]
    flip: Tensor | None = None  # bool [steps, batch]

    def to(self, device: torch.device) -> "Plan":
        """The same plan on that device: copied once a visit, not once a step."""
        moved = (None if draws is None else draws.to(device) for draws in (self.shift, self.flip))
        return Plan(self.index.to(device), self.counts, *moved)


@dataclass(frozen=True)
class Pixels:
    """Images, in memory or read when asked for, and how they are normalised: (x/255 − mean) / std."""

    images: Tensor | StoredImages  # uint8 [N, ch, H, W]
    labels: Tensor  # int64 [N]
    scale: Tensor  # [1, ch, 1, 1]
    offset: Tensor  # [1, ch, 1, 1]

    @staticmethod
    def of(images: Tensor | StoredImages, labels: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> "Pixels":
        """Fold the constants into one multiplication and one addition."""
        mean, std = mean.double().view(1, -1, 1, 1), std.double().view(1, -1, 1, 1)
        return Pixels(images, labels, (1 / (255 * std)).to(dtype), (-mean / std).to(dtype))

    def to(self, device: torch.device) -> "Pixels":
        """The same images on that device; those that are read when asked for go there batch by batch."""
        images = self.images.to(device) if isinstance(self.images, Tensor) else self.images
        return Pixels(images, *(value.to(device) for value in (self.labels, self.scale, self.offset)))

    @property
    def device(self) -> torch.device:
        """Where its batches are."""
        return self.labels.device

    def taken(self, index: Tensor) -> Tensor:
        """uint8 [B, ch, H, W], the examples' images as they are; ``index`` is on the device."""
        if isinstance(self.images, Tensor):
            return self.images.index_select(0, index)
        return torch.from_numpy(self.images.take(index.cpu().numpy())).to(self.device)

    def batch(self, index: Tensor, shift: Tensor | None = None, flip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The examples' normalised images [B, ch, H, W] and labels [B], on the device of the images."""
        index = index.to(self.device)
        images = self.taken(index)
        if shift is not None and flip is not None:
            crop = augment_crop.resized_crop if shift.shape[-1] == BOX else augment.crop_and_flip
            images = crop(images, shift.to(images.device), flip.to(images.device))
        normal = images.to(self.scale.dtype).mul_(self.scale).add_(self.offset)
        return normal, self.labels.index_select(0, index)


def suited(augmentation: str, images: ImageSet) -> str:
    """``auto`` resolved: resized crops for large photographs of a table, shifts by a few pixels for all else."""
    if augmentation != AUTO:
        return augmentation
    stored = not isinstance(images.train.images, np.ndarray)
    return RESIZED_CROP if stored and min(images.shape[1:]) >= LARGE else SHIFT


def steps_for(examples: int, local: Local) -> int:
    """How many steps a visit with that number of examples takes."""
    return local.epochs * -(-examples // local.batch)


def check_visit(examples: int, local: Local, shape: tuple[int, int, int]) -> None:
    """Refuse a visit whose plan or whose largest batch cannot be in memory, before any is made."""
    planned = 11 * local.epochs * examples + 8 * steps_for(examples, local) + 12 * examples
    batch = 5 * math.prod(shape) * min(local.batch, examples)  # as bytes, and as float32
    needed, most = planned + batch, physical_memory() / 2
    if needed > most:
        raise UserError(
            f"a visit of {examples:,} examples with epochs {local.epochs:,} and batch {local.batch:,} takes "
            f"{format_bytes(needed)} of memory before it trains, and {format_bytes(most)} is the limit; give less"
        )


def plan(examples: npt.NDArray[np.int32], take: int | None, local: Local, key: Key) -> Plan:
    """Each epoch a new permutation cut into batches, the last one short; ``take`` first draws that many examples.

    A client that holds fewer than ``take`` draws with replacement, any other without.
    """
    generator = key.fold("plan").numpy()
    if take is not None:
        examples = generator.choice(examples, take, replace=take > len(examples))
    held = len(examples)
    size = max(1, min(local.batch, held))  # a batch larger than the client is the client
    per_epoch = -(-held // size)
    index = np.full((local.epochs, per_epoch * size), -1, np.int64)
    for epoch in range(local.epochs):
        index[epoch, :held] = generator.permutation(examples)
    last = held - (per_epoch - 1) * size
    counts = ((size,) * (per_epoch - 1) + (last,)) * local.epochs if held else ()
    table = torch.from_numpy(index.reshape(-1, size))
    if not local.augment or not held:
        return Plan(table, counts)
    draw = augment_crop.draw if local.augmentation == RESIZED_CROP else augment.draw
    shift, flip = draw(key.fold("augment").numpy(), table.numel())
    drawn = torch.from_numpy(shift).view(-1, size, shift.shape[1])
    return Plan(table, counts, drawn, torch.from_numpy(flip).view(-1, size))
