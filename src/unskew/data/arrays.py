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
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from unskew.core.errors import UserError, a_kind
from unskew.core.key import Key, seeded
from unskew.core.limits import MAX_CLASSES, check_plain, check_unpacked, size_on_disk, user_path
from unskew.core.plugins import load_function
from unskew.core.text import apply, parse_call
from unskew.core.types import ImageSet, Split, StoredImages
from unskew.data.binary import Images
from unskew.data.interface import OWN, DataRequest, Source
from unskew.data.photographs import Photographs, count_values

# everything that reading was observed to raise for files with a few bytes changed or cut off
DAMAGED: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, LookupError)
DAMAGED += (MemoryError, OverflowError, TypeError, AttributeError, RuntimeError)  # also RecursionError
DAMAGED += (SyntaxError, tokenize.TokenError)  # for a header that is not a Python literal
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_SUFFIX = ".npy"

Array = npt.NDArray[Any]


def read_npz(path: Path, wanted: Collection[str] | None = None) -> tuple[dict[str, Array], list[str]]:
    """Read the wanted arrays, or all, and the names of everything in the file. Raises one of ``DAMAGED``."""
    check_plain(path)
    on_disk = size_on_disk([path])
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(_SUFFIX): info for info in archive.infolist()}
        chosen = {name: info for name, info in members.items() if wanted is None or name in wanted}
        entries = 0
        for name, info in chosen.items():
            if info.compress_type not in _METHODS:
                raise ValueError(f"{name} uses a compression that np.savez does not use")
            with archive.open(info) as stream:
                shape, dtype = _header(stream)
                entries += math.prod(shape) * max(1, dtype.itemsize)
                if math.prod(shape) * dtype.itemsize != info.file_size - stream.tell():
                    raise ValueError(f"{name} is shorter than its header declares")
        check_unpacked(entries, on_disk, str(path))  # zero-size entries count too: 2^40 empty strings
        arrays = {}
        for name, info in chosen.items():
            with archive.open(info) as stream:  # yields at most file_size bytes, and compares their checksum
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
                if stream.read(1):
                    raise ValueError(f"{name} is longer than its header declares")
        return arrays, list(members)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"the array format {version} is unknown")
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it contains Python objects, which are never loaded")
    return shape, dtype


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
        arrays, names = read_npz(path, {*KEYS[0], *KEYS[1], *OPTIONAL})
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give the path of an .npz file") from error
    except DAMAGED as error:
        raise UserError(f"{path} is not an .npz file of plain arrays ({error}); save it with np.savez") from error
    return from_arrays(arrays, name=request.name, where=str(path), names=names)


ARRAYS = Source("arrays", "your own arrays: x_train, y_train, x_test, y_test", OWN, load_arrays, path="FILE.npz")


def from_arrays(source: Mapping[str, Array], *, name: str, where: str, names: Sequence[str] = ()) -> ImageSet:
    """Make an image set from arrays; ``where`` and ``names`` (of all arrays in the file) are for errors.

    Images are uint8, or floats in 0..1, of shape [N, H, W], [N, H, W, ch] or [N, ch, H, W] with 1 or 3 channels; if
    both of the latter fit, the channels are assumed to be last. Labels are numbers from 0, or strings.
    """
    arrays = dict(source)
    keys = next((k for k in KEYS if k[0] in arrays), KEYS[0])
    wanted = keys if keys[2] in arrays or keys[3] in arrays else keys[:2]
    missing = [k for k in wanted if k not in arrays]
    if missing:
        shown = sorted(name if len(name) <= 40 else f"{name[:39]}…" for name in names or arrays)
        have = ", ".join(shown[:9]) + (f" and {len(shown) - 9:,} more" if len(shown) > 9 else "") or "no arrays"
        wanted_names = " or ".join(", ".join(keys) for keys in KEYS)
        raise UserError(f"{where} has no {missing[0]!r}, but {have}; name the arrays {wanted_names}")
    classes = tuple(map(str, texts(arrays["classes"], f"{where}: classes"))) if "classes" in arrays else None
    numbers, classes = number_labels([arrays[y] for y in wanted[1::2]], classes, where, wanted[1::2])
    notes: list[str] = []
    splits: list[Split] = []
    for x, y, labels in zip(wanted[::2], wanted[1::2], numbers, strict=True):
        images, exact = to_bytes(arrays.pop(x), f"{where}: {x}")  # popped: floats are freed once they are bytes
        if len(images) != len(labels):
            sizes = f"{len(images):,} images in {x}, but {len(labels):,} labels in {y}"
            raise UserError(f"{where}: {sizes}; give one label per image")
        notes += [] if exact else [f"{x}: pixels were rounded to 256 levels"]
        splits.append(Split(images, labels))
    users = None if "users" not in arrays else texts(arrays["users"], f"{where}: users", len(splits[0]))
    return assemble(name, splits, classes, users, notes, where, no_test=f"neither {keys[2]} nor")


