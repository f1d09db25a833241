"""Reads a user's own pictures: ``folder:DIR`` with one folder a class, and ``arrays:FILE.npz``.

Both measure their normalisation from the training images. Where there is no test part, every fifth example is
test, and the set's notes say so. Shapes: N images [N, ch, H, W], bytes.
"""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from unskew.core.errors import UserError
from unskew.core.types import ImageSet, Split
from unskew.data.binary import Images

TESTS = ("test", "val", "valid", "validation")  # the first that is there
_IGNORED = {"thumbs.db", "desktop.ini"}
_GREY = {"1", "L", "LA", "La"}
_DEEP = ("I", "F")  # more than 8 bits a pixel, also "I;16"
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, OverflowError, struct.error)
_UNREADABLE = (*_DAMAGE, Image.DecompressionBombError)
_KEYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_KNOWN = {*_KEYS[0], *_KEYS[1], "users", "classes"}
_CLASSES = 1_000_000  # more than any image set has: a label beyond it is no class number
_CHUNK = 1024

Array = npt.NDArray[Any]
Numbers = tuple[float, ...]
Classes = dict[str, list[Path]]  # the files of each class


def measure(images: Images) -> tuple[Numbers, Numbers]:
    """Each channel's mean and standard deviation for pixels scaled to 0..1, exact: their values are counted.

    A deviation below one grey level counts as one, so that a constant channel does not divide by zero.
    """
    counts = np.zeros((images.shape[1], 256), np.int64)
    for start in range(0, len(images), _CHUNK):
        for channel, row in enumerate(counts):
            row += np.bincount(images[start : start + _CHUNK, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values  # [ch]
    std = np.sqrt((share * (values - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.maximum(std, 1 / 255).tolist())


def fifth(count: int) -> npt.NDArray[np.bool_]:
    """True for every fifth of ``count`` examples, those that serve as test."""
    return np.equal(np.arange(count) % 5, 4)


def load_folder(text: str) -> ImageSet:
    """``DIR`` or ``DIR?size=64``: a folder a class, perhaps inside train/ and test/; decoded as they lie.

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
    if asked and not (query.isascii() and query.isdigit() and 1 <= int(query[:6]) <= 4096):
        raise UserError(f"folder:{text}: size={query} is no size; give 1 to 4096, as in ?size=64")
    directory = Path(name).expanduser()
    if not name or not directory.is_dir():
        raise UserError(f"folder:{text}: {name!r} is not a folder; give one that holds a folder a class")
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
    found = {p.name: _visible(p) for p in _visible(directory) if p.is_dir()}
    if not found:
        raise UserError(f"{directory} holds no folders; put each class's pictures in a folder of its name")
    for name, files in found.items():
        if not files:
            raise UserError(f"{directory / name} is empty; put pictures there or remove the folder")
        inner = next((p for p in files if p.is_dir()), None)
        if inner is not None:
            raise UserError(
                f"{inner} is a folder inside a class folder; wanted: DIR/CLASS/picture, "
                "or DIR/train/CLASS/picture and DIR/test/CLASS/picture"
            )
    return found


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except _UNREADABLE as error:
        raise UserError(f"{path} is no picture ({type(error).__name__}); remove or replace it") from error


def _survey_files(files: list[Path], directory: Path, size: int | None) -> tuple[bool, tuple[int, int]]:
    """Whether all pictures are grey, and their [H, W]; only the files' headers are read."""
    grey = True
    first: dict[tuple[int, int], Path] = {}  # of each size
    for path in files:
        with _open(path) as picture:
            if picture.mode.startswith(_DEEP):
                raise UserError(f"{path} has more than 8 bits a pixel ({picture.mode}); save it with 8")
            grey = grey and picture.mode in _GREY
            first.setdefault(picture.size, path)
    if size is not None:
        return grey, (size, size)
    if len(first) > 1:
        (a, here), (b, there) = list(first.items())[:2]
        raise UserError(
            f"pictures must have one size: {here} is {a[0]}×{a[1]}, {there} is {b[0]}×{b[1]}; "
            f"folder:{directory}?size=64 scales and crops all to 64×64"
        )
    ((width, height),) = first
    return grey, (height, width)


def _decode(files: list[tuple[Path, int]], shape: tuple[int, int], size: int | None, mode: str) -> Split:
    """Decode one picture after another into its place."""
    images = np.empty((len(files), len(mode), *shape), np.uint8)
    for image, (path, _) in zip(images, files, strict=True):
        with _open(path) as picture:
            try:
                # By way of RGBA: a palette with transparency has no direct way to RGB.
                plain = picture.convert("RGBA").convert(mode) if picture.mode in ("P", "PA") else picture.convert(mode)
            except _UNREADABLE as error:
                raise UserError(f"{path} is damaged ({error}); replace or remove it") from error
        pixels = np.asarray(plain if size is None else _square(plain, size))
        image[:] = pixels if mode == "L" else pixels.transpose(2, 0, 1)
    return Split(images, np.array([label for _, label in files], np.int64))


def _square(picture: Image.Image, size: int) -> Image.Image:
    """The shorter side becomes ``size``, then the centre is cropped."""
    scale = size / min(picture.size)
    width, height = (max(size, round(side * scale)) for side in picture.size)
    left, top = (width - size) // 2, (height - size) // 2
    scaled = picture.resize((width, height), Image.Resampling.BILINEAR)
    return scaled.crop((left, top, left + size, top + size))


def load_arrays(text: str) -> ImageSet:
    """``FILE.npz`` with x_train, y_train and perhaps x_test, y_test, users (of the training part), classes.

    Images are uint8, or floats in 0..1, of shape [N, H, W], [N, H, W, ch] or [N, ch, H, W] with 1 or 3
    channels; where both of the latter fit, the channels are taken to be last. Labels are numbers from 0.
    """
    path = Path(text).expanduser()
    held = _load_npz(path)
    keys = next((k for k in _KEYS if k[0] in held), _KEYS[0])
    wanted = keys if keys[2] in held or keys[3] in held else keys[:2]
    missing = [k for k in wanted if k not in held]
    if missing:
        have = ", ".join(sorted(held)[:9]) or "nothing"
        raise UserError(f"{path} has no {missing[0]!r}, it holds {have}; save it with {', '.join(_KEYS[0])}")
    # Each array leaves the dict on its way in, so that floats are freed once they are bytes.
    train, *tests = [_split(held.pop(x), held[y], path, x, y) for x, y in zip(wanted[::2], wanted[1::2], strict=True)]
    users = None if "users" not in held else _texts(held["users"], f"{path}: users", len(train))
    notes = []
    if not tests:
        out = fifth(len(train))
        if not out.any():
            raise UserError(f"{path} has neither {keys[2]} nor five examples to take a test from; add it")
        tests = [Split(train.images[out], train.labels[out])]
        train = Split(train.images[~out], train.labels[~out])
        users = None if users is None else users[~out]
        notes.append("every fifth example is test: the file has no test part")
    if train.images.shape[1:] != tests[0].images.shape[1:]:
        shapes = [list(s.images.shape[1:]) for s in (train, tests[0])]
        raise UserError(f"{path}: images are {shapes[0]} in train, {shapes[1]} in test; give one shape")
    largest = int(max(train.labels.max(), tests[0].labels.max()))
    classes = tuple(map(str, range(largest + 1)))
    if "classes" in held:
        classes = tuple(map(str, _texts(held["classes"], f"{path}: classes")))
        if len(classes) <= largest:
            raise UserError(f"{path}: classes names {len(classes)}, but a label is {largest}; name all")
    mean, std = measure(train.images)
    return ImageSet(f"arrays:{text}", classes, train, tests[0], mean, std, users=users, notes=tuple(notes))


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {k: archive[k] for k in archive.files if k in _KNOWN}
    except FileNotFoundError as error:
        raise UserError(f"{path} is not there; give the path of an .npz file") from error
    except (*_DAMAGE, AttributeError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is no .npz of plain arrays ({error}); save it by np.savez") from error


def _split(given: Array, labels: Array, path: Path, x: str, y: str) -> Split:
    """Images and labels of one part, which the file calls ``x`` and ``y``."""
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{path}: {y} is {labels.dtype} {list(labels.shape)}; give whole numbers, one an image")
    images = _images(given, f"{path}: {x}")
    if len(images) != len(labels):
        raise UserError(f"{path}: {len(images):,} images in {x}, {len(labels):,} labels in {y}; give as many")
    if labels.min() < 0 or labels.max() >= _CLASSES:
        raise UserError(f"{path}: {y} goes from {labels.min()} to {labels.max()}; number the classes from 0")
    return Split(images, labels.astype(np.int64))


def _images(given: Array, where: str) -> Images:
    """[N, ch, H, W] bytes."""
    if given.ndim == 3:
        given = given[:, None]
    elif given.ndim == 4 and given.shape[3] in (1, 3):
        given = given.transpose(0, 3, 1, 2)
    if given.ndim != 4 or given.shape[1] not in (1, 3) or not given.size:
        raise UserError(f"{where} has shape {list(given.shape)}; give [N, H, W] or [N, H, W, 1 or 3], N > 0")
    if given.dtype.kind != "f" and given.dtype != np.uint8:
        raise UserError(f"{where} is {given.dtype}; give uint8, or floats from 0 to 1")
    images = np.empty(given.shape, np.uint8)
    for start in range(0, len(given), _CHUNK):
        part = given[start : start + _CHUNK]
        if given.dtype.kind == "f":
            if not ((part >= 0) & (part <= 1)).all():
                raise UserError(f"{where} has values outside 0..1 or NaN; scale them, or give uint8")
            part = np.rint(part.astype(np.float64) * 255)
        images[start : start + _CHUNK] = part
    return images


def _texts(given: Array, where: str, count: int | None = None) -> npt.NDArray[np.str_]:
    if given.ndim != 1 or given.dtype.kind not in "iuUS" or count not in (None, len(given)):
        wanted = "one text or number each" if count is None else f"{count:,} texts or numbers, one an example"
        raise UserError(f"{where} is {given.dtype} of shape {list(given.shape)}; give {wanted}")
    return np.char.decode(given, "utf-8") if given.dtype.kind == "S" else given.astype(np.str_)
