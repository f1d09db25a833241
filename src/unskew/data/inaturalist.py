"""iNaturalist-2017 as it is distributed, as rows: which photograph, which species, whose, where.

Reads train2017.json and val2017.json (COCO's form) and the locations with user ids that were added in 2019, unpacked or
inside their zip archives. Pictures are below the folder at the ``file_name`` of the annotations.
"""

import codecs
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief
from unskew.core.key import Key
from unskew.core.limits import check_plain, check_unpacked, size_on_disk
from unskew.data.rows import Rows, read_split
from unskew.data.tables import row_source

BLOCK = 1 << 20  # bytes read at a time
MAX_RECORD = 16 * BLOCK  # characters of one record
_SPACE = " \t\n\r"

Columns = list[list[Any]]  # a list for each wanted field


def read_records(stream: IO[bytes], path: Path | str, wanted: Mapping[str, Sequence[str]]) -> dict[str, Columns]:
    """The wanted fields of the named lists as columns; the list with the name "" is the whole file.

    A field whose name ends with ``?`` may be missing, and is None then. What is not JSON, a list that is missing or
    twice there, and a record without its field are a UserError that says where.
    """
    reader = _JsonReader(stream, path)
    columns: dict[str, Columns] = {name: [[] for _ in fields] for name, fields in wanted.items()}
    seen: set[str] = set()
    for name in reader.names() if "" not in wanted else [""]:
        if name not in wanted:
            reader.value()
            continue
        if name in seen:
            raise UserError(f"{path} is not the published file: it has a second list {name!r}; fetch it again")
        seen.add(name)
        for number, record in enumerate(reader.items(name)):
            _take(record, wanted[name], columns[name], f"{path}, {name or 'the list'}, record {number}")
    reader.end()
    if missing := [name for name in wanted if name not in seen]:
        raise UserError(f"{path} has no list {missing[0]!r}; give the annotations as published")
    return columns


def _take(record: Any, fields: Sequence[str], columns: Columns, where: str) -> None:
    if not isinstance(record, dict):
        raise UserError(f"{where} is not an object with {', '.join(fields).replace('?', '')}; give the published file")
    for field, column in zip(fields, columns, strict=True):
        name = field.rstrip("?")
        if name not in record and name == field:
            raise UserError(f"{where} has no {name!r}; give the annotations as published")
        column.append(record.get(name))


class _JsonReader:
    """A place in a stream of JSON text."""

    def __init__(self, stream: IO[bytes], path: Path | str) -> None:
        self._stream, self._path = stream, path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder(parse_constant=_no_number).raw_decode
        self._text, self._at, self._before, self._ended = "", 0, 0, False

    def names(self) -> Iterator[str]:
        """The names in the object that the file is; after each, its value must be read."""
        for name in self._members("{", "}"):
            if not isinstance(name, str):
                self._broken("a name was expected")
            self._expect(":")
            yield name

    def items(self, name: str) -> Iterator[Any]:
        """The values of the list that begins here."""
        if self._peek() != "[":
            self._broken(f"{name or 'the file'} is not a list")
        yield from self._members("[", "]")

    def value(self) -> Any:
        """The value that begins here."""
        self._peek()
        while True:
            try:
                value, end = self._parse(self._text, self._at)
                if end < len(self._text) or self._ended:  # a number may go on in the next block
                    self._at = end
                    return value
            except RecursionError:
                self._broken("lists or objects are nested too deeply")
            except ValueError as error:
                if self._ended:
                    self._broken(getattr(error, "msg", str(error)))
            if len(self._text) - self._at > MAX_RECORD:
                self._broken(f"a value has more than {MAX_RECORD:,} characters, or is not JSON")
            self._more()

    def end(self) -> None:
        """Refuse what follows the last value."""
        if self._peek():
            self._broken("more follows after its end")

    def _members(self, opening: str, closing: str) -> Iterator[Any]:
        self._expect(opening)
        if self._peek() == closing:
            self._at += 1
            return
        while True:
            yield self.value()
            mark = self._peek()
            if mark == closing:
                self._at += 1
                return
            self._expect(",")

    def _expect(self, mark: str) -> None:
        if self._peek() != mark:
            self._broken(f"expected {mark!r}")
        self._at += 1

    def _peek(self) -> str:
        """The next character that is not a space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def _more(self) -> None:
        try:
            block = self._stream.read(max(BLOCK, len(self._text) - self._at))
            self._before += self._at
            self._text, self._at = self._text[self._at :] + self._decode(block, final=not block), 0
        except UnicodeDecodeError:
            self._broken("it is not UTF-8")
        self._ended = not block

    def _broken(self, why: str) -> NoReturn:
        where = f"character {self._before + self._at:,}"
        raise UserError(f"{self._path} is damaged, or not JSON, at {where}: {why}; fetch it again")


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


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
        row_of = {str(image): row for row, image in enumerate(images)}
        kept = _found(given.images, row_of, split)
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
        if not all(type(number) is int and 0 <= number < 2**62 for number in column):
            raise UserError(f"{path}: ids must be whole numbers; give the annotations as published")
    of = dict(zip(*lists["annotations"], strict=True))
    names = dict(zip(*lists["categories"], strict=True))
    if not images:
        raise UserError(f"{path} lists no images; give the annotations as published")
    for image, file in zip(images, files, strict=True):
        if not isinstance(file, str) or file.startswith("/") or ".." in Path(file).parts:
            raise UserError(f"{path}: image {image} has the file {brief(str(file))}, which is not below it")
        if of.get(image) not in names:
            raise UserError(f"{path}: image {image} has no annotation with a category; fetch it again")
    if len(set(images)) != len(images):
        raise UserError(f"{path} lists an image id twice; give the annotations as published")
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
            f"inaturalist(balance={balance}): {int(held.sum())} of {len(ids):,} classes have that many training "
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
    return kept, tuple(names[int(category_id)] for category_id in ids[held]), labels, notes


def _locations(
    folder: Path, images: Sequence[int], kept: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.str_]]:
    """Place and user of each kept image: NaN and "" where the file has none."""
    row = {images[number]: at for at, number in enumerate(kept)}
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
        raise UserError(f"{path}: the location of image {image} is {given}; expected numbers") from None


def _found(images: Sequence[str], row_of: dict[str, int], split: str) -> npt.NDArray[np.int64]:
    if absent := next((image for image in images if image not in row_of), None):
        raise UserError(f"{split}: image_id {brief(absent)} is in no annotation file; is it the split of other data?")
    return np.array([row_of[image] for image in images], np.int64)


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
    return tuple(names[int(category_id)] for category_id in pairs[:, 1])


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
        with zipfile.ZipFile(archive) as zipped:
            inside = next((info for info in zipped.infolist() if Path(info.filename).name == name), None)
            if inside is None:
                raise UserError(f"{archive} has no {name}; give the archive as published")
            check_unpacked(inside.file_size, size_on_disk([archive]), f"{archive}/{name}", at_once=False)
            with zipped.open(inside) as file:
                yield file
    except FileNotFoundError as error:
        raise UserError(f"inaturalist: {path} does not exist, nor is {archive.name}; get them from {WHERE}") from error
    except (OSError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise UserError(f"inaturalist: {path} cannot be read: {error}; fetch it again from {WHERE}") from error


INATURALIST = row_source(
    "inaturalist",
    "photographs of species with users and places (iNaturalist-2017)",
    f"Van Horn et al. 2018, {WHERE}",
    inaturalist_rows,
    folders=("inaturalist", "inaturalist-2017", "inat2017", "2017"),
    known_by=("train2017.json", "train_val2017.zip"),
    side=224,
)
