"""iNaturalist-2017 as it is distributed, as rows: which photograph, which species, whose, where.

Reads train2017.json and val2017.json (COCO's form) and the locations with user ids that were added in 2019, unpacked or
inside their zip archives. Pictures are below the folder at the ``file_name`` of the annotations.
"""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief
from unskew.core.key import Key
from unskew.core.limits import check_plain, check_unpacked, size_on_disk
from unskew.data.json_records import read_records
from unskew.data.published_split import read_split
from unskew.data.rows import Rows

FOLDERS = ("inaturalist", "inaturalist-2017", "inat2017", "2017")
ARCHIVES = {"train2017.json": "train_val2017.zip", "val2017.json": "train_val2017.zip",
            "train2017_locations.json": "inat2017_locations.zip",
            "val2017_locations.json": "inat2017_locations.zip"}  # fmt: skip
WHERE = "github.com/visipedia/inat_comp/tree/master/2017"


def inaturalist_rows(folder: Path, *, balance: int = 100, seed: int = 0, split: str | None = None) -> Rows:
    """The training set of 2017 and its validation set as test, of the classes that are kept.

    ``balance``: classes with fewer training examples are left out, and of the others as many are drawn; 0 keeps all.
    With 100 that is iNaturalist-User-120k: 1,203 classes, 120,300 examples (Hsu, Qi and Brown 2020, section 4.1). The
    paper does not say which 100; ``split``, one of its published CSVs, does, and gives its classes, users and test set.
    """
    parts = [_part(folder, name) for name in ("train2017", "val2017")]
    images = [*parts[0][0], *parts[1][0]]
    paths = [*parts[0][1], *parts[1][1]]
    category = np.concatenate([parts[0][2], parts[1][2]])
    test = np.arange(len(images)) >= len(parts[0][0])
    names = {**parts[1][3], **parts[0][3]}
    if split is not None:
        given = read_split(split, folder)
        place = {str(image): row for row, image in enumerate(images)}
        kept = _found(given.images, place, split)
        labels, test, users = given.labels, given.test, np.array(given.users, np.str_)
        classes = _names_by_label(labels, category[kept], names, split)
        notes = [f"examples, classes and users are those of {split}"]
    else:
        kept, classes, labels, notes = _balanced(category, test, names, balance, seed)
        test, users = test[kept], None
    where, owner = _locations(folder, images, kept)
    files = np.array([paths[row] for row in kept], np.str_)
    return Rows(folder, files, labels, classes, test, owner if users is None else users, where, tuple(notes))


