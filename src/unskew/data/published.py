"""The image sets with published files: digits, CIFAR and the MNIST family; finding, reading and checking their files.

A file that differs from the published one may be used if it can be read completely; one that differs from its format is
rejected. Shapes: N records in a file, images [N, ch, H, W] (CIFAR) or [N, H, W] (idx), labels [N].
"""

import gzip
import hashlib
import io
import pickletools
import string
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.limits import BLOCK, check_unpacked, read_plain
from unskew.core.types import ImageSet, Split
from unskew.data.arrays import every_fifth
from unskew.data.interface import AS_PUBLISHED, DAMAGED, NO_CHECKSUM, OTHER, DataRequest, Download, Finding, Source

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


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
        "cifar10", "photographs in 10 classes of animals and vehicles",
        "Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (3, 32, 32), (50_000, 10_000),
        (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255),
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
        tuple(_FINE.split()), (3, 32, 32), (50_000, 10_000),
        (129.3 / 255, 124.1 / 255, 112.4 / 255), (68.2 / 255, 65.4 / 255, 70.4 / 255),
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


def load_published(request: DataRequest) -> ImageSet:
    """Load a set from its published files, with a note on any that differ."""
    facts = SETS[request.source.name]
    layout, folder, files = find_files(facts, request.data_dir)
    train, changed = _read_part(facts, layout, files[: len(layout.train)])
    test, also_changed = _read_part(facts, layout, files[len(layout.train) :])
    notes = list(facts.notes)
    if names := ", ".join(path.name for path in (*changed, *also_changed)):
        notes.append(f"{folder}: the checksums of {names} are not those of the published files; they are used anyway")
    if (len(train), len(test)) != facts.sizes:
        published = f"the published set has {facts.sizes[0]:,} and {facts.sizes[1]:,}"
        notes.append(f"{folder} has {len(train):,} training and {len(test):,} test images; {published}")
    return ImageSet(facts.name, facts.classes, train, test, facts.mean, facts.std, facts.augment, notes=tuple(notes))


def check_published(request: DataRequest) -> list[Finding]:
    """Compare every file of a set with the published one."""
    facts = SETS[request.source.name]
    layout, folder, files = find_files(facts, request.data_dir)
    findings = []
    for path in files:
        size = path.stat().st_size
        try:
            raw = read_file(path)
            status = _checksum(facts, path, raw)
            array = idx(raw, path) if layout.kind == "idx" else _read_batch(facts, layout, path, raw)[0]
            detail = f"{len(array):,} {'labels' if array.ndim == 1 else 'images'}"
        except UserError as error:
            status, detail = DAMAGED, str(error)
        findings.append(Finding(str(path), size, status, detail))
    if all(finding.whole for finding in findings):
        try:
            load_published(request)
        except UserError as error:  # each file is complete, but they do not belong together
            findings.append(Finding(str(folder), 0, DAMAGED, str(error)))
    return findings


def find_files(facts: PublishedSet, data_dir: Path | None) -> tuple[FileLayout, Path, list[Path]]:
    """Return the first folder that has all files of one layout, and the training and test files in it."""
    searched = [(layout, name) for layout in facts.layouts for name in layout.folders]
    searched += [(layout, ".") for layout in facts.layouts]
    incomplete = ""
    for layout, below in searched if data_dir is not None else ():
        folder, names = Path(data_dir or "", below), (*layout.train, *layout.test)
        files = {name: path for name in names if (path := _find_file(folder, name, layout)) is not None}
        if len(files) == len(names):
            return layout, folder, list(files.values())
        if files:
            incomplete = incomplete or f"; {folder} is missing {', '.join(n for n in names if n not in files)}"
    where = "no data folder was given" if data_dir is None else f"it was not found in {data_dir}{incomplete}"
    folders = " or ".join(dict.fromkeys(name for _, name in searched))
    give = f"pass the folder that contains {folders} as --data-dir DIR or UNSKEW_DATA"
    raise UserError(f"{facts.name}: {where}; {give}, or download it: unskew data fetch {facts.name} --data-dir DIR")


def _make_source(facts: PublishedSet) -> Source:
    names = ("name", "what", "origin", "shape", "sizes", "download")
    known: dict[str, Any] = {name: getattr(facts, name) for name in names} | {"classes": len(facts.classes)}
    if not facts.layouts:
        return Source(**known, load=load_digits)
    known["locate"] = lambda _, data_dir: find_files(facts, data_dir)[1]
    return Source(**known, load=load_published, check=check_published)


PUBLISHED = tuple(map(_make_source, _TABLE))


def _find_file(folder: Path, name: str, layout: FileLayout) -> Path | None:
    """The file of that name; idx files may be gzipped, or have a dot before idx as in some copies."""
    dotted = name.replace("-idx", ".idx")
    names = (name, f"{name}.gz", dotted, f"{dotted}.gz") if layout.kind == "idx" else (name,)
    return next((folder / n for n in names if (folder / n).is_file()), None)


