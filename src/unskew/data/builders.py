"""The data sets that are made as rows: from annotation files (iNaturalist, Landmarks) or from folders of pictures.

``inaturalist?balance=0`` and ``landmarks?split=FILE.csv``: knobs follow the question mark, apart by ``&``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unskew.core.errors import UserError, brief
from unskew.core.limits import is_folder, user_path
from unskew.core.text import Call, Value, apply, cut
from unskew.data import folders, inaturalist, landmarks
from unskew.data.rows import Rows

READING = ("size", "broken")  # how pictures are read, for every set


@dataclass(frozen=True)
class Builder:
    """A data set made as rows: where it is looked for, by which files it is known, what makes its rows."""

    what: str
    origin: str
    folders: tuple[str, ...]
    known_by: tuple[str, ...]  # any one of these files or folders
    rows: Callable[..., Rows]
    classes: int | None = None  # as published; None where knobs decide
    shape: tuple[int, int, int] | None = None  # [ch, H, W]
    sizes: tuple[int, int] | None = None  # training and test images


BUILDERS: Mapping[str, Builder] = {
    "inaturalist": Builder(
        "photographs of species with users and places (iNaturalist-2017)",
        f"Van Horn et al. 2018, {inaturalist.WHERE}",
        inaturalist.FOLDERS,
        ("train2017.json", "train_val2017.zip"),
        inaturalist.inaturalist_rows,
    ),
    "landmarks": Builder(
        "photographs of landmarks with users (Google Landmarks v2, cleaned)",
        f"Weyand et al. 2020, {landmarks.WHERE}",
        landmarks.FOLDERS,
        ("train_clean.csv",),
        landmarks.landmarks_rows,
    ),
    "cinic10": Builder(
        "CIFAR-10's classes, with pictures of ImageNet too",
        "Darlow et al. 2018, github.com/BayesWatch/cinic-10",
        ("cinic10", "CINIC-10", "cinic-10", "CINIC10"),
        ("train/airplane",),
        folders.cinic10_rows,
        10,
        (3, 32, 32),
        (90_000, 90_000),
    ),
    "tiny-imagenet": Builder(
        "small pictures of ImageNet",
        "Le & Yang 2015, cs231n.stanford.edu/tiny-imagenet-200.zip",
        ("tiny-imagenet-200", "tiny-imagenet"),
        ("wnids.txt",),
        folders.tiny_imagenet_rows,
        200,
        (3, 64, 64),
        (100_000, 10_000),
    ),
    "omniglot": Builder(
        "handwritten characters, with their drawers as users",
        "Lake et al. 2015, github.com/brendenlake/omniglot",
        ("omniglot", "omniglot-py", "omniglot/python"),
        ("images_background", "images_evaluation"),
        folders.omniglot_rows,
        964,
        (1, 105, 105),
        (15_424, 3_856),
    ),
}


def is_built(name: str) -> bool:
    """Whether a data set is made as rows."""
    return name.partition("?")[0] in BUILDERS


def build_rows(name: str, data_dir: Path | None) -> Rows:
    """The rows of a named set, with the knobs after the question mark; those of ``READING`` are not for rows."""
    base, _, query = name.partition("?")
    builder = BUILDERS[base]
    knobs = {knob: value for knob, value in _knobs(name, query).items() if knob not in READING}
    call = Call(base, (), knobs, 0, name)
    make = partial(builder.rows, locate(base, data_dir))
    rows: Rows = apply(call, make, "data set")
    return rows


def reading_knobs(name: str) -> tuple[int | None, str]:
    """How the pictures of a set are read: ``size``, None where it is not given, and what ``broken`` ones lead to."""
    base, _, query = name.partition("?")
    knobs = _knobs(name, query)
    size, broken = knobs.get("size"), str(knobs.get("broken", "stop"))
    if size is not None and not (isinstance(size, int) and 1 <= size <= 4096):
        raise UserError(f"{cut(name)}: size={cut(str(size))} is not a size; give 1 to 4096, as in {base}?size=128")
    if broken not in ("stop", "skip"):
        raise UserError(f"{cut(name)}: broken={cut(broken)}: give stop or skip")
    return size, broken


def absolute(name: str) -> str:
    """The name with the path of a published split made absolute: a run can be resumed from any folder."""
    base, asked, query = name.partition("?")
    if base not in BUILDERS:
        return name
    knobs = (knob.partition("=") for knob in query.split("&"))
    return (
        base
        + asked
        + "&".join(
            f"{knob}={user_path(value).absolute()}" if knob == "split" and value else f"{knob}{given}{value}"
            for knob, given, value in knobs
        )
    )


def locate(base: str, data_dir: Path | None) -> Path:
    """The folder that has the set's files."""
    builder = BUILDERS[base]
    files = " or ".join(builder.known_by)
    if data_dir is None or not is_folder(data_dir):
        given = "no data folder is known" if data_dir is None else f"the data folder {data_dir} is not there"
        raise UserError(f"{base}: {given}; pass the folder that has {builder.folders[0]}/{files} as --data-dir DIR")
    looked = [*(data_dir / folder for folder in builder.folders), data_dir]
    for folder in looked:
        if any((folder / file).exists() for file in builder.known_by):
            return folder
    places = ", ".join(map(str, looked))
    raise UserError(f"{base} was not found: {files} is in none of {places}; get it from {builder.origin.split()[-1]}")


def _knobs(name: str, query: str) -> dict[str, Value]:
    knobs: dict[str, Value] = {}
    for pair in query.split("&") if query else ():
        knob, given, value = pair.partition("=")
        if not given or not knob or not value or knob in knobs:
            raise UserError(f"{brief(name)}: {brief(pair)} is not a knob; give knob=value, each once, apart by &")
        knobs[knob] = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else value
    return knobs
