"""Images and their labels: what a data set is.

Shapes: N images, [ch, H, W] one image, C classes.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


class StoredImages(Protocol):
    """Images that are read when asked for, instead of an array: as much like one as the rest of the package needs.

    Another process opens the same images from ``described``: a JSON text, and arrays of one entry for each image.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[N, ch, H, W]."""

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        """Bytes."""

    @property
    def nbytes(self) -> int:
        """What all of them would take in memory."""

    @property
    def sha256(self) -> str:
        """Of all pixels: the same on every machine, for the same images in the same order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> npt.NDArray[np.uint8]:
        """As of an array, along the first axis."""

    def take(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[B, ch, H, W], the images of these numbers."""

    def described(self) -> tuple[str, Arrays]:
        """How another process opens them."""


@dataclass(frozen=True)
class Split:
    """Images and their labels, as they are in the files: bytes, not yet normalised.

    What a frozen part of a network made of the images may be in their place: floating point.
    """

    images: npt.NDArray[Any] | StoredImages  # [N, ch, H, W]
    labels: npt.NDArray[np.int64]  # [N], each in 0..C-1
    rows: npt.NDArray[np.int64] | None = None  # [N], which of more images these are; None: all, in their order

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Examples:
    """The training examples without their images: all that a partition is made from."""

    labels: npt.NDArray[np.int64]  # [N]
    classes: tuple[str, ...]
    users: npt.NDArray[np.str_] | None = None  # [N]
    places: npt.NDArray[np.float64] | None = None  # [N, 2]


@dataclass(frozen=True)
class ImageSet:
    """A data set: what is train, what is test, how its pixels are normalised.

    ``mean`` and ``std`` are per channel, for pixels scaled to 0..1. ``augment`` says whether crops and flips
    leave a picture's class alone (a mirrored digit is not one). ``users`` names the owner of each training example,
    ``places`` says where it was taken, ``test_users`` names the owners of the test examples.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool = False
    users: npt.NDArray[np.str_] | None = None  # [N]
    notes: tuple[str, ...] = ()
    places: npt.NDArray[np.float64] | None = None  # [N, 2], latitude and longitude in degrees; NaN where unknown
    test_users: npt.NDArray[np.str_] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """[ch, H, W] of one image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def examples(self) -> Examples:
        """The training examples without their images."""
        return Examples(self.train.labels, self.classes, self.users, self.places)
