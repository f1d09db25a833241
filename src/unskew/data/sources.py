"""The registry of data sources, and how the text of ``--data`` becomes an image set; nothing here uses a network.

``digits``, ``inaturalist(balance=0, size=64)``, ``folder:DIR(size=64)``, ``package.module:function(knob=value)``. The
options of a path are in its last pair of parentheses, if that has the form ``(option=value, ...)``; an existing file or
folder of exactly the given name takes precedence.
"""

import inspect
import os
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unskew.core.errors import UserError, brief, nearest
from unskew.core.limits import user_path
from unskew.core.text import Value, apply, cut, parse_call
from unskew.core.types import Examples, ImageSet, Split
from unskew.core.units import counted, format_bytes
from unskew.data.arrays import ARRAYS, load_from_function, moments
from unskew.data.coco import COCO
from unskew.data.folders import CINIC10, FOLDER, OMNIGLOT, TINY_IMAGENET
from unskew.data.hugging_face import HUGGING_FACE
from unskew.data.inaturalist import INATURALIST
from unskew.data.interface import BROKEN, DAMAGED, NO_CHECKSUM, OWN, DataRequest, Finding, Rows, Source, split_options
from unskew.data.landmarks import LANDMARKS
from unskew.data.photographs import Pictures, Say, Scan, scan, silent
from unskew.data.published import PUBLISHED
from unskew.data.review import review, summarize
from unskew.data.store import Cache, cache_of
from unskew.data.tables import TABLE

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        *PUBLISHED, INATURALIST, LANDMARKS, CINIC10, TINY_IMAGENET, OMNIGLOT, FOLDER, TABLE, COCO, HUGGING_FACE, ARRAYS
    )
}  # fmt: skip
SIDE = 224  # pixels: the size of photographs without a network
NAMED = 5  # photographs in a message
SAMPLED = 50  # ``check`` looks for every 50th picture of a published set


def parse(
    text: str, data_dir: Path | None = None, cache: Cache | None = None, say: Say = silent, side: int | None = None
) -> tuple[Source, DataRequest]:
    """Find the source that a text names, and make the request for it; the options are checked.

    A user's function is not in the registry: see ``is_function``. The parameters are described in ``DataRequest``.
    """
    kind, colon, rest = text.partition(":")
    base, path = text.partition("(")[0].strip(), ""
    if colon and kind in SOURCES and SOURCES[kind].path:
        base = kind
        path, options = split_options(rest)
        call = parse_call(f"{kind}({options})", "data set")
    elif base not in SOURCES or SOURCES[base].path:
        known = [*(source.spelling for source in SOURCES.values()), "package.module:function"]
        raise UserError(f"no data set is called {brief(text)}; {_hint(text) or nearest(text.lower(), known)}")
    else:
        call = parse_call(text, "data set")
    request = DataRequest(text, call, path, data_dir, cache, say, side)
    _options(request)
    return SOURCES[base], request


def _hint(text: str) -> str:
    name, mark, options = text.partition("?")
    if mark and name in SOURCES:
        return f"give options in parentheses: {name}({options.replace('&', ', ')})"
    path = text.partition("(")[0]
    kind = {".csv": "table", ".tsv": "table", ".parquet": "table", ".npz": "arrays", ".zip": "folder"}
    kind |= {".json": "coco", "": "folder"}
    suffix = Path(path).suffix.lower()
    is_path = suffix in kind and (suffix or os.path.isdir(user_path(path)))
    return f"did you mean {kind[suffix]}:{text}?" if is_path else ""


def _options(request: DataRequest) -> dict[str, Any]:
    source = SOURCES[request.call.name]
    functions = [function for function in (source.rows, load_photographs if source.rows else source.load) if function]
    parameters = [parameter for function in functions for parameter in inspect.signature(function).parameters.values()]

    def collect(**given: Value) -> dict[str, Value]:
        return given

    collect.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    )
    options: dict[str, Any] = apply(request.call, collect, "data set")
    return options


