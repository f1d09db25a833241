"""Arrays as an image set: ``arrays:FILE.npz``, and what a program gives by name.

Normalisation is measured from the training images. Where there is no test part, every fifth example is test, and
the set's notes say so. Shapes: N images [N, ch, H, W], bytes.
"""

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.limits import MAX_CLASSES, check_plain, check_unpacked, size_on_disk, user_path
from unskew.core.types import ImageSet, Split, StoredImages
from unskew.data.binary import Images

DAMAGED = (  # all that reading was seen to raise for files with a few bytes changed or cut off
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    OSError,
    KeyError,
    NotImplementedError,
    RuntimeError,  # also RecursionError
    MemoryError,
    OverflowError,
    TypeError,
    AttributeError,
    SyntaxError,
    tokenize.TokenError,  # of a header that is not a Python literal
)
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_SUFFIX = ".npy"

Array = npt.NDArray[Any]


def read_npz(path: Path, wanted: Collection[str] | None = None) -> tuple[dict[str, Array], list[str]]:
    """The arrays of these names, or all, and the names of everything in the file.

    One of ``DAMAGED`` where it is not a whole .npz of plain arrays; UserError where it is not a file or too large.
    """
    check_plain(path)
    on_disk = size_on_disk([path])
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(_SUFFIX): info for info in archive.infolist()}
        chosen = {name: info for name, info in members.items() if wanted is None or name in wanted}
        entries = 0
        for name, info in chosen.items():
            if info.compress_type not in _METHODS:
                raise ValueError(f"{name} is packed in a way that np.savez does not use")
            with archive.open(info) as stream:
                shape, dtype = _header(stream)
                entries += math.prod(shape) * max(1, dtype.itemsize)
                if math.prod(shape) * dtype.itemsize != info.file_size - stream.tell():
                    raise ValueError(f"{name} is not as long as its header says")
        check_unpacked(entries, on_disk, str(path))  # also entries of no bytes: 2^40 empty texts
        arrays = {}
        for name, info in chosen.items():
            with archive.open(info) as stream:  # gives no more than file_size bytes, and compares their checksum
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
                if stream.read(1):
                    raise ValueError(f"{name} is longer than its header says")
        return arrays, list(members)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"the array format {version} is not known")
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    return shape, dtype


DAMAGE = (OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, OverflowError, struct.error)
KEYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
OPTIONAL = ("users", "classes")
FEW_CLASSES = 1000  # may be numbered with gaps, beyond that there are at most as many classes as examples
_CHUNK = 1024  # images converted at a time

Numbers = tuple[float, ...]


def measure(images: Images | StoredImages) -> tuple[Numbers, Numbers]:
    """Each channel's mean and standard deviation for pixels scaled to 0..1, exact: their values are counted."""
    counts = np.zeros((images.shape[1], 256), np.int64)
    for start in range(0, len(images), _CHUNK):
        part = images[start : start + _CHUNK]
        for channel, row in enumerate(counts):
            row += np.bincount(part[:, channel].ravel(), minlength=256)
    return moments(counts)


