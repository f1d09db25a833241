"""The named image sets: where their files are looked for and how they become arrays; never over a network.

A file that differs from the published one is legal as long as it reads whole: the set's notes then say so.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unskew.core.errors import UserError, brief, nearest
from unskew.core.limits import is_folder, usable_path
from unskew.core.types import Examples, ImageSet, Split
from unskew.data import arrays, folders, tables
from unskew.data.arrays import is_function, load_from_function
from unskew.data.builders import BUILDERS, build_rows, is_built, reading_knobs
from unskew.data.builders import locate as locate_annotations
from unskew.data.photographs import Say
from unskew.data.published import SOURCES as SOURCES
from unskew.data.published import Layout, Source, read_part
from unskew.data.rows import Rows
from unskew.data.store import Cache

OWN = {
    "folder:": ("folder:DIR", "your own pictures, one folder for each class", folders.load_folder),
    "arrays:": ("arrays:FILE.npz", "your own arrays: x_train, y_train, x_test, y_test", arrays.load_arrays),
    "table:": (
        "table:FILE.csv", "your own photographs: path or image, label, user, latitude, longitude, split (.parquet too)",
        tables.load_table,
    ),
}  # fmt: skip
BUILT_SIZE = {"inaturalist": 224, "landmarks": 224}  # pixels of a side, where ?size= is not given


@dataclass(frozen=True)
class Files:
    """A set's files, all there."""

    layout: Layout
    folder: Path
    train: tuple[Path, ...]
    test: tuple[Path, ...]


@dataclass(frozen=True)
class Listing:
    """A row of ``unskew data list``; ``place`` is None where it is not in any of ``looked``."""

    name: str
    what: str
    origin: str
    classes: int | None
    shape: tuple[int, int, int] | None
    sizes: tuple[int, int] | None
    mean: tuple[float, ...] | None  # None: measured from the training images
    std: tuple[float, ...] | None
    place: str | None
    looked: tuple[Path, ...]


def load(name: str, data_dir: Path | None, cache: Cache | None = None, say: Say = tables.silent) -> ImageSet:
    """The image set of that name; ``data_dir`` is where published sets are, None where the user named none.

    ``cache`` is where decoded photographs are kept, ``say`` is told how far reading them is.
    """
    if name.startswith("table:"):
        return tables.load_table(name.removeprefix("table:"), cache, say)
    if is_built(name):
        return _built(name, data_dir, cache, say)
    for prefix, (_, _, read) in OWN.items():
        if name.startswith(prefix):
            return read(name.removeprefix(prefix))
    if is_function(name):
        return load_from_function(name, data_dir)
    source = find(name)
    if source.name == "digits":
        return _digits(source)
    files = locate(source, data_dir)
    train, strange = read_part(source, files.layout, files.train)
    test, also_strange = read_part(source, files.layout, files.test)
    notes = [*source.notes, *_odd_files([*strange, *also_strange]), *_odd_place(source, files)]
    if (len(train), len(test)) != source.sizes:
        published = f"the published set has {source.sizes[0]:,} and {source.sizes[1]:,}"
        notes.append(f"{files.folder} has {len(train):,} training and {len(test):,} test images; {published}")
    return ImageSet(name, source.classes, train, test, source.mean, source.std, source.augment, notes=tuple(notes))


def load_examples(name: str, data_dir: Path | None, cache: Cache | None = None, say: Say = tables.silent) -> Examples:
    """The training examples of that set without their images: photographs are not read unless that is needed."""
    if name.startswith("table:"):
        return tables.table_examples(name.removeprefix("table:"), cache, say)
    if is_built(name) and reading_knobs(name)[1] == "stop":
        return tables.row_examples(_rows(name, data_dir, say))
    return load(name, data_dir, cache, say).examples


def _built(name: str, data_dir: Path | None, cache: Cache | None, say: Say) -> ImageSet:
    """A set whose rows are made from annotation files or folders: read as a table is."""
    size, broken = reading_knobs(name)
    rows = _rows(name, data_dir, say)
    size = size or BUILT_SIZE.get(name.partition("?")[0])
    return tables.from_rows(rows, name=name, size=size, broken=broken, cache=cache, say=say)


def _rows(name: str, data_dir: Path | None, say: Say) -> Rows:
    base = name.partition("?")[0]
    say(f"reading the files of {base} in {locate_annotations(base, data_dir)}", 0, 0)
    return build_rows(name, data_dir)


def moved(name: str, data_dir: Path | None) -> str:
    """The name of a user's own data; where it is not at its place any more, that of the same in ``data_dir``."""
    kind, colon, place = name.partition(":")
    path, asked, query = place.partition("?")
    if f"{kind}{colon}" not in OWN or not path or os.path.lexists(usable_path(path)):
        return name
    if data_dir is not None and os.path.lexists(there := data_dir / Path(path).name):
        return f"{kind}:{there}{asked}{query}"
    raise UserError(f"{path} is not there; if it has moved, give the folder that has it now as --data-dir DIR")