def _part(folder: Path, name: str) -> tuple[list[int], list[str], npt.NDArray[np.int64], dict[int, str]]:
    """Image ids, file names, category ids and the categories' names of one annotation file."""
    path = folder / f"{name}.json"
    with _open(folder, path.name) as stream:
        lists = read_records(
            stream,
            path,
            {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id", "name")},
        )
    images, files = lists["images"]
    for column in (images, *lists["annotations"], lists["categories"][0]):
        if not all(type(each) is int and 0 <= each < 2**62 for each in column):
            raise UserError(f"{path}: ids must be whole numbers; give the annotations as they were published")
    of = dict(zip(*lists["annotations"], strict=True))
    names = dict(zip(*lists["categories"], strict=True))
    if not images:
        raise UserError(f"{path} lists no images; give the annotations as they were published")
    for image, file in zip(images, files, strict=True):
        if not isinstance(file, str) or file.startswith("/") or ".." in Path(file).parts:
            raise UserError(f"{path}: image {image} has the file {brief(str(file))}, which is not below it")
        if of.get(image) not in names:
            raise UserError(f"{path}: image {image} has no annotation with a category; fetch it again")
    if len(set(images)) != len(images):
        raise UserError(f"{path} has an image id twice; give the annotations as they were published")
    return images, files, np.array([of[image] for image in images], np.int64), {k: str(v) for k, v in names.items()}


def _balanced(
    category: npt.NDArray[np.int64], test: npt.NDArray[np.bool_], names: dict[int, str], balance: int, seed: int
) -> tuple[npt.NDArray[np.int64], tuple[str, ...], npt.NDArray[np.int64], list[str]]:
    """Which rows are kept, the classes by their category ids, the rows' labels, and notes."""
    train = np.flatnonzero(~test)
    ids, number, frequency = np.unique(category[train], return_inverse=True, return_counts=True)
    held = frequency >= max(balance, 1)
    if held.sum() < 2:
        raise UserError(
            f"inaturalist?balance={balance}: {int(held.sum())} of {len(ids):,} classes have that many training "
            f"examples, the largest has {int(frequency.max()):,}; give a smaller balance"
        )
    mixed = Key(seed).fold("inaturalist").numpy().permutation(len(train))
    order = mixed[np.argsort(number[mixed], kind="stable")]  # by class, in a drawn order inside each
    rank = np.arange(len(order)) - np.repeat(np.cumsum(frequency) - frequency, frequency)
    chosen = held[number[order]] & ((rank < balance) | (balance == 0))
    own = np.isin(category, ids[held]) & test
    kept = np.sort(np.concatenate([train[order[chosen]], np.flatnonzero(own)]))
    labels = np.searchsorted(ids[held], category[kept])
    notes = []
    if balance:
        drawn = f"{balance} examples of each were drawn (seed {seed})"
        notes.append(f"{int(held.sum()):,} of {len(ids):,} classes have {balance} training examples; {drawn}")
    return kept, tuple(names[int(each)] for each in ids[held]), labels, notes


def _locations(
    folder: Path, images: Sequence[int], kept: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.str_]]:
    """Place and user of each kept image: NaN and "" where the file has none."""
    row = {images[each]: at for at, each in enumerate(kept)}
    places, users = np.full((len(kept), 2), np.nan), [""] * len(kept)
    for name in ("train2017_locations.json", "val2017_locations.json"):
        with _open(folder, name) as stream:
            ids, *columns = read_records(stream, folder / name, {"": ("id", "lat?", "lon?", "user_id?")})[""]
        for image, latitude, longitude, user in zip(ids, *columns, strict=True):
            if isinstance(image, int) and (at := row.get(image)) is not None:
                places[at] = _place(latitude, longitude, folder / name, image)
                users[at] = "" if user is None else str(user)
    return places, np.array(users, np.str_)


def _place(latitude: Any, longitude: Any, path: Path, image: Any) -> tuple[float, float]:
    if latitude is None or longitude is None:
        return np.nan, np.nan
    try:
        return float(latitude), float(longitude)
    except (TypeError, ValueError):
        given = brief(f"{latitude}, {longitude}")
        raise UserError(f"{path}: the place of image {image} is {given}; numbers are wanted") from None


def _found(images: Sequence[str], place: dict[str, int], split: str) -> npt.NDArray[np.int64]:
    if absent := next((image for image in images if image not in place), None):
        raise UserError(f"{split}: image_id {brief(absent)} is in no annotation file; is it the split of other data?")
    return np.array([place[image] for image in images], np.int64)


def _names_by_label(
    labels: npt.NDArray[np.int64], category: npt.NDArray[np.int64], names: dict[int, str], split: str
) -> tuple[str, ...]:
    """The name of each class of a published split; its classes must be the categories, numbered in another way."""
    pairs = np.unique(np.stack([labels, category], axis=1), axis=0)
    if len(pairs) != len(np.unique(labels)) or len(pairs) != len(np.unique(category)):
        raise UserError(
            f"{split}: its classes are not the categories of the annotations; is it the split of other data?"
        )
    if pairs[-1, 0] != len(pairs) - 1:
        raise UserError(f"{split}: its classes are not numbered from 0 without gaps; give the published split")
    return tuple(names[int(each)] for each in pairs[:, 1])


@contextmanager
def _open(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """An annotation file, unpacked or in its archive."""
    path, archive = folder / name, folder / ARCHIVES[name]
    check_plain(path)
    check_plain(archive)
    try:
        if path.is_file() or not archive.is_file():
            with path.open("rb") as file:
                yield file
            return
        with zipfile.ZipFile(archive) as held:
            inside = next((each for each in held.infolist() if Path(each.filename).name == name), None)
            if inside is None:
                raise UserError(f"{archive} has no {name}; give the archive as it was published")
            check_unpacked(inside.file_size, size_on_disk([archive]), f"{archive}/{name}", at_once=False)
            with held.open(inside) as file:
                yield file
    except FileNotFoundError as error:
        raise UserError(f"inaturalist: {path} is not there, nor is {archive.name}; get them from {WHERE}") from error
    except (OSError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise UserError(f"inaturalist: {path} cannot be read: {error}; fetch it again from {WHERE}") from error
