"""A visit's batches, drawn before training: the order of the examples and their augmentation.

Every engine uses the same plan, since it depends only on the visit's key.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import physical_memory
from unskew.core.types import ImageSet, Local, StoredImages
from unskew.core.units import format_bytes
from unskew.data import augment
from unskew.data.augment import resize_images

AUGMENTATIONS = (AUTO := "auto", SHIFT := "shift", RESIZED_CROP := "resized-crop")
LARGE = 64  # pixels: photographs with sides of at least this length are cropped and resized
BOX = 4  # numbers per draw of a resized crop

Images = Tensor | StoredImages
Shape = tuple[int, int, int]  # [ch, H, W]


@dataclass(frozen=True)
class Plan:
    """The examples of each step, −1 past the end of a short batch; augmentation draws as in augment, or None."""

    index: Tensor  # int64 [steps, batch]
    counts: tuple[int, ...]  # examples in each step
    shift: Tensor | None = None  # uint8 [steps, batch, 2], or float32 [steps, batch, 4]
    flip: Tensor | None = None  # bool [steps, batch]

    def to(self, device: torch.device) -> "Plan":
        """Copy the plan to that device, once per visit instead of once per step."""
        if self.index.device == device:
            return self
        copied = (None if draws is None else draws.to(device) for draws in (self.shift, self.flip))
        return Plan(self.index.to(device), self.counts, *copied)

    def row(self, step: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The examples of a step, and their draws."""
        count = self.counts[step]
        shift, flip = (None if draws is None else draws[step, :count] for draws in (self.shift, self.flip))
        return self.index[step, :count], shift, flip