def assemble(
    name: str, splits: list[Split], classes: tuple[str, ...], users: npt.NDArray[np.str_] | None, notes: list[str],
    where: str, *, no_test: str = "neither a test part nor",
) -> ImageSet:  # fmt: skip
    """Make a set from its parts: train and test, or only train, of which every fifth example then becomes test."""
    train, *tests = splits
    if not tests:
        out = every_fifth(len(train))
        if not out.any():
            raise UserError(f"{where} has {no_test} five examples to split a test part from; add a test part")
        tests = [Split(train.images[out], train.labels[out])]
        train = Split(train.images[~out], train.labels[~out])
        users = None if users is None else users[~out]
        notes = [*notes, "every fifth example is used for testing, since the data has no test part"]
    mean, std = measure(train.images)
    labels = np.concatenate([train.labels, tests[0].labels])
    empty = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0).tolist()
    if empty == [0] and classes == tuple(map(str, range(len(classes)))):
        notes = [*notes, "no example has the label 0: if labels start at 1, subtract 1; class 0 stays empty"]
    elif empty:
        named = ", ".join(classes[label] for label in empty[:9]) + (" …" if len(empty) > 9 else "")
        notes = [*notes, f"{len(empty):,} of {len(classes):,} classes have no example in train or test: {named}"]
    images = ImageSet(name, classes, train, tests[0], mean, std, users=users, notes=tuple(notes))
    return check_image_set(images, where, fewest=1)  # a node of a federation may hold a single class


def number_labels(
    labels: list[Array], classes: tuple[str, ...] | None, where: str, names: tuple[str, ...]
) -> tuple[list[npt.NDArray[np.int64]], tuple[str, ...]]:
    """Turn labels into class numbers, and name the classes; strings are numbered by ``classes`` or in sorted order."""
    flat = [column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column for column in labels]
    for name, column in zip(names, flat, strict=True):
        if column.ndim != 1 or column.dtype.kind not in "iuUS":
            kind = f"{name} is {column.dtype} {list(column.shape)}"
            raise UserError(f"{where}: {kind}; give whole numbers or strings, one per image")
        if not len(column):
            raise UserError(f"{where}: {name} is empty; give at least one image, and one label per image")
    if any(column.dtype.kind in "US" for column in flat):
        columns = [texts(column, f"{where}: {name}") for name, column in zip(names, flat, strict=True)]
        classes = tuple(np.unique(np.concatenate(columns)).tolist()) if classes is None else classes
        number_of = {word: number for number, word in enumerate(classes)}
        if unknown := sorted({word for column in columns for word in column.tolist()} - set(number_of)):
            raise UserError(f"{where}: the label {unknown[0]!r} is not in classes ({', '.join(classes[:9])}); add it")
        return [np.array([number_of[word] for word in column.tolist()], np.int64) for column in columns], classes
    for name, column in zip(names, flat, strict=True):
        if column.min() < 0 or column.max() >= MAX_CLASSES:
            raise UserError(f"{where}: {name} ranges from {column.min()} to {column.max()}; number the classes from 0")
    largest = int(max(column.max() for column in flat))
    if classes is not None and len(classes) <= largest:
        raise UserError(f"{where}: classes has {len(classes)} names, but a label is {largest}; name every class")
    if classes is None and largest >= max(FEW_CLASSES, sum(map(len, flat))):
        gap = f"a label is {largest:,}, but there are only {sum(map(len, flat)):,} examples"
        raise UserError(f"{where}: {gap}; number the classes from 0 without gaps, or name all in classes")
    return [column.astype(np.int64) for column in flat], classes or tuple(map(str, range(largest + 1)))


