"""Whatever a program calls its data, as an image set: arrays, tensors, torch Datasets.

Shapes: N images [N, ch, H, W], bytes. In a NumPy array the channels are taken to be last where both places fit, in a
torch tensor first: that is how either library stores images.
"""

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from unskew.core.errors import UserError, a_kind
from unskew.core.key import Key, seeded
from unskew.core.plugins import load_function
from unskew.core.text import apply, parse_calls
from unskew.core.types import ImageSet, Split
from unskew.data.arrays import KEYS, OPTIONAL, Array, assemble, from_arrays, numbered, texts, to_bytes
from unskew.data.photographs import Photographs

FORMS = (
    "an ImageSet; a dict with x_train, y_train, x_test, y_test; a tuple of these four, (images, labels) or "
    "((images, labels), (images, labels)); a torch Dataset of (image, label), or a tuple (train, test) of two"
)
_GREY = ("1", "L", "LA", "La")


def image_set_from(value: Any, name: str = "your data") -> ImageSet:
    """The image set that a value is; the forms that are accepted are listed in ``FORMS``.

    Labels are whole numbers from 0 or texts. Names of classes come from ``classes`` and the owners of the training
    examples from ``users``: entries of a dict, attributes of a Dataset.
    """
    if isinstance(value, ImageSet):
        return checked(value, name)
    if isinstance(value, Mapping):
        return checked(from_arrays(_arrays_of(value, name), name=name, where=name), name)
    if isinstance(value, list | tuple) and value:
        return checked(_from_tuple(tuple(value), name), name)
    if _is_dataset(value):
        return checked(_from_datasets((value,), name), name)
    raise UserError(f"{name} is {a_kind(value)}; give {FORMS}")


def is_function(name: str) -> bool:
    """Whether a data set's name is ``package.module:function``, perhaps with knobs."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\(.*\))?", name.strip()) is not None and not name.startswith(
        "table:"
    )


def load_from_function(name: str, data_dir: Path | None) -> ImageSet:
    """What ``package.module:function(knobs)`` gives; a function with a knob ``data_dir`` is told the data folder."""
    calls = parse_calls(name, "data set")
    if len(calls) > 1:
        raise UserError(f"data {name!r}: give one data set; data sets cannot be added")
    function = load_function(calls[0].name, "data set")
    with suppress(TypeError, ValueError):
        if "data_dir" in inspect.signature(function).parameters and "data_dir" not in calls[0].knobs:
            function = partial(function, data_dir=data_dir)
    try:
        value = apply(calls[0], function, "data set")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data {name!r} raises {type(error).__name__}: {error}") from error
    return replace(image_set_from(value, f"data {name!r}"), name=name)


def checked(images: ImageSet, name: str) -> ImageSet:
    """The set, if a federation can be trained on it."""
    for part, split in (("train", images.train), ("test", images.test)):
        pixels, labels = split.images, split.labels
        held = isinstance(pixels, Photographs | np.ndarray)
        if not held or pixels.dtype != np.uint8 or len(pixels.shape) != 4 or not pixels.nbytes:
            raise UserError(f"{name}: {part}.images must be a uint8 array [N, ch, H, W] with N > 0; {_is(pixels)}")
        if not isinstance(labels, np.ndarray) or labels.dtype != np.int64 or labels.shape != (len(pixels),):
            raise UserError(f"{name}: {part}.labels must be an int64 array [{len(pixels)}]; {_is(labels)}")
        if labels.min() < 0 or labels.max() >= len(images.classes):
            span = f"{labels.min()} to {labels.max()}"
            raise UserError(f"{name}: labels of {part} go from {span}, but there are {len(images.classes)} classes")
    if images.train.images.shape[1:] != images.test.images.shape[1:]:
        shapes = [list(s.images.shape[1:]) for s in (images.train, images.test)]
        raise UserError(f"{name}: images are {shapes[0]} in train, {shapes[1]} in test; give one shape")
    if len(images.classes) < 2 or len(np.unique(images.train.labels)) < 2:
        raise UserError(f"{name}: all training examples have one class; a classifier needs two or more")
    channels = images.shape[0]
    if len(images.mean) != channels or len(images.std) != channels or not all(s > 0 for s in images.std):
        raise UserError(f"{name}: mean and std need {channels} numbers each, one for each channel, std above 0")
    if images.users is not None and len(images.users) != len(images.train):
        raise UserError(f"{name}: {len(images.users)} users for {len(images.train)} training examples; give one each")
    return images


def _is(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"this is {value.dtype} {list(value.shape)}"
    return f"this is {a_kind(value)}"


def _from_tuple(value: tuple[Any, ...], name: str) -> ImageSet:
    if len(value) <= 2 and all(_is_dataset(each) for each in value):
        return _from_datasets(value, name)
    if len(value) == 2 and all(isinstance(each, list | tuple) and len(each) == 2 and _many(each[1]) for each in value):
        value = (*value[0], *value[1])
    if len(value) not in (2, 4):
        raise UserError(f"{name} is a tuple of {len(value)}; give {FORMS}")
    return from_arrays(_arrays_of(dict(zip(KEYS[0], value, strict=False)), name), name=name, where=name)


def _many(value: Any) -> bool:
    """Whether a value has entries: the labels of one part have, the label of one example has not."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def _arrays_of(value: Mapping[Any, Any], name: str) -> dict[str, Array]:
    """The entries as arrays, the channels of tensors put last."""
    known = {*KEYS[0], *KEYS[1], *OPTIONAL}
    if strange := [key for key in value if key not in known]:
        raise UserError(f"{name} has an entry {strange[0]!r}; give {', '.join((*KEYS[0], *OPTIONAL))}")
    return {key: _array(each, f"{name}: {key}") for key, each in value.items() if each is not None}