def is_function(text: str) -> bool:
    """Whether a data set's text is ``package.module:function``, perhaps with knobs."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*(\(.*\))?", text.strip(), re.DOTALL)
    return match is not None and match[1] not in SOURCES


def load(
    text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent, side: int | None = None
) -> ImageSet:
    """Load the image set of that text; the parameters are described in ``DataRequest``."""
    if is_function(text):
        images, origin = load_from_function(text, data_dir), OWN
    else:
        source, request = parse(text, data_dir, cache, say, side)
        origin, load_source = source.origin, source.load or partial(load_photographs, source)
        images = load_source(request, **_options(request))
    return replace(images, notes=(*images.notes, *review(summarize(images)))) if origin == OWN else images


def load_examples(text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent) -> Examples:
    """Load the training examples without their images; photographs are read only if broken ones are to be skipped."""
    if not is_function(text):
        source, request = parse(text, data_dir, cache, say)
        options = _options(request)
        if source.rows is not None and options.get("broken") != "skip":
            rows = _read_rows(source, request, **options)
            train = rows.part(np.flatnonzero(~rows.test))
            return Examples(train.labels, train.classes, train.users, train.places)
    return load(text, data_dir, cache, say).examples


def load_rows(text: str, data_dir: Path | None) -> Rows:
    """List the photographs of a published set, as ``unskew data table`` writes them."""
    source, request = parse(text, data_dir)
    if source.rows is None or source.path:
        tables = ", ".join(other.name for other in SOURCES.values() if other.rows and not other.path)
        raise UserError(f"{text} is not a published set of image files; choose from {tables}")
    return _read_rows(source, request, **_options(request))


def check(text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent) -> list[Finding]:
    """Read every file of a set and compare it with the published one.

    A set that does not exist is a UserError; a damaged file is a finding.
    """
    where = Path(text)
    if not is_function(text):
        source, request = parse(text, data_dir, cache, say)
        options = _options(request)
        if source.check is not None:
            return source.check(request, **options)
        if source.rows is not None:
            return _check_photographs(source, request, **options)
        where = user_path(request.path) if request.path else where
    return [_describe(where, load(text, data_dir, cache, say))]


def _describe(where: Path, images: ImageSet) -> Finding:
    detail = f"{len(images.train):,} training and {len(images.test):,} test images"
    size = where.stat().st_size if where.is_file() else images.train.images.nbytes + images.test.images.nbytes
    return Finding(str(where), size, NO_CHECKSUM, detail, images.notes, summarize(images))


def locate(text: str, data_dir: Path | None) -> Path | None:
    """Find the folder of a published set; None if the set has no folder, a UserError if it is missing."""
    source = None if is_function(text) else parse(text)[0]
    return None if source is None or source.locate is None else source.locate(data_dir)


def survey(data_dir: Path | None) -> list[tuple[Source, str]]:
    """List all sources with their locations, which are empty for a user's own files."""
    locations = []
    for source in SOURCES.values():
        where = "inside scikit-learn" if source.name == "digits" else ""
        if source.locate is not None:
            try:
                where = str(source.locate(data_dir))
            except UserError:
                where = "not found"
        locations.append((source, where))
    return locations


def make_absolute(text: str) -> str:
    """Make the paths in a data set's text absolute, so that a run can be resumed from any folder."""
    if is_function(text) or re.split(r"[:(]", text)[0].strip() not in SOURCES:
        return text
    request, changed = parse(text)[1], {}
    if split := request.call.knobs.get("split"):
        changed["split"] = str(user_path(str(split)).absolute())
    named = SOURCES[request.call.name].remote and not user_path(request.path).exists()
    path = "" if named or not request.path else str(user_path(request.path).absolute())
    return replace(request, path=path or request.path).spell(**changed) if path or changed else text


def find_moved(text: str, data_dir: Path | None) -> str:
    """The text of a user's own data, adapted if they have moved to ``data_dir``."""
    if is_function(text) or not (path := (request := parse(text)[1]).path) or os.path.lexists(user_path(path)):
        return text
    if SOURCES[request.call.name].remote:
        return text
    if data_dir is not None and os.path.lexists(moved := data_dir / Path(path).name):
        return replace(request, path=str(moved)).spell()
    raise UserError(f"{path} does not exist; if it has moved, give its new folder as --data-dir DIR")


def load_photographs(
    source: Source, request: DataRequest, *, size: int | None = None, broken: str = "stop", **options: Any
) -> ImageSet:
    """Decode the photographs of a source.

    ``size`` is the side of the images in pixels; ``broken`` is stop, or skip to leave out unreadable files.
    """
    rows = _read_rows(source, request, size=size, broken=broken, **options)
    return _assemble(request, rows, _scan(request, rows, size), broken)


def _read_rows(
    source: Source, request: DataRequest, *, size: int | None = None, broken: str = "stop", **options: Any
) -> Rows:
    if size is not None and not 1 <= size <= 4096:
        raise UserError(f"{cut(request.name)}: size={cut(str(size))} is out of range; give 1 to 4096, as in (size=128)")
    if broken not in ("stop", "skip"):
        raise UserError(f"{cut(request.name)}: broken={cut(broken)}: {nearest(broken, ('stop', 'skip'))}")
    assert source.rows is not None
    if source.locate is None:
        return source.rows(request, **options)
    folder = source.locate(request.data_dir)
    request.say(f"reading the files of {source.name} in {folder}", 0, 0)
    return source.rows(folder, **options)


def _scan(request: DataRequest, rows: Rows, size: int | None) -> Scan:
    store = str([request.call.name, str(user_path(request.path).absolute()) if request.path else "", str(rows.root)])
    cache = request.cache or cache_of()
    return scan(rows.pictures, store, size, request.side or SIDE, ~rows.test, cache, request.say)