def to_bytes(pixels: Array, where: str) -> tuple[Images, bool]:
    """[N, ch, H, W] bytes, and whether they are exact: no pixel had to be rounded beyond its dtype's precision."""
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[3] in (1, 3):
        pixels = pixels.transpose(0, 3, 1, 2)
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or not pixels.size:
        raise UserError(f"{where} has shape {list(pixels.shape)}; give [N, H, W] or [N, H, W, 1 or 3], N > 0")
    if pixels.dtype.kind != "f" and pixels.dtype != np.uint8:
        raise UserError(f"{where} is {pixels.dtype}; give uint8, or floats from 0 to 1")
    images, exact = np.empty(pixels.shape, np.uint8), True
    for start in range(0, len(pixels), _CHUNK):
        part = pixels[start : start + _CHUNK]
        if pixels.dtype.kind == "f":
            if not ((part >= 0) & (part <= 1)).all():
                raise UserError(f"{where} has values outside 0..1 or NaN; undo its normalisation, or give uint8")
            scaled = part.astype(np.float64) * 255
            part = np.rint(scaled)
            exact = exact and bool((np.abs(scaled - part) <= 255 * np.finfo(pixels.dtype).eps).all())
        images[start : start + _CHUNK] = part
    return images, exact


def texts(values: Array, where: str, count: int | None = None) -> npt.NDArray[np.str_]:
    """Strings or numbers as strings; ``count`` is the required length."""
    if values.ndim != 1 or values.dtype.kind not in "iuUS" or count not in (None, len(values)):
        wanted = "strings or numbers" if count is None else f"{count:,} strings or numbers"
        raise UserError(f"{where} is {values.dtype} of shape {list(values.shape)}; give {wanted}, one per example")
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values.astype(np.str_)


FORMS = (
    "an ImageSet; a dict with x_train, y_train, x_test, y_test; a tuple of these four, (images, labels) or "
    "((images, labels), (images, labels)); a torch Dataset of (image, label), or a tuple (train, test) of two"
)
_GREY = ("1", "L", "LA", "La")


def image_set_from(value: Any, name: str = "your data") -> ImageSet:
    """Make an image set from any of ``FORMS``; a dict or Dataset may also have ``classes`` and ``users``."""
    if isinstance(value, ImageSet):
        images = value
    elif isinstance(value, Mapping):
        images = from_arrays(_arrays_of(value, name), name=name, where=name)
    elif _is_dataset(value):
        images = _from_datasets((value,), name)
    elif isinstance(value, list | tuple) and 0 < len(value) <= 2 and all(map(_is_dataset, value)):
        images = _from_datasets(tuple(value), name)
    elif isinstance(value, list | tuple) and value:
        parts = tuple(value)
        if len(parts) == 2 and all(isinstance(p, list | tuple) and len(p) == 2 and _has_entries(p[1]) for p in parts):
            parts = (*parts[0], *parts[1])
        if len(parts) not in (2, 4):
            raise UserError(f"{name} is a tuple of {len(parts)}; give {FORMS}")
        images = from_arrays(_arrays_of(dict(zip(KEYS[0], parts, strict=False)), name), name=name, where=name)
    else:
        raise UserError(f"{name} is {a_kind(value)}; give {FORMS}")
    return check_image_set(images, name)


