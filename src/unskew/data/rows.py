"""A table of photographs as columns: what each row shows, whose it is, where it was taken, whether it is test.

Shapes: N rows.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Rows:
    """Photographs by their files. ``paths`` are below ``root``; ``labels`` number the classes."""

    root: Path
    paths: npt.NDArray[np.str_]  # [N]
    labels: npt.NDArray[np.int64]  # [N]
    classes: tuple[str, ...]
    test: npt.NDArray[np.bool_]  # [N]
    users: npt.NDArray[np.str_] | None = None  # [N]
    places: npt.NDArray[np.float64] | None = None  # [N, 2], latitude and longitude in degrees; NaN where unknown
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)
