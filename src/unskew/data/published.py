"""Reads the files of a published image set, and compares them with what was published.

A file that differs from the published one is legal as long as it reads whole.
"""

import hashlib
import string
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from unskew.core.errors import UserError
from unskew.core.types import Split
from unskew.data import binary
from unskew.data.binary import Images, Labels


@dataclass(frozen=True)
class Layout:
    """One way in which a set's files are distributed; idx files come as images and labels."""

    kind: str  # "binary" | "python" | "idx"
    folders: tuple[str, ...]  # below the data folder, which is looked in last
    train: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A published set; ``md5`` holds the checksums known of its files, ``sizes`` its training and test images."""

    name: str
    what: str
    origin: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # [ch, H, W]
    sizes: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layouts: tuple[Layout, ...] = ()
    md5: Mapping[str, str] = field(default_factory=dict)
    augment: bool = False
    label_bytes: int = 1  # in CIFAR's records: CIFAR-100 has the coarse label before the fine one
    first: int = 0  # the smallest label in the files
    transposed: bool = False
    notes: tuple[str, ...] = ()


_FINE = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm"""
_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_IDX_FILES = tuple(
    f"{part}-{what}" for part in ("train", "t10k") for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
_DIGITS = tuple(string.digits)
_ALL = (*_DIGITS, *string.ascii_uppercase, *string.ascii_lowercase)
_MERGED = (*_DIGITS, *string.ascii_uppercase, *"abdefghnqrt")  # the other small letters count as capitals
_EMNIST = {  # classes, training images, test images
    "balanced": (_MERGED, 112_800, 18_800),
    "byclass": (_ALL, 697_932, 116_323),
    "bymerge": (_MERGED, 697_932, 116_323),
    "digits": (_DIGITS, 240_000, 40_000),
    "letters": (tuple(string.ascii_lowercase), 124_800, 20_800),
    "mnist": (_DIGITS, 60_000, 10_000),
}


def _cifar(*values: float) -> tuple[float, ...]:
    return tuple(value / 255 for value in values)


def _idx_layouts(*folder: str, files: tuple[str, ...] = _IDX_FILES) -> tuple[Layout, ...]:
    return (Layout("idx", folder, files[:2], files[2:]),)


def _emnist(split: str) -> Source:
    classes, train, test = _EMNIST[split]
    files = tuple(f"emnist-{split}-{name.replace('t10k', 'test')}" for name in _IDX_FILES)
    same = "normalised by the constants of EMNIST balanced"
    return Source(
        "emnist" if split == "balanced" else f"emnist-{split}",
        f"handwritten letters and digits, split {split}",
        "Cohen et al. 2017, nist.gov/itl/products-and-services/emnist-dataset",
        classes, (1, 28, 28), (train, test), (0.1751,), (0.3332,),
        _idx_layouts("emnist", "EMNIST/raw", "emnist/gzip", "gzip", files=files),
        first=int(split == "letters"), transposed=True, notes=() if split == "balanced" else (same,),
    )  # fmt: skip


_TABLE = (
    Source(
        "digits", "handwritten digits, inside scikit-learn", "Alpaydin & Kaynak 1998, sklearn.datasets.load_digits",
        _DIGITS, (1, 8, 8), (1438, 359), (0.3058552097821048,), (0.3762791251918089,),
        notes=("every fifth example is test: scikit-learn has no split of this set",),
    ),
    Source(
        "cifar10", "photographs of 10 animals and vehicles", "Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (3, 32, 32), (50_000, 10_000), _cifar(125.3, 123.0, 113.9), _cifar(63.0, 62.1, 66.7),
        (
            Layout("binary", ("cifar-10-batches-bin",), tuple(f"{b}.bin" for b in _BATCHES), ("test_batch.bin",)),
            Layout("python", ("cifar-10-batches-py",), _BATCHES, ("test_batch",)),
        ),
        {
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25", "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692", "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421", "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb", "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d", "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d", "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        augment=True,
    ),
    Source(
        "cifar100", "photographs of 100 things", "Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html",
        tuple(_FINE.split()), (3, 32, 32), (50_000, 10_000), _cifar(129.3, 124.1, 112.4), _cifar(68.2, 65.4, 70.4),
        (
            Layout("binary", ("cifar-100-binary",), ("train.bin",), ("test.bin",)),
            Layout("python", ("cifar-100-python",), ("train",), ("test",)),
        ),
        {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        augment=True, label_bytes=2,
    ),
    Source(
        "mnist", "handwritten digits", "LeCun et al. 1998",
        _DIGITS, (1, 28, 28), (60_000, 10_000), (0.1307,), (0.3081,), _idx_layouts("mnist", "MNIST/raw"),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    Source(
        "fashion-mnist", "articles of clothing", "Xiao et al. 2017, github.com/zalandoresearch/fashion-mnist",
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        (1, 28, 28), (60_000, 10_000), (0.2860,), (0.3530,), _idx_layouts("fashion-mnist", "FashionMNIST/raw"),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    *(_emnist(split) for split in _EMNIST),
)  # fmt: skip
SOURCES: Mapping[str, Source] = {source.name: source for source in _TABLE}


AS_PUBLISHED = "as published"
OTHER = "reads whole, but is not the published file"
NO_CHECKSUM = "no published checksum"
DAMAGED = "does not read whole"
BROKEN = "is a broken photograph"
_OWNER = {md5: source.name for source in SOURCES.values() for md5 in source.md5.values()}


@dataclass(frozen=True)
class Finding:
    """A row of ``unskew data check``: what a file is and what is in it, or what is wrong with it."""

    path: str
    size: int  # bytes
    status: str  # AS_PUBLISHED | OTHER | NO_CHECKSUM | DAMAGED | BROKEN
    detail: str
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it reads from its beginning to its end."""
        return self.status not in (DAMAGED, BROKEN)


def read_part(source: Source, layout: Layout, paths: tuple[Path, ...]) -> tuple[Split, list[Path]]:
    """One part of a set, and those of its files that are not the published ones."""
    with ThreadPoolExecutor() as pool:  # reading and hashing leave the interpreter free
        raws = list(pool.map(binary.read_file, paths))
        status = list(pool.map(partial(_checksum, source), paths, raws))
    strange = [path for path, each in zip(paths, status, strict=True) if each == OTHER]
    images: Images
    if layout.kind == "idx":
        pixels, numbers = (_read_idx(path, raw) for path, raw in zip(paths, raws, strict=True))
        images, labels = binary.join(
            pixels, numbers, (paths[0], paths[1]),
            classes=len(source.classes), first=source.first, transposed=source.transposed,
        )  # fmt: skip
        images = np.array(images, order="C")
    else:
        parts = [_batch(source, layout, path, raw) for path, raw in zip(paths, raws, strict=True)]
        images, labels = np.concatenate([i for i, _ in parts]), np.concatenate([n for _, n in parts])
    if images.shape[1:] != source.shape:
        given, wanted = list(images.shape[1:]), list(source.shape)
        raise UserError(f"{paths[0]} holds images of {given}, {source.name} has {wanted}; give it as arrays:FILE.npz")
    return Split(images, labels), strange


def _read_idx(path: Path, raw: bytes) -> Images:
    return binary.idx(raw, path, dimensions=3 if "images" in path.name else 1)


def _batch(source: Source, layout: Layout, path: Path, raw: bytes) -> tuple[Images, Labels]:
    classes = len(source.classes)
    if layout.kind == "binary":
        return binary.cifar(raw, path, label_bytes=source.label_bytes, classes=classes)
    key = "labels" if source.label_bytes == 1 else "fine_labels"
    return binary.check_cifar_python(binary.read(raw, path), path, key=key, classes=classes)


def examine(source: Source, layout: Layout, path: Path) -> Finding:
    """What a file of a set is: as published or not, whole or damaged."""
    size = path.stat().st_size
    try:
        raw = binary.read_file(path)
        status = _checksum(source, path, raw)
        held = _read_idx(path, raw) if layout.kind == "idx" else _batch(source, layout, path, raw)[0]
    except UserError as error:
        return Finding(str(path), size, DAMAGED, str(error))
    return Finding(str(path), size, status, f"{len(held):,} {'labels' if held.ndim == 1 else 'images'}")


def _checksum(source: Source, path: Path, raw: bytes) -> str:
    if path.name not in source.md5:
        return NO_CHECKSUM
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if _OWNER.get(md5, source.name) != source.name:
        raise UserError(
            f"{path} is the published file of {_OWNER[md5]}, not of {source.name}; give --data {_OWNER[md5]}"
        )
    return AS_PUBLISHED if md5 == source.md5[path.name] else OTHER
