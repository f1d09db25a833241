"""Image sets in folders of pictures: ``folder:DIR``, and CINIC-10, Tiny-ImageNet and Omniglot as distributed.

``folder:FILE.zip`` is such a folder in an archive. Without a test folder, every fifth picture of each class is test.
"""

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_plain, check_unpacked, is_folder, read_plain, size_on_disk, user_path
from unskew.core.text import cut
from unskew.data.interface import OWN, DataRequest, Download, Rows, Source, find_by

TESTS = ("test", "val", "valid", "validation")  # the first that exists is used
LAYOUT = "DIR/CLASS/picture, or DIR/train/CLASS/picture and DIR/test/CLASS/picture"
KINDS = {
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pgm",
    ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp", "",
}  # fmt: skip
MAX_DEPTH = 20  # nested folders: more is a loop of links
_IGNORED = {"thumbs.db", "desktop.ini", "__macosx"}

Parts = tuple[str, ...]  # of a path relative to the folder


def read_folder(request: DataRequest) -> Rows:
    """List ``folder:DIR``, where DIR may be a zip archive: one folder per class, perhaps inside train/ and test/.

    Pictures may be in subfolders of a class's folder, as in torchvision's ImageFolder.
    """
    root = user_path(request.path)
    if not request.path or not (is_folder(root) or root.suffix.lower() == ".zip"):
        wrong = f"{cut(request.name)}: {brief(request.path)} is not a folder"
        raise UserError(f"{wrong}; give a folder that contains one folder per class, or such a .zip")
    inside = sorted(_members(root) if root.suffix.lower() == ".zip" else _walk(root))
    inside = [parts for parts in inside if not any(p.startswith(".") or p.lower() in _IGNORED for p in parts)]
    train, test, notes = _find_parts(root, inside)
    paths: list[Parts] = []
    labels, held = list[str](), list[bool]()
    for top in (train, test):
        if top is None:
            continue
        for name, pictures in _by_class(root, top, inside, notes).items():
            paths += pictures
            labels += [name] * len(pictures)
            held += [number % 5 == 4 if test is None else top is test for number in range(len(pictures))]
    if not any(held):
        raise UserError(f"{root}: no class has five pictures, so none are left for testing; add a folder test/")
    if test is None:
        notes.append("every fifth picture of each class, by name, is used for testing, since there is no folder test")
    classes, numbers = np.unique(labels, return_inverse=True)
    names = ["/".join(parts) for parts in paths]
    known = tuple(classes.tolist())
    return Rows(root.absolute(), names, numbers.astype(np.int64), known, np.array(held), notes=tuple(notes))


FOLDER = Source("folder", "your own pictures, one folder per class (or a .zip)", OWN, rows=read_folder, path="DIR")


