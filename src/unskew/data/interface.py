"""What a data source is: the record that the registry in ``sources.py`` lists, and what such a source is asked.

A new source is one module that makes a ``Source``, and one line in the registry:

    def load_noise(request: Request, *, examples: int = 100) -> ImageSet:
        ...

    NOISE = Source("noise", "random pixels", "drawn", load_noise)     # --data "noise(examples=500)"
"""

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unskew.core.limits import usable_path, user_path
from unskew.core.text import Call, Value
from unskew.core.types import Examples, ImageSet
from unskew.data.photographs import Say, silent
from unskew.data.review import Summary
from unskew.data.rows import Rows
from unskew.data.store import Cache

AS_PUBLISHED = "as published"
OTHER = "complete, but not the published file"
NO_CHECKSUM = "no published checksum"
DAMAGED = "cannot be read completely"
BROKEN = "is a broken photograph"

SPLITS = "https://storage.googleapis.com/gresearch/federated-vision-datasets/"  # of Hsu, Qi and Brown 2020
OWN = "yours"  # the origin of the user's own data
SIDE = 224  # pixels: the size of photographs where no network is known

_GROUP = re.compile(r"""(.+?)\s*\((\s*[A-Za-z_]\w*\s*=(?:[^()"']|"[^"]*"|'[^']*')*)\)\s*""", re.DOTALL)


@dataclass(frozen=True)
class Request:
    """What a source is asked for.

    Parameters
    ----------
    name
        The text that the user wrote, which becomes the image set's name.
    call
        The source's name and its options.
    path
        What follows the colon, without the options; empty for a set that is found by its name.
    old
        Whether the options were spelled ``?a=1&b=2``.
    data_dir
        The folder of the published sets; None where the user named none.
    cache
        Where decoded photographs are kept; None for the default.
    say
        Is told how far reading is.
    side
        The network's input size: photographs of different sizes become squares of this side. None: no network is known.
    """

    name: str
    call: Call
    path: str = ""
    old: bool = False
    data_dir: Path | None = None
    cache: Cache | None = None
    say: Say = silent
    side: int | None = None

    def spell(self, **changed: Value) -> str:
        """The text with these options changed or added."""
        head = f"{self.call.name}:{self.path}" if self.path else self.call.name
        return str(replace(self.call, name=head, knobs={**self.call.knobs, **changed}))


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
        """Whether it reads from its beginning to its end."""
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
    path
        What follows the colon, such as ``DIR`` or ``FILE.npz``; empty for a set that is found by its name.
    locate
        The folder of the set in a data folder; a UserError where it is not there. None: there is nothing to find.
    rows
        ``rows(request, **options)``, for a published set of photographs: the same as a table.
    examples
        The same as ``load``, without the images. None: ``load`` is quick enough.
    check
        The same as ``load``, but looks at every file. None: the set is loaded.
    classes, shape, sizes
        The published number of classes, [ch, H, W], and numbers of training and test images; None where the options
        or the user's files decide.
    download
        Where it can be fetched.
    reads
        A function that ``load`` calls with its own keyword-only parameters, which are options too.
    remote
        Whether what follows the colon may be a name instead of a file.
    """

    name: str
    what: str
    origin: str
    load: Callable[..., ImageSet]
    path: str = ""
    locate: Callable[[Path | None], Path] | None = None
    rows: Callable[..., Rows] | None = None
    examples: Callable[..., Examples] | None = None
    check: Callable[..., list[Finding]] | None = None
    classes: int | None = None
    shape: tuple[int, int, int] | None = None
    sizes: tuple[int, int] | None = None
    download: Download | None = None
    reads: Callable[..., Any] | None = None
    remote: bool = False

    @property
    def spelling(self) -> str:
        """How ``--data`` names it: ``digits``, ``folder:DIR``."""
        return f"{self.name}:{self.path}" if self.path else self.name

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters of ``reads`` and ``load``."""
        signatures = [inspect.signature(function) for function in (self.reads, self.load) if function is not None]
        parameters = [parameter for signature in signatures for parameter in signature.parameters.values()]
        return {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}


def split_options(text: str) -> tuple[str, str, str]:
    """Split a path from the options behind it: the path, those in parentheses, those of the old spelling.

    A file of exactly that name has no options; neither has a last pair of parentheses without ``option=value``.
    """
    if os.path.lexists(usable_path(user_path(text))):
        return text, "", ""
    if match := _GROUP.fullmatch(text):
        return match[1], match[2], ""
    if match := re.fullmatch(r"(.*?)\?([a-z]+=[^?/]*)", text, re.DOTALL):
        return match[1], "", match[2]
    return text, "", ""
