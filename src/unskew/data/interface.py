"""What a data source is: the record that the registry in ``sources.py`` lists, and what such a source is asked for.

A new source is one module that makes a ``Source``, and one line in the registry:

    def load_noise(request: Request, *, examples: int = 100) -> ImageSet:
        ...

    NOISE = Source("noise", "random pixels", OWN, load_noise)     # --data "noise(examples=500)"

A source of photographs lists them in ``Rows`` instead; decoding, caching and checking them is done for it:

    def list_album(request: Request, *, year: int = 2026) -> Rows:
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
class Request:
    """What a source is asked for.

    Parameters
    ----------
    name
        The user's text, which becomes the image set's name.
    call
        The source's name and its options.
    path
        What follows the colon, without the options; empty for a set that is found by its name.
    data_dir
        The folder of the published sets, if the user gave one.
    cache
        Where decoded photographs are stored; None for the default.
    say
        Called with the progress of reading.
    side
        The network's input size: photographs of different sizes become squares of this side. None: no network is known.
    """

    name: str
    call: Call
    path: str = ""
    data_dir: Path | None = None
    cache: Cache | None = None
    say: Say = silent
    side: int | None = None

    def spell(self, **changed: Value) -> str:
        """Return the text with these options changed or added."""
        head = f"{self.call.name}:{self.path}" if self.path else self.call.name
        return str(replace(self.call, name=head, knobs={**self.call.knobs, **changed}))


@dataclass(frozen=True)
class Rows:
    """N photographs and what is known of them; ``labels`` number the classes.

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
        """Return these rows alone."""
        own: dict[str, Any] = {
            name: None if (column := getattr(self, name)) is None else column[index]
            for name in ("labels", "test", "users", "places", "numbers")
        }
        return replace(self, paths=[self.paths[row] for row in index.tolist()] if self.paths else [], **own)


@dataclass(frozen=True)
class Finding:
    """A row of ``unskew data check``: what a file is and what is in it, or what is wrong with it."""

    path: str
    size: int  # bytes
    status: str  # AS_PUBLISHED | OTHER | NO_CHECKSUM | DAMAGED | BROKEN
    detail: str
    notes: tuple[str, ...] = ()
    summary: Summary | None = None  # of data that were read completely

    @property
    def whole(self) -> bool:
        """Whether it can be read completely."""
        return self.status not in (DAMAGED, BROKEN)


@dataclass(frozen=True)
class Download:
    """Where a set is published, and what of it is kept in which folder.

    The files themselves are kept; of archives with ``members`` only those, of one with ``tree`` all files below that
    folder of the archive.
    """

    base: str
    folder: str
    files: dict[str, str]  # name -> MD5; empty where none was published
    members: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()  # tried in turn where the base does not have it
    tree: str | None = None
    whole: str = ""  # the options with which the set has all its pictures
    splits: bool = False  # whether these are the published splits of a set whose pictures come from elsewhere


@dataclass(frozen=True)
class Source:
    """A data set that ``--data`` can name, or a kind of them: ``digits``, ``folder:DIR``.

    Parameters
    ----------
    name
        What ``--data`` says, up to a colon or a parenthesis.
    what, origin
        What it is and who published it, for ``unskew data list``.
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
        The published number of classes, [ch, H, W], and numbers of training and test images; None where the options
        or the user's files decide.
    download
        Where it can be fetched.
    remote
        Whether what follows the colon may be a name instead of a file.
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
        """How ``--data`` names it: ``digits``, ``folder:DIR``."""
        return f"{self.name}:{self.path}" if self.path else self.name


def find_by(
    name: str, folders: tuple[str, ...], known_by: tuple[str, ...], where: str
) -> Callable[[Path | None], Path]:
    """Return a ``locate`` for a published set: in one of ``folders`` below the data folder, or in that folder itself.

    Any one of the files or folders in ``known_by`` identifies it. ``where`` is the address at which users get the set.
    """

    def locate(data_dir: Path | None) -> Path:
        files = " or ".join(known_by)
        if data_dir is None or not is_folder(data_dir):
            given = "no data folder was given" if data_dir is None else f"the data folder {data_dir} does not exist"
            raise UserError(f"{name}: {given}; pass the folder that has {folders[0]}/{files} as --data-dir DIR")
        candidates = [*(data_dir / folder for folder in folders), data_dir]
        for folder in candidates:
            if any((folder / file).exists() for file in known_by):
                return folder
        looked = ", ".join(map(str, candidates))
        raise UserError(f"{name} was not found: {files} is in none of {looked}; get it from {where}")

    return locate


def split_options(text: str) -> tuple[str, str]:
    """Split a path from the options in parentheses behind it.

    A file of exactly that name has no options; neither has a last pair of parentheses without ``option=value``.
    """
    if not os.path.lexists(usable_path(user_path(text))) and (match := _GROUP.fullmatch(text)):
        return match[1], match[2]
    return text, ""
