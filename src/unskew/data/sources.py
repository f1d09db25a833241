"""The registry of data sources, and how the text of ``--data`` becomes an image set; nothing here uses a network."""

import inspect
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from unskew.core.errors import UserError, brief, nearest
from unskew.core.files import user_path
from unskew.core.language import Call, Value, apply, cut, parse_call
from unskew.core.plugins import add_working_directory
from unskew.core.types import Examples, ImageSet, Split
from unskew.core.units import counted, format_bytes
from unskew.data.arrays import ARRAYS, FUNCTION, moments
from unskew.data.coco import COCO
from unskew.data.federated_vision import INATURALIST, LANDMARKS
from unskew.data.folders import CINIC10, FOLDER, OMNIGLOT, TINY_IMAGENET
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
from unskew.data.photographs import Say, Scan, scan, silent
from unskew.data.published import PUBLISHED
from unskew.data.store import Cache, cache_of
from unskew.data.tables import HUGGING_FACE, TABLE

_PHOTOGRAPHS = (INATURALIST, LANDMARKS, CINIC10, TINY_IMAGENET, OMNIGLOT)
_YOURS = (FOLDER, TABLE, COCO, HUGGING_FACE, ARRAYS)
SOURCES: dict[str, Source] = {source.name: source for source in (*PUBLISHED, *_PHOTOGRAPHS, *_YOURS)}
SIDE = 224  # pixels: the size of photographs without a network
NAMED = 5  # classes, users or photographs in a note
SAMPLED = 50  # ``check`` looks for every 50th picture of a published set


def parse(
    text: str, data_dir: Path | None = None, cache: Cache | None = None, say: Say = silent, side: int | None = None
) -> DataRequest:
    """Find the source that a text names, and check its options; the parameters are described in ``DataRequest``."""
    kind, colon, rest = text.partition(":")
    base, path = text.partition("(")[0].strip(), ""
    if is_function(text) and not _misspelled(kind):
        return DataRequest(FUNCTION, text, Call(text, (), {}, 0, text), "", data_dir, cache, say, side)
    if colon and kind in SOURCES and SOURCES[kind].path:
        base = kind
        path, given = split_options(rest)
        call = parse_call(f"{kind}({given})", "data set")
    elif base not in SOURCES or SOURCES[base].path:
        known = [source.spelling for source in (*SOURCES.values(), FUNCTION)]
        raise UserError(f"no data set is called {brief(text)}; {_hint(text) or nearest(text.lower(), known)}")
    else:
        call = parse_call(text, "data set")
    source = SOURCES[base]
    options = apply(call, _options(source), "data set")
    size, broken = options.pop("size", None), options.pop("broken", "stop")
    if (size is not None and not 1 <= size <= 4096) or broken not in ("stop", "skip"):
        raise UserError(f"{cut(text)}: size must be 1 to 4096, and broken must be stop or skip")
    return DataRequest(source, text, call, path, data_dir, cache, say, side, options, size, broken)


def _misspelled(kind: str) -> bool:
    """Whether this is no module, but almost the name of a source."""
    add_working_directory()
    close = get_close_matches(kind, [name for name, source in SOURCES.items() if source.path], cutoff=0.8)
    return bool(close) and "." not in kind and find_spec(kind) is None


def _hint(text: str) -> str:
    """The right spelling of a path without its kind."""
    path = text.partition("(")[0]
    kinds = {".csv": "table", ".tsv": "table", ".parquet": "table", ".npz": "arrays", ".zip": "folder", ".json": "coco"}
    kind = "folder" if os.path.isdir(user_path(path)) else kinds.get(Path(path).suffix.lower())
    return f"did you mean {kind}:{text}?" if kind else ""


def _options(source: Source) -> Callable[..., dict[str, Any]]:
    """A function that returns its arguments, with the signature of the source's options."""

    def of_photographs(*, size: int | None = None, broken: str = "stop") -> None: ...

    def collect(**given: Value) -> dict[str, Value]:
        return given

    functions = [function for function in (source.rows and of_photographs, source.rows or source.load) if function]
    parameters = [parameter for function in functions for parameter in inspect.signature(function).parameters.values()]
    collect.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    )
    return collect


