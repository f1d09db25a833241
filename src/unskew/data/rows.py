"""A table of photographs as columns: what each row shows, whose it is, where it was taken, whether it is test.

Shapes: N rows.
"""

import csv
import io
import os
from collections.abc import Iterator
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


def table_csv(rows: Rows, out: Path) -> bytes:
    """The table; paths in it are relative to the folder of ``out``, so that both can be moved together."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_lines(rows, out))
    return text.getvalue().encode()


def _lines(rows: Rows, out: Path) -> Iterator[list[str]]:
    """The header, then the rows; a place that is not known is empty."""
    users, places = rows.users is not None, rows.places is not None
    header = ["path", "label", *["user"] * users, *["latitude", "longitude"] * places, "split"]
    yield header
    root = os.path.relpath(rows.root.resolve(), out.resolve().parent)
    before = "" if root == os.curdir else f"{root}/"
    for at, (path, label, test) in enumerate(zip(rows.paths, rows.labels.tolist(), rows.test.tolist(), strict=True)):
        line = [f"{before}{path}", rows.classes[label]]
        if rows.users is not None:
            line.append(str(rows.users[at]))
        if rows.places is not None:
            line += ["" if np.isnan(degrees) else repr(degrees) for degrees in rows.places[at].tolist()]
        yield [*line, "test" if test else "train"]