def moments(counts: npt.NDArray[np.int64]) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation of each channel, from how many of its pixels have each value: [ch, 256].

    A deviation below one grey level counts as one, so that a constant channel does not divide by zero.
    """
    values = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values  # [ch]
    std = np.sqrt((share * (values - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.maximum(std, 1 / 255).tolist())


def fifth(count: int) -> npt.NDArray[np.bool_]:
    """True for every fifth of ``count`` examples, those that serve as test."""
    return np.equal(np.arange(count) % 5, 4)


def load_arrays(text: str) -> ImageSet:
    """``FILE.npz`` with x_train, y_train and perhaps x_test, y_test, users (of the training part), classes."""
    path = user_path(text)
    held, names = _load_npz(path)
    return from_arrays(held, name=f"arrays:{text}", where=str(path), names=names)


def from_arrays(given: Mapping[str, Array], *, name: str, where: str, names: Sequence[str] = ()) -> ImageSet:
    """The image set that these arrays are; ``where`` says in errors where they come from.

    ``names`` are those of all that is there, for errors.

    Images are uint8, or floats in 0..1, of shape [N, H, W], [N, H, W, ch] or [N, ch, H, W] with 1 or 3 channels; where
    both of the latter fit, the channels are taken to be last. Labels are numbers from 0, or texts.
    """
    held = dict(given)
    keys = next((k for k in KEYS if k[0] in held), KEYS[0])
    wanted = keys if keys[2] in held or keys[3] in held else keys[:2]
    missing = [k for k in wanted if k not in held]
    if missing:
        raise UserError(f"{where} has no {missing[0]!r}, it has {_listed(names or held)}; name the arrays {_wanted()}")
    classes = tuple(map(str, texts(held["classes"], f"{where}: classes"))) if "classes" in held else None
    numbers, classes = numbered([held[y] for y in wanted[1::2]], classes, where, wanted[1::2])
    notes: list[str] = []
    splits: list[Split] = []
    for x, y, labels in zip(wanted[::2], wanted[1::2], numbers, strict=True):
        images, exact = to_bytes(held.pop(x), f"{where}: {x}")  # popped: floats are freed once they are bytes
        if len(images) != len(labels):
            raise UserError(f"{where}: {len(images):,} images in {x}, {len(labels):,} labels in {y}; give one for each")
        notes += [] if exact else [f"{x}: pixels were rounded to 256 levels"]
        splits.append(Split(images, labels))
    users = None if "users" not in held else texts(held["users"], f"{where}: users", len(splits[0]))
    return assemble(name, splits, classes, users, notes, where, no_test=f"neither {keys[2]} nor")


def assemble(
    name: str, splits: list[Split], classes: tuple[str, ...], users: npt.NDArray[np.str_] | None, notes: list[str],
    where: str, *, no_test: str = "neither a test part nor",
) -> ImageSet:  # fmt: skip
    """A set from its parts: train and test, or train alone, of which every fifth example then becomes test."""
    train, *tests = splits
    if not tests:
        out = fifth(len(train))
        if not out.any():
            raise UserError(f"{where} has {no_test} five examples to take a test from; add a test part")
        tests = [Split(train.images[out], train.labels[out])]
        train = Split(train.images[~out], train.labels[~out])
        users = None if users is None else users[~out]
        notes = [*notes, "every fifth example is test: the data has no test part"]
    if train.images.shape[1:] != tests[0].images.shape[1:]:
        shapes = [list(s.images.shape[1:]) for s in (train, tests[0])]
        raise UserError(f"{where}: images are {shapes[0]} in train, {shapes[1]} in test; give one shape")
    mean, std = measure(train.images)
    notes = [*notes, *_empty_classes(np.concatenate([train.labels, tests[0].labels]), classes)]
    return ImageSet(name, classes, train, tests[0], mean, std, users=users, notes=tuple(notes))


def _empty_classes(labels: npt.NDArray[np.int64], classes: tuple[str, ...]) -> list[str]:
    """A note on classes that neither train nor test has an example of."""
    empty = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0).tolist()
    if empty == [0] and classes == tuple(map(str, range(len(classes)))):
        return [
            "no example has the label 0: the labels start at 1, and class 0 stays empty; subtract 1 from all of them"
        ]
    if not empty:
        return []
    named = ", ".join(classes[label] for label in empty[:9]) + (" …" if len(empty) > 9 else "")
    return [f"{len(empty):,} of {len(classes):,} classes have no example in train or test: {named}"]


def numbered(
    labels: list[Array], classes: tuple[str, ...] | None, where: str, names: tuple[str, ...]
) -> tuple[list[npt.NDArray[np.int64]], tuple[str, ...]]:
    """Labels as class numbers, and the classes' names; texts are numbered by ``classes`` or in sorted order."""
    flat = [each[:, 0] if each.ndim == 2 and each.shape[1] == 1 else each for each in labels]
    for name, each in zip(names, flat, strict=True):
        if each.ndim != 1 or each.dtype.kind not in "iuUS":
            raise UserError(
                f"{where}: {name} is {each.dtype} {list(each.shape)}; give whole numbers or texts, one for each image"
            )
        if not len(each):
            raise UserError(f"{where}: {name} is empty; give one label for each image, N > 0")
    if any(each.dtype.kind in "US" for each in flat):
        words = [texts(each, f"{where}: {name}") for name, each in zip(names, flat, strict=True)]
        classes = tuple(np.unique(np.concatenate(words)).tolist()) if classes is None else classes
        place = {word: number for number, word in enumerate(classes)}
        if strange := sorted({word for each in words for word in each.tolist()} - set(place)):
            raise UserError(f"{where}: the label {strange[0]!r} is not in classes ({', '.join(classes[:9])}); add it")
        return [np.array([place[word] for word in each.tolist()], np.int64) for each in words], classes
    for name, each in zip(names, flat, strict=True):
        if each.min() < 0 or each.max() >= MAX_CLASSES:
            raise UserError(f"{where}: {name} goes from {each.min()} to {each.max()}; number the classes from 0")
    largest = int(max(each.max() for each in flat))
    if classes is not None and len(classes) <= largest:
        raise UserError(f"{where}: classes has {len(classes)} names, but a label is {largest}; name every class")
    if classes is None and largest >= max(FEW_CLASSES, sum(map(len, flat))):
        raise UserError(
            f"{where}: a label is {largest:,}, but there are only {sum(map(len, flat)):,} examples; number the classes "
            "from 0 without gaps, or name all of them in classes"
        )
    return [each.astype(np.int64) for each in flat], classes or tuple(map(str, range(largest + 1)))


