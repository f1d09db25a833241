"""The interface of a data source: the ``Source`` record that the registry in ``sources.py`` lists, and its request.

A new source is one module that defines a ``Source``, and one line in the registry:

    def load_noise(request: DataRequest, *, examples: int = 100) -> ImageSet:
        ...

    NOISE = Source("noise", "random pixels", OWN, load_noise)     # --data "noise(examples=500)"

A source of photographs lists them in ``Rows`` instead; the package decodes, caches and checks them:

    def list_album(request: DataRequest, *, year: int = 2026) -> Rows:
        ...

    ALBUM = Source("album", "a photo album", OWN, rows=list_album, path="FILE")     # --data "album:FILE(size=64)"
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.limits import is_folder, usable_path, user_path
from unskew.core.text import Call, Value
from unskew.core.types import ImageSet
from unskew.data.photographs import Files, Parquet, Pictures, Say, silent
from unskew.data.review import Summary
from unskew.data.store import Cache

AS_PUBLISHED = "as published"
OTHER = "complete, but not the published file"
NO_CHECKSUM = "no published checksum"
DAMAGED = "cannot be read completely"
BROKEN = "is a broken photograph"

SPLITS = "https://storage.googleapis.com/gresearch/federated-vision-datasets/"  # of Hsu, Qi and Brown 2020
OWN = "yours"  # the origin of the user's own data

_GROUP = re.compile(r"""(.+?)\s*\((\s*[A-Za-z_]\w*\s*=(?:[^()"']|"[^"]*"|'[^']*')*)\)\s*""", re.DOTALL)


@dataclass(frozen=True)
class DataRequest:
    """What a source has to load.

    Parameters
    ----------
    name
        The user's text, which becomes the image set's name.
    call
        The source's name and its options.
    path
        The text after the colon, without the options; empty for a set that is found by its name.
    data_dir
        The folder of the published sets, if the user gave one.
    cache
        The cache for decoded photographs; None for the default.
    say
        Called with the progress of reading.
    side
        The network's input size: photographs of different sizes become squares of this side. None without a network.
    """

    name: str
    call: Call
    path: str = ""
    data_dir: Path | None = None
    cache: Cache | None = None
    say: Say = silent
    side: int | None = None

    def spell(self, **changed: Value) -> str:
        """The request's text with these options changed or added."""
        head = f"{self.call.name}:{self.path}" if self.path else self.call.name
        return str(replace(self.call, name=head, knobs={**self.call.knobs, **changed}))


@dataclass(frozen=True)
class Rows:
    """N photographs with their labels and other columns.

    The photographs are the files ``paths`` below ``root``, or the ``column`` of the parquet file ``root``.
    """

    root: Path
    paths: list[str]  # [N]; empty for a parquet file
    labels: npt.NDArray[np.int64]  # [N]
    classes: tuple[str, ...]
    test: npt.NDArray[np.bool_]  # [N]
    users: npt.NDArray[np.str_] | None = None  # [N]
    places: npt.NDArray[np.float64] | None = None  # [N, 2], latitude and longitude in degrees; NaN where unknown
    notes: tuple[str, ...] = ()
    numbers: npt.NDArray[np.int64] | None = None  # [N], rows of the parquet file
    column: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def pictures(self) -> Pictures:
        """Where the photographs are."""
        if self.numbers is None:
            return Files.of(self.root, self.paths)
        return Parquet(self.root, self.column, self.numbers)

    def part(self, index: npt.NDArray[np.int64]) -> "Rows":
        """Only these rows."""
        columns: dict[str, Any] = {
            name: None if (column := getattr(self, name)) is None else column[index]
            for name in ("labels", "test", "users", "places", "numbers")
        }
        return replace(self, paths=[self.paths[row] for row in index.tolist()] if self.paths else [], **columns)


@dataclass(frozen=True)
class Finding:
    """A row of ``unskew data check``: a file's status and content, or what is wrong with it."""

    path: str
    size: int  # bytes
    status: str  # AS_PUBLISHED | OTHER | NO_CHECKSUM | DAMAGED | BROKEN
    detail: str
    notes: tuple[str, ...] = ()
    summary: Summary | None = None  # if the data were read completely

    @property
    def whole(self) -> bool:
        """Whether the file can be read completely."""
        return self.status not in (DAMAGED, BROKEN)


@dataclass(frozen=True)
class Download:
    """Where a set is published, and which files go into which folder.

    The files are kept as they are, except for archives: from those, only the ``members`` are extracted, or all files
    below the archive's folder ``tree``.
    """

    base: str
    folder: str
    files: dict[str, str]  # name -> MD5; empty if none was published
    members: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()  # tried in turn if the base does not have a file
    tree: str | None = None
    whole: str = ""  # the options that include all pictures of the set
    splits: bool = False  # whether these are the published splits of a set whose pictures come from elsewhere


@dataclass(frozen=True)
class Source:
    """A data set that ``--data`` can name, or a kind of them: ``digits``, ``folder:DIR``.

    Parameters
    ----------
    name
        The text of ``--data`` up to a colon or a parenthesis.
    what, origin
        A description and the publisher, for ``unskew data list``.
    load
        ``load(request, *, options)`` returns the image set. Its keyword-only parameters are the options that the text
        may have in parentheses.
    rows
        For photographs, instead of ``load``: ``rows(request, *, options)`` lists them. If the source has ``locate``,
        the first argument is the folder that it found. ``size`` and ``broken`` are options of every such source.
    path
        What follows the colon, such as ``DIR`` or ``FILE.npz``; empty for a set that is found by its name.
    locate
        Finds the set in a data folder, or raises a UserError. None: there is nothing to find.
    check
        Compares every file of a set with the published one. None: the set is loaded.
    classes, shape, sizes
        The published number of classes, [ch, H, W], and numbers of training and test images; None if they depend on the
        options or the user's files.
    download
        Where it can be downloaded.
    remote
        Whether the text after the colon may be a name instead of a file.
    """

    name: str
    what: str
    origin: str
    load: Callable[..., ImageSet] | None = None
    rows: Callable[..., Rows] | None = None
    path: str = ""
    locate: Callable[[Path | None], Path] | None = None
    check: Callable[..., list[Finding]] | None = None
    classes: int | None = None
    shape: tuple[int, int, int] | None = None
    sizes: tuple[int, int] | None = None
    download: Download | None = None
    remote: bool = False

    @property
    def spelling(self) -> str:
        """Its form in ``--data``: ``digits``, ``folder:DIR``."""
        return f"{self.name}:{self.path}" if self.path else self.name


def find_by(
    name: str, folders: tuple[str, ...], known_by: tuple[str, ...], where: str
) -> Callable[[Path | None], Path]:
    """Make a ``locate`` that searches the data folder and its subfolders ``folders`` for a published set.

    Any one of the files or folders in ``known_by`` identifies it. ``where`` is the address where users can get it.
    """

    def locate(data_dir: Path | None) -> Path:
        files = " or ".join(known_by)
        if data_dir is None or not is_folder(data_dir):
            problem = "no data folder was given" if data_dir is None else f"the data folder {data_dir} does not exist"
            raise UserError(f"{name}: {problem}; pass the folder that contains {folders[0]}/{files} as --data-dir DIR")
        candidates = [*(data_dir / folder for folder in folders), data_dir]
        for folder in candidates:
            if any((folder / file).exists() for file in known_by):
                return folder
        searched = ", ".join(map(str, candidates))
        raise UserError(f"{name} was not found: looked for {files} in {searched}; get it from {where}")

    return locate


def split_options(text: str) -> tuple[str, str]:
    """Split a path from the options in parentheses after it.

    If a file of exactly that name exists, or the last parentheses contain no ``option=value``, there are no options.
    """
    if not os.path.lexists(usable_path(user_path(text))) and (match := _GROUP.fullmatch(text)):
        return match[1], match[2]
    return text, ""
