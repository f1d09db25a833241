"""The image sets with published files: digits, CIFAR and the MNIST family; finding, reading and checking their files.

A file that differs from the published one may be used if it can be read completely.
"""

import hashlib
import string
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unskew.core.errors import UserError
from unskew.core.types import ImageSet, Split
from unskew.data import binary
from unskew.data.arrays import every_fifth
from unskew.data.binary import Images, Labels
from unskew.data.interface import AS_PUBLISHED, DAMAGED, NO_CHECKSUM, OTHER, DataRequest, Download, Finding, Source


@dataclass(frozen=True)
class FileLayout:
    """One layout of a set's files; idx files are pairs of images and labels."""

    kind: str  # "binary" | "python" | "idx"
    folders: tuple[str, ...]  # below the data folder, which is searched last
    train: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True)
class PublishedSet:
    """The facts about a set; ``md5`` has its files' known checksums, ``sizes`` its training and test images."""

    name: str
    what: str
    origin: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # [ch, H, W]
    sizes: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layouts: tuple[FileLayout, ...] = ()
    md5: Mapping[str, str] = field(default_factory=dict)
    augment: bool = False
    label_bytes: int = 1  # in CIFAR's records: CIFAR-100 has the coarse label before the fine one
    first: int = 0  # the smallest label in the files
    transposed: bool = False  # EMNIST's images are stored transposed
    notes: tuple[str, ...] = ()
    download: Download | None = None


