"""Image sets from arrays, tensors and torch Datasets: ``arrays:FILE.npz``, and values passed from Python.

Normalisation is measured on the training images. Without a test part, every fifth example becomes test, with a note.
If a NumPy array has two possible channel axes, the last one is used; in a torch tensor, the first.

Shapes: N images [N, ch, H, W], bytes.
"""

import inspect
import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from unskew.core.errors import UserError, a_kind, describe_error
from unskew.core.files import user_path
from unskew.core.key import Key, seeded
from unskew.core.language import apply, parse_call
from unskew.core.limits import MAX_CLASSES, check_plain, check_unpacked, size_on_disk
from unskew.core.plugins import load_function
from unskew.core.types import ImageSet, Split, StoredImages
from unskew.data.decode import Pixels as Images
from unskew.data.interface import OWN, DataRequest, Source
from unskew.data.photographs import Photographs, count_values

# everything that reading was observed to raise for files with a few bytes changed or cut off
DAMAGED: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, LookupError)
DAMAGED += (MemoryError, OverflowError, TypeError, AttributeError, RuntimeError)  # also RecursionError
DAMAGED += (SyntaxError, tokenize.TokenError)  # for a header that is not a Python literal

Array = npt.NDArray[Any]


def read_npz(path: Path, wanted: Collection[str] | None = None) -> dict[str, Array]:
    """Read the wanted arrays, or all. Raises one of ``DAMAGED``."""
    check_plain(path)
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        members = {name: info for name, info in members.items() if wanted is None or name in wanted}
        entries = 0
        for name, info in members.items():
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{name} uses a compression that np.savez does not use")
            with archive.open(info) as stream:
                second = np.lib.format.read_magic(stream) != (1, 0)
                form = np.lib.format
                shape, _, dtype = (form.read_array_header_2_0 if second else form.read_array_header_1_0)(stream)
                entries += math.prod(shape) * max(1, dtype.itemsize)
                if math.prod(shape) * dtype.itemsize != info.file_size - stream.tell():
                    raise ValueError(f"{name} does not have the size that its header declares")
        check_unpacked(entries, size_on_disk([path]), str(path))  # zero-size entries count too: 2^40 empty strings
        arrays = {}
        for name, info in members.items():
            with archive.open(info) as stream:  # yields at most file_size bytes, and compares their checksum
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
                stream.read(1)  # the end, where the checksum is compared
        return arrays


KEYS = (("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels"))
OPTIONAL = ("users", "classes")
FEW_CLASSES = 1000  # class numbers below this may have gaps; beyond, there must be as many examples as classes
_CHUNK = 1024  # images converted at a time

Numbers = tuple[float, ...]


def measure(images: Images | StoredImages) -> tuple[Numbers, Numbers]:
    """The mean and standard deviation of each channel for pixels scaled to 0..1, exact by counting values."""
    counts = np.zeros((3, 256), np.int64)
    for start in range(0, len(images), _CHUNK):
        counts += count_values(images[start : start + _CHUNK])
    return moments(counts[: images.shape[1]])