@dataclass(frozen=True)
class Pixels:
    """Images, in memory or read on demand, and their normalisation: (x/255 − mean) / std.

    Floating-point entries are the output of a network's frozen part, of the plain image and of augmented ``views``.
    """

    images: Images  # uint8 [N, ch, H, W], or floating point [N·(1 + views), ch, H, W]
    labels: Tensor  # int64 [N]
    scale: Tensor  # [1, ch, 1, 1]
    offset: Tensor  # [1, ch, 1, 1]
    size: Shape | None = None  # [ch, H, W] that images are resized to; None: not resized
    per_example: int = 1  # entries of ``images`` per example: the plain one and its views
    rows: Tensor | None = None  # int64 [N], the examples that belong here; None: all

    @staticmethod
    def of(
        images: Images, labels: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype, size: Shape | None = None
    ) -> "Pixels":
        """Fold the constants into one multiplication and one addition."""
        mean, std = mean.double().view(1, -1, 1, 1), std.double().view(1, -1, 1, 1)
        same = size is None or _floating(images) or tuple(images.shape[1:]) == size
        scale, offset = (1 / (255 * std)).to(dtype), (-mean / std).to(dtype)
        per_example = len(images) // max(1, len(labels))
        return Pixels(images, labels, scale, offset, None if same else size, per_example)

    def select(self, rows: Tensor) -> "Pixels":
        """Only these examples; the images are not copied."""
        return replace(self, labels=self.labels.index_select(0, rows), rows=rows)

    @property
    def shape(self) -> Shape:
        """[ch, H, W] of one image in a batch."""
        channels, height, width = self.size or self.images.shape[1:]
        return channels, height, width

    @property
    def stored(self) -> bool:
        """Whether these are outputs of a frozen part, not images."""
        return _floating(self.images)

    def to(self, device: torch.device) -> "Pixels":
        """Copy the images to that device; those that are read on demand are copied batch by batch."""
        images = self.images.to(device) if isinstance(self.images, Tensor) else self.images
        labels, scale, offset = (value.to(device) for value in (self.labels, self.scale, self.offset))
        rows = None if self.rows is None else self.rows.to(device)
        return replace(self, images=images, labels=labels, scale=scale, offset=offset, rows=rows)

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self.labels.device

    def take(self, index: Tensor) -> Tensor:
        """[B, ch, H, W], entries of ``images``, not normalised; ``index`` is on the device."""
        if isinstance(self.images, Tensor):
            return self.images.index_select(0, index)
        return torch.from_numpy(self.images.take(index.cpu().numpy())).to(self.device)

    def batch(self, index: Tensor, shift: Tensor | None = None, flip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The examples' normalised images [B, ch, H, W] and labels [B], on the device."""
        index = index.to(self.device)
        labels = self.labels.index_select(0, index)
        index = index if self.rows is None else self.rows.index_select(0, index)
        if self.stored:
            return self._views(index, shift, flip).to(self.scale.dtype), labels
        if shift is None or flip is None:
            images = self.take(index)
        elif shift.shape[-1] != BOX:
            images = augment.crop_and_flip(self.take(index), shift.to(self.device), flip.to(self.device))
        elif isinstance(self.images, Tensor):
            images = augment.resized_crop(self.take(index), shift.to(self.device), flip.to(self.device))
        else:
            images = _crop_photographs(self.images, index.cpu(), shift.cpu(), flip.cpu()).to(self.device)
        images = images.to(self.scale.dtype)
        if self.size is not None:
            return resize_images(images, self.size).mul(self.scale).add_(self.offset), labels
        return images.mul_(self.scale).add_(self.offset), labels

    def _views(self, index: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
        rows, views = index * self.per_example, self.per_example - 1
        if shift is not None and flip is not None and views:
            if shift.shape[-1] == BOX:
                chosen = (shift[:, 0].double() * views).long().clamp(max=views - 1)
            else:
                chosen = (2 * ((2 * augment.PAD + 1) * shift[:, 0].long() + shift[:, 1].long()) + flip.long()) % views
            rows = rows + 1 + chosen.to(rows.device)
        return self.take(rows)


def _crop_photographs(images: StoredImages, index: Tensor, box: Tensor, flip: Tensor) -> Tensor:
    """float32 [B, ch, H, W], crops of uncropped photographs, one by one because their sizes differ."""
    _, channels, height, width = images.shape
    crops = torch.empty(len(index), channels, height, width)
    for row, pixels in enumerate(images.whole(index.numpy())):
        one = slice(row, row + 1)
        crops[one] = augment.resized_crop(torch.from_numpy(pixels)[None], box[one], flip[one], (height, width))
    return crops


def _floating(images: Images) -> bool:
    return isinstance(images, Tensor) and images.is_floating_point()


def draw_augmentation(augmentation: str, generator: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Draw shifts [count, 2] or boxes [count, 4], and flips [count]."""
    crops, flip = (augment.draw_crops if augmentation == RESIZED_CROP else augment.draw)(generator, count)
    return torch.from_numpy(crops), torch.from_numpy(flip)


def choose_augmentation(augmentation: str, images: ImageSet) -> str:
    """Resolve ``auto``: resized crops for large photographs, shifts by a few pixels otherwise."""
    if augmentation != AUTO:
        return augmentation
    stored = not isinstance(images.train.images, np.ndarray)
    return RESIZED_CROP if stored and min(images.shape[1:]) >= LARGE else SHIFT


def steps_for(examples: int, local: Local) -> int:
    """The number of steps in a visit with ``examples`` examples."""
    if local.steps is not None:
        return local.steps if examples else 0
    return local.epochs * -(-examples // local.batch)


def examples_for(examples: int, local: Local) -> int:
    """How many examples a visit with ``examples`` examples processes, counting repetitions."""
    if local.steps is None:
        return local.epochs * examples
    passes, rest = divmod(steps_for(examples, local), max(1, -(-examples // local.batch)))
    return passes * examples + min(rest * local.batch, examples)


def visit_bytes(examples: int, local: Local, shape: tuple[int, int, int]) -> int:
    """What a visit's plan and its largest batch take in memory."""
    planned = 11 * examples_for(examples, local) + 8 * steps_for(examples, local) + 12 * examples
    return planned + 5 * math.prod(shape) * min(local.batch, examples)  # as bytes, and as float32


def check_visit(examples: int, local: Local, shape: tuple[int, int, int]) -> None:
    """Reject a visit whose plan and largest batch do not fit in memory."""
    needed, most = visit_bytes(examples, local, shape), physical_memory() / 2
    if needed > most:
        length = f"epochs {local.epochs:,}" if local.steps is None else f"steps {local.steps:,}"
        visit = f"a visit of {examples:,} examples with {length} and batch {local.batch:,}"
        excess = f"{format_bytes(needed)} of memory before training, more than the limit of {format_bytes(most)}"
        raise UserError(f"{visit} needs {excess}; give fewer {length.split()[0]} or a smaller batch")


def plan(examples: npt.NDArray[np.int32], take: int | None, local: Local, key: Key) -> Plan:
    """Draw a permutation per epoch and cut it into batches, the last one short, until all epochs or steps are filled.

    ``take`` first draws that many examples, with replacement if the client has fewer.
    """
    generator = key.fold("plan").numpy()
    if take is not None:
        examples = generator.choice(examples, take, replace=take > len(examples))
    count = len(examples)
    size = max(1, min(local.batch, count))
    per_epoch = -(-count // size)
    steps = steps_for(count, local)
    epochs = -(-steps // max(1, per_epoch))
    index = np.full((epochs, per_epoch * size), -1, np.int64)
    for epoch in range(epochs):
        index[epoch, :count] = generator.permutation(examples)
    last = count - (per_epoch - 1) * size
    counts = (((size,) * (per_epoch - 1) + (last,)) * epochs)[:steps]
    table = torch.from_numpy(index.reshape(-1, size)[:steps])
    if not local.augment or not count:
        return Plan(table, counts)
    shift, flip = draw_augmentation(local.augmentation, key.fold("augment").numpy(), table.numel())
    return Plan(table, counts, shift.view(-1, size, shift.shape[1]), flip.view(-1, size))