def _array(value: Any, where: str) -> Array:
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        plain = plain.float() if plain.dtype == torch.bfloat16 else plain
        channels_first = plain.dim() == 4 and plain.shape[1] in (1, 3)
        return (plain.permute(0, 2, 3, 1) if channels_first else plain).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise UserError(f"{where} is not one array ({error}); give images of one shape") from error
    if array.dtype.hasobject:
        raise UserError(f"{where} has entries of different kinds or shapes; give one array of numbers or texts")
    return array


def _is_dataset(value: Any) -> bool:
    """A map-style Dataset, by what it can do; arrays, tensors and lists can do more, and are not meant."""
    if isinstance(value, np.ndarray | Tensor | list | tuple | Mapping | str | bytes):
        return False
    return isinstance(value, IterableDataset) or hasattr(value, "__getitem__") or hasattr(value, "__iter__")


def _from_datasets(datasets: tuple[Any, ...], name: str) -> ImageSet:
    parts = ("train", "test")[: len(datasets)]
    read = [
        _read(each, f"{name}: {part}", Key(0).fold("read", part)) for each, part in zip(datasets, parts, strict=True)
    ]
    classes = _attribute(datasets[0], "classes")
    names = None if classes is None else tuple(map(str, texts(np.asarray(classes), f"{name}: classes")))
    labels, names = numbered([each[1] for each in read], names, name, parts)
    users = _attribute(datasets[0], "users")
    owners = None if users is None else texts(np.asarray(users), f"{name}: users", len(labels[0]))
    notes = [
        f"{part}: pixels were rounded to 256 levels" for part, each in zip(parts, read, strict=True) if not each[2]
    ]
    splits = [Split(each[0], numbers) for each, numbers in zip(read, labels, strict=True)]
    return assemble(name, splits, names, owners, notes, name)


def _attribute(dataset: Any, name: str) -> Any:
    """An attribute of a Dataset; a Subset has it from the Dataset that it is a part of."""
    if (value := getattr(dataset, name, None)) is not None:
        return value
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is None or indices is None or (value := _attribute(inner, name)) is None:
        return None
    return value if name == "classes" else np.asarray(value)[np.asarray(indices)]


def _read(dataset: Any, where: str, key: Key) -> tuple[npt.NDArray[np.uint8], Array, bool]:
    """Images, labels, and whether the images were bytes already; each example is read once, in order."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UserError(f"{where} can only be iterated over; give a Dataset with __len__ and __getitem__")
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise UserError(f"{where} has no length; give a Dataset with __len__ and __getitem__") from error
    if count == 0:
        raise UserError(f"{where} is empty; give a Dataset with at least one example")
    images, labels, exact = np.empty(0, np.uint8), [], True
    with seeded(key):  # a transform that draws with torch draws the same every time
        for place in range(count):
            image, label = _example(dataset, place, where)
            pixels, whole = to_bytes(_picture(image, f"{where}: image {place}")[None], f"{where}: image {place}")
            if place == 0:
                images = np.empty((count, *pixels.shape[1:]), np.uint8)
            if pixels.shape[1:] != images.shape[1:]:
                shapes = f"image 0 is {list(images.shape[1:])}, image {place} is {list(pixels.shape[1:])}"
                raise UserError(f"{where}: {shapes}; resize or convert them to one shape in the Dataset")
            images[place], exact = pixels[0], exact and whole
            labels.append(label)
    kinds = {isinstance(label, str) for label in labels}
    if len(kinds) > 1:
        raise UserError(f"{where}: some labels are texts and some are numbers; give one kind")
    return images, np.asarray(labels, np.str_ if kinds == {True} else np.int64), exact


def _example(dataset: Any, place: int, where: str) -> tuple[Any, int | str]:
    try:
        example = dataset[place]
    except Exception as error:  # a Dataset may raise anything
        raise UserError(f"{where}: example {place} raises {type(error).__name__}: {error}") from error
    if not isinstance(example, list | tuple) or len(example) != 2:
        raise UserError(f"{where}: example {place} is {a_kind(example)}; give pairs (image, label)")
    image, label = example
    if isinstance(label, Tensor | np.ndarray | np.generic) and label.ndim == 0:
        label = label.item()
    if not isinstance(label, int | str) or isinstance(label, bool) or (isinstance(label, int) and label >= 2**63):
        raise UserError(f"{where}: label {place} is {a_kind(label)}; give a whole number or a text")
    return image, label


def _picture(image: Any, where: str) -> Array:
    """One image as an array [H, W] or [H, W, ch]."""
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("L" if image.mode in _GREY else "RGB"))
    if isinstance(image, Tensor):
        one: Array = _array(image[None], where)[0]
        return one
    if isinstance(image, np.ndarray):
        return image
    raise UserError(f"{where} is {a_kind(image)}; give a PIL image, an array or a tensor")
