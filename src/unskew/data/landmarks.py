"""The cleaned part of Google Landmarks v2, as distributed: its photographs, landmarks and users.

Reads train_clean.csv (landmark_id, images: ids separated by spaces) and train_attribution.csv (id, author). The
picture with id 0123456789abcdef is train/0/1/2/0123456789abcdef.jpg.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.units import counted
from unskew.data.inaturalist import draw_from_each, read_split
from unskew.data.interface import SPLITS, Download, Rows, Source, find_by
from unskew.data.tables import read_columns

WHERE = "github.com/cvdfoundation/google-landmark"
MIN_IMAGES, MIN_USERS, MIN_LANDMARKS = 30, 10, 5  # per landmark or user, per landmark, per user

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


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
        names, users = tuple(map(str, np.unique(part.labels).tolist())), np.array(part.users, np.str_)
        note = f"examples, classes and users are those of {split}"
        return Rows(folder, _paths(part.images, below), part.labels, names, part.test, users, notes=(note,))
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
    people = list(authors)
    follow = f"{counted(int(train.sum()), 'training image')} of {counted(len(np.unique(user[train])), 'user')}"
    notes = (
        f"{follow} follow the rules of Landmarks-User-160k",
        f"test: at most {test} images of each landmark, by authors without a training image (seed {seed})",
    )
    paths, names = _paths([images[row] for row in kept], below), tuple(map(str, classes.tolist()))
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
    f"Weyand et al. 2020, {WHERE}",
    rows=landmarks_rows,
    locate=find_by("landmarks", "landmarks google-landmark gldv2", "train_clean.csv", WHERE),
    download=Download(
        SPLITS, "landmarks", {"landmarks-user-160k.zip": "53c36bd7d5fc12f927af2820b7e4a57c"}, splits=True
    ),
)