def is_function(text: str) -> bool:
    """Whether a data set's text is ``package.module:function``, perhaps with knobs."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*(\(.*\))?", text.strip(), re.DOTALL)
    return match is not None and match[1] not in SOURCES


def load(
    text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent, side: int | None = None
) -> ImageSet:
    """Load the image set of that text; the parameters are described in ``DataRequest``."""
    request = parse(text, data_dir, cache, say, side)
    if request.source.load is not None:
        return _add_review(request, request.source.load(request, **request.options))
    rows = _read_rows(request)
    return _assemble(request, rows, _scan(request, rows))


def _add_review(request: DataRequest, images: ImageSet) -> ImageSet:
    """Add notes on the user's own data."""
    notes = review(summarize(images)) if request.source.origin == OWN else ()
    return replace(images, notes=(*images.notes, *notes))


def load_examples(text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent) -> Examples:
    """Load the training examples without their images; photographs are read only if broken ones are to be skipped."""
    request = parse(text, data_dir, cache, say)
    if request.source.rows is None or request.broken == "skip":
        return load(text, data_dir, cache, say).examples
    rows = _read_rows(request)
    train = rows.part(np.flatnonzero(~rows.test))
    return Examples(train.labels, train.classes, train.users, train.places)


def load_rows(text: str, data_dir: Path | None) -> Rows:
    """List the photographs of a published set, as ``unskew data table`` writes them."""
    request = parse(text, data_dir)
    if request.source.locate is None or request.source.rows is None:
        tables = ", ".join(source.name for source in SOURCES.values() if source.rows and source.locate)
        raise UserError(f"{text} is not a published set of image files; choose from {tables}")
    return _read_rows(request)


def check(text: str, data_dir: Path | None, cache: Cache | None = None, say: Say = silent) -> list[Finding]:
    """Read every file of a set and compare it with the published one; a damaged file is a finding.

    A broken photograph is a finding too; of a published set of photographs, only some files are looked for.
    """
    request = parse(text, data_dir, cache, say)
    if request.source.check is not None:
        return request.source.check(request, **request.options)
    where = user_path(request.path) if request.path else Path(text)
    if request.source.rows is None:
        return [_describe(where, load(text, data_dir, cache, say))]
    rows = _read_rows(request)
    if request.source.locate is not None:
        train, sample = int(np.count_nonzero(~rows.test)), rows.paths[::SAMPLED]
        present = sum((rows.root / path).is_file() for path in sample)
        numbers = f"{train:,} training and {len(rows) - train:,} test images of {len(rows.classes):,} classes"
        detail = f"{numbers}; in a sample of {counted(len(sample), 'picture')}, {present:,} exist"
        return [Finding(str(rows.root), 0, NO_CHECKSUM, detail, rows.notes)]
    scanned = _scan(request, rows)
    findings = [Finding(scanned.source.name(row), 0, BROKEN, why) for row, why in sorted(scanned.broken.items())]
    if findings and request.broken == "stop":
        return [*findings, Finding(text, 0, DAMAGED, _describe_broken(request, scanned))]
    return [*findings, _describe(where, _assemble(request, rows, scanned))]


def _describe(where: Path, images: ImageSet) -> Finding:
    detail = f"{len(images.train):,} training and {len(images.test):,} test images"
    size = where.stat().st_size if where.is_file() else images.train.images.nbytes + images.test.images.nbytes
    return Finding(str(where), size, NO_CHECKSUM, detail, images.notes, summarize(images))


def locate(text: str, data_dir: Path | None) -> Path | None:
    """Find the folder of a published set; None if the set has no folder, a UserError if it is missing."""
    source = parse(text).source
    return None if source.locate is None else source.locate(source, data_dir)


def survey(data_dir: Path | None) -> list[tuple[Source, str]]:
    """List all sources with their locations, which are empty for a user's own files."""
    locations = {name: "inside scikit-learn" if name == "digits" else "" for name in SOURCES}
    for name, source in SOURCES.items():
        if source.locate is not None:
            locations[name] = "not found"
            with suppress(UserError):
                locations[name] = str(source.locate(source, data_dir))
    return list(zip(SOURCES.values(), locations.values(), strict=True))


def make_absolute(text: str) -> str:
    """Make the paths in a data set's text absolute, so that a run can be resumed from any folder."""
    if re.split(r"[:(]", text)[0].strip() not in SOURCES:
        return text
    request = parse(text)
    given = {name: value for name in request.source.paths if (value := request.options.get(name))}
    changed = {name: str(user_path(value).absolute()) for name, value in given.items()}
    named = request.source.remote and not user_path(request.path).exists()
    path = "" if named or not request.path else str(user_path(request.path).absolute())
    return replace(request, path=path or request.path).spell(**changed) if path or changed else text