def _read_part(facts: PublishedSet, layout: FileLayout, paths: list[Path]) -> tuple[Split, list[Path]]:
    with ThreadPoolExecutor() as pool:  # reading and hashing release the GIL
        raws = list(pool.map(read_file, paths))
        status = list(pool.map(partial(_checksum, facts), paths, raws))
    changed = [path for path, known in zip(paths, status, strict=True) if known == OTHER]
    images: Images
    if layout.kind == "idx":
        images, numbers = (idx(raw, path) for path, raw in zip(paths, raws, strict=True))
        if len(images) != len(numbers):
            both = f"{paths[0]} has {len(images):,} images, but {paths[1]} {len(numbers):,} labels"
            raise UserError(f"{both}; {REPLACE}")
        labels = numbers.astype(np.int64) - facts.first
        _check_labels(labels, paths[1], len(facts.classes), facts.first)
        images = np.array(images.transpose(0, 2, 1) if facts.transposed else images, order="C")[:, None]
    else:
        parts = [_read_batch(facts, layout, path, raw) for path, raw in zip(paths, raws, strict=True)]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if images.shape[1:] != facts.shape:
        shapes = f"{list(images.shape[1:])}, not {list(facts.shape)}"
        raise UserError(f"{paths[0]} has images of shape {shapes}; convert it to use it as arrays:FILE.npz")
    return Split(images, labels), changed


def _read_batch(facts: PublishedSet, layout: FileLayout, path: Path, raw: bytes) -> tuple[Images, Labels]:
    classes = len(facts.classes)
    if layout.kind == "binary":
        return cifar(raw, path, label_bytes=facts.label_bytes, classes=classes)
    key = "labels" if facts.label_bytes == 1 else "fine_labels"
    return cifar_python(raw, path, key=key, classes=classes)


def _checksum(facts: PublishedSet, path: Path, raw: bytes) -> str:
    if path.name not in facts.md5:
        return NO_CHECKSUM
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if _OWNER.get(md5, facts.name) != facts.name:
        owner = _OWNER[md5]
        raise UserError(f"{path} is the published file of {owner}, not {facts.name}; use --data {owner}")
    return AS_PUBLISHED if md5 == facts.md5[path.name] else OTHER


CIFAR_SHAPE = (3, 32, 32)
CIFAR_PIXELS = 3 * 32 * 32
REPLACE = "replace it with the published file"
_DEFLATE_LIMIT = 1032  # the best compression ratio of deflate


def read_file(path: Path) -> bytes:
    """All bytes of a file that must not be empty."""
    if not (raw := read_plain(path)):
        raise UserError(f"{path} is empty; {REPLACE}")
    return raw


def cifar(raw: bytes, path: Path, *, label_bytes: int, classes: int) -> tuple[Images, Labels]:
    """One CIFAR binary file: records of ``label_bytes`` labels (the last one counts) and 3072 pixels."""
    record = label_bytes + CIFAR_PIXELS
    if not raw or len(raw) % record:
        raise UserError(f"{path} is truncated: {len(raw):,} bytes are not records of {record:,} bytes; {REPLACE}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].astype(np.int64)
    _check_labels(labels, path, classes)
    return records[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), labels


def cifar_python(raw: bytes, path: Path, *, key: str, classes: int) -> tuple[Images, Labels]:
    """One batch of CIFAR's Python layout; the labels are under "labels", in CIFAR-100 under "fine_labels"."""
    batch = read_pickle(raw, path)
    data: Any = batch.get("data")
    labels: Any = batch.get(key)
    numbers = labels.tolist() if isinstance(labels, np.ndarray) else labels
    pixels = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (CIFAR_PIXELS,)
    listed = isinstance(numbers, list) and all(type(n) is int and 0 <= n < classes for n in numbers)
    if not pixels or not listed or not len(data) == len(numbers) > 0:
        wanted = f"'data', bytes [N, {CIFAR_PIXELS}], and {key!r}, N whole numbers from 0 to {classes - 1}"
        raise UserError(f"{path} is not a batch in CIFAR's Python layout: it must have {wanted}; {REPLACE}")
    return data.reshape(-1, *CIFAR_SHAPE), np.array(numbers, np.int64)


def _check_labels(labels: Labels, path: Path, classes: int, first: int = 0) -> None:
    """Reject a label that is no class; in the file, the smallest one is ``first``."""
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= classes))):
        label = f"the label of record {wrong[0]} is {labels[wrong[0]] + first}"
        raise UserError(f"{path}: {label}, but labels range from {first} to {first + classes - 1}; {REPLACE}")