def to_bytes(given: Array, where: str) -> tuple[Images, bool]:
    """[N, ch, H, W] bytes, and whether no pixel had to be rounded to become one."""
    if given.ndim == 3:
        given = given[:, None]
    elif given.ndim == 4 and given.shape[3] in (1, 3):
        given = given.transpose(0, 3, 1, 2)
    if given.ndim != 4 or given.shape[1] not in (1, 3) or not given.size:
        raise UserError(f"{where} has shape {list(given.shape)}; give [N, H, W] or [N, H, W, 1 or 3], N > 0")
    if given.dtype.kind != "f" and given.dtype != np.uint8:
        raise UserError(f"{where} is {given.dtype}; give uint8, or floats from 0 to 1")
    images, exact = np.empty(given.shape, np.uint8), True
    for start in range(0, len(given), _CHUNK):
        part = given[start : start + _CHUNK]
        if given.dtype.kind == "f":
            part, whole = _levels(part, where)
            exact = exact and whole
        images[start : start + _CHUNK] = part
    return images, exact


def _levels(part: Array, where: str) -> tuple[Array, bool]:
    """Floats in 0..1 as the nearest of 256 levels, and whether each was k/255 to its type's own precision."""
    if not ((part >= 0) & (part <= 1)).all():
        raise UserError(f"{where} has values outside 0..1 or NaN; undo its normalisation, or give uint8")
    scaled = part.astype(np.float64) * 255
    levels = np.rint(scaled)
    return levels, bool((np.abs(scaled - levels) <= 255 * np.finfo(part.dtype).eps).all())


def texts(given: Array, where: str, count: int | None = None) -> npt.NDArray[np.str_]:
    """Texts or numbers as texts; ``count`` is how many there must be."""
    if given.ndim != 1 or given.dtype.kind not in "iuUS" or count not in (None, len(given)):
        wanted = "one text or number each" if count is None else f"{count:,} texts or numbers, one for each example"
        raise UserError(f"{where} is {given.dtype} of shape {list(given.shape)}; give {wanted}")
    return np.char.decode(given, "utf-8") if given.dtype.kind == "S" else given.astype(np.str_)


def _load_npz(path: Path) -> tuple[dict[str, Array], list[str]]:
    """The arrays that a data set has, and the names of all that the file has."""
    try:
        return read_npz(path, {*KEYS[0], *KEYS[1], *OPTIONAL})
    except FileNotFoundError as error:
        raise UserError(f"{path} is not there; give the path of an .npz file") from error
    except DAMAGED as error:
        raise UserError(f"{path} is not an .npz of plain arrays ({error}); save it with np.savez") from error


def _listed(names: Iterable[str]) -> str:
    """The first names of a file's arrays, each cut to a length that people read."""
    shown = sorted(name if len(name) <= 40 else f"{name[:39]}…" for name in names)
    return ", ".join(shown[:9]) + (f" and {len(shown) - 9:,} more" if len(shown) > 9 else "") or "no arrays"


def _wanted() -> str:
    return " or ".join(", ".join(keys) for keys in KEYS)
