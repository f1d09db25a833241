"""The registry of data sources, and how the text of ``--data`` becomes an image set; nothing here uses a network."""

import inspect
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
from unskew.data.interface import (
    BROKEN,
    DAMAGED,
    NO_CHECKSUM,
    OWN,
    DataRequest,
    Finding,
    Rows,
    Source,
    Summary,
    split_options,
)
from unskew.data.landmarks import LANDMARKS
from unskew.data.photographs import Pictures, Say, Scan, scan, silent
from unskew.data.published import PUBLISHED
from unskew.data.store import Cache, cache_of
from unskew.data.tables import TABLE

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        *PUBLISHED, INATURALIST, LANDMARKS, CINIC10, TINY_IMAGENET, OMNIGLOT, FOLDER, TABLE, COCO, HUGGING_FACE, ARRAYS
    )
}  # fmt: skip
SIDE = 224  # pixels: the size of photographs without a network
NAMED = 5  # classes, users or photographs in a note
SAMPLED = 50  # ``check`` looks for every 50th picture of a published set


def parse(
    text: str, data_dir: Path | None = None, cache: Cache | None = None, say: Say = silent, side: int | None = None
) -> tuple[Source, DataRequest]:
    """Find the source that a text names, and make the request for it; the options are checked."""
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
    """The right spelling of a path without its kind."""
    path = text.partition("(")[0]
    kinds = {".csv": "table", ".tsv": "table", ".parquet": "table", ".npz": "arrays", ".zip": "folder", ".json": "coco"}
    kind = "folder" if os.path.isdir(user_path(path)) else kinds.get(Path(path).suffix.lower())
    return f"did you mean {kind}:{text}?" if kind else ""


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
    """Read every file of a set and compare it with the published one; a damaged file is a finding."""
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
    """Decode the photographs of a source; ``broken`` is stop, or skip to leave out unreadable files."""
    rows = _read_rows(source, request, size=size, broken=broken, **options)
    return _assemble(request, rows, _scan(request, rows, size), broken)


def _read_rows(
    source: Source, request: DataRequest, *, size: int | None = None, broken: str = "stop", **options: Any
) -> Rows:
    if (size is not None and not 1 <= size <= 4096) or broken not in ("stop", "skip"):
        raise UserError(f"{cut(request.name)}: size must be 1 to 4096, and broken must be stop or skip")
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
        return [*findings, Finding(request.name, 0, DAMAGED, _describe_broken(request, pictures, scanned))]
    complete = _describe(user_path(request.path), _assemble(request, rows, scanned, broken))
    notes = review(complete.summary) if complete.summary else []
    return [*findings, replace(complete, notes=(*complete.notes, *notes))]


def _describe_broken(request: DataRequest, pictures: Pictures, scanned: Scan) -> str:
    share = f"{len(scanned.broken):,} of {counted(len(pictures), 'photograph')} cannot be read"
    return f"{share}; replace them, or leave them out: {request.spell(broken='skip')}"


def _assemble(request: DataRequest, rows: Rows, scanned: Scan, broken: str) -> ImageSet:
    name, cache, size, pictures = request.name, request.cache or cache_of(), scanned.size, rows.pictures
    notes = list(rows.notes)
    if scanned.broken:
        named = name_some([f"{pictures.name(row)} {why}" for row, why in sorted(scanned.broken.items())])
        if broken == "stop":
            raise UserError(f"{_describe_broken(request, pictures, scanned)} ({named})")
        share = f"{len(scanned.broken):,} of {counted(len(pictures), 'photograph')}"
        notes.append(f"{share} cannot be read and are skipped: {named}")
    notes += _note_repeated(pictures, rows, scanned)
    if size is not None:
        why = f"{scanned.scaled}: all" if scanned.scaled else "photographs"
        notes.append(f"{why} are scaled and cropped to {size}×{size}; (size={size}) fixes it for every network")
    parts = [np.flatnonzero(scanned.good & part) for part in (~rows.test, rows.test)]
    if not all(map(len, parts)):
        raise UserError(f"{name} has no photographs in the train or the test part; add rows with that split")
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


