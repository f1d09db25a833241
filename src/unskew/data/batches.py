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
from unskew.core.key import Key
from unskew.core.machine import physical_memory
from unskew.core.types import Local
from unskew.core.units import format_bytes
from unskew.data import augment
from unskew.data.resize import fitted


@dataclass(frozen=True)
class Plan:
    """``index`` [steps, B] holds example ids, −1 past the end of a short batch; draws as in augment, or None."""

    index: Tensor  # int64 [steps, batch]
    counts: tuple[int, ...]  # examples in each step
    shift: Tensor | None = None  # uint8 [steps, batch, 2]
    flip: Tensor | None = None  # bool [steps, batch]

    def to(self, device: torch.device) -> "Plan":
        """The same plan on that device: copied once a visit, not once a step."""
        moved = (None if draws is None else draws.to(device) for draws in (self.shift, self.flip))
        return Plan(self.index.to(device), self.counts, *moved)


@dataclass(frozen=True)
class Pixels:
    """Images in memory and how they are normalised: (x/255 − mean) / std.

    Floating point in the place of bytes is what a frozen part made of the images: it is given out as it is. Of each
    example there may be ``views`` more beside the plain one, made of augmented images: the draws then choose a view.
    """

    images: Tensor  # uint8 [N, ch, H, W], or floating point [N·(1 + views), ch, H, W]
    labels: Tensor  # int64 [N]
    scale: Tensor  # [1, ch, 1, 1]
    offset: Tensor  # [1, ch, 1, 1]
    size: tuple[int, int, int] | None = None  # [ch, H, W] that images are brought to; None: as they are

    @staticmethod
    def of(
        images: Tensor, labels: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype,
        size: tuple[int, int, int] | None = None,
    ) -> "Pixels":  # fmt: skip
        """Fold the constants into one multiplication and one addition."""
        mean, std = mean.double().view(1, -1, 1, 1), std.double().view(1, -1, 1, 1)
        same = size is None or images.is_floating_point() or tuple(images.shape[1:]) == size
        return Pixels(images, labels, (1 / (255 * std)).to(dtype), (-mean / std).to(dtype), None if same else size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[ch, H, W] of one image in a batch."""
        channels, height, width = self.size or self.images.shape[1:]
        return channels, height, width

    @property
    def stored(self) -> bool:
        """Whether these are no images but what a frozen part made of them."""
        return self.images.is_floating_point()

    def to(self, device: torch.device) -> "Pixels":
        """The same images on that device."""
        images, labels = self.images.to(device), self.labels.to(device)
        return Pixels(images, labels, self.scale.to(device), self.offset.to(device), self.size)

    def batch(self, index: Tensor, shift: Tensor | None = None, flip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The examples' normalised images [B, ch, H, W] and labels [B], on the device of the images."""
        index = index.to(self.images.device)
        if self.stored:
            return self._views(index, shift, flip).to(self.scale.dtype), self.labels.index_select(0, index)
        images = self.images.index_select(0, index)
        if shift is not None and flip is not None:
            images = augment.crop_and_flip(images, shift.to(images.device), flip.to(images.device))
        images = images.to(self.scale.dtype)
        if self.size is not None:
            normal = fitted(images, self.size).mul(self.scale).add_(self.offset)
        else:
            normal = images.mul_(self.scale).add_(self.offset)
        return normal, self.labels.index_select(0, index)

    def _views(self, index: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
        """The stored output for these examples: of the plain image, or of the view that the draws choose."""
        kept = len(self.images) // max(1, len(self.labels))  # the plain one and the views
        rows = index * kept
        if shift is not None and flip is not None and kept > 1:
            drawn = 2 * ((2 * augment.PAD + 1) * shift[:, 0].long() + shift[:, 1].long()) + flip.long()
            rows = rows + 1 + drawn.to(rows.device) % (kept - 1)
        return self.images.index_select(0, rows)


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
    shift, flip = augment.draw(key.fold("augment").numpy(), table.numel())
    return Plan(table, counts, torch.from_numpy(shift).view(-1, size, 2), torch.from_numpy(flip).view(-1, size))
