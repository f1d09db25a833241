"""Image sets in folders of pictures: ``folder:DIR``, and CINIC-10, Tiny-ImageNet and Omniglot as distributed.

``folder:FILE.zip`` is such a folder in an archive. Without a test folder, every fifth picture of each class is test.
"""

import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from unskew.core.errors import UserError, brief
from unskew.core.files import user_path
from unskew.core.language import cut
from unskew.core.limits import check_plain, check_unpacked, read_plain, size_on_disk
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
Listed = tuple[str, int, bool]  # path, label, whether it is for testing


def read_folder(request: DataRequest) -> Rows:
    """List ``folder:DIR`` or a zip archive: a folder per class, as in ImageFolder, perhaps inside train/ and test/."""
    root = user_path(request.path)
    zipped = root.suffix.lower() == ".zip"
    if not request.path or not (zipped or os.path.isdir(root)):
        raise UserError(f"{cut(request.name)}: {brief(request.path)} is not a folder; give {LAYOUT}, or such a .zip")
    found = _members(root) if zipped else _walk(root)
    files = [parts for parts in found if not any(name[:1] == "." or name.lower() in _IGNORED for name in parts)]
    pictures = sorted(parts for parts in files if Path(parts[-1]).suffix.lower() in KINDS)
    top = 0
    while pictures and pictures[0][top] != "train" and len({parts[top] for parts in pictures}) == 1:
        if any(len(parts) < top + 3 for parts in pictures):
            break
        top += 1
    names = {parts[top] for parts in pictures if len(parts) > top + 1}
    test = next((name for name in TESTS if name in names), None) if "train" in names else None
    depth = top + ("train" in names)  # of the classes
    parts_used = ("train", test) if depth > top else names
    inside = [parts for parts in pictures if len(parts) > depth + 1 and parts[top] in parts_used]
    paths = sorted(inside, key=lambda parts: depth > top and parts[top] == test)  # train first
    if not paths:
        raise UserError(f"{root} has no class folders with pictures; expected {LAYOUT}")
    classes, seen, listed = sorted({parts[depth] for parts in paths}), Counter[str](), list[Listed]()
    number = {name: at for at, name in enumerate(classes)}
    for parts in paths:
        seen[parts[depth]] += 1
        held = seen[parts[depth]] % 5 == 0 if test is None else parts[top] == test
        listed.append(("/".join(parts), number[parts[depth]], held))
    if not any(held for *_, held in listed):
        raise UserError(f"{root}: no class has five pictures, so none are left for testing; add a folder test/")
    notes = []
    if ignored := sorted(set(files) - set(paths)):
        more = " …" if len(ignored) > 9 else ""
        shown = ", ".join("/".join(parts[top:]) for parts in ignored[:9])
        notes.append(f"ignored: {len(ignored):,} files that are not pictures of a class: {shown}{more}")
    if test is None:
        notes.append("every fifth picture of each class, by name, is used for testing, since there is no folder test")
    return list_rows(root.absolute(), listed, classes, notes=notes)


FOLDER = Source("folder", "your own pictures, one folder per class (or a .zip)", OWN, rows=read_folder, path="DIR")


