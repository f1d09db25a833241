"""The registry of data sources, and the text by which ``--data`` names one; nothing here uses a network.

``digits``, ``inaturalist(balance=0, size=64)``, ``folder:DIR(size=64)``, ``package.module:function(knob=value)``. The
options of a path are its last pair of parentheses, if that has the form ``(option=value, ...)``; a file or folder of
exactly the given name wins. The old spelling ``table:FILE.csv?size=128&broken=skip`` is still read, with a note.
"""

import inspect
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError, brief, nearest
from unskew.core.limits import user_path
from unskew.core.text import Call, Value, apply, parse_call
from unskew.core.types import Examples, ImageSet
from unskew.data.arrays import ARRAYS, load_from_function
from unskew.data.coco import COCO
from unskew.data.folders import CINIC10, FOLDER, OMNIGLOT, TINY_IMAGENET
from unskew.data.hugging_face import HUGGING_FACE
from unskew.data.inaturalist import INATURALIST
from unskew.data.interface import OWN, Finding, Request, Source, split_options
from unskew.data.landmarks import LANDMARKS
from unskew.data.photo_sources import describe_images
from unskew.data.photographs import Say, silent
from unskew.data.published import PUBLISHED
from unskew.data.review import review, summarize
from unskew.data.rows import Rows, is_number
from unskew.data.store import Cache
from unskew.data.tables import TABLE

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        *PUBLISHED, INATURALIST, LANDMARKS, CINIC10, TINY_IMAGENET, OMNIGLOT, FOLDER, TABLE, COCO, HUGGING_FACE, ARRAYS
    )
}  # fmt: skip


def parse(
    text: str, data_dir: Path | None = None, cache: Cache | None = None, say: Say = silent, side: int | None = None
) -> tuple[Source, Request]:
    """Find the source that a text names, and what it is asked for; the options are checked against the source's.

    A user's function is not in the registry: see ``is_function``. The parameters are described in ``Request``.
    """
    kind, colon, rest = text.partition(":")
    base = re.split(r"[(?]", text)[0].strip()
    path, query = "", ""
    if colon and kind in SOURCES and SOURCES[kind].path:
        base = kind
        path, options, query = split_options(rest)
        call = parse_call(f"{kind}({options})", "data set")
    elif base not in SOURCES or SOURCES[base].path:
        known = [*(source.spelling for source in SOURCES.values()), "package.module:function"]
        hint = _hint(text) or nearest(text.lower(), known)
        raise UserError(f"no data set is called {brief(text)}; {hint}")
    elif "?" in text.partition("(")[0]:
        query = text.partition("?")[2]
    else:
        call = parse_call(text, "data set")
    if query:
        call = _parse_query(base, query, text)
    request = Request(text, call, path, bool(query), data_dir, cache, say, side)
    _options(request)
    return SOURCES[base], request


def is_function(text: str) -> bool:
    """Whether a data set's text is ``package.module:function``, perhaps with knobs."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*(\(.*\))?", text.strip(), re.DOTALL)
    return match is not None and match[1] not in SOURCES


def load(
    text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent, side: int | None = None
) -> ImageSet:
    """Load the image set of that text; the parameters are described in ``Request``."""
    if is_function(text):
        images, old, own = load_from_function(text, data_dir), list[str](), True
    else:
        source, request = parse(text, data_dir, cache, say, side)
        images, own = source.load(request, **_options(request)), source.origin == OWN
        old = [f"the next release will not accept the spelling with ?; write {request.spell()}"] * request.old
    notes = review(summarize(images)) if own else []
    return replace(images, notes=(*images.notes, *notes, *old))


def load_examples(text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent) -> Examples:
    """Load the training examples without their images: photographs are not read unless that is needed."""
    if not is_function(text):
        source, request = parse(text, data_dir, cache, say)
        if source.examples is not None:
            return source.examples(request, **_options(request))
    return load(text, data_dir, cache, say).examples


def load_rows(text: str, data_dir: Path | None) -> Rows:
    """List the photographs of a published set, as ``unskew data table`` writes them."""
    source, request = parse(text, data_dir)
    if source.rows is None:
        tables = ", ".join(other.name for other in SOURCES.values() if other.rows)
        raise UserError(f"{text} does not consist of image files; give one of {tables}")
    options = {option: value for option, value in _options(request).items() if option not in ("size", "broken")}
    return source.rows(request, **options)


def check(text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent) -> list[Finding]:
    """Read every file of a set and compare it with what was published.

    What cannot be found or is no data set is a UserError; a file of the set that is damaged is a finding.
    """
    where = Path(text)
    if not is_function(text):
        source, request = parse(text, data_dir, cache, say)
        if source.check is not None:
            found = source.check(request, **_options(request))
            return [
                replace(each, notes=(*each.notes, *review(each.summary))) if each.summary else each for each in found
            ]
        where = user_path(request.path) if request.path else where
    return [describe_images(where, load(text, data_dir, cache, say))]


def locate(text: str, data_dir: Path | None) -> Path | None:
    """Find the folder of a published set; None where there is nothing to find, a UserError where it is not there."""
    source = None if is_function(text) else parse(text)[0]
    return None if source is None or source.locate is None else source.locate(data_dir)


def survey(data_dir: Path | None) -> list[tuple[Source, str]]:
    """List all sources, and where each was found: empty for a user's own files."""
    found = []
    for source in SOURCES.values():
        where = "inside scikit-learn" if source.name == "digits" else ""
        if source.locate is not None:
            try:
                where = str(source.locate(data_dir))
            except UserError:
                where = "not found"
        found.append((source, where))
    return found


