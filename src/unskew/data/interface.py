"""The interface of a data source: the ``Source`` record that the registry in ``sources.py`` lists, and its request.

A new source is one module that defines a ``Source``, and one line in the registry. A source of photographs lists them
in ``Rows``; the package decodes, caches and checks them.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.files import usable_path, user_path
from unskew.core.language import Call, Value
from unskew.core.types import ImageSet
from unskew.data.photographs import Files, Parquet, Pictures, Say, silent
from unskew.data.store import Cache

AS_PUBLISHED, OTHER, NO_CHECKSUM = "as published", "complete, but not the published file", "no published checksum"
DAMAGED, BROKEN = "cannot be read completely", "is a broken photograph"

SPLITS = "https://storage.googleapis.com/gresearch/federated-vision-datasets/"  # of Hsu, Qi and Brown 2020
OWN = "yours"  # the origin of the user's own data

_GROUP = re.compile(r"""(.+?)\s*\((\s*[A-Za-z_]\w*\s*=(?:[^()"']|"[^"]*"|'[^']*')*)\)\s*""", re.DOTALL)


@dataclass(frozen=True)
class DataRequest:
    """What a source has to load."""

    source: "Source"
    name: str  # the user's text, which becomes the image set's name
    call: Call  # the source's name and the options as given
    path: str = ""  # the text after the colon, without the options; empty for a set that is found by its name
    data_dir: Path | None = None  # the folder of the published sets, if the user gave one
    cache: Cache | None = None  # for decoded photographs; None: the default
    say: Say = silent  # called with the progress of reading
    side: int | None = None  # the network's input size, for photographs of different sizes; None without a network
    options: dict[str, Any] = field(default_factory=dict)  # of the source's own function
    size: int | None = None  # of photographs, if it is fixed
    broken: str = "stop"  # or skip, to leave out photographs that cannot be read

    def spell(self, **changed: Value) -> str:
        """The request's text with these options changed or added."""
        head = f"{self.call.name}:{self.path}" if self.path else self.call.name
        return str(replace(self.call, name=head, knobs={**self.call.knobs, **changed}))


@dataclass(frozen=True)
class Rows:
    """N photographs, the files ``paths`` below ``root`` or the ``column`` of the parquet file ``root``."""

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
            name: value[index] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, paths=[self.paths[row] for row in index.tolist()] if self.paths else [], **columns)


Counts = dict[str, tuple[int, int]]  # training and test examples, by name


@dataclass(frozen=True)
class Summary:
    """The training and test examples of each class and each user; empty without users."""

    classes: Counts
    users: Counts


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
    """Where a set is published; of archives, the ``members`` or all files below the folder ``tree`` are extracted."""

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

    ``load(request, *, options)`` returns the image set; its keyword-only parameters are the options that the text may
    have in parentheses. For photographs, ``rows(request, *, options)`` lists them instead; if the source has
    ``locate``, the first argument is the folder that it found. All of these have the options ``size`` and ``broken``.
    """

    name: str  # the text of ``--data`` up to a colon or a parenthesis
    what: str  # a description and the publisher, for ``unskew data list``
    origin: str
    load: Callable[..., ImageSet] | None = None
    rows: Callable[..., Rows] | None = None
    path: str = ""  # what follows the colon, such as ``DIR`` or ``FILE.npz``; empty for a set that is found by its name
    locate: Callable[["Source", Path | None], Path] | None = None  # finds it in a data folder, or raises a UserError
    check: Callable[..., list[Finding]] | None = None  # compares every file with the published one; None: load it
    classes: int | None = None  # as published; these three are None if they depend on the options or the user's files
    shape: tuple[int, int, int] | None = None  # [ch, H, W]
    sizes: tuple[int, int] | None = None  # of train and test
    download: Download | None = None
    remote: bool = False  # whether the text after the colon may be a name instead of a file
    paths: tuple[str, ...] = ()  # options that are paths

    @property
    def spelling(self) -> str:
        """Its form in ``--data``: ``digits``, ``folder:DIR``."""
        return f"{self.name}:{self.path}" if self.path else self.name

    @property
    def address(self) -> str:
        """Where it is published: the last word of ``origin``."""
        return self.origin.split()[-1]


def find_by(folders: str, known_by: str) -> Callable[[Source, Path | None], Path]:
    """Make a ``locate`` that searches the data folder and its ``folders`` for any one of the files in ``known_by``."""

    def locate(source: Source, data_dir: Path | None) -> Path:
        candidates = [] if data_dir is None else [*(data_dir / folder for folder in folders.split()), data_dir]
        for folder in candidates:
            if any((folder / file).exists() for file in known_by.split()):
                return folder
        wanted = f"{folders.split()[0]}/{known_by.replace(' ', ' or ')}"
        looked = f"looked in {', '.join(map(str, candidates))}" if candidates else "no data folder was given"
        pass_it = f"pass the folder that contains {wanted} as --data-dir, or get the data from {source.address}"
        raise UserError(f"{source.name} was not found: {looked}; {pass_it}")

    return locate


def split_options(text: str) -> tuple[str, str]:
    """Split a path from the options in parentheses after it, unless a file of exactly that name exists."""
    if not os.path.lexists(usable_path(user_path(text))) and (match := _GROUP.fullmatch(text)):
        return match[1], match[2]
    return text, ""
