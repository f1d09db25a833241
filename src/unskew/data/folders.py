"""Image sets that are folders of pictures: ``folder:DIR``, and CINIC-10, Tiny-ImageNet and Omniglot as distributed.

Without a test folder, every fifth picture of each class becomes test, and a note reports it.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_memory, check_plain, check_unpacked, is_folder, read_plain, size_on_disk, user_path
from unskew.core.text import cut
from unskew.core.types import ImageSet, Split
from unskew.data.arrays import measure
from unskew.data.decode import DAMAGE, DEEP, GREY, crop_square, flatten_mode
from unskew.data.interface import Download, Request, Source
from unskew.data.rows import Rows, is_number
from unskew.data.tables import check_side, row_source

TESTS = ("test", "val", "valid", "validation")  # the first that is there
_IGNORED = {"thumbs.db", "desktop.ini"}
_UNREADABLE = (*DAMAGE, MemoryError)

Classes = dict[str, list[Path]]  # the files of each class


def load_folder(request: Request, *, size: int | None = None) -> ImageSet:
    """Load ``folder:DIR``: a folder for each class, perhaps inside train/ and test/.

    Grey if all pictures are grey, RGB otherwise; transparency is dropped; EXIF rotation is not applied.

    Parameters
    ----------
    size
        Scale the shorter side to it (bilinear) and crop the centre; without it pictures must have one size.
    """
    check_side(request, size)
    directory = user_path(request.path)
    if not request.path or not is_folder(directory):
        given = f"{cut(request.name)}: {brief(request.path)} is not a folder"
        raise UserError(f"{given}; give a folder that contains one folder per class")
    train, test, notes = _list_files(directory)
    if size is not None:
        notes = [*notes, f"pictures are scaled and cropped to {size}×{size}"]
    classes = tuple(train)
    files = [[(path, k) for k, c in enumerate(classes) for path in part.get(c, [])] for part in (train, test)]
    grey, shape = _survey_files([path for part in files for path, _ in part], request, size)
    splits = [_decode(part, shape, size, "L" if grey else "RGB") for part in files]
    mean, std = measure(splits[0].images)
    return ImageSet(request.name, classes, splits[0], splits[1], mean, std, notes=tuple(notes))


FOLDER = Source("folder", "your own pictures, one folder per class", "yours", load_folder, path="DIR")


def _visible(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror or error}; check its permissions") from error
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
        notes = [f"ignored, next to train: {', '.join(unread[:9])}"] if unread else []
        notes += [note for part in ("train", held) if part for note in _beside(entries[part])]
        strange = sorted(set(test) - set(train))
        if held and strange:
            raise UserError(f"{entries[held] / strange[0]}: this class is not in train; add it there or remove it here")
    if test:
        return train, test, notes
    if all(len(files) < 5 for files in train.values()):
        raise UserError(f"{directory}: no class has five pictures, so there are none for testing; add a folder test/")
    kept = {c: [p for i, p in enumerate(files) if i % 5 != 4] for c, files in train.items()}
    notes += ["every fifth picture of each class, by name, is used for testing, since there is no folder test"]
    return kept, {c: files[4::5] for c, files in train.items()}, notes


def _beside(directory: Path) -> list[str]:
    loose = [p.name for p in _visible(directory) if not p.is_dir()]
    return [f"ignored, next to the classes of {directory.name}: {', '.join(loose[:9])}"] if loose else []


def _list_classes(directory: Path) -> Classes:
    classes = {p.name: _visible(p) for p in _visible(directory) if p.is_dir()}
    if not classes:
        raise UserError(f"{directory} contains no folders; put the pictures of each class in a folder named after it")
    for name, files in classes.items():
        if not files:
            raise UserError(f"{directory / name} is empty; put pictures there or remove the folder")
        inner = next((p for p in files if p.is_dir()), None)
        if inner is not None:
            wanted = "DIR/CLASS/picture, or DIR/train/CLASS/picture and DIR/test/CLASS/picture"
            raise UserError(f"{inner} is a folder inside a class folder; expected {wanted}")
    return classes


def _open(path: Path) -> Image.Image:
    check_plain(path)
    try:
        with warnings.catch_warnings():  # how large pictures may be is decided for all of them together
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(path)
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UserError(f"{path} claims to have more than {most:,} pixels; scale it down, or remove it") from error
    except _UNREADABLE as error:
        raise UserError(f"{path} is not a picture ({type(error).__name__}); remove or replace it") from error


def _survey_files(files: list[Path], request: Request, size: int | None) -> tuple[bool, tuple[int, int]]:
    """Whether all pictures are grey, and their [H, W]; only the files' headers are read.

    What all of them unpack to is bounded by what they take on disk, before the first is decoded.
    """
    grey, pixels = True, 0
    first: dict[tuple[int, int], Path] = {}  # of each size
    for path in files:
        with _open(path) as picture:
            pixels += picture.size[0] * picture.size[1]
            if picture.mode.startswith(DEEP):
                raise UserError(f"{path} has more than 8 bits per channel ({picture.mode}); save it with 8")
            grey = grey and picture.mode in GREY
            first.setdefault(picture.size, path)
    channels = 1 if grey else 3
    if size is not None:
        check_unpacked(pixels * channels, size_on_disk(files), request.name, at_once=False)
        check_memory(len(files) * channels * size**2, request.name, "give a smaller size, or fewer pictures")
        return grey, (size, size)
    if len(first) > 1:
        one, other = (f"{path} is {width}×{height}" for (width, height), path in list(first.items())[:2])
        instead = f"{request.spell(size=64)} scales and crops all to 64×64"
        raise UserError(f"all pictures must have the same size: {one}, {other}; {instead}")
    check_unpacked(pixels * channels, size_on_disk(files), request.name)
    ((width, height),) = first
    return grey, (height, width)


def _decode(files: list[tuple[Path, int]], shape: tuple[int, int], size: int | None, mode: str) -> Split:
    images = np.empty((len(files), len(mode), *shape), np.uint8)
    for image, (path, _) in zip(images, files, strict=True):
        with _open(path) as picture:
            try:
                plain = flatten_mode(picture, mode)
            except _UNREADABLE as error:
                raise UserError(f"{path} is damaged ({error}); replace or remove it") from error
        pixels = np.asarray(plain if size is None else crop_square(plain, size))
        image[:] = pixels if mode == "L" else pixels.transpose(2, 0, 1)
    return Split(images, np.array([label for _, label in files], np.int64))


PICTURES = (".png", ".jpg", ".jpeg")
Listed = list[tuple[str, int, bool]]  # path, label, whether it is test


def cinic10_rows(folder: Path, *, valid: str = "out") -> Rows:
    """CINIC-10: train and test; ``valid="train"`` adds the validation images to the training images.

    90,000 images each, in folders of CIFAR-10's class names (Darlow et al. 2018).
    """
    if valid not in ("out", "train"):
        raise UserError(
            f"cinic10(valid={valid}): give out to leave the validation images out, or train to use them for training"
        )
    classes = _folders(folder / "train")
    parts = ["train", *["valid"] * (valid == "train"), "test"]
    listed = [
        (path, label, part == "test")
        for part in parts
        for label, name in enumerate(classes)
        for path in _pictures(folder, f"{part}/{name}")
    ]
    notes = ("the validation images are used for training too",) if valid == "train" else ()
    return _rows(folder, listed, classes, notes=notes)


def tiny_imagenet_rows(folder: Path) -> Rows:
    """Tiny-ImageNet: 100,000 training images of 200 classes; its 10,000 validation images are test, as usual.

    The labels of its own test images were not published. Classes are in the order of wnids.txt, named by words.txt.
    """
    ids = [line.strip() for line in _lines(folder / "wnids.txt") if line.strip()]
    names_of = dict(line.split("\t", 1) for line in _lines(folder / "words.txt") if "\t" in line)
    first = [names_of.get(wnid, wnid).split(",")[0].strip() for wnid in ids]
    names = [f"{name} ({wnid})" if first.count(name) > 1 else name for name, wnid in zip(first, ids, strict=True)]
    label = {wnid: at for at, wnid in enumerate(ids)}
    listed = [(path, at, False) for wnid, at in label.items() for path in _pictures(folder, f"train/{wnid}/images")]
    annotations = folder / "val" / "val_annotations.txt"
    for number, line in enumerate(_lines(annotations), 1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in label or "/" in fields[0] or not fields[0].lower().endswith(PICTURES):
            raise UserError(f"{annotations}, line {number}: {brief(line)} does not name a picture and a known class")
        listed.append((f"val/images/{fields[0]}", label[fields[1]], True))
    notes = ("the validation images, whose labels are published, are used for testing",)
    return _rows(folder, listed, names, notes=notes)


def omniglot_rows(folder: Path, *, part: str = "background") -> Rows:
    """Omniglot: characters are classes, drawers users; ``part`` is background, evaluation or all (Lake et al. 2015).

    Every character was drawn by 20 people, named by the number at the end of the file's name; they are the same people
    within an alphabet, so a user is an alphabet and a number. Users 5, 10, 15 and 20 of each alphabet are test.
    """
    if part not in ("background", "evaluation", "all"):
        raise UserError(f"omniglot(part={part}): give background, evaluation or all")
    classes: list[str] = []
    listed: Listed = []
    users: list[str] = []
    for held in ("background", "evaluation") if part == "all" else (part,):
        for alphabet in _folders(folder / f"images_{held}"):
            for character in _folders(folder / f"images_{held}" / alphabet):
                for path in _pictures(folder, f"images_{held}/{alphabet}/{character}"):
                    drawer = Path(path).stem.rpartition("_")[2]
                    if not is_number(drawer):
                        raise UserError(
                            f"{folder / path}: its name must end with its drawer's number, as in 0001_07.png"
                        )
                    listed.append((path, len(classes), int(drawer) % 5 == 0))
                    users.append(f"{alphabet} {int(drawer)}")
                classes.append(f"{alphabet}/{character}")
    notes = ("every fifth drawer of each alphabet is used for testing, since Omniglot has no test part",)
    return _rows(folder, listed, classes, users, notes)


def _rows(
    folder: Path, listed: Listed, classes: Sequence[str], users: list[str] | None = None, notes: tuple[str, ...] = ()
) -> Rows:
    paths, labels, test = (list(column) for column in zip(*listed, strict=True))
    owners = None if users is None else np.array(users, np.str_)
    return Rows(folder, paths, np.array(labels), tuple(classes), np.array(test), owners, notes=notes)


def _folders(directory: Path) -> list[str]:
    return _entries(directory, "folders", lambda entry: entry.is_dir())


def _pictures(root: Path, below: str) -> list[str]:
    names = _entries(root / below, "pictures", lambda entry: entry.name.lower().endswith(PICTURES))
    return [f"{below}/{name}" for name in names]


def _entries(directory: Path, what: str, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if wanted(entry) and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(
            f"{directory} cannot be read: {error.strerror or error}; unpack the complete data set there"
        ) from error
    if not names:
        raise UserError(f"{directory} has no {what}; unpack the complete data set there")
    return names


def _lines(path: Path) -> list[str]:
    try:
        return read_plain(path).decode("utf-8").splitlines()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}; unpack the complete data set there"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; unpack the set again") from error


CINIC10 = row_source(
    "cinic10",
    "CIFAR-10's classes, with pictures from ImageNet too",
    "Darlow et al. 2018, github.com/BayesWatch/cinic-10",
    cinic10_rows,
    folders=("cinic10", "CINIC-10", "cinic-10", "CINIC10"),
    known_by=("train/airplane",),
    classes=10,
    shape=(3, 32, 32),
    sizes=(90_000, 90_000),
    download=Download(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/",
        "CINIC-10",
        {"CINIC-10.tar.gz": "6ee4d0c996905fe93221de577967a372"},
        mirrors=("https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/",),
        tree="",
        whole="(valid=train)",
    ),
)
TINY_IMAGENET = row_source(
    "tiny-imagenet",
    "small pictures from ImageNet",
    "Le & Yang 2015, cs231n.stanford.edu/tiny-imagenet-200.zip",
    tiny_imagenet_rows,
    folders=("tiny-imagenet-200", "tiny-imagenet"),
    known_by=("wnids.txt",),
    classes=200,
    shape=(3, 64, 64),
    sizes=(100_000, 10_000),
    download=Download(
        "http://cs231n.stanford.edu/",
        "tiny-imagenet-200",
        {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
        tree="tiny-imagenet-200/",
    ),
)
OMNIGLOT = row_source(
    "omniglot",
    "handwritten characters, with their drawers as users",
    "Lake et al. 2015, github.com/brendenlake/omniglot",
    omniglot_rows,
    folders=("omniglot", "omniglot-py", "omniglot/python"),
    known_by=("images_background", "images_evaluation"),
    classes=964,
    shape=(1, 105, 105),
    sizes=(15_424, 3_856),
    download=Download(
        "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
        "omniglot",
        {
            "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
            "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
        },
        mirrors=("https://github.com/brendenlake/omniglot/raw/master/python/",),
        tree="",
        whole="(part=all)",
    ),
)