def load_from_function(name: str, data_dir: Path | None) -> ImageSet:
    """Load a set with ``package.module:function(knobs)``; a knob ``data_dir`` receives the data folder."""
    call = parse_call(name, "data set")
    function = load_function(call.name, "data set")
    with suppress(TypeError, ValueError):
        if "data_dir" in inspect.signature(function).parameters and "data_dir" not in call.knobs:
            function = partial(function, data_dir=data_dir)
    value = apply(call, function, "data set")
    return replace(image_set_from(value, f"data {name!r}"), name=name)


def check_image_set(images: ImageSet, name: str, fewest: int = 2) -> ImageSet:
    """Return the set if it can be trained on; at least ``fewest`` classes must have examples."""
    for part, split in (("train", images.train), ("test", images.test)):
        pixels, labels = split.images, split.labels
        known = isinstance(pixels, Photographs | np.ndarray)
        if not known or pixels.dtype != np.uint8 or len(pixels.shape) != 4 or not pixels.nbytes:
            raise UserError(f"{name}: {part}.images must be a uint8 array [N, ch, H, W] with N > 0; {_is(pixels)}")
        if not isinstance(labels, np.ndarray) or labels.dtype != np.int64 or labels.shape != (len(pixels),):
            raise UserError(f"{name}: {part}.labels must be an int64 array [{len(pixels)}]; {_is(labels)}")
        if labels.min() < 0 or labels.max() >= len(images.classes):
            span = f"{labels.min()} to {labels.max()}"
            raise UserError(f"{name}: labels of {part} range from {span}, but there are {len(images.classes)} classes")
    if images.train.images.shape[1:] != images.test.images.shape[1:]:
        shapes = [list(s.images.shape[1:]) for s in (images.train, images.test)]
        raise UserError(f"{name}: images are {shapes[0]} in train, {shapes[1]} in test; give one shape")
    if len(np.unique(images.train.labels)) < fewest:
        raise UserError(f"{name}: all training examples have the same class; a classifier needs two or more")
    channels = images.shape[0]
    if len(images.mean) != channels or len(images.std) != channels or not all(s > 0 for s in images.std):
        raise UserError(f"{name}: mean and std need {channels} numbers each, one per channel, with std above 0")
    if images.users is not None and len(images.users) != len(images.train):
        sizes = f"{len(images.users)} users for {len(images.train)} training examples"
        raise UserError(f"{name}: {sizes}; give one per example")
    if images.places is not None and np.shape(images.places) != (len(images.train), 2):
        raise UserError(f"{name}: places must be an array [{len(images.train)}, 2]; {_is(images.places)}")
    return images


def _is(value: Any) -> str:
    return f"this is {f'{value.dtype} {list(value.shape)}' if isinstance(value, np.ndarray) else a_kind(value)}"