def make_absolute(text: str) -> str:
    """Make the paths in a data set's text absolute, so that a run can be resumed from any folder."""
    if is_function(text) or re.split(r"[:(?]", text)[0].strip() not in SOURCES:
        return text
    request, changed = parse(text)[1], {}
    if split := request.call.knobs.get("split"):
        changed["split"] = str(user_path(str(split)).absolute())
    named = SOURCES[request.call.name].remote and not user_path(request.path).exists()
    path = "" if named or not request.path else str(user_path(request.path).absolute())
    return _spell(replace(request, path=path or request.path), **changed) if path or changed else text


def find_moved(text: str, data_dir: Path | None) -> str:
    """Return the text of a user's own data; where they have moved to ``data_dir``, the text that finds them there."""
    if is_function(text) or not (path := (request := parse(text)[1]).path) or os.path.lexists(user_path(path)):
        return text
    if SOURCES[request.call.name].remote:
        return text
    if data_dir is not None and os.path.lexists(found := data_dir / Path(path).name):
        return _spell(replace(request, path=str(found)))
    raise UserError(f"{path} does not exist; if it has moved, give its new folder as --data-dir DIR")


def _hint(text: str) -> str:
    """The text that was meant, where it is a file or folder without its kind."""
    path = re.split(r"\(|\?", text)[0]
    kind = {".csv": "table", ".tsv": "table", ".parquet": "table", ".npz": "arrays", ".zip": "folder"}
    kind |= {".json": "coco", "": "folder"}
    suffix = Path(path).suffix.lower()
    is_path = suffix in kind and (suffix or os.path.isdir(user_path(path)))
    return f"did you mean {kind[suffix]}:{text}?" if is_path else ""


def _spell(request: Request, **changed: Value) -> str:
    """The text in the spelling that it had: that of a stored configuration must not change."""
    if not request.old:
        return request.spell(**changed)
    head = f"{request.call.name}:{request.path}" if request.path else request.call.name
    return f"{head}?{'&'.join(f'{knob}={value}' for knob, value in {**request.call.knobs, **changed}.items())}"


def _options(request: Request) -> dict[str, Any]:
    """The options by name, checked against the parameters of the source."""

    def collect(**given: Value) -> dict[str, Value]:
        return given

    parameters = list(SOURCES[request.call.name].options.values())
    collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    options: dict[str, Any] = apply(request.call, collect, "data set")
    return options


def _parse_query(name: str, query: str, text: str) -> Call:
    knobs: dict[str, Value] = {}
    for pair in query.split("&"):
        knob, equals, value = pair.partition("=")
        if not equals or not knob or not value or knob in knobs:
            raise UserError(f"{brief(text)}: {brief(pair)} is not an option; give {name}(option=value), each once")
        knobs[knob] = int(value) if is_number(value) else value
    return Call(name, (), knobs, 0, text)
