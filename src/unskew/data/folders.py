"""Reads ``folder:DIR``: a user's own pictures, one folder for each class.

Where there is no test folder, every fifth picture of each class is test, and the set's notes say so.
"""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_memory, check_plain, check_unpacked, is_folder, size_on_disk, user_path
from unskew.core.text import cut
from unskew.core.types import ImageSet, Split
from unskew.data.arrays import DAMAGE, measure
from unskew.data.decode import DEEP, GREY, flat, square

TESTS = ("test", "val", "valid", "validation")  # the first that is there
_IGNORED = {"thumbs.db", "desktop.ini"}
_UNREADABLE = (*DAMAGE, MemoryError)

Classes = dict[str, list[Path]]  # the files of each class


def load_folder(text: str) -> ImageSet:
    """``DIR`` or ``DIR?size=64``: a folder for each class, perhaps inside train/ and test/; decoded as they are.

    Pictures must have one size, or ``size`` scales the shorter side to it (bilinear) and crops the centre.
    Grey if all pictures are grey, RGB otherwise; transparency is dropped; EXIF rotation is not applied.
    """
    directory, size = _parse(text)
    train, test, notes = _list_files(directory)
    if size is not None:
        notes = [*notes, f"pictures are scaled and cropped to {size}×{size}"]
    classes = tuple(train)
    files = [[(path, k) for k, c in enumerate(classes) for path in part.get(c, [])] for part in (train, test)]
    grey, shape = _survey_files([path for part in files for path, _ in part], directory, size)
    splits = [_decode(part, shape, size, "L" if grey else "RGB") for part in files]
    mean, std = measure(splits[0].images)
    return ImageSet(f"folder:{text}", classes, splits[0], splits[1], mean, std, notes=tuple(notes))


def _parse(text: str) -> tuple[Path, int | None]:
    name, asked, query = text.partition("?size=")
    shown = cut(text)
    if asked and not (query.isascii() and query.isdigit() and 1 <= int(query[:6]) <= 4096):
        raise UserError(f"folder:{shown}: size={cut(query)} is not a size; give 1 to 4096, as in ?size=64")
    directory = user_path(name)
    if not name or not is_folder(directory):
        raise UserError(f"folder:{shown}: {brief(name)} is not a folder; give one that has a folder for each class")
    return directory, int(query) if asked else None


def _visible(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror or error}; check its rights") from error
    return [p for p in entries if not p.name.startswith(".") and p.name.lower() not in _IGNORED]


def _list_files(directory: Path) -> tuple[Classes, Classes, list[str]]:
    """The files of each class for train and for test, and notes on how that was decided."""
    entries = {p.name: p for p in _visible(directory)}
    if "train" not in entries or not entries["train"].is_dir():
        train, test, notes = _list_classes(directory), {}, _beside(directory)
    else:
        held = next((t for t in TESTS if t in entries and entries[t].is_dir()), None)
        train, test = _list_classes(entries["train"]), _list_classes(entries[held]) if held else {}
        unread = [name for name in entries if name not in ("train", held)]
        notes = [f"not read, beside train: {', '.join(unread[:9])}"] if unread else []
        notes += [note for part in ("train", held) if part for note in _beside(entries[part])]
        strange = sorted(set(test) - set(train))
        if held and strange:
            raise UserError(f"{entries[held] / strange[0]}: train has no such class; add it there or remove it here")
    if test:
        return train, test, notes
    if all(len(files) < 5 for files in train.values()):
        raise UserError(f"{directory}: no class has five pictures, none is left for test; add test/")
    kept = {c: [p for i, p in enumerate(files) if i % 5 != 4] for c, files in train.items()}
    notes += ["every fifth picture of each class, by name, is test: the folder has no test part"]
    return kept, {c: files[4::5] for c, files in train.items()}, notes


def _beside(directory: Path) -> list[str]:
    loose = [p.name for p in _visible(directory) if not p.is_dir()]
    return [f"not read, beside the classes of {directory.name}: {', '.join(loose[:9])}"] if loose else []


def _list_classes(directory: Path) -> Classes:
    classes = {p.name: _visible(p) for p in _visible(directory) if p.is_dir()}
    if not classes:
        raise UserError(f"{directory} has no folders; put each class's pictures in a folder of its name")
    for name, files in classes.items():
        if not files:
            raise UserError(f"{directory / name} is empty; put pictures there or remove the folder")
        inner = next((p for p in files if p.is_dir()), None)
        if inner is not None:
            raise UserError(
                f"{inner} is a folder inside a class folder; wanted: DIR/CLASS/picture, "
                "or DIR/train/CLASS/picture and DIR/test/CLASS/picture"
            )
    return classes


def _open(path: Path) -> Image.Image:
    check_plain(path)
    try:
        with warnings.catch_warnings():  # how large pictures may be is decided for all of them together
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(path)
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UserError(f"{path} claims more than {most:,} pixels; scale it down, or remove it") from error
    except _UNREADABLE as error:
        raise UserError(f"{path} is not a picture ({type(error).__name__}); remove or replace it") from error


def _survey_files(files: list[Path], directory: Path, size: int | None) -> tuple[bool, tuple[int, int]]:
    """Whether all pictures are grey, and their [H, W]; only the files' headers are read.

    What all of them unpack to is bounded by what they take on disk, before the first is decoded.
    """
    grey, pixels = True, 0
    first: dict[tuple[int, int], Path] = {}  # of each size
    for path in files:
        with _open(path) as picture:
            pixels += picture.size[0] * picture.size[1]
            if picture.mode.startswith(DEEP):
                raise UserError(f"{path} has more than 8 bits a pixel ({picture.mode}); save it with 8")
            grey = grey and picture.mode in GREY
            first.setdefault(picture.size, path)
    channels, name = 1 if grey else 3, f"folder:{directory}"
    if size is not None:
        check_unpacked(pixels * channels, size_on_disk(files), name, at_once=False)
        check_memory(len(files) * channels * size**2, f"{name}?size={size}", "give a smaller size, or fewer pictures")
        return grey, (size, size)
    if len(first) > 1:
        (a, here), (b, there) = list(first.items())[:2]
        raise UserError(
            f"pictures must have one size: {here} is {a[0]}×{a[1]}, {there} is {b[0]}×{b[1]}; "
            f"folder:{directory}?size=64 scales and crops all to 64×64"
        )
    check_unpacked(pixels * channels, size_on_disk(files), name)
    ((width, height),) = first
    return grey, (height, width)


def _decode(files: list[tuple[Path, int]], shape: tuple[int, int], size: int | None, mode: str) -> Split:
    """Decode one picture after another into its place."""
    images = np.empty((len(files), len(mode), *shape), np.uint8)
    for image, (path, _) in zip(images, files, strict=True):
        with _open(path) as picture:
            try:
                plain = flat(picture, mode)
            except _UNREADABLE as error:
                raise UserError(f"{path} is damaged ({error}); replace or remove it") from error
        pixels = np.asarray(plain if size is None else square(plain, size))
        image[:] = pixels if mode == "L" else pixels.transpose(2, 0, 1)
    return Split(images, np.array([label for _, label in files], np.int64))
