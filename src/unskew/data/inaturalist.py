"""iNaturalist-2017 as distributed: annotations and locations, unpacked or inside their zip archives.

Also the published splits of iNaturalist and Landmarks (Hsu, Qi and Brown 2020): ``federated_train*.csv`` has user_id,
image_id and class, ``test.csv`` next to it image_id and class.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.limits import user_path
from unskew.data.coco import AnnotationFile, CocoImage, classify, read_annotations
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
    """The training set of 2017, with its validation set for testing.

    ``balance``: classes with fewer training examples are left out, and this many are drawn from each of the others; 0
    keeps all. 100 is iNaturalist-User-120k: 1,203 classes, 120,300 examples (Hsu, Qi and Brown 2020, section 4.1).
    ``test``: the most test examples drawn per class; 0 keeps all, as does ``balance=0``. The published test set has
    29.6 per class. ``split``: one of the paper's CSV files, which list its examples, classes, users and test set.
    """
    most = test if balance else 0
    train, train_category, names = _part(folder, "train2017")
    val, val_category, more = _part(folder, "val2017")
    images, category, names = [*train, *val], np.concatenate([train_category, val_category]), more | names
    held = np.arange(len(images)) >= len(train)
    if split is not None:
        part = read_split(split, folder)
        row_of = {str(image.id): row for row, image in enumerate(images)}
        rows = np.array([row_of.get(image, -1) for image in part.images], np.int64)
        labels, held, users = part.labels, part.test, np.array(part.users, np.str_)
        pairs = np.unique(np.stack([labels, category[rows]], axis=1), axis=0)  # may number the classes differently
        if rows.min() < 0 or not len(pairs) == len(np.unique(labels)) == len(np.unique(category[rows])):
            raise UserError(f"{split}: its images or classes are not the annotated ones; is it for another data set?")
        classes = tuple(names[int(category_id)] for category_id in pairs[:, 1])
        notes = [f"examples, classes and users are those of {split}"]
    else:
        rows, classes, labels, notes = _balanced(category, held, names, balance, most, seed)
        held, users = held[rows], None
    where, owner = _locations(folder, [images[row].id for row in rows])
    files = [images[row].file_name for row in rows]
    return Rows(folder, files, labels, classes, held, owner if users is None else users, where, tuple(notes))


def _part(folder: Path, name: str) -> tuple[list[CocoImage], Ints, dict[int, str]]:
    path = folder / f"{name}.json"
    read = read_annotations(path, AnnotationFile, folder / "train_val2017.zip", AGAIN)
    category_of = classify(read, path)
    if any(image.id not in category_of for image in read.images):
        raise UserError(f"{path} has an image without an annotation; {AGAIN}")
    names = {category.id: category.name for category in read.categories}
    return read.images, np.array([category_of[image.id] for image in read.images], np.int64), names


def _balanced(
    category: Ints, test: npt.NDArray[np.bool_], names: dict[int, str], balance: int, most: int, seed: int
) -> tuple[Ints, tuple[str, ...], Ints, list[str]]:
    train = np.flatnonzero(~test)
    ids, frequency = np.unique(category[train], return_counts=True)
    held = ids[frequency >= max(balance, 1)]
    if len(held) < 2:
        have = f"only {len(held)} of {len(ids):,} classes have that many training examples"
        raise UserError(f"inaturalist(balance={balance}): {have}; give a smaller balance")
    key = Key(seed).fold("inaturalist")
    parts = [train[np.isin(category[train], held)], np.flatnonzero(test & np.isin(category, held))]
    if balance:
        parts[0] = draw_from_each(train, category, balance, key.numpy())
        parts[0] = parts[0][np.isin(category[parts[0]], held)]
    if most:
        parts[1] = draw_from_each(parts[1], category, most, key.fold("test").numpy())
    rows = np.sort(np.concatenate(parts))
    notes = []
    if balance:
        drawn = f"{balance} examples of each were drawn (seed {seed})"
        notes.append(f"{len(held):,} of {len(ids):,} classes have {balance} training examples; {drawn}")
    if most:
        notes.append(f"test: at most {most} validation images per class, {len(parts[1]):,} in total")
    return rows, tuple(names[int(category_id)] for category_id in held), np.searchsorted(held, category[rows]), notes


def _locations(folder: Path, images: list[int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.str_]]:
    row = {image: at for at, image in enumerate(images)}
    places, users = np.full((len(images), 2), np.nan), [""] * len(images)
    for part in ("train", "val"):
        path, archive = folder / f"{part}2017_locations.json", folder / "inat2017_locations.zip"
        for location in read_annotations(path, list[_Location], archive, AGAIN):
            if (at := row.get(location.id)) is not None:
                if location.lat is not None and location.lon is not None:
                    places[at] = location.lat, location.lon
                users[at] = "" if location.user_id is None else str(location.user_id)
    return places, np.array(users, np.str_)


@dataclass(frozen=True)
class PublishedSplit:
    """First the training images, then the test images: id, class as numbered by the split, user ("" in test)."""

    images: list[str]
    labels: Ints
    users: list[str]
    test: npt.NDArray[np.bool_]


def read_split(text: str, folder: Path) -> PublishedSplit:
    """Read a CSV file and the test.csv next to it; a bare name is searched for in the data set's folder."""
    path = user_path(text)
    if not os.path.lexists(path):
        files = (file for depth in ("", "*/", "*/*/") for file in sorted(folder.glob(f"{depth}{path.name}")))
        path = next(files, folder / path.name)
        if not os.path.lexists(path):
            instead = f"fetch it (unskew data fetch {folder.name} --data-dir DIR), or give its path"
            raise UserError(f"the split {user_path(text)} does not exist, nor does {path}; {instead}")
    users, images, classes = read_columns(path, ("user_id", "image_id", "class"))
    test_images, test_classes = read_columns(path.with_name("test.csv"), ("image_id", "class"))
    names, numbers = [*images, *test_images], [*classes, *test_classes]
    try:
        labels = np.array(list(map(int, numbers)), np.int64)
        if len(set(names)) != len(names) or set(labels.tolist()) != set(range(len(np.unique(labels)))):
            raise ValueError("an image_id appears twice, or the classes are not numbered from 0 without gaps")
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path} or its test.csv is damaged ({error}); use the published split") from error
    test = np.arange(len(names)) >= len(images)
    return PublishedSplit(names, labels, [*users, *[""] * len(test_images)], test)


def draw_from_each(rows: Ints, owner: Ints, most: int, draw: np.random.Generator) -> Ints:
    """Draw at most ``most`` of each owner's rows; ``owner`` has an entry for every row."""
    mixed = draw.permutation(rows)
    order = mixed[np.argsort(owner[mixed], kind="stable")]
    sizes = np.unique(owner[order], return_counts=True)[1]
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[rank < most]


INATURALIST = Source(
    "inaturalist",
    "photographs of species with users and places (iNaturalist-2017)",
    f"Van Horn et al. 2018, {WHERE}",
    rows=inaturalist_rows,
    locate=find_by(
        "inaturalist", "inaturalist inaturalist-2017 inat2017 2017", "train2017.json train_val2017.zip", WHERE
    ),
    download=Download(SPLITS, "inaturalist", {"inaturalist-user-120k.zip": "", "inaturalist-geo.zip": ""}, splits=True),
)
