"""iNaturalist-2017 as it is distributed, as rows: which photograph, which species, whose, where.

Reads train2017.json and val2017.json (COCO's form) and the locations with user ids that were added in 2019, unpacked or
inside their zip archives. Pictures are below the folder at the ``file_name`` of the annotations.
"""

import zipfile
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief
from unskew.core.key import Key
from unskew.core.limits import check_unpacked, read_plain, size_on_disk
from unskew.data.photo_sources import published_source
from unskew.data.rows import Rows, read_split

WHERE = "github.com/visipedia/inat_comp/tree/master/2017"

Ints = npt.NDArray[np.int64]
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Content = TypeVar("Content")


class _Image(msgspec.Struct, gc=False):  # here and below: the fields that are used, of those in the file
    id: Id
    file_name: str


class _Annotation(msgspec.Struct, gc=False):
    image_id: Id
    category_id: Id


class _Category(msgspec.Struct, gc=False):
    id: Id
    name: str


class _AnnotationFile(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


class _Location(msgspec.Struct, gc=False):
    id: int
    lat: float | None = None
    lon: float | None = None
    user_id: int | str | None = None


def inaturalist_rows(folder: Path, *, balance: int = 100, seed: int = 0, split: str | None = None) -> Rows:
    """The training set of 2017 and its validation set as test, of the classes that are kept.

    ``balance``: classes with fewer training examples are left out, and of the others as many are drawn; 0 keeps all.
    With 100 that is iNaturalist-User-120k: 1,203 classes, 120,300 examples (Hsu, Qi and Brown 2020, section 4.1). The
    paper does not say which 100; ``split``, one of its published CSVs, does, and gives its classes, users and test set.
    """
    train, train_category, names = _part(folder, "train2017")
    val, val_category, more = _part(folder, "val2017")
    images, category, names = [*train, *val], np.concatenate([train_category, val_category]), more | names
    test = np.arange(len(images)) >= len(train)
    if split is not None:
        given = read_split(split, folder)
        row_of = {str(image.id): row for row, image in enumerate(images)}
        if absent := next((image for image in given.images if image not in row_of), None):
            unknown = f"image_id {brief(absent)} is in no annotation file"
            raise UserError(f"{split}: {unknown}; does it belong to other data?")
        kept = np.array([row_of[image] for image in given.images], np.int64)
        labels, test, users = given.labels, given.test, np.array(given.users, np.str_)
        classes = _names_by_label(labels, category[kept], names, split)
        notes = [f"examples, classes and users are those of {split}"]
    else:
        kept, classes, labels, notes = _balanced(category, test, names, balance, seed)
        test, users = test[kept], None
    where, owner = _locations(folder, [images[row].id for row in kept])
    files = [images[row].file_name for row in kept]
    return Rows(folder, files, labels, classes, test, owner if users is None else users, where, tuple(notes))


def _part(folder: Path, name: str) -> tuple[list[_Image], Ints, dict[int, str]]:
    path = folder / f"{name}.json"
    read = _read(folder, path.name, "train_val2017.zip", _AnnotationFile)
    category_of = {annotation.image_id: annotation.category_id for annotation in read.annotations}
    names = {category.id: category.name for category in read.categories}
    if not read.images:
        raise UserError(f"{path} lists no images; use the published annotations")
    for image in read.images:
        if image.file_name.startswith("/") or ".." in Path(image.file_name).parts:
            raise UserError(
                f"{path}: image {image.id} has the file {brief(image.file_name)}, which is outside its folder"
            )
        if category_of.get(image.id) not in names:
            raise UserError(f"{path}: image {image.id} has no annotation with a category; fetch it again")
    if len({image.id for image in read.images}) != len(read.images):
        raise UserError(f"{path} lists an image id twice; use the published annotations")
    return read.images, np.array([category_of[image.id] for image in read.images], np.int64), names


def _balanced(
    category: Ints, test: npt.NDArray[np.bool_], names: dict[int, str], balance: int, seed: int
) -> tuple[Ints, tuple[str, ...], Ints, list[str]]:
    """Which rows are kept, the classes by their category ids, the rows' labels, and notes."""
    train = np.flatnonzero(~test)
    ids, number, frequency = np.unique(category[train], return_inverse=True, return_counts=True)
    held = frequency >= max(balance, 1)
    if held.sum() < 2:
        have = f"{int(held.sum())} of {len(ids):,} classes have that many training examples"
        largest = f"the largest has {int(frequency.max()):,}"
        raise UserError(f"inaturalist(balance={balance}): {have}, {largest}; give a smaller balance")
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
    return kept, tuple(names[int(category_id)] for category_id in ids[held]), labels, notes


def _locations(folder: Path, images: list[int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.str_]]:
    """Place and user of each image: NaN and "" where the files have none."""
    row = {image: at for at, image in enumerate(images)}
    places, users = np.full((len(images), 2), np.nan), [""] * len(images)
    for part in ("train", "val"):
        for found in _read(folder, f"{part}2017_locations.json", "inat2017_locations.zip", list[_Location]):
            if (at := row.get(found.id)) is not None:
                if found.lat is not None and found.lon is not None:
                    places[at] = found.lat, found.lon
                users[at] = "" if found.user_id is None else str(found.user_id)
    return places, np.array(users, np.str_)


def _names_by_label(labels: Ints, category: Ints, names: dict[int, str], split: str) -> tuple[str, ...]:
    """The name of each class of a published split; its classes must be the categories, numbered in another way."""
    pairs = np.unique(np.stack([labels, category], axis=1), axis=0)
    if len(pairs) != len(np.unique(labels)) or len(pairs) != len(np.unique(category)):
        raise UserError(
            f"{split}: its classes are not the categories of the annotations; does it belong to other data?"
        )
    return tuple(names[int(category_id)] for category_id in pairs[:, 1])


def _read(folder: Path, name: str, archive: str, kind: type[Content]) -> Content:
    path, packed = folder / name, folder / archive
    try:
        if path.is_file() or not packed.is_file():
            content = read_plain(path)
        else:
            with zipfile.ZipFile(packed) as zipped:
                inside = next((info for info in zipped.infolist() if Path(info.filename).name == name), None)
                if inside is None:
                    raise UserError(f"{packed} has no {name}; use the published archive")
                check_unpacked(inside.file_size, size_on_disk([packed]), f"{packed}/{name}")
                content = zipped.read(inside)
        return msgspec.json.decode(content, type=kind)
    except FileNotFoundError as error:
        raise UserError(f"inaturalist: {path} does not exist, nor does {archive}; get them from {WHERE}") from error
    except (OSError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise UserError(f"inaturalist: {path} cannot be read: {error}; fetch it again from {WHERE}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged, or not the published file: {error}; fetch it again") from error


INATURALIST = published_source(
    "inaturalist",
    "photographs of species with users and places (iNaturalist-2017)",
    f"Van Horn et al. 2018, {WHERE}",
    inaturalist_rows,
    folders=("inaturalist", "inaturalist-2017", "inat2017", "2017"),
    known_by=("train2017.json", "train_val2017.zip"),
)
