"""iNaturalist-2017 as it is distributed, as rows: which photograph, which species, whose, where.

Reads train2017.json and val2017.json (COCO's form) and the locations with user ids that were added in 2019, unpacked or
inside their zip archives. Pictures are below the folder at the ``file_name`` of the annotations.

Also the published splits of iNaturalist and Landmarks (Hsu, Qi and Brown 2020): ``federated_train*.csv`` has user_id,
image_id and class, ``test.csv`` next to it image_id and class. An image id is that of the original data set, a user id
any text: a number, an author, a cell of the S2 grid.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief
from unskew.core.key import Key
from unskew.core.limits import user_path
from unskew.data.coco import AnnotationFile, Image, classify, read_json
from unskew.data.interface import SPLITS, Download, Rows, Source, find_by
from unskew.data.tables import read_columns

WHERE = "github.com/visipedia/inat_comp/tree/master/2017"
AGAIN = f"get it from {WHERE}"

Ints = npt.NDArray[np.int64]


class _Location(msgspec.Struct, gc=False):
    id: int
    lat: float | None = None
    lon: float | None = None
    user_id: int | str | None = None


def inaturalist_rows(
    folder: Path, *, balance: int = 100, test: int = 30, seed: int = 0, split: str | None = None
) -> Rows:
    """The training set of 2017 and its validation set as test, of the classes that are kept.

    ``balance``: classes with fewer training examples are left out, and of the others as many are drawn; 0 keeps all.
    With 100 that is iNaturalist-User-120k: 1,203 classes, 120,300 examples (Hsu, Qi and Brown 2020, section 4.1).
    ``test``: at most so many test examples of each class are drawn; 0 keeps all, as does ``balance=0``. The paper calls
    its test set class-balanced without a number; the published one has 35,641 images, 29.6 of each class.

    The paper does not say which examples it drew; ``split``, one of its published CSVs, does, and gives its classes,
    users and test set.
    """
    most = test if balance else 0
    train, train_category, names = _part(folder, "train2017")
    val, val_category, more = _part(folder, "val2017")
    images, category, names = [*train, *val], np.concatenate([train_category, val_category]), more | names
    held = np.arange(len(images)) >= len(train)
    if split is not None:
        given = read_split(split, folder)
        row_of = {str(image.id): row for row, image in enumerate(images)}
        if absent := next((image for image in given.images if image not in row_of), None):
            unknown = f"image_id {brief(absent)} is in no annotation file"
            raise UserError(f"{split}: {unknown}; does it belong to other data?")
        kept = np.array([row_of[image] for image in given.images], np.int64)
        labels, held, users = given.labels, given.test, np.array(given.users, np.str_)
        classes = _names_by_label(labels, category[kept], names, split)
        notes = [f"examples, classes and users are those of {split}"]
    else:
        kept, classes, labels, notes = _balanced(category, held, names, balance, most, seed)
        held, users = held[kept], None
    where, owner = _locations(folder, [images[row].id for row in kept])
    files = [images[row].file_name for row in kept]
    return Rows(folder, files, labels, classes, held, owner if users is None else users, where, tuple(notes))


def _part(folder: Path, name: str) -> tuple[list[Image], Ints, dict[int, str]]:
    path = folder / f"{name}.json"
    read = read_json(path, AnnotationFile, folder / "train_val2017.zip", AGAIN)
    category_of = classify(read, path)
    if not read.images:
        raise UserError(f"{path} lists no images; {AGAIN}")
    if bare := next((image for image in read.images if image.id not in category_of), None):
        raise UserError(f"{path}: image {bare.id} has no annotation; {AGAIN}")
    names = {category.id: category.name for category in read.categories}
    return read.images, np.array([category_of[image.id] for image in read.images], np.int64), names


def _balanced(
    category: Ints, test: npt.NDArray[np.bool_], names: dict[int, str], balance: int, most: int, seed: int
) -> tuple[Ints, tuple[str, ...], Ints, list[str]]:
    train = np.flatnonzero(~test)
    ids, frequency = np.unique(category[train], return_counts=True)
    held = ids[frequency >= max(balance, 1)]
    if len(held) < 2:
        have = f"{len(held)} of {len(ids):,} classes have that many training examples"
        largest = f"the largest has {int(frequency.max()):,}"
        raise UserError(f"inaturalist(balance={balance}): {have}, {largest}; give a smaller balance")
    key = Key(seed).fold("inaturalist")
    parts = [train[np.isin(category[train], held)], np.flatnonzero(test & np.isin(category, held))]
    if balance:
        parts[0] = draw_from_each(train, category, balance, key.numpy())
        parts[0] = parts[0][np.isin(category[parts[0]], held)]
    if most:
        parts[1] = draw_from_each(parts[1], category, most, key.fold("test").numpy())
    kept = np.sort(np.concatenate(parts))
    notes = []
    if balance:
        drawn = f"{balance} examples of each were drawn (seed {seed})"
        notes.append(f"{len(held):,} of {len(ids):,} classes have {balance} training examples; {drawn}")
    if most:
        notes.append(f"test: at most {most} validation images of each class, {len(parts[1]):,} in all")
    return kept, tuple(names[int(category_id)] for category_id in held), np.searchsorted(held, category[kept]), notes


def _locations(folder: Path, images: list[int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.str_]]:
    row = {image: at for at, image in enumerate(images)}
    places, users = np.full((len(images), 2), np.nan), [""] * len(images)
    for part in ("train", "val"):
        path, archive = folder / f"{part}2017_locations.json", folder / "inat2017_locations.zip"
        for found in read_json(path, list[_Location], archive, AGAIN):
            if (at := row.get(found.id)) is not None:
                if found.lat is not None and found.lon is not None:
                    places[at] = found.lat, found.lon
                users[at] = "" if found.user_id is None else str(found.user_id)
    return places, np.array(users, np.str_)


def _names_by_label(labels: Ints, category: Ints, names: dict[int, str], split: str) -> tuple[str, ...]:
    """The name of each class of a published split; its classes must be the categories, numbered in another way."""
    pairs = np.unique(np.stack([labels, category], axis=1), axis=0)
    if len(pairs) != len(np.unique(labels)) or len(pairs) != len(np.unique(category)):
        raise UserError(f"{split}: its classes are not the annotations' categories; does it belong to other data?")
    return tuple(names[int(category_id)] for category_id in pairs[:, 1])


@dataclass(frozen=True)
class PublishedSplit:
    """Train first, then test: which image, of which class (numbered by the split), of which user ("" in test)."""

    images: list[str]
    labels: Ints
    users: list[str]
    test: npt.NDArray[np.bool_]


def read_split(text: str, folder: Path) -> PublishedSplit:
    """Read a CSV and the test.csv next to it; a name alone is looked for in the set's folder."""
    path = user_path(text)
    if not os.path.lexists(path):
        found = (file for depth in ("", "*/", "*/*/") for file in sorted(folder.glob(f"{depth}{path.name}")))
        given, path = path, next(found, folder / path.name)
        if not os.path.lexists(path):
            instead = f"fetch it (unskew data fetch {folder.name} --data-dir DIR), or give its path"
            raise UserError(f"the split {given} does not exist, not even in {folder}; {instead}")
    users, images, classes = read_columns(path, ("user_id", "image_id", "class"))
    test_images, test_classes = read_columns(path.with_name("test.csv"), ("image_id", "class"))
    names, numbers = [*images, *test_images], [*classes, *test_classes]
    if wrong := next((text for text in numbers if not is_number(text)), None):
        raise UserError(f"{path}: the class {brief(wrong)} is not a whole number; give the published split")
    labels = np.array(numbers, np.int64)
    if len(names) and len(np.unique(labels)) != labels.max() + 1:
        raise UserError(f"{path}: its classes are not numbered from 0 without gaps; give the published split")
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise UserError(f"{path}: image_id {brief(twice)} appears twice, here or in test.csv; give the published files")
    test = np.arange(len(names)) >= len(images)
    return PublishedSplit(names, labels, [*users, *[""] * len(test_images)], test)


def draw_from_each(rows: Ints, owner: Ints, most: int, draw: np.random.Generator) -> Ints:
    """Draw at most so many of the rows of each owner; ``owner`` is over all rows."""
    mixed = draw.permutation(rows)
    order = mixed[np.argsort(owner[mixed], kind="stable")]
    sizes = np.unique(owner[order], return_counts=True)[1]
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[rank < most]


def is_number(text: str) -> bool:
    """Whether a text is a whole number of few digits."""
    return text.isascii() and text.isdigit() and len(text) < 10


INATURALIST = Source(
    "inaturalist",
    "photographs of species with users and places (iNaturalist-2017)",
    f"Van Horn et al. 2018, {WHERE}",
    rows=inaturalist_rows,
    locate=find_by(
        "inaturalist",
        ("inaturalist", "inaturalist-2017", "inat2017", "2017"),
        ("train2017.json", "train_val2017.zip"),
        WHERE,
    ),
    download=Download(SPLITS, "inaturalist", {"inaturalist-user-120k.zip": "", "inaturalist-geo.zip": ""}, splits=True),
)