def _walk(root: Path) -> Iterator[Parts]:
    """All files below a folder."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; check its permissions") from error

    for folder, _, files in os.walk(root, onerror=refuse, followlinks=True):
        above = Path(folder).relative_to(root).parts
        if len(above) > MAX_DEPTH:
            raise UserError(f"{folder} is more than {MAX_DEPTH} folders deep; expected {LAYOUT}")
        yield from ((*above, name) for name in files)


def _members(archive: Path) -> Iterator[Parts]:
    """All files in an archive."""
    check_plain(archive)
    try:
        with zipfile.ZipFile(archive) as zipped:
            infos = zipped.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(f"{archive} cannot be read as a zip archive ({error}); create it again") from error
    check_unpacked(sum(info.file_size for info in infos), size_on_disk([archive]), str(archive), at_once=False)
    yield from (tuple(info.filename.split("/")) for info in infos if not info.is_dir())


PICTURES = (".png", ".jpg", ".jpeg")
UNPACK = "unpack the complete data set there"


def cinic10_rows(folder: Path, *, valid: str = "out") -> Rows:
    """CINIC-10: train and test; ``valid="train"`` adds the validation images to the training images.

    90,000 images each, in folders named after CIFAR-10's classes (Darlow et al. 2018).
    """
    if valid not in ("out", "train"):
        instead = "give 'train' to train on the validation images, or 'out' to ignore them"
        raise UserError(f"cinic10(valid={valid}): {instead}")
    classes = _entries(folder / "train")
    parts = ["train", *["valid"] * (valid == "train"), "test"]
    listed = [
        (path, label, part == "test")
        for part in parts
        for label, name in enumerate(classes)
        for path in _pictures(folder, f"{part}/{name}")
    ]
    notes = ("the validation images are used for training too",) if valid == "train" else ()
    return list_rows(folder, listed, classes, notes=notes)


def tiny_imagenet_rows(folder: Path) -> Rows:
    """Tiny-ImageNet: 100,000 training images of 200 classes; its 10,000 validation images serve as test, as usual.

    The labels of its own test images were not published. Classes are in the order of wnids.txt, named by words.txt.
    """
    ids, words, annotations = (
        [line.split("\t") for line in read_plain(folder / name, UNPACK).decode(errors="replace").splitlines() if line]
        for name in ("wnids.txt", "words.txt", "val/val_annotations.txt")
    )
    try:
        label = {wnid.strip(): number for number, (wnid, *_) in enumerate(ids)}
        names_of = {wnid: name for wnid, name, *_ in words}
        held = [(f"val/images/{name}", label[wnid], True) for name, wnid, *_ in annotations]
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder}: words.txt or val_annotations.txt is damaged ({error}); {UNPACK}") from error
    first = [names_of.get(wnid, wnid).split(",")[0].strip() for wnid in label]
    names = [f"{name} ({wnid})" if first.count(name) > 1 else name for name, wnid in zip(first, label, strict=True)]
    train = [(path, at, False) for wnid, at in label.items() for path in _pictures(folder, f"train/{wnid}/images")]
    notes = ("the validation images, whose labels are published, are used for testing",)
    return list_rows(folder, train + held, names, notes=notes)


def omniglot_rows(folder: Path, *, part: str = "background") -> Rows:
    """Omniglot: characters are classes, drawers users; ``part`` is background, evaluation or all (Lake et al. 2015).

    Every character was drawn by 20 people, identified by the number at the end of the file name; they are the same
    people within an alphabet, so a user is an alphabet and a number. Users 5, 10, 15 and 20 of each alphabet are test.
    """
    if part not in ("background", "evaluation", "all"):
        raise UserError(f"omniglot(part={part}): give background, evaluation or all")
    classes: list[str] = []
    listed, users = list[Listed](), list[str]()
    for name in ("background", "evaluation") if part == "all" else (part,):
        for alphabet in _entries(folder / f"images_{name}"):
            for character in _entries(folder / f"images_{name}" / alphabet):
                for path in _pictures(folder, f"images_{name}/{alphabet}/{character}"):
                    drawer = Path(path).stem.rpartition("_")[2]
                    if not drawer.isdecimal():
                        raise UserError(f"{folder / path}: the name must end with a drawer's number, as in 0001_07.png")
                    listed.append((path, len(classes), int(drawer) % 5 == 0))
                    users.append(f"{alphabet} {int(drawer)}")
                classes.append(f"{alphabet}/{character}")
    notes = ("every fifth drawer of each alphabet is used for testing, since Omniglot has no test part",)
    return list_rows(folder, listed, classes, users, notes)


def list_rows(
    folder: Path, listed: list[Listed], classes: Sequence[str], users: Sequence[str] = (), notes: Sequence[str] = ()
) -> Rows:
    """The rows of listed photographs; a user may be empty."""
    paths, labels, test = (list(column) for column in zip(*listed, strict=True))
    owners = np.array(users, np.str_) if any(users) else None
    return Rows(folder, paths, np.array(labels, np.int64), tuple(classes), np.array(test), owners, notes=tuple(notes))


def _pictures(root: Path, below: str) -> list[str]:
    return [f"{below}/{name}" for name in _entries(root / below, PICTURES)]


def _entries(directory: Path, endings: tuple[str, ...] = ()) -> list[str]:
    """The names of a folder's files with these endings, or of its folders; there must be some."""
    try:
        wanted = (e for e in os.scandir(directory) if (e.name.lower().endswith(endings) if endings else e.is_dir()))
        names = sorted(entry.name for entry in wanted if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror or error}; {UNPACK}") from error
    if not names:
        raise UserError(f"{directory} has no {'pictures' if endings else 'folders'}; {UNPACK}")
    return names


CINIC10 = Source(
    "cinic10", "CIFAR-10's classes, with pictures from ImageNet too",
    "Darlow et al. 2018, github.com/BayesWatch/cinic-10", rows=cinic10_rows,
    locate=find_by("cinic10 CINIC-10 cinic-10 CINIC10", "train/airplane"),
    classes=10, shape=(3, 32, 32), sizes=(90_000, 90_000),
    download=Download(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/", "CINIC-10",
        {"CINIC-10.tar.gz": "6ee4d0c996905fe93221de577967a372"}, tree="", whole="(valid=train)",
        mirrors=("https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/",),
    ),
)  # fmt: skip
TINY_IMAGENET = Source(
    "tiny-imagenet", "small pictures from ImageNet",
    "Le & Yang 2015, cs231n.stanford.edu/tiny-imagenet-200.zip", rows=tiny_imagenet_rows,
    locate=find_by("tiny-imagenet-200 tiny-imagenet", "wnids.txt"),
    classes=200, shape=(3, 64, 64), sizes=(100_000, 10_000),
    download=Download(
        "http://cs231n.stanford.edu/", "tiny-imagenet-200",
        {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"}, tree="tiny-imagenet-200/",
    ),
)  # fmt: skip
OMNIGLOT = Source(
    "omniglot", "handwritten characters, with their writers as users",
    "Lake et al. 2015, github.com/brendenlake/omniglot", rows=omniglot_rows,
    locate=find_by("omniglot omniglot-py omniglot/python", "images_background images_evaluation"),
    classes=964, shape=(1, 105, 105), sizes=(15_424, 3_856),
    download=Download(
        "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/", "omniglot",
        {
            "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
            "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
        },
        mirrors=("https://github.com/brendenlake/omniglot/raw/master/python/",), tree="", whole="(part=all)",
    ),
)  # fmt: skip
