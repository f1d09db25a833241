"""Rows as the CSV that ``table:FILE.csv`` reads: path, label, user, latitude, longitude, split."""

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unskew.data.rows import Rows


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
