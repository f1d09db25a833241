"""Sets that are distributed as folders of pictures, as rows: CINIC-10, Tiny-ImageNet, Omniglot.

Only pictures count, by the ending of their names; other files beside them are left alone.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unskew.core.errors import UserError, brief
from unskew.core.limits import read_plain
from unskew.data.rows import Rows

PICTURES = (".png", ".jpg", ".jpeg")


def cinic10_rows(folder: Path, *, valid: str = "out") -> Rows:
    """CINIC-10: train and test; ``valid="train"`` adds the validation images to the training images.

    90,000 images each, in folders of CIFAR-10's class names (Darlow et al. 2018).
    """
    if valid not in ("out", "train"):
        raise ValueError(f"cinic10?valid={valid}: give out (they are left out) or train (they are training images too)")
    classes = _folders(folder / "train")
    parts = ["train", *["valid"] * (valid == "train"), "test"]
    listed: list[tuple[str, int, bool]] = []
    for part in parts:
        for label, name in enumerate(classes):
            listed += [(path, label, part == "test") for path in _pictures(folder, f"{part}/{name}")]
    notes = ("the validation images are training images too",) if valid == "train" else ()
    return _rows(folder, listed, classes, notes=notes)


def tiny_imagenet_rows(folder: Path) -> Rows:
    """Tiny-ImageNet: 100,000 training images of 200 classes; its 10,000 validation images are test, as usual.

    The labels of its own test images were not published. Classes are in the order of wnids.txt, named by words.txt.
    """
    ids = [line.strip() for line in _lines(folder / "wnids.txt") if line.strip()]
    words = dict(line.split("\t", 1) for line in _lines(folder / "words.txt") if "\t" in line)
    first = [words.get(each, each).split(",")[0].strip() for each in ids]
    names = [f"{name} ({wnid})" if first.count(name) > 1 else name for name, wnid in zip(first, ids, strict=True)]
    label = {wnid: at for at, wnid in enumerate(ids)}
    listed = [(path, at, False) for wnid, at in label.items() for path in _pictures(folder, f"train/{wnid}/images")]
    annotations = folder / "val" / "val_annotations.txt"
    for number, line in enumerate(_lines(annotations), 1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in label or "/" in fields[0] or not fields[0].lower().endswith(PICTURES):
            raise UserError(f"{annotations}, line {number}: {brief(line)} is not a picture and one of the classes")
        listed.append((f"val/images/{fields[0]}", label[fields[1]], True))
    notes = ("test: the validation images, whose labels were published",)
    return _rows(folder, listed, names, notes=notes)


def omniglot_rows(folder: Path, *, part: str = "background") -> Rows:
    """Omniglot: characters are classes, drawers users; ``part`` is background, evaluation or all (Lake et al. 2015).

    Every character was drawn by 20 people, named by the number at the end of the file's name; they are the same people
    within an alphabet, so a user is an alphabet and a number. Users 5, 10, 15 and 20 of each alphabet are test.
    """
    if part not in ("background", "evaluation", "all"):
        raise ValueError(f"omniglot?part={part}: give background, evaluation or all")
    classes: list[str] = []
    listed: list[tuple[str, int, bool]] = []
    users: list[str] = []
    for held in ("background", "evaluation") if part == "all" else (part,):
        for alphabet in _folders(folder / f"images_{held}"):
            for character in _folders(folder / f"images_{held}" / alphabet):
                for path in _pictures(folder, f"images_{held}/{alphabet}/{character}"):
                    drawer = Path(path).stem.rpartition("_")[2]
                    if not (drawer.isascii() and drawer.isdigit() and len(drawer) < 4):
                        raise UserError(f"{folder / path}: its name must end with its drawer's number, as 0001_07.png")
                    listed.append((path, len(classes), int(drawer) % 5 == 0))
                    users.append(f"{alphabet} {int(drawer)}")
                classes.append(f"{alphabet}/{character}")
    notes = ("every fifth drawer of each alphabet is test: Omniglot has no split of its examples",)
    return _rows(folder, listed, classes, users, notes)


def _rows(
    folder: Path,
    listed: Sequence[tuple[str, int, bool]],
    classes: Sequence[str],
    users: Sequence[str] | None = None,
    notes: tuple[str, ...] = (),
) -> Rows:
    paths, labels, test = (list(column) for column in zip(*listed, strict=True))
    return Rows(
        folder, np.array(paths, np.str_), np.array(labels, np.int64), tuple(classes), np.array(test, np.bool_),
        None if users is None else np.array(users, np.str_), notes=notes,
    )  # fmt: skip


def _folders(directory: Path) -> list[str]:
    """The names of the folders in a folder, sorted."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(each.name for each in entries if each.is_dir() and not each.name.startswith("."))
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror or error}; unpack the whole set there") from error
    if not names:
        raise UserError(f"{directory} has no folders; unpack the whole set there")
    return names


def _pictures(root: Path, below: str) -> list[str]:
    """The pictures in a folder, sorted, as paths below ``root``."""
    directory = root / below
    try:
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.name.lower().endswith(PICTURES) and not e.name.startswith("."))
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror or error}; unpack the whole set there") from error
    if not names:
        raise UserError(f"{directory} has no pictures; unpack the whole set there")
    return [f"{below}/{name}" for name in names]


def _lines(path: Path) -> list[str]:
    try:
        return read_plain(path).decode("utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; unpack the whole set there") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text in UTF-8; unpack the set again") from error