def _walk(root: Path) -> Iterator[Parts]:
    """All files and folders below a folder; a folder's parts end with an empty one."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; check its permissions") from error

    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        above = Path(folder).relative_to(root).parts
        if len(above) > MAX_DEPTH:
            raise UserError(f"{folder} is more than {MAX_DEPTH} folders deep; expected {LAYOUT}")
        yield from ((*above, name, "") for name in folders)
        yield from ((*above, name) for name in files)


def _members(archive: Path) -> Iterator[Parts]:
    """All files and folders in an archive."""
    check_plain(archive)
    try:
        with zipfile.ZipFile(archive) as zipped:
            infos = zipped.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(f"{archive} cannot be read as a zip archive ({error}); create it again") from error
    check_unpacked(sum(info.file_size for info in infos), size_on_disk([archive]), str(archive), at_once=False)
    yield from (tuple(info.filename.split("/")) for info in infos)


def _find_parts(root: Path, inside: list[Parts]) -> tuple[Parts, Parts | None, list[str]]:
    """The folders with the classes of train and of test, inside any single folder around everything."""
    top: Parts = ()
    while True:
        depth = len(top)
        names = {parts[depth] for parts in inside if parts[:depth] == top and len(parts) > depth + 1}
        direct = [parts[depth] for parts in inside if parts[:depth] == top and len(parts) == depth + 1 and parts[-1]]
        below = {parts[depth + 1] for parts in inside if parts[:depth] == top and len(parts) > depth + 2}
        if len(names) != 1 or not below or direct or names == {"train"}:
            break
        top = (*top, *names)
    if "train" not in names:
        return top, None, []
    test = next((name for name in TESTS if name in names), None)
    unread = [*sorted(names - {"train", test}), *direct]
    notes = [f"ignored, next to train: {', '.join(unread[:9])}"] if unread else []
    return (*top, "train"), (*top, test) if test else None, notes


def _by_class(root: Path, top: Parts, inside: list[Parts], notes: list[str]) -> dict[str, list[Parts]]:
    depth = len(top)
    below = [parts for parts in inside if parts[:depth] == top and len(parts) > depth]
    loose = [parts[-1] for parts in below if len(parts) == depth + 1 and parts[-1]]
    classes: dict[str, list[Parts]] = {}
    for name, members in groupby((parts for parts in below if len(parts) > depth + 1), lambda parts: parts[depth]):
        classes[name] = []
        for parts in members:
            if Path(parts[-1]).suffix.lower() in KINDS:
                classes[name] += [parts] if parts[-1] else []
            else:
                loose.append("/".join(parts[depth:]))
        if not classes[name]:
            raise UserError(f"{root.joinpath(*top, name)} has no pictures; add some or remove the folder")
    if not classes:
        where = root.joinpath(*top)
        raise UserError(f"{where} contains no folders; put the pictures of each class in a folder named after it")
    if loose:
        more = f" and {len(loose) - 9:,} more" if len(loose) > 9 else ""
        notes.append(f"ignored in {'/'.join(top) or root.name}, not pictures of a class: {', '.join(loose[:9])}{more}")
    return classes


PICTURES = (".png", ".jpg", ".jpeg")
UNPACK = "unpack the complete data set there"
Listed = list[tuple[str, int, bool]]  # path, label, whether it is for testing


def cinic10_rows(folder: Path, *, valid: str = "out") -> Rows:
    """CINIC-10: train and test; ``valid="train"`` adds the validation images to the training images.

    90,000 images each, in folders named after CIFAR-10's classes (Darlow et al. 2018).
    """
    if valid not in ("out", "train"):
        raise UserError(f"cinic10(valid={valid}): give train to train on the validation images, or out to ignore them")
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
    """Tiny-ImageNet: 100,000 training images of 200 classes; its 10,000 validation images serve as test, as usual.

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
            raise UserError(f"{annotations}, line {number}: {brief(line)} is not a picture and a known class; {UNPACK}")
        listed.append((f"val/images/{fields[0]}", label[fields[1]], True))
    notes = ("the validation images, whose labels are published, are used for testing",)
    return _rows(folder, listed, names, notes=notes)


def omniglot_rows(folder: Path, *, part: str = "background") -> Rows:
    """Omniglot: characters are classes, drawers users; ``part`` is background, evaluation or all (Lake et al. 2015).

    Every character was drawn by 20 people, identified by the number at the end of the file name; they are the same
    people within an alphabet, so a user is an alphabet and a number. Users 5, 10, 15 and 20 of each alphabet are test.
    """
    if part not in ("background", "evaluation", "all"):
        raise UserError(f"omniglot(part={part}): give background, evaluation or all")
    classes: list[str] = []
    listed: Listed = []
    users: list[str] = []
    for name in ("background", "evaluation") if part == "all" else (part,):
        for alphabet in _folders(folder / f"images_{name}"):
            for character in _folders(folder / f"images_{name}" / alphabet):
                for path in _pictures(folder, f"images_{name}/{alphabet}/{character}"):
                    drawer = Path(path).stem.rpartition("_")[2]
                    if not re.fullmatch(r"\d{1,9}", drawer, re.ASCII):
                        raise UserError(f"{folder / path}: the name must end with a drawer's number, as in 0001_07.png")
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
        raise UserError(f"{directory} cannot be read: {error.strerror or error}; {UNPACK}") from error
    if not names:
        raise UserError(f"{directory} has no {what}; {UNPACK}")
    return names


def _lines(path: Path) -> list[str]:
    try:
        return read_plain(path, UNPACK).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; {UNPACK}") from error


CINIC10 = Source(
    "cinic10",
    "CIFAR-10's classes, with pictures from ImageNet too",
    "Darlow et al. 2018, github.com/BayesWatch/cinic-10",
    rows=cinic10_rows,
    locate=find_by(
        "cinic10", ("cinic10", "CINIC-10", "cinic-10", "CINIC10"), ("train/airplane",), "github.com/BayesWatch/cinic-10"
    ),
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
TINY_IMAGENET = Source(
    "tiny-imagenet",
    "small pictures from ImageNet",
    "Le & Yang 2015, cs231n.stanford.edu/tiny-imagenet-200.zip",
    rows=tiny_imagenet_rows,
    locate=find_by(
        "tiny-imagenet",
        ("tiny-imagenet-200", "tiny-imagenet"),
        ("wnids.txt",),
        "cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
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
OMNIGLOT = Source(
    "omniglot",
    "handwritten characters, with their drawers as users",
    "Lake et al. 2015, github.com/brendenlake/omniglot",
    rows=omniglot_rows,
    locate=find_by(
        "omniglot",
        ("omniglot", "omniglot-py", "omniglot/python"),
        ("images_background", "images_evaluation"),
        "github.com/brendenlake/omniglot",
    ),
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
