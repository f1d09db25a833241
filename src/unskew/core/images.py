"""Images and their labels: what a data set is.

Shapes: N images, [ch, H, W] one image, C classes.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Split:
    """Images and their labels, as they are in the files: bytes, not yet normalised."""

    images: npt.NDArray[np.uint8]  # [N, ch, H, W]
    labels: npt.NDArray[np.int64]  # [N], each in 0..C-1

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory: what is train, what is test, how its pixels are normalised.

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