def _note_repeated(pictures: Pictures, rows: Rows, scanned: Scan) -> list[str]:
    """Note duplicates: in both train and test they raise accuracy; with two labels, one must be wrong."""
    by_pixels = defaultdict[bytes, list[int]](list)
    for row in np.flatnonzero(scanned.good).tolist():
        by_pixels[scanned.entries["sha256"][row].tobytes()].append(row)
    groups = [group for group in by_pixels.values() if len(group) > 1]
    if not groups:
        return []
    both = sum(len(set(rows.test[group].tolist())) > 1 for group in groups)
    repeats = counted(sum(len(group) - 1 for group in groups), "repeated photograph")
    notes = [f"{repeats}, {both:,} of them in both train and test"]
    conflicts = [group for group in groups if len(set(rows.labels[group].tolist())) > 1]
    if conflicts:
        labels = [sorted({rows.classes[label] for label in rows.labels[group].tolist()}) for group in conflicts]
        named = [f"{pictures.name(group[0])} ({name_some(n)})" for group, n in zip(conflicts, labels, strict=True)]
        notes.append(f"{counted(len(conflicts), 'photograph')} with several labels: {name_some(named)}")
    return notes


def summarize(images: ImageSet) -> Summary:
    """Count the examples of a data set."""
    size = len(images.classes)
    parts = [np.bincount(part.labels, minlength=size).tolist() for part in (images.train, images.test)]
    classes = dict(zip(images.classes, zip(*parts, strict=True), strict=True))
    held = []
    for users in (images.users, images.test_users):
        owners, counts = np.unique(np.zeros(0, np.str_) if users is None else users, return_counts=True)
        held.append(dict(zip(owners.tolist(), counts.tolist(), strict=True)))
    names = sorted({*held[0], *held[1]} - {""})
    return Summary(classes, {name: (held[0].get(name, 0), held[1].get(name, 0)) for name in names})


def review(summary: Summary) -> list[str]:
    """What a user should know before training."""
    classes = {name: counts for name, counts in summary.classes.items() if any(counts)}
    users = summary.users if any(test for _, test in summary.users.values()) else {}
    notes = []
    if classes and all(0 in counts for counts in classes.values()):
        notes.append("train and test have no class in common, so accuracy is meaningless")
    for word, known in (("class", classes), ("user", users)):
        for part, examples in enumerate(("training", "test")):
            if missing := [name for name, counts in known.items() if not counts[part]]:
                share = f"{counted(len(missing), word)} of {len(known):,}"
                notes.append(f"no {examples} examples of {share}: {name_some(missing)}")
    return [*notes, *_review_names(classes, "labels"), *_review_names(summary.users, "users")]


def name_some(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    shown = ", ".join(cut(name, 200) for name in names[:NAMED])
    return f"{shown} and {len(names) - NAMED:,} more" if len(names) > NAMED else shown


def _review_names(names: Iterable[str], what: str) -> list[str]:
    """Find names that may mean the same (``CAT`` and ``cat``, ``3`` and ``3.0``), and labels of mixed kinds."""
    alike = defaultdict[str, list[str]](list)
    numbers, texts = list[str](), list[str]()
    for name in names:
        number = re.fullmatch(r"[+-]?0*(\d+)(\.0*)?", name)
        alike[number[1] if number else re.sub(r"[\s_-]+", " ", name).casefold()].append(name)
        (numbers if number else texts).append(name)
    twins = [" and ".join(group) for group in alike.values() if len(group) > 1]
    notes = [f"{what} that differ only in spelling count as different: {name_some(twins)}"] if twins else []
    if what == "labels" and numbers and texts:
        few = min(numbers, texts, key=len)
        notes.append(f"labels mix numbers and words; {counted(len(few), 'label')} may be wrong: {name_some(few)}")
    return notes
