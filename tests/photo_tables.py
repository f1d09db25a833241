"""A stranger's photographs for tests: pictures of differing sizes in folders, and a CSV that lists them."""

import csv
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from unskew.console.main import main
from unskew.core.errors import UserError
from unskew.data.photographs import silent
from unskew.data.sources import load

HEADER = ("path", "label", "user", "latitude", "longitude", "split")


def photograph(draw, kind, low=20, high=60):
    """A noisy picture of a random size whose colour and brightness tell its kind."""
    height, width = draw.integers(low, high, 2)
    pixels = draw.normal(90, 25, (height, width, 3))
    pixels[..., kind % 3] += 60
    pixels[: height // 2 if kind > 1 else height] += 20
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_table(folder, count=40, *, columns=HEADER, name="photos.csv", suffix="png", **sizes):
    """``folder/name`` and its pictures; every fifth is test."""
    draw = np.random.default_rng(7)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        kind = int(draw.integers(0, 3))
        path = f"pictures/{number}.{suffix}"
        photograph(draw, kind, **sizes).save(folder / path)
        place = draw.uniform(-80, 80), draw.uniform(-170, 170)
        user = f"user {draw.integers(0, 4)}"
        rows.append((path, ("ant", "bee", "cat")[kind], user, *place, "test" if number % 5 == 4 else "train"))
    return write_rows(folder / name, rows, columns)


def write_rows(path, rows, columns=HEADER):
    """A CSV of these columns; rows are as in HEADER."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(columns)
        lines.writerows([row[HEADER.index(column)] for column in columns] for row in rows)
    return path


def as_arrays(images, path):
    """The same pixels, labels and users as an .npz that ``arrays:`` reads."""
    owners = {} if images.users is None else {"users": images.users}
    np.savez(
        path, x_train=images.train.images[:].transpose(0, 2, 3, 1), y_train=images.train.labels,
        x_test=images.test.images[:].transpose(0, 2, 3, 1), y_test=images.test.labels, **owners,
    )  # fmt: skip
    return f"arrays:{path}"


def load_table(text, cache=None, say=silent):
    return load(f"table:{text}", None, cache, say)


def load_folder(text):
    return load(f"folder:{text}", None)


def load_arrays(text):
    return load(f"arrays:{text}", None)


def refused(read, *given):
    """The message, of one line, with which ``read`` refuses what it is given."""
    with pytest.raises(UserError, match=r"\A[^\n]+\Z") as caught:
        read(*given)
    return str(caught.value)


def hollow_png(side):
    """A PNG of a few bytes whose header claims that size."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def command(capsys, *words):
    """A command in this process: exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err