def idx(raw: bytes, path: Path) -> Images:
    """One idx file of unsigned bytes, gzipped or not: one dimension for labels, three if its name has "images"."""
    dimensions, what = (3, "images") if "images" in path.name else (1, "labels")
    packed = raw[:2] == b"\x1f\x8b"
    stream = gzip.GzipFile(fileobj=io.BytesIO(raw)) if packed else io.BytesIO(raw)
    try:
        magic, *shape = struct.unpack(f">{1 + dimensions}I", stream.read(4 * (1 + dimensions)))
        size = int(np.prod(shape, dtype=object))
        if magic != 0x800 + dimensions or not size:
            raise ValueError(f"it does not begin like an idx file of {what}")
        if size > len(raw) * (_DEFLATE_LIMIT if packed else 1):  # a damaged count must not allocate terabytes
            raise ValueError(f"it is truncated: its header declares {size:,} bytes")
        check_unpacked(size, max(BLOCK, len(raw)), str(path))
        body = stream.read(size + 1)
        if len(body) != size:
            raise ValueError(f"it has {'more' if len(body) > size else 'fewer'} than the declared {size:,} bytes")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}); {REPLACE}") from error
    return np.frombuffer(body, np.uint8).reshape(shape)


_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


@dataclass(frozen=True)
class _Name:
    """Something that the file imports; our own code emulates it."""

    text: str


def read_pickle(raw: bytes, path: Path) -> dict[str, Any]:
    """Read the dict in a pickle of protocol 2 to 5 without executing it: only the opcodes listed here are allowed."""
    stacks: list[list[Any]] = [[]]  # a mark, at the start of a tuple, list or dict, adds one
    memo: dict[int, Any] = {}
    position = encoded = 0
    try:
        argument: Any
        for opcode, argument, at in pickletools.genops(raw):
            position, name, stack = at or 0, opcode.name, stacks[-1]
            match name:
                case "PROTO" | "FRAME" | "STOP":
                    pass
                case "BINSTRING" | "SHORT_BINSTRING":  # bytes of Python 2
                    stack.append(argument.encode("latin-1"))
                case "EMPTY_LIST" | "EMPTY_DICT":
                    stack.append([] if name == "EMPTY_LIST" else {})
                case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                    memo[len(memo) if argument is None else argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "MARK":
                    stacks.append([])
                case "TUPLE" | "APPENDS" | "SETITEMS":
                    values = stacks.pop()
                    _add(name, stacks[-1], values)
                case "TUPLE1" | "TUPLE2" | "TUPLE3" | "APPEND" | "SETITEM":
                    count = {"APPEND": 1, "SETITEM": 2}.get(name) or int(name[-1])
                    values = [stack.pop() for _ in range(count)][::-1]
                    _add(name, stack, values)
                case "GLOBAL":
                    stack.append(_Name(argument.replace("numpy._core", "numpy.core")))
                case "STACK_GLOBAL":
                    function, module = stack.pop(), stack.pop()
                    stack.append(_Name(f"{module} {function}".replace("numpy._core", "numpy.core")))
                case "REDUCE":
                    arguments, function = stack.pop(), stack.pop()
                    stack.append(_call(function, arguments))
                    encoded += len(stack[-1]) if isinstance(stack[-1], bytes) else 0
                    if encoded > len(raw):
                        raise ValueError("it would unpack to more bytes than it contains")
                case "BUILD":
                    state = stack.pop()
                    stack[-1] = _build(stack[-1], state)
                case _ if name in _LITERALS:
                    stack.append(argument)
                case _ if name in _CONSTANTS:
                    stack.append(_CONSTANTS[name])
                case _:
                    raise ValueError(f"the opcode {name} does not belong in a batch of images")
        ((top,),) = stacks
        return {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in top.items()}
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:  # also UnicodeError
        wrong = f"is damaged, or not a batch of images (at byte {position:,}: {error})"
        raise UserError(f"{path} {wrong}; {REPLACE}") from error


def _add(name: str, stack: list[Any], values: list[Any]) -> None:
    """Make a tuple of the values, or add them to the list or dict on the stack."""
    if name.startswith("TUPLE"):
        stack.append(tuple(values))
    elif name.startswith("APPEND"):
        list.extend(stack[-1], values)  # raises TypeError if it is not a list
    elif all(isinstance(key, str | bytes) for key in values[::2]):  # nothing nested is ever hashed
        dict.update(stack[-1], zip(values[::2], values[1::2], strict=True))
    else:
        raise ValueError("a key is not a string")


def _call(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case _Name("__builtin__ bytes" | "builtins bytes"), ():
            return b""
        case _Name("_codecs encode"), (str() as text, "latin1"):
            return text.encode("latin-1")
        case _Name("numpy dtype"), ("u1" | b"u1" | "i8" | b"i8" as code, _, _):
            return np.dtype(code if isinstance(code, str) else code.decode())
        case _Name("numpy.core.multiarray _reconstruct"), _:
            return _Name("array")
        case _Name("numpy.core.numeric _frombuffer"), (bytes() | bytearray() as data, np.dtype() as dtype, shape, "C"):
            return np.frombuffer(data, dtype).reshape(shape)
    raise ValueError(f"unsafe: it calls {function.text if isinstance(function, _Name) else 'a value'}")


def _build(value: Any, state: Any) -> Any:
    match value, state:
        case np.dtype(), (_, "|" | "<" | b"|" | b"<", *_):  # the byte order
            return value
        case _Name("array"), (_, shape, np.dtype() as dtype, False, bytes() as data):
            return np.frombuffer(data, dtype).reshape(shape)
    raise ValueError("unsafe: it sets the state of something other than an array")
