"""``coco:FILE.json``: photographs with COCO's annotations, one class for each photograph.

A photograph's class is the category with the largest area in it: by its annotations' ``area``, otherwise their boxes,
otherwise their number. Photographs without an annotation are left out. Camera traps' field ``location`` is the user.
"""

import os
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_unpacked, read_plain, size_on_disk, user_path
from unskew.core.units import counted
from unskew.data.arrays import every_fifth
from unskew.data.interface import OWN, Request, Rows, Source

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Content = TypeVar("Content")


class Image(msgspec.Struct, gc=False):  # here and below: the fields that are used, of those in the file
    """A photograph."""

    id: Id
    file_name: str
    location: Any = None


class Annotation(msgspec.Struct, gc=False):
    """What a part of a photograph shows."""

    image_id: Id
    category_id: Id
    area: float | None = None
    bbox: tuple[float, float, float, float] | None = None


class Category(msgspec.Struct, gc=False):
    """A class."""

    id: Id
    name: str


class AnnotationFile(msgspec.Struct):
    """The whole file."""

    images: list[Image]
    annotations: list[Annotation]
    categories: list[Category]


def read_json(path: Path, kind: type[Content], archive: Path | None = None, again: str = "write it again") -> Content:
    """Read a JSON file of that kind, or the file of its name inside an archive."""
    try:
        if not os.path.lexists(path) and not (archive and archive.is_file()):
            packed = f", nor does {archive.name}" if archive else ""
            raise UserError(f"{path} does not exist{packed}; {again}")
        if archive is None or path.is_file() or not archive.is_file():
            content = read_plain(path, again)
        else:
            with zipfile.ZipFile(archive) as zipped:
                inside = next((info for info in zipped.infolist() if Path(info.filename).name == path.name), None)
                if inside is None:
                    raise UserError(f"{archive} has no {path.name}; use the published archive")
                check_unpacked(inside.file_size, size_on_disk([archive]), f"{archive}/{path.name}")
                content = zipped.read(inside)
        return msgspec.json.decode(content, type=kind)
    except (OSError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise UserError(f"{path} cannot be read: {error}; {again}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged, or another kind of file: {error}; {again}") from error


def classify(read: AnnotationFile, path: Path) -> dict[int, int]:
    """The category of each photograph that has one; refused where the file contradicts itself."""
    known = {category.id for category in read.categories}
    areas: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for found in read.annotations:
        if found.category_id not in known:
            raise UserError(f"{path}: image {found.image_id} has the unknown category {found.category_id}; correct it")
        box = found.bbox[2] * found.bbox[3] if found.bbox else 0.0
        areas[found.image_id][found.category_id] += found.area or box or 1e-9
    for image in read.images:
        if image.file_name.startswith("/") or ".." in Path(image.file_name).parts:
            raise UserError(f"{path}: image {image.id} has the file {brief(image.file_name)}, outside its folder")
    if len({image.id for image in read.images}) != len(read.images):
        raise UserError(f"{path} lists an image id twice; give each image once")
    return {image: max(shares, key=lambda category: (shares[category], -category)) for image, shares in areas.items()}


def read_coco(request: Request, *, images: str = "", test: str = "") -> Rows:
    """List annotated photographs.

    ``images`` is their folder, by default one next to the annotations, as COCO has it. ``test`` is the file of the test
    photographs, by default the one with ``val`` instead of ``train``; without one every fifth photograph is test.
    """
    path = user_path(request.path)
    request.say(f"reading {path}", 0, 0)
    sibling = path.with_name(path.name.replace("train", "val"))
    held = user_path(test) if test else sibling if sibling != path and sibling.is_file() else None
    files, labels, part, users, notes = list[str](), list[int](), list[bool](), list[str](), list[str]()
    names: dict[int, str] = {}
    for file in [path, *([held] if held else [])]:
        read = read_json(file, AnnotationFile)
        category_of = classify(read, file)
        folder = _find_folder(file, images, read.images)
        kept = [image for image in read.images if image.id in category_of]
        names |= {category.id: category.name for category in read.categories}
        files += [str(folder / image.file_name) for image in kept]
        labels += [category_of[image.id] for image in kept]
        users += ["" if image.location is None else str(image.location) for image in kept]
        part += [file == held] * len(kept)
        pairs = {(found.image_id, found.category_id) for found in read.annotations}
        if without := len(read.images) - len(kept):
            notes.append(f"{file.name}: {counted(without, 'photograph')} without an annotation left out")
        if len(pairs) > len(category_of):
            several = "more than one category; a photograph's class is the one with the largest area"
            notes.append(f"{file.name}: some photographs have {several}")
    if not files:
        raise UserError(f"{path} has no photographs with an annotation; give one that has")
    kind = every_fifth(len(files)) if held is None else np.array(part)
    notes.append(
        f"{held.name} is used for testing" if held else "every fifth photograph is used for testing; option test"
    )
    ids, numbers = np.unique(labels, return_inverse=True)
    texts = [names[category] for category in ids.tolist()]
    classes = tuple(f"{n} ({i})" if texts.count(n) > 1 else n for n, i in zip(texts, ids.tolist(), strict=True))
    owners = np.array(users, np.str_) if any(users) else None
    return Rows(path.absolute().parent, files, numbers.astype(np.int64), classes, kind, owners, notes=tuple(notes))


COCO = Source("coco", "photographs with COCO's annotations, one class each", OWN, rows=read_coco, path="FILE.json")


def _find_folder(file: Path, given: str, images: list[Image]) -> Path:
    part = file.stem.rpartition("_")[2]  # instances_train2017.json: train2017
    here = file.absolute().parent
    looked = [here, here / "images", here / part, here.parent, here.parent / part, here.parent / "images" / part]
    looked = [user_path(given).absolute()] if given else looked
    if not images:
        return here
    for folder in looked:
        if (folder / images[0].file_name).is_file():
            return folder
    first = brief(images[0].file_name)
    raise UserError(f"{first} of {file} is in none of {', '.join(map(str, looked))}; give its folder as (images=DIR)")