def _check_photographs(
    source: Source, request: DataRequest, *, size: int | None = None, broken: str = "stop", **options: Any
) -> list[Finding]:
    """Make a finding for each broken photograph, then one for the set; for a published set, only look for some."""
    rows = _read_rows(source, request, size=size, broken=broken, **options)
    if source.locate is not None:
        train, sample = int(np.count_nonzero(~rows.test)), rows.paths[::SAMPLED]
        present = sum((rows.root / path).is_file() for path in sample)
        numbers = f"{train:,} training and {len(rows) - train:,} test images of {len(rows.classes):,} classes"
        detail = f"{numbers}; in a sample of {counted(len(sample), 'picture')}, {present:,} exist"
        return [Finding(str(rows.root), 0, NO_CHECKSUM, detail, rows.notes)]
    scanned, pictures = _scan(request, rows, size), rows.pictures
    findings = [Finding(pictures.name(row), 0, BROKEN, why) for row, why in sorted(scanned.broken.items())]
    if findings and broken == "stop":
        share = f"{len(findings):,} of {counted(len(pictures), 'photograph')} cannot be read"
        detail = f"{share}; replace them, or leave them out: {request.spell(broken='skip')}"
        return [*findings, Finding(request.name, 0, DAMAGED, detail)]
    complete = _describe(user_path(request.path), _assemble(request, rows, scanned, broken))
    notes = review(complete.summary) if complete.summary else []
    return [*findings, replace(complete, notes=(*complete.notes, *notes))]


def _assemble(request: DataRequest, rows: Rows, scanned: Scan, broken: str) -> ImageSet:
    name, cache, size, pictures = request.name, request.cache or cache_of(), scanned.size, rows.pictures
    notes = [*rows.notes, *_note_broken(request, pictures, scanned, broken), *_note_repeated(pictures, rows, scanned)]
    if scanned.scaled:
        which = "default size without a network" if request.side is None else "network's input size"
        to = f"all are scaled and cropped to {size}×{size}, the {which}"
        notes.append(f"{scanned.scaled}: {to}; (size={size}) fixes it for every network")
    elif size is not None:
        notes.append(f"photographs are scaled and cropped to {size}×{size}")
    parts = [np.flatnonzero(scanned.good & part) for part in (~rows.test, rows.test)]
    for part, numbers in zip(("train", "test"), parts, strict=True):
        if not len(numbers):
            raise UserError(f"{name} has no photographs in the {part} part; add rows with split = {part}")
    train, test = (rows.part(numbers) for numbers in parts)
    first, second = (Split(scanned.photographs(numbers), rows.labels[numbers]) for numbers in parts)
    mean, std = moments(scanned.counts[: scanned.channels])
    disk = f"{format_bytes(scanned.on_disk)} on disk (at most {format_bytes(cache.disk)})"
    notes.append(f"images: {disk}, at most {format_bytes(cache.memory)} in memory")
    if beyond := int(scanned.beyond.sum()):
        limit = f"--cache-disk {format_bytes(cache.disk)} (or half of the free space there)"
        notes.append(f"{counted(beyond, 'photograph')} beyond {limit}: decoded again whenever needed")
    images = ImageSet(name, rows.classes, first, second, mean, std, notes=tuple(notes))
    return replace(images, users=train.users, test_users=test.users, places=train.places)


def _note_broken(request: DataRequest, pictures: Pictures, scanned: Scan, broken: str) -> list[str]:
    if not scanned.broken:
        return []
    first = [f"{pictures.name(row)} {why}" for row, why in sorted(scanned.broken.items())[:NAMED]]
    more = f"; and {len(scanned.broken) - NAMED:,} more" if len(scanned.broken) > NAMED else ""
    share = f"{len(scanned.broken):,} of {counted(len(pictures), 'photograph')}"
    if broken == "skip":
        return [f"{share} cannot be read and are skipped: {'; '.join(first)}{more}"]
    instead = f"{request.spell(broken='skip')} leaves them out"
    raise UserError(f"{share} cannot be read: {'; '.join(first)}{more}; replace them, or {instead}")


def _note_repeated(pictures: Pictures, rows: Rows, scanned: Scan) -> list[str]:
    """Note duplicates: in both train and test they raise accuracy; with two labels, one must be wrong."""
    by_pixels = defaultdict[bytes, list[int]](list)
    for row in np.flatnonzero(scanned.good).tolist():
        by_pixels[scanned.entries["sha256"][row].tobytes()].append(row)
    groups = [group for group in by_pixels.values() if len(group) > 1]
    if not groups:
        return []
    count = sum(len(group) - 1 for group in groups)
    both = sum(len(set(rows.test[group].tolist())) > 1 for group in groups)
    more = f"; {both:,} of them are in both train and test" if both else ""
    notes = [f"{counted(count, 'photograph')} {'repeats' if count == 1 else 'repeat'} another one{more}"]
    conflicts = [group for group in groups if len(set(rows.labels[group].tolist())) > 1]
    if conflicts:
        first = []
        for group in conflicts[:NAMED]:
            labels = sorted({rows.classes[label] for label in rows.labels[group].tolist()})
            others = f" and {len(labels) - NAMED:,} more" if len(labels) > NAMED else ""
            first.append(f"{pictures.name(group[0])} ({', '.join(labels[:NAMED])}{others})")
        more = f" and {len(conflicts) - NAMED:,} more" if len(conflicts) > NAMED else ""
        have = "photograph has" if len(conflicts) == 1 else "photographs have"
        notes.append(f"{len(conflicts):,} {have} several labels: {', '.join(first)}{more}")
    return notes