def _has_entries(value: Any) -> bool:
    """Whether these are the labels of several examples, not of one."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def _arrays_of(value: Mapping[Any, Any], name: str) -> dict[str, Array]:
    known = {*KEYS[0], *KEYS[1], *OPTIONAL}
    if unknown := [key for key in value if key not in known]:
        raise UserError(f"{name} has an unknown entry {unknown[0]!r}; give {', '.join((*KEYS[0], *OPTIONAL))}")
    return {key: _array(entry, f"{name}: {key}") for key, entry in value.items() if entry is not None}


def _array(value: Any, where: str) -> Array:
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        plain = plain.float() if plain.dtype == torch.bfloat16 else plain
        channels_first = plain.dim() == 4 and plain.shape[1] in (1, 3)
        return (plain.permute(0, 2, 3, 1) if channels_first else plain).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise UserError(f"{where} cannot be made into one array ({error}); give images of one shape") from error
    if array.dtype.hasobject:
        raise UserError(f"{where} has entries of different kinds or shapes; give one array of numbers or strings")
    return array


def _is_dataset(value: Any) -> bool:
    """Whether a value behaves like a Dataset; arrays, tensors and lists do too, but are not meant."""
    if isinstance(value, np.ndarray | Tensor | list | tuple | Mapping | str | bytes):
        return False
    return isinstance(value, IterableDataset) or hasattr(value, "__getitem__") or hasattr(value, "__iter__")


def _from_datasets(datasets: tuple[Any, ...], name: str) -> ImageSet:
    parts = ("train", "test")[: len(datasets)]
    read = [_read(d, f"{name}: {part}", Key(0).fold("read", part)) for d, part in zip(datasets, parts, strict=True)]
    images, columns, exact = zip(*read, strict=True)
    classes, users = (_attribute(datasets[0], attribute) for attribute in ("classes", "users"))
    names = None if classes is None else tuple(map(str, texts(np.asarray(classes), f"{name}: classes")))
    labels, names = number_labels(list(columns), names, name, parts)
    owners = None if users is None else texts(np.asarray(users), f"{name}: users", len(labels[0]))
    notes = [f"{part}: pixels were rounded to 256 levels" for part, same in zip(parts, exact, strict=True) if not same]
    splits = [Split(pixels, numbers) for pixels, numbers in zip(images, labels, strict=True)]
    return assemble(name, splits, names, owners, notes, name)


def _attribute(dataset: Any, name: str) -> Any:
    if (value := getattr(dataset, name, None)) is not None:
        return value
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is None or indices is None or (value := _attribute(inner, name)) is None:
        return None
    return value if name == "classes" else np.asarray(value)[np.asarray(indices)]


def _read(dataset: Any, where: str, key: Key) -> tuple[npt.NDArray[np.uint8], Array, bool]:
    """Images, labels, and whether the pixels are exact; each example is read once, in order."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UserError(f"{where} is iterable but cannot be indexed; give a Dataset with __len__ and __getitem__")
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise UserError(f"{where} has no length; give a Dataset with __len__ and __getitem__") from error
    if count == 0:
        raise UserError(f"{where} is empty; give a Dataset with at least one example")
    images, labels, exact = np.empty(0, np.uint8), [], True
    with seeded(key):  # transforms that use torch's generator give the same every time
        for index in range(count):
            image, label = _example(dataset, index, where)
            pixels, same = to_bytes(_picture(image, f"{where}: image {index}")[None], f"{where}: image {index}")
            if index == 0:
                images = np.empty((count, *pixels.shape[1:]), np.uint8)
            if pixels.shape[1:] != images.shape[1:]:
                shapes = f"image 0 is {list(images.shape[1:])}, image {index} is {list(pixels.shape[1:])}"
                raise UserError(f"{where}: {shapes}; resize or convert them to one shape in the Dataset")
            images[index], exact = pixels[0], exact and same
            labels.append(label)
    if len({isinstance(label, str) for label in labels}) > 1:
        raise UserError(f"{where}: some labels are strings and some are numbers; give one kind")
    return images, np.asarray(labels, np.str_ if isinstance(labels[0], str) else np.int64), exact


def _example(dataset: Any, index: int, where: str) -> tuple[Any, int | str]:
    try:
        example = dataset[index]
    except Exception as error:  # a Dataset may raise anything
        raise UserError(f"{where}: example {index} raises {type(error).__name__}: {error}") from error
    if not isinstance(example, list | tuple) or len(example) != 2:
        raise UserError(f"{where}: example {index} is {a_kind(example)}; give pairs (image, label)")
    image, label = example
    if isinstance(label, Tensor | np.ndarray | np.generic) and label.ndim == 0:
        label = label.item()
    if not isinstance(label, int | str) or isinstance(label, bool) or (isinstance(label, int) and label >= 2**63):
        raise UserError(f"{where}: label {index} is {a_kind(label)}; give a whole number or a string")
    return image, label


def _picture(image: Any, where: str) -> Array:
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("L" if image.mode in _GREY else "RGB"))
    if not isinstance(image, Tensor | np.ndarray):
        raise UserError(f"{where} is {a_kind(image)}; give a PIL image, an array or a tensor")
    pixels: Array = _array(image[None], where)[0] if isinstance(image, Tensor) else image
    return pixels