def moments(counts: npt.NDArray[np.int64]) -> tuple[Numbers, Numbers]:
    """The mean and standard deviation (at least one gray level) of each channel, from counts of values [ch, 256]."""
    values = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values  # [ch]
    std = np.sqrt((share * (values - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.maximum(std, 1 / 255).tolist())


def every_fifth(count: int) -> npt.NDArray[np.bool_]:
    """True for every fifth of ``count`` examples, which serve as test."""
    return np.equal(np.arange(count) % 5, 4)


def load_arrays(request: DataRequest) -> ImageSet:
    """Load ``arrays:FILE.npz``: x_train, y_train and optionally x_test, y_test, users (for training), classes."""
    path = user_path(request.path)
    try:
        arrays = read_npz(path, {*KEYS[0], *KEYS[1], *OPTIONAL})
    except DAMAGED as error:
        raise UserError(f"{path} is not an .npz file of plain arrays ({error}); save it with np.savez") from error
    return from_arrays(arrays, name=request.name, where=str(path))


ARRAYS = Source("arrays", "your own arrays: x_train, y_train, x_test, y_test", OWN, load_arrays, path="FILE.npz")


def from_arrays(source: Mapping[str, Array], *, name: str, where: str) -> ImageSet:
    """Make an image set from arrays; ``where`` begins error messages.

    Images are uint8, or floats in 0..1, of shape [N, H, W], [N, H, W, ch] or [N, ch, H, W] with 1 or 3 channels; if
    both of the latter fit, the channels are assumed to be last. Labels are numbers from 0, or strings. Without a test
    part, every fifth example becomes test.
    """
    arrays = dict(source)
    keys = next((k for k in KEYS if k[0] in arrays), KEYS[0])
    wanted = keys if keys[2] in arrays or keys[3] in arrays else keys[:2]
    if missing := next((key for key in wanted if key not in arrays), None):
        known = " or ".join(", ".join(keys) for keys in KEYS)
        raise UserError(f"{where} has no {missing!r}; name the arrays {known}")
    classes = tuple(map(str, texts(arrays["classes"], f"{where}: classes"))) if "classes" in arrays else None
    numbers, classes = number_labels({y: arrays[y] for y in wanted[1::2]}, classes, where)
    splits = []
    for x, labels in zip(wanted[::2], numbers, strict=True):
        images = to_bytes(arrays.pop(x), f"{where}: {x}")  # popped: floats are freed once they are bytes
        if len(images) != len(labels):
            raise UserError(f"{where}: {len(images):,} images in {x}, but {len(labels):,} labels; give one per image")
        splits.append(Split(images, labels))
    train, test = splits[0], splits[-1]
    users = texts(arrays["users"], f"{where}: users", len(train)) if "users" in arrays else None
    notes = []
    if len(splits) == 1:
        out = every_fifth(len(train))
        if not out.any():
            raise UserError(f"{where} has neither a test part nor five examples to split one from; add {keys[2]}")
        train, test = (Split(train.images[part], train.labels[part]) for part in (~out, out))
        users = None if users is None else users[~out]
        notes.append("every fifth example is used for testing, since the data has no test part")
    counts = np.bincount(np.concatenate([train.labels, test.labels]), minlength=len(classes))
    if len(empty := np.flatnonzero(counts == 0)):
        named = ", ".join(classes[label] for label in empty[:9]) + (" …" if len(empty) > 9 else "")
        notes.append(f"{len(empty):,} of {len(classes):,} classes have no example in train or test: {named}")
    found = ImageSet(name, classes, train, test, *measure(train.images), users=users, notes=tuple(notes))
    return check_image_set(found, where, fewest=1)  # a node of a federation may hold a single class


def number_labels(
    labels: Mapping[str, Array], classes: tuple[str, ...] | None, where: str
) -> tuple[list[npt.NDArray[np.int64]], tuple[str, ...]]:
    """Turn labels into class numbers, and name the classes; strings are numbered by ``classes`` or in sorted order."""
    columns = {name: column[:, 0] if column.shape[1:] == (1,) else column for name, column in labels.items()}
    for name, column in columns.items():
        if column.ndim != 1 or column.dtype.kind not in "iuUS" or not len(column):
            kind = f"{name} is {column.dtype} {list(column.shape)}"
            raise UserError(f"{where}: {kind}; give whole numbers or strings, one per image")
    if any(column.dtype.kind in "US" for column in columns.values()):
        words = [texts(column, where) for column in columns.values()]
        classes = tuple(np.unique(np.concatenate(words)).tolist()) if classes is None else classes
        number_of = {word: number for number, word in enumerate(classes)}
        if unknown := sorted({word for column in words for word in column.tolist()} - set(number_of)):
            raise UserError(f"{where}: the label {unknown[0]!r} is not in classes; add it")
        return [np.array([number_of[word] for word in column.tolist()], np.int64) for column in words], classes
    low, high = (int(f([f(column) for column in columns.values()])) for f in (np.min, np.max))
    most = max(FEW_CLASSES, sum(map(len, columns.values()))) if classes is None else len(classes)
    if low < 0 or high >= min(most, MAX_CLASSES):
        raise UserError(f"{where}: labels range from {low:,} to {high:,}; number the classes from 0 without gaps")
    return [column.astype(np.int64) for column in columns.values()], classes or tuple(map(str, range(high + 1)))


def to_bytes(pixels: Array, where: str) -> Images:
    """[N, ch, H, W] bytes; floats from 0 to 1 are rounded."""
    shape = list(pixels.shape)
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[3] in (1, 3):
        pixels = pixels.transpose(0, 3, 1, 2)
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or not pixels.size:
        raise UserError(f"{where} has shape {shape}; give [N, H, W] or [N, H, W, 1 or 3], N > 0")
    if pixels.dtype == np.uint8:
        return np.array(pixels, order="C")
    images = np.empty(pixels.shape, np.uint8)
    for start in range(0, len(pixels), _CHUNK):
        part = pixels[start : start + _CHUNK]
        if part.dtype.kind != "f" or not ((part >= 0) & (part <= 1)).all():
            raise UserError(f"{where} is {pixels.dtype}; give uint8, or floats from 0 to 1 (undo any normalisation)")
        images[start : start + _CHUNK] = np.rint(part.astype(np.float64) * 255)
    return images


def texts(values: Array, where: str, count: int | None = None) -> npt.NDArray[np.str_]:
    """Strings or numbers as strings; ``count`` is the required length."""
    if values.ndim != 1 or values.dtype.kind not in "iuUS" or count not in (None, len(values)):
        raise UserError(f"{where} is {values.dtype} {list(values.shape)}; give strings or numbers, one per example")
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values.astype(np.str_)


FORMS = (
    "an ImageSet; a dict with x_train, y_train, x_test, y_test; a tuple of these four, (images, labels) or "
    "((images, labels), (images, labels)); a torch Dataset of (image, label), or a tuple (train, test) of two"
)
_GREY = ("1", "L", "LA", "La")


def image_set_from(value: Any, name: str = "your data") -> ImageSet:
    """Make an image set from any of ``FORMS``; a dict or Dataset may also have ``classes`` and ``users``."""
    if isinstance(value, ImageSet):
        return check_image_set(value, name)
    parts: Any = (value,) if _is_dataset(value) else value
    if isinstance(parts, list | tuple):
        if 0 < len(parts) <= 2 and all(map(_is_dataset, parts)):
            parts = _read_datasets(parts, name)
        else:
            if len(parts) == 2 and all(isinstance(p, list | tuple) and len(p) == 2 and np.ndim(p[1]) for p in parts):
                parts = (*parts[0], *parts[1])
            parts = dict(zip(KEYS[0], parts, strict=False)) if len(parts) in (2, 4) else None
    if not isinstance(parts, Mapping):
        raise UserError(f"{name} is {a_kind(value)}; give {FORMS}")
    if unknown := next((key for key in parts if key not in {*KEYS[0], *KEYS[1], *OPTIONAL}), None):
        raise UserError(f"{name} has an unknown entry {unknown!r}; give {', '.join((*KEYS[0], *OPTIONAL))}")
    arrays = {key: _array(entry, f"{name}: {key}") for key, entry in parts.items() if entry is not None}
    return check_image_set(from_arrays(arrays, name=name, where=name), name)


def load_from_function(request: DataRequest) -> ImageSet:
    """Load a set with ``package.module:function(knobs)``; a knob ``data_dir`` receives the data folder."""
    call = parse_call(request.name, "data set")
    function = load_function(call.name, "data set")
    with suppress(TypeError, ValueError):
        if "data_dir" in inspect.signature(function).parameters and "data_dir" not in call.knobs:
            function = partial(function, data_dir=request.data_dir)
    value = apply(call, function, "data set")
    return replace(image_set_from(value, f"data {request.name!r}"), name=request.name)


FUNCTION = Source("package.module:function", "the value of your own function", OWN, load_from_function)


def check_image_set(images: ImageSet, name: str, fewest: int = 2) -> ImageSet:
    """Return the set if it can be trained on; at least ``fewest`` classes must have examples."""
    for part, split in (("train", images.train), ("test", images.test)):
        pixels, labels = split.images, split.labels
        known = isinstance(pixels, Photographs | np.ndarray)
        if not known or pixels.dtype != np.uint8 or len(pixels.shape) != 4 or not pixels.nbytes:
            raise UserError(f"{name}: {part}.images must be a uint8 array [N, ch, H, W] with N > 0")
        known = isinstance(labels, np.ndarray) and labels.dtype == np.int64 and labels.shape == (len(pixels),)
        if not known or labels.min() < 0 or labels.max() >= len(images.classes):
            wanted = f"an int64 array [{len(pixels)}] of class numbers from 0 to {len(images.classes) - 1}"
            raise UserError(f"{name}: {part}.labels must be {wanted}")
    channels, count = images.shape[0], len(images.train)
    rules = {
        "images in train and test must have the same shape": images.test.images.shape[1:] == images.shape,
        "training examples of two or more classes are needed": len(np.unique(images.train.labels)) >= fewest,
        f"mean and std need {channels} numbers each, std above 0": (
            len(images.mean) == len(images.std) == channels and min(images.std) > 0
        ),
        f"users must have {count:,} entries, one per training example": (
            images.users is None or len(images.users) == count
        ),
        f"places must be an array [{count}, 2]": images.places is None or np.shape(images.places) == (count, 2),
    }
    if broken := next((rule for rule, kept in rules.items() if not kept), None):
        raise UserError(f"{name}: {broken}")
    return images


def _array(value: Any, where: str) -> Array:
    """A value as an array; of a tensor, the channels are moved to the end."""
    try:
        if not isinstance(value, Tensor):
            return np.asarray(value)
        plain = value.detach().cpu()
        return (plain.permute(0, 2, 3, 1) if plain.dim() == 4 and plain.shape[1] in (1, 3) else plain).numpy()
    except (ValueError, TypeError) as error:  # rows of different lengths; a dtype that NumPy does not have
        raise UserError(f"{where} cannot be converted to an array ({error}); give items of the same shape") from error


def _is_dataset(value: Any) -> bool:
    """Whether a value behaves like a Dataset; arrays, tensors and lists do too, but are not meant."""
    if isinstance(value, np.ndarray | Tensor | list | tuple | Mapping | str | bytes):
        return False
    return hasattr(value, "__getitem__") or hasattr(value, "__iter__")


def _read_datasets(datasets: Sequence[Any], name: str) -> dict[str, Any]:
    """The arrays of one or two Datasets; each example is read once, in order."""
    arrays = {attribute: _attribute(datasets[0], attribute) for attribute in OPTIONAL}
    for part, dataset in zip(("train", "test"), datasets, strict=False):
        images, labels = list[Images](), list[Any]()
        try:
            with seeded(Key(0).fold("read", part)):  # transforms that use torch's generator give the same every time
                for index in range(len(dataset)):
                    image, label = dataset[index]
                    if isinstance(image, Image.Image):
                        image = np.asarray(image.convert("L" if image.mode in _GREY else "RGB"))
                    where = f"{name}: {part}: image {index}"
                    images.append(to_bytes(_array(image[None], where), where))
                    labels.append(label.item() if isinstance(label, Tensor | np.ndarray | np.generic) else label)
            arrays[f"x_{part}"] = np.concatenate(images).transpose(0, 2, 3, 1)
        except UserError:
            raise
        except Exception as error:  # a Dataset may raise anything
            wanted = "give a Dataset with __len__ whose examples are pairs (image, label), all images of the same shape"
            raise UserError(f"{name}: {part}: example {len(labels)}: {describe_error(error)}; {wanted}") from error
        arrays[f"y_{part}"] = labels
    return arrays


def _attribute(dataset: Any, name: str) -> Any:
    if (value := getattr(dataset, name, None)) is not None:
        return value
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is None or indices is None or (value := _attribute(inner, name)) is None:
        return None
    return value if name == "classes" else np.asarray(value)[np.asarray(indices)]