_FINE = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm"""
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_GOOGLE = "https://storage.googleapis.com/"
_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_IDX_FILES = tuple(f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))
_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
_DIGITS = tuple(string.digits)
_ALL = (*_DIGITS, *string.ascii_uppercase, *string.ascii_lowercase)
_MERGED = (*_DIGITS, *string.ascii_uppercase, *"abdefghnqrt")  # other lowercase letters are merged with capitals
_EMNIST = {  # classes, training images, test images
    "balanced": (_MERGED, 112_800, 18_800),
    "byclass": (_ALL, 697_932, 116_323),
    "bymerge": (_MERGED, 697_932, 116_323),
    "digits": (_DIGITS, 240_000, 40_000),
    "letters": (tuple(string.ascii_lowercase), 124_800, 20_800),
    "mnist": (_DIGITS, 60_000, 10_000),
}


_EMNIST_DOWNLOAD = Download(
    "https://biometrics.nist.gov/cs_links/EMNIST/",
    "emnist",
    {"gzip.zip": "58c8d27c78d21e728a6bc7b3cc06412e"},
    tuple(f"gzip/emnist-{split}-{name.replace('t10k', 'test')}.gz" for split in _EMNIST for name in _IDX_FILES),
)


def _cifar(*values: float) -> tuple[float, ...]:
    return tuple(value / 255 for value in values)


def _idx_layouts(*folder: str, files: tuple[str, ...] = _IDX_FILES) -> tuple[FileLayout, ...]:
    return (FileLayout("idx", folder, files[:2], files[2:]),)


def _emnist(split: str) -> PublishedSet:
    classes, train, test = _EMNIST[split]
    files = tuple(f"emnist-{split}-{name.replace('t10k', 'test')}" for name in _IDX_FILES)
    same = "normalised with the constants of EMNIST balanced"
    return PublishedSet(
        "emnist" if split == "balanced" else f"emnist-{split}",
        f"handwritten letters and digits, split {split}",
        "Cohen et al. 2017, nist.gov/itl/products-and-services/emnist-dataset",
        classes, (1, 28, 28), (train, test), (0.1751,), (0.3332,),
        _idx_layouts("emnist", "EMNIST/raw", "emnist/gzip", "gzip", files=files),
        first=int(split == "letters"), transposed=True, notes=() if split == "balanced" else (same,),
        download=_EMNIST_DOWNLOAD,
    )  # fmt: skip


_TABLE = (
    PublishedSet(
        "digits", "handwritten digits, part of scikit-learn", "Alpaydin & Kaynak 1998, sklearn.datasets.load_digits",
        _DIGITS, (1, 8, 8), (1438, 359), (0.3058552097821048,), (0.3762791251918089,),
        notes=("every fifth example is used for testing, since scikit-learn's digits have no test part",),
    ),
    PublishedSet(
        "cifar10", "photographs of 10 animals and vehicles", "Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (3, 32, 32), (50_000, 10_000), _cifar(125.3, 123.0, 113.9), _cifar(63.0, 62.1, 66.7),
        (
            FileLayout("binary", ("cifar-10-batches-bin",), tuple(f"{b}.bin" for b in _BATCHES), ("test_batch.bin",)),
            FileLayout("python", ("cifar-10-batches-py",), _BATCHES, ("test_batch",)),
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
        download=Download(
            _TORONTO, "cifar-10-batches-bin", {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
            tuple(f"cifar-10-batches-bin/{b}.bin" for b in (*_BATCHES, "test_batch")),
        ),
    ),
    PublishedSet(
        "cifar100", "photographs of 100 things", "Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html",
        tuple(_FINE.split()), (3, 32, 32), (50_000, 10_000), _cifar(129.3, 124.1, 112.4), _cifar(68.2, 65.4, 70.4),
        (
            FileLayout("binary", ("cifar-100-binary",), ("train.bin",), ("test.bin",)),
            FileLayout("python", ("cifar-100-python",), ("train",), ("test",)),
        ),
        {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        augment=True, label_bytes=2,
        download=Download(
            _TORONTO, "cifar-100-binary", {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
            ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        ),
    ),
    PublishedSet(
        "mnist", "handwritten digits", "LeCun et al. 1998",
        _DIGITS, (1, 28, 28), (60_000, 10_000), (0.1307,), (0.3081,), _idx_layouts("mnist", "MNIST/raw"),
        _MNIST_FILES,
        download=Download(
            "https://ossci-datasets.s3.amazonaws.com/mnist/", "mnist", _MNIST_FILES,
            mirrors=(f"{_GOOGLE}cvdf-datasets/mnist/",)
        ),
    ),
    PublishedSet(
        "fashion-mnist", "articles of clothing", "Xiao et al. 2017, github.com/zalandoresearch/fashion-mnist",
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        (1, 28, 28), (60_000, 10_000), (0.2860,), (0.3530,), _idx_layouts("fashion-mnist", "FashionMNIST/raw"),
        _FASHION_FILES,
        download=Download(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", "fashion-mnist", _FASHION_FILES,
            mirrors=(f"{_GOOGLE}tensorflow/tf-keras-datasets/",),
        ),
    ),
    *(_emnist(split) for split in _EMNIST),
)  # fmt: skip
SETS: Mapping[str, PublishedSet] = {facts.name: facts for facts in _TABLE}
_OWNER = {md5: facts.name for facts in SETS.values() for md5 in facts.md5.values()}


def load_digits(request: DataRequest) -> ImageSet:
    """Load the digits that come with scikit-learn."""
    from sklearn import datasets  # slow to import, and only needed here

    digits, facts = datasets.load_digits(), SETS["digits"]
    images = np.rint(digits.images * 255 / 16).astype(np.uint8)[:, None]  # pixels go from 0 to 16
    labels, out = digits.target.astype(np.int64), every_fifth(len(images))
    train, test = Split(images[~out], labels[~out]), Split(images[out], labels[out])
    return ImageSet(request.name, facts.classes, train, test, facts.mean, facts.std, notes=facts.notes)


def load_published(name: str, request: DataRequest) -> ImageSet:
    """Load a set from its published files, with a note on any that differ."""
    facts = SETS[name]
    layout, folder, train_files, test_files = find_files(facts, request.data_dir)
    train, changed = _read_part(facts, layout, train_files)
    test, also_changed = _read_part(facts, layout, test_files)
    notes = list(facts.notes)
    if changed := [*changed, *also_changed]:
        names = ", ".join(path.name for path in changed)
        notes.append(f"{folder}: the checksums of {names} are not those of the published files; they are used anyway")
    if (len(train), len(test)) != facts.sizes:
        published = f"the published set has {facts.sizes[0]:,} and {facts.sizes[1]:,}"
        notes.append(f"{folder} has {len(train):,} training and {len(test):,} test images; {published}")
    return ImageSet(name, facts.classes, train, test, facts.mean, facts.std, facts.augment, notes=tuple(notes))


def check_published(name: str, request: DataRequest) -> list[Finding]:
    """Compare every file of a set with the published one."""
    facts = SETS[name]
    layout, folder, train, test = find_files(facts, request.data_dir)
    findings = []
    for path in (*train, *test):
        size = path.stat().st_size
        try:
            raw = binary.read_file(path)
            status = _checksum(facts, path, raw)
            array = binary.idx(raw, path) if layout.kind == "idx" else _read_batch(facts, layout, path, raw)[0]
            detail = f"{len(array):,} {'labels' if array.ndim == 1 else 'images'}"
        except UserError as error:
            status, detail = DAMAGED, str(error)
        findings.append(Finding(str(path), size, status, detail))
    if all(finding.whole for finding in findings):
        try:
            load_published(name, request)
        except UserError as error:  # each file is complete, but they do not belong together
            findings.append(Finding(str(folder), 0, DAMAGED, str(error)))
    return findings


def find_files(
    facts: PublishedSet, data_dir: Path | None
) -> tuple[FileLayout, Path, tuple[Path, ...], tuple[Path, ...]]:
    """Return the first folder that has all files of one layout, and the training and test files in it."""
    searched = [(layout, name) for layout in facts.layouts for name in layout.folders]
    searched += [(layout, ".") for layout in facts.layouts]
    incomplete = ""
    for layout, below in searched if data_dir is not None else ():
        folder, names = Path(data_dir or "", below), (*layout.train, *layout.test)
        files = {name: path for name in names if (path := _find_file(folder, name, layout)) is not None}
        if len(files) == len(names):
            return layout, folder, tuple(files[n] for n in layout.train), tuple(files[n] for n in layout.test)
        if files:
            incomplete = incomplete or f"; {folder} is missing {', '.join(n for n in names if n not in files)}"
    where = "no data folder was given" if data_dir is None else f"it was not found in {data_dir}{incomplete}"
    folders = " or ".join(dict.fromkeys(name for _, name in searched))
    give = f"pass the folder that contains {folders} as --data-dir DIR or UNSKEW_DATA"
    raise UserError(f"{facts.name}: {where}; {give}, or download it: unskew data fetch {facts.name} --data-dir DIR")


def _make_source(facts: PublishedSet) -> Source:
    known: dict[str, Any] = {name: getattr(facts, name) for name in ("shape", "sizes", "download")}
    known["classes"] = len(facts.classes)
    if not facts.layouts:
        return Source(facts.name, facts.what, facts.origin, load_digits, **known)
    load, check = partial(load_published, facts.name), partial(check_published, facts.name)

    def locate(data_dir: Path | None) -> Path:
        return find_files(facts, data_dir)[1]

    return Source(facts.name, facts.what, facts.origin, load, locate=locate, check=check, **known)


PUBLISHED = tuple(map(_make_source, _TABLE))


def _find_file(folder: Path, name: str, layout: FileLayout) -> Path | None:
    """The file of that name; idx files may be gzipped, or have a dot before idx as in some copies."""
    dotted = name.replace("-idx", ".idx")
    names = (name, f"{name}.gz", dotted, f"{dotted}.gz") if layout.kind == "idx" else (name,)
    return next((folder / n for n in names if (folder / n).is_file()), None)


def _read_part(facts: PublishedSet, layout: FileLayout, paths: tuple[Path, ...]) -> tuple[Split, list[Path]]:
    with ThreadPoolExecutor() as pool:  # reading and hashing release the GIL
        raws = list(pool.map(binary.read_file, paths))
        status = list(pool.map(partial(_checksum, facts), paths, raws))
    changed = [path for path, known in zip(paths, status, strict=True) if known == OTHER]
    images: Images
    if layout.kind == "idx":
        pixels, numbers = (binary.idx(raw, path) for path, raw in zip(paths, raws, strict=True))
        images, labels = binary.join(
            pixels, numbers, (paths[0], paths[1]), classes=len(facts.classes), first=facts.first
        )
        images = np.array(images.transpose(0, 1, 3, 2) if facts.transposed else images, order="C")
    else:
        parts = [_read_batch(facts, layout, path, raw) for path, raw in zip(paths, raws, strict=True)]
        images, labels = np.concatenate([i for i, _ in parts]), np.concatenate([n for _, n in parts])
    if images.shape[1:] != facts.shape:
        shapes = f"{list(images.shape[1:])}, not {list(facts.shape)}"
        raise UserError(f"{paths[0]} has images of shape {shapes}; convert it to use it as arrays:FILE.npz")
    return Split(images, labels), changed


def _read_batch(facts: PublishedSet, layout: FileLayout, path: Path, raw: bytes) -> tuple[Images, Labels]:
    classes = len(facts.classes)
    if layout.kind == "binary":
        return binary.cifar(raw, path, label_bytes=facts.label_bytes, classes=classes)
    key = "labels" if facts.label_bytes == 1 else "fine_labels"
    return binary.cifar_python(raw, path, key=key, classes=classes)


def _checksum(facts: PublishedSet, path: Path, raw: bytes) -> str:
    if path.name not in facts.md5:
        return NO_CHECKSUM
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if _OWNER.get(md5, facts.name) != facts.name:
        owner = _OWNER[md5]
        raise UserError(f"{path} is the published file of {owner}, not {facts.name}; use --data {owner}")
    return AS_PUBLISHED if md5 == facts.md5[path.name] else OTHER
