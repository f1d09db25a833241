"""iNaturalist-2017 and the cleaned Google Landmarks v2 as distributed, or the splits of Hsu, Qi and Brown 2020.

A published split is ``federated_train*.csv`` (user_id, image_id, class) and ``test.csv`` next to it (image_id, class).
iNaturalist's annotations and locations may be inside their zip archives. Landmarks has train_clean.csv (landmark_id,
images: ids separated by spaces), train_attribution.csv (id, author) and train/0/1/2/0123456789abcdef.jpg.
"""

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.files import user_path
from unskew.core.key import Key
from unskew.core.units import counted
from unskew.data.coco import AnnotationFile, CocoImage, classify, read_annotations
from unskew.data.interface import SPLITS, Download, Rows, Source, find_by
from unskew.data.tables import read_columns

INAT = "github.com/visipedia/inat_comp/tree/master/2017"
AGAIN = f"get it from {INAT}"
MIN_IMAGES, MIN_USERS, MIN_LANDMARKS = 30, 10, 5  # per landmark or user, per landmark, per user

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


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
        rows = np.array([row_of.get(image, -1) for image in part.paths], np.int64)
        labels, held, users, notes = part.labels, part.test, part.users, part.notes
        pairs = np.unique(np.stack([labels, category[rows]], axis=1), axis=0)  # may number the classes differently
        if rows.min() < 0 or not len(pairs) == len(np.unique(labels)) == len(np.unique(category[rows])):
            raise UserError(f"{split}: its images or classes are not the annotated ones; is it for another data set?")
        classes = tuple(names[category_id] for category_id in pairs[:, 1].tolist())
    else:
        rows, classes, labels, notes = _balanced(category, held, names, balance, most, seed)
        held, users = held[rows], None
    where, owner = _locations(folder, [images[row].id for row in rows])
    files = [images[row].file_name for row in rows]
    return Rows(folder, files, labels, classes, held, owner if users is None else users, where, notes)


def _part(folder: Path, name: str) -> tuple[list[CocoImage], Ints, dict[int, str]]:
    path = folder / f"{name}.json"
    read = read_annotations(path, AnnotationFile, folder / "train_val2017.zip", AGAIN)
    category_of = classify(read, path)
    if any(image.id not in category_of for image in read.images):
        raise UserError(f"{path} has an image without an annotation; download the file again from {INAT}")
    names = {category.id: category.name for category in read.categories}
    return read.images, np.array([category_of[image.id] for image in read.images], np.int64), names


def _balanced(
    category: Ints, test: Flags, names: dict[int, str], balance: int, most: int, seed: int
) -> tuple[Ints, tuple[str, ...], Ints, tuple[str, ...]]:
    train = np.flatnonzero(~test)
    ids, frequency = np.unique(category[train], return_counts=True)
    held = ids[frequency >= max(balance, 1)]
    if len(held) < 2:
        have = f"only {len(held)} of {len(ids):,} classes have that many training examples"
        raise UserError(f"inaturalist(balance={balance}): {have}; give a smaller balance")
    key = Key(seed).fold("inaturalist")
    notes, tested = list[str](), np.flatnonzero(test & np.isin(category, held))
    if balance:
        train = draw_from_each(train, category, balance, key.numpy())
        drawn = f"{balance} examples of each were drawn (seed {seed})"
        notes.append(f"{len(held):,} of {len(ids):,} classes have {balance} training examples; {drawn}")
    if most:
        tested = draw_from_each(tested, category, most, key.fold("test").numpy())
        notes.append(f"test: at most {most} validation images per class, {len(tested):,} in total")
    rows = np.sort(np.concatenate([train[np.isin(category[train], held)], tested]))
    classes = tuple(names[category_id] for category_id in held.tolist())
    return rows, classes, np.searchsorted(held, category[rows]), tuple(notes)


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


def read_split(text: str, folder: Path) -> Rows:
    """Read a CSV file and the test.csv next to it; a bare name is searched for in the data set's folder.

    First come the training images, then the test images. Paths are image ids, classes the split's numbers.
    """
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
    owners = np.array([*users, *[""] * len(test_images)], np.str_)
    known = tuple(map(str, np.unique(labels).tolist()))
    return Rows(folder, names, labels, known, test, owners, notes=(f"examples, classes and users are those of {text}",))


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
    f"Van Horn et al. 2018, {INAT}",
    rows=inaturalist_rows,
    paths=("split",),
    locate=find_by("inaturalist inaturalist-2017 inat2017 2017", "train2017.json train_val2017.zip"),
    download=Download(SPLITS, "inaturalist", {"inaturalist-user-120k.zip": "", "inaturalist-geo.zip": ""}, splits=True),
)


