"""``coco:FILE.json``: photographs with COCO annotations, one class per photograph.

A photograph's class is the category with the largest total area: by the annotations' ``area``, otherwise their boxes,
otherwise their number. Photographs without an annotation are left out. The field ``location`` of camera traps is the
user.
"""

import os
import zipfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from unskew.core.errors import UserError, brief
from unskew.core.files import user_path
from unskew.core.limits import check_unpacked, read_plain, size_on_disk
from unskew.core.units import counted
from unskew.data.arrays import every_fifth
from unskew.data.folders import Listed, list_rows
from unskew.data.interface import OWN, DataRequest, Rows, Source

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Content = TypeVar("Content")


class CocoImage(msgspec.Struct, gc=False):  # here and below: only the fields that are used
    """A photograph."""

    id: Id
    file_name: str
    location: Any = None


class _Annotation(msgspec.Struct, gc=False):
    image_id: Id
    category_id: Id
    area: float | None = None
    bbox: tuple[float, float, float, float] | None = None


class _Category(msgspec.Struct, gc=False):
    id: Id
    name: str


class AnnotationFile(msgspec.Struct):
    """A COCO file."""

    images: list[CocoImage]
    annotations: list[_Annotation]
    categories: list[_Category]


def read_annotations(
    path: Path, kind: type[Content], archive: Path | None = None, again: str = "write it again"
) -> Content:
    """Read a JSON file of that kind, or the file of the same name in an archive."""
    try:
        if archive is None or os.path.lexists(path) or not archive.is_file():
            content = read_plain(path, again)
        else:
            with zipfile.ZipFile(archive) as zipped:
                member = next(info for info in zipped.infolist() if Path(info.filename).name == path.name)
                check_unpacked(member.file_size, size_on_disk([archive]), f"{archive}/{path.name}")
                content = zipped.read(member)
        return msgspec.json.decode(content, type=kind)
    except (OSError, zipfile.BadZipFile, RuntimeError, EOFError, StopIteration, ValueError) as error:
        raise UserError(f"{path} is damaged, or another kind of file: {error}; {again}") from error


def classify(read: AnnotationFile, path: Path) -> dict[int, int]:
    """The category of each annotated photograph; a file that contradicts itself is rejected."""
    known = {category.id for category in read.categories}
    areas: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for note in read.annotations:
        box = note.bbox[2] * note.bbox[3] if note.bbox else 0.0
        areas[note.image_id][note.category_id] += note.area or box or 1e-9
    twice = len({image.id for image in read.images}) != len(read.images)
    if twice or not all(map(known.issuperset, areas.values())):
        raise UserError(f"{path} lists an image twice, or an annotation has an unknown category; write it again")
    return {image: max(shares, key=lambda category: (shares[category], -category)) for image, shares in areas.items()}


def read_coco(request: DataRequest, *, images: str = "", test: str = "") -> Rows:
    """List annotated photographs.

    ``images`` is their folder, by default one next to the annotations. ``test`` is the file of the test photographs, by
    default the one with ``val`` instead of ``train``; without one, every fifth photograph is test.
    """
    path = user_path(request.path)
    request.say(f"reading {path}", 0, 0)
    sibling = path.with_name(path.name.replace("train", "val"))
    held = user_path(test) if test else sibling if sibling != path and sibling.is_file() else None
    listed, users, notes, names = list[Listed](), list[str](), list[str](), dict[int, str]()
    for file in [path, *([held] if held else [])]:
        read = read_annotations(file, AnnotationFile)
        category_of = classify(read, file)
        folder = _find_folder(file, images, read.images)
        labeled = [image for image in read.images if image.id in category_of]
        names |= {category.id: category.name for category in read.categories}
        listed += [(str(folder / image.file_name), category_of[image.id], file == held) for image in labeled]
        users += ["" if image.location is None else str(image.location) for image in labeled]
        if without := len(read.images) - len(labeled):
            notes.append(f"{file.name}: left out {counted(without, 'photograph')} without an annotation")
        if len({(note.image_id, note.category_id) for note in read.annotations}) > len(category_of):
            notes.append(f"{file.name}: photographs of several categories are in the one with the largest area")
    if not listed:
        raise UserError(f"{path} has no annotated photographs; give a file that has some")
    fifth = "every fifth photograph is used for testing; see option test"
    notes.append(f"{held.name} is used for testing" if held else fifth)
    ids = sorted({category for _, category, _ in listed})
    texts = [names[category] for category in ids]
    classes = [f"{n} ({i})" if texts.count(n) > 1 else n for n, i in zip(texts, ids, strict=True)]
    number = {category: at for at, category in enumerate(ids)}
    rows = [(file, number[category], for_test) for file, category, for_test in listed]
    found = list_rows(path.absolute().parent, rows, classes, users, notes)
    return found if held else replace(found, test=every_fifth(len(found)))


COCO = Source(
    "coco",
    "photographs with COCO annotations, one class each",
    OWN,
    rows=read_coco,
    path="FILE.json",
    paths=("images", "test"),
)


def _find_folder(file: Path, option: str, images: list[CocoImage]) -> Path:
    part = file.stem.rpartition("_")[2]  # instances_train2017.json: train2017
    near = file.absolute().parent
    searched = [near, near / "images", near / part, near.parent, near.parent / part, near.parent / "images" / part]
    searched = [user_path(option).absolute()] if option else searched
    first = images[0].file_name if images else ""
    if found := next((folder for folder in searched if not images or (folder / first).is_file()), None):
        return found
    looked = f"looked in {', '.join(map(str, searched))}"
    raise UserError(f'{brief(first)} of {file} was not found; {looked}; give its folder as (images="DIR")')