def find_moved(text: str, data_dir: Path | None) -> str:
    """The text of a user's own data, adapted if they have moved to ``data_dir``."""
    request = parse(text)
    if not request.path or request.source.remote or os.path.lexists(user_path(request.path)):
        return text
    if data_dir is not None and os.path.lexists(moved := data_dir / Path(request.path).name):
        return replace(request, path=str(moved)).spell()
    raise UserError(f"{request.path} does not exist; if it has moved, give its new folder as --data-dir DIR")


def _read_rows(request: DataRequest) -> Rows:
    source = request.source
    assert source.rows is not None
    if source.locate is None:
        return source.rows(request, **request.options)
    folder = source.locate(source, request.data_dir)
    request.say(f"reading the files of {source.name} in {folder}", 0, 0)
    return source.rows(folder, **request.options)


def _scan(request: DataRequest, rows: Rows) -> Scan:
    path = str(user_path(request.path).absolute()) if request.path else ""
    store, side = str([request.source.name, path, str(rows.root)]), request.side or SIDE
    return scan(rows.pictures, store, request.size, side, ~rows.test, request.cache or cache_of(), request.say)


def _describe_broken(request: DataRequest, scanned: Scan) -> str:
    share = f"{len(scanned.broken):,} of {counted(len(scanned.good), 'photograph')} cannot be read"
    return f"{share}; replace them, or leave them out: {request.spell(broken='skip')}"


def _assemble(request: DataRequest, rows: Rows, scanned: Scan) -> ImageSet:
    size, cache, notes = scanned.size, scanned.cache, list(rows.notes)
    if scanned.broken:
        named = name_some([f"{scanned.source.name(row)} {why}" for row, why in sorted(scanned.broken.items())])
        if request.broken == "stop":
            raise UserError(f"{_describe_broken(request, scanned)} ({named})")
        share = f"{len(scanned.broken):,} of {counted(len(rows), 'photograph')}"
        notes.append(f"{share} cannot be read and are skipped: {named}")
    notes += _note_repeated(rows, scanned)
    if size is not None:
        why = f"{scanned.scaled}: all" if scanned.scaled else "photographs"
        notes.append(f"{why} are scaled and cropped to {size}×{size}; (size={size}) fixes it for every network")
    parts = [np.flatnonzero(scanned.good & part) for part in (~rows.test, rows.test)]
    if not all(map(len, parts)):
        raise UserError(f"{request.name} has no photographs in the train or the test part; add rows with that split")
    train, test = (rows.part(numbers) for numbers in parts)
    first, second = (Split(scanned.photographs(numbers), rows.labels[numbers]) for numbers in parts)
    mean, std = moments(scanned.counts[: scanned.channels])
    disk = f"{format_bytes(scanned.on_disk)} on disk (at most {format_bytes(cache.disk)})"
    notes.append(f"images: {disk}, at most {format_bytes(cache.memory)} in memory")
    if beyond := int(scanned.beyond.sum()):
        limit = f"--cache-disk {format_bytes(cache.disk)} (or half of the free space there)"
        notes.append(f"{counted(beyond, 'photograph')} beyond {limit}: decoded again whenever needed")
    images = ImageSet(request.name, rows.classes, first, second, mean, std, notes=tuple(notes))
    return _add_review(request, replace(images, users=train.users, test_users=test.users, places=train.places))


def _note_repeated(rows: Rows, scanned: Scan) -> list[str]:
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
        named = [
            f"{scanned.source.name(group[0])} ({name_some(n)})" for group, n in zip(conflicts, labels, strict=True)
        ]
        notes.append(f"{counted(len(conflicts), 'photograph')} with several labels: {name_some(named)}")
    return notes


def summarize(images: ImageSet) -> Summary:
    """Count the examples of a data set."""
    size = len(images.classes)
    parts = [np.bincount(part.labels, minlength=size).tolist() for part in (images.train, images.test)]
    classes = dict(zip(images.classes, zip(*parts, strict=True), strict=True))
    train, test = (Counter(map(str, () if u is None else u)) for u in (images.users, images.test_users))
    return Summary(classes, {name: (train[name], test[name]) for name in sorted({*train, *test} - {""})})


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