def find(name: str) -> Source:
    """The published facts of a named set."""
    if name not in SOURCES:
        known = [*SOURCES, *BUILDERS, *(spelling for spelling, _, _ in OWN.values()), "package.module:function"]
        raise UserError(f"there is no data set {brief(name)}; {nearest(name.lower(), known)}")
    return SOURCES[name]


def survey(data_dir: Path | None) -> list[Listing]:
    """All sets that can be named, and where each was found."""
    rows = []
    for s in SOURCES.values():
        place = _try_locate(s, data_dir) if s.layouts else "inside scikit-learn"
        looked = tuple(dict.fromkeys(folder for _, folder in _places(s, data_dir))) if data_dir else ()
        size = (len(s.classes), s.shape, s.sizes)
        rows.append(Listing(s.name, s.what, s.origin, *size, s.mean, s.std, place, looked))
    for name, builder in BUILDERS.items():
        try:
            there = str(locate_annotations(name, data_dir))
        except UserError:
            there = None
        facts = (builder.classes, builder.shape, builder.sizes)
        rows.append(Listing(name, builder.what, builder.origin, *facts, None, None, there, ()))
    own = [
        Listing(spelling, what, "yours", None, None, None, None, None, None, ()) for spelling, what, _ in OWN.values()
    ]
    return [*rows, *own]


def locate(source: Source, data_dir: Path | None) -> Files:
    """The first folder that has all files of one layout."""
    fetch = f"unskew data fetch {source.name} --data-dir DIR"
    if data_dir is None:
        raise UserError(
            f"{source.name}: no data folder is known; pass --data-dir DIR or set UNSKEW_DATA to the folder that "
            f"holds {source.layouts[0].folders[0]}/, or download it: {fetch}"
        )
    if not is_folder(data_dir):
        raise UserError(f"{source.name}: the data folder {data_dir} is not there; give another, or {fetch}")
    partly = ""
    for layout, folder in _places(source, data_dir):
        files = {name: _present(folder, name, layout) for name in (*layout.train, *layout.test)}
        train, test = ([path for n in part if (path := files[n])] for part in (layout.train, layout.test))
        missing = [name for name, path in files.items() if path is None]
        if not missing:
            return Files(layout, folder, tuple(train), tuple(test))
        if len(missing) < len(files):
            partly = partly or f"{folder} lacks {', '.join(missing)}"
    if partly:
        raise UserError(f"{source.name}: {partly}; put the whole set there, or {fetch}")
    looked = ", ".join(dict.fromkeys(str(folder) for _, folder in _places(source, data_dir)))
    raise UserError(
        f"{source.name} was not found; looked in {looked}; pass the folder that holds it as --data-dir, or {fetch}"
    )


def _try_locate(source: Source, data_dir: Path | None) -> str | None:
    try:
        return str(locate(source, data_dir).folder)
    except UserError:
        return None


def _places(source: Source, data_dir: Path) -> list[tuple[Layout, Path]]:
    """Where to look: each layout's own folders, then the data folder itself unless its name is another set's."""
    below = [(layout, data_dir / folder) for layout in source.layouts for folder in layout.folders]
    itself = [] if any(_named(t, data_dir) for t in _twins(source)) else [(x, data_dir) for x in source.layouts]
    return below + itself


def _twins(source: Source) -> list[Source]:
    """Other sets with files of the same names: MNIST and Fashion-MNIST."""
    files = {layout.train for layout in source.layouts}
    return [s for s in SOURCES.values() if s is not source and files & {x.train for x in s.layouts}]


def _named(source: Source, folder: Path) -> bool:
    return any(folder.match(name) for layout in source.layouts for name in layout.folders)


def _present(folder: Path, name: str, layout: Layout) -> Path | None:
    """The file under its name or, for idx, gzipped or with the dot that some copies have."""
    dotted = name.replace("-idx", ".idx")
    names = (name, f"{name}.gz", dotted, f"{dotted}.gz") if layout.kind == "idx" else (name,)
    return next((folder / n for n in names if (folder / n).is_file()), None)


def _odd_files(strange: list[Path]) -> list[str]:
    more = f", nor are {len(strange) - 1} beside it" if len(strange) > 1 else ""
    return [f"{strange[0]} is not the published file{more} (by checksum); read as it is"] if strange else []


def _odd_place(source: Source, files: Files) -> list[str]:
    twins = [t.name for t in _twins(source)]
    if not twins or _named(source, files.folder):
        return []
    return [f"{files.folder} was taken for {source.name}: files of {', '.join(twins)} have the same names"]


def _digits(source: Source) -> ImageSet:
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    held = load_digits()
    images = np.rint(held.images * 255 / 16).astype(np.uint8)[:, None]  # pixels go from 0 to 16
    labels, out = held.target.astype(np.int64), arrays.fifth(len(images))
    train, test = Split(images[~out], labels[~out]), Split(images[out], labels[out])
    return ImageSet("digits", source.classes, train, test, source.mean, source.std, notes=source.notes)