def landmarks_rows(folder: Path, *, test: int = 10, seed: int = 0, split: str | None = None) -> Rows:
    """Landmarks-User-160k by its rules, or one of the published splits (Hsu, Qi and Brown 2020, section 4.2).

    Train: the largest set of images in which every landmark has 30 images and 10 users, and every user 30 images of 5
    landmarks. Test: images of these landmarks by authors without a training image, at most ``test`` drawn of each.
    """
    if test < 1:
        raise UserError(f"landmarks: test, the test images per landmark, must be at least 1, not {test}")
    below = "train/" if (folder / "train").is_dir() else ""
    if split is not None:
        part = read_split(split, folder)
        return replace(part, paths=_paths(part.paths, below))
    images, ids, landmark, authors, user = _annotations(folder)
    known = user > 0
    train = core(landmark, user, known)
    if not train.any():
        raise UserError(f"landmarks: {folder} has no images that follow the rules; use the published files")
    free = known & np.isin(landmark, landmark[train]) & ~np.isin(user, user[train])
    held = np.zeros(len(landmark), np.bool_)
    held[draw_from_each(np.flatnonzero(free), landmark, test, Key(seed).fold("landmarks").numpy())] = True
    if not held.any():
        raise UserError(f"landmarks: {folder} has no images by other authors to test on; use all published files")
    kept = np.flatnonzero(train | held)
    classes, labels = np.unique(ids[landmark[kept]], return_inverse=True)
    follow = f"{counted(int(train.sum()), 'training image')} of {counted(len(np.unique(user[train])), 'user')}"
    notes = (
        f"{follow} follow the rules of Landmarks-User-160k",
        f"test: at most {test} images of each landmark, by authors without a training image (seed {seed})",
    )
    paths, names = _paths([images[row] for row in kept], below), tuple(map(str, classes.tolist()))
    people = list(authors)
    owners = np.array([people[n] for n in user[kept]], np.str_)
    return Rows(folder, paths, labels.astype(np.int64), names, held[kept], owners, notes=notes)


def core(landmark: Ints, user: Ints, images: Flags) -> Flags:
    """The largest set of images that follows the rules: landmarks and users with too few are removed until none has."""
    while True:
        both = np.unique(np.stack([landmark[images], user[images]], axis=1), axis=0)
        landmarks = _enough(landmark, images, both[:, 0], MIN_USERS)
        users = _enough(user, images, both[:, 1], MIN_LANDMARKS)
        fewer = images & landmarks[landmark] & users[user]
        if fewer.sum() == images.sum():
            return fewer
        images = fewer


def _enough(owner: Ints, images: Flags, others: Ints, least: int) -> Flags:
    """Which owners have enough images, and enough different others (users of a landmark, landmarks of a user)."""
    count = int(owner.max()) + 1
    enough: Flags = np.bincount(owner[images], minlength=count) >= MIN_IMAGES
    return enough & (np.bincount(others, minlength=count) >= least)


def _annotations(folder: Path) -> tuple[list[str], Ints, Ints, dict[str, int], Ints]:
    """Image ids; landmark ids and each image's index into them; the authors' numbers and each image's author."""
    path = folder / "train_clean.csv"
    names, lists = read_columns(path, ("landmark_id", "images"))
    images = [image for listed in lists for image in listed.split()]
    sizes = [len(listed.split()) for listed in lists]
    try:
        ids, landmark = np.unique(np.repeat(np.array(list(map(int, names)), np.int64), sizes), return_inverse=True)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path} is damaged ({error}); download it again") from error
    row = {image: at for at, image in enumerate(images)}
    authors, user = {"": 0}, np.zeros(len(images), np.int64)
    attribution = read_columns(folder / "train_attribution.csv", ("id", "author"), only=set(row))
    for image, name in zip(*attribution, strict=True):
        user[row[image]] = authors.setdefault(name.strip(), len(authors))
    return images, ids, landmark.astype(np.int64), authors, user


def _paths(images: list[str], below: str) -> list[str]:
    return [f"{below}{i[:1]}/{i[1:2]}/{i[2:3]}/{i}.jpg" for i in images]


LANDMARKS = Source(
    "landmarks",
    "photographs of landmarks with users (Google Landmarks v2, cleaned)",
    "Weyand et al. 2020, github.com/cvdfoundation/google-landmark",
    rows=landmarks_rows,
    paths=("split",),
    locate=find_by("landmarks google-landmark gldv2", "train_clean.csv"),
    download=Download(
        SPLITS, "landmarks", {"landmarks-user-160k.zip": "53c36bd7d5fc12f927af2820b7e4a57c"}, splits=True
    ),
)
