"""``unskew data check``: reads a data set whole, and says what its files are or what is wrong with them."""

import re
from pathlib import Path

import numpy as np

from unskew.core.errors import UserError
from unskew.core.types import ImageSet
from unskew.core.units import counted
from unskew.data import tables
from unskew.data.arrays import is_function
from unskew.data.builders import build_rows, is_built, locate
from unskew.data.photographs import Say
from unskew.data.published import BROKEN, DAMAGED, NO_CHECKSUM, Finding, examine
from unskew.data.sources import OWN, find, load
from unskew.data.sources import locate as locate_files
from unskew.data.store import Cache

EVERY = 50  # of the pictures that annotations name, each such one is looked for


def check(name: str, data_dir: Path | None, cache: Cache | None = None, say: Say = tables.silent) -> list[Finding]:
    """Read every file of a set and compare it with what was published.

    What cannot be found or is no data set is a UserError; a file of the set that is damaged is a finding.
    """
    if name.startswith("table:"):
        return _check_table(name, cache, say)
    if is_built(name):
        return [_check_annotations(name, data_dir)]
    if name.startswith(tuple(OWN)):
        where = Path(re.sub(r"\?[a-z]+=.*", "", name.partition(":")[2]))
        return [_found(where, load(name, data_dir, cache, say))]
    if is_function(name) or not (source := find(name)).layouts:
        return [_found(Path(name), load(name, data_dir, cache, say))]
    files = locate_files(source, data_dir)
    findings = [examine(source, files.layout, path) for path in (*files.train, *files.test)]
    if all(finding.whole for finding in findings):
        try:
            load(name, data_dir, cache, say)
        except UserError as error:  # each file is whole, but they do not belong together
            findings.append(Finding(str(files.folder), 0, DAMAGED, str(error)))
    return findings


def _found(where: Path, images: ImageSet, notes: tuple[str, ...] = ()) -> Finding:
    detail = f"{len(images.train):,} training and {len(images.test):,} test images"
    size = where.stat().st_size if where.is_file() else images.train.images.nbytes + images.test.images.nbytes
    return Finding(str(where), size, NO_CHECKSUM, detail, notes)


def _check_table(name: str, cache: Cache | None, say: Say) -> list[Finding]:
    """A finding for each broken photograph, then one for the table, unless the broken ones would stop a run."""
    broken, total, images = tables.check_table(name.removeprefix("table:"), cache, say)
    findings = [Finding(path, 0, BROKEN, why) for path, why in broken]
    if images is None:
        share = f"{len(broken):,} of {counted(total, 'photograph')} cannot be read"
        instead = f"{name}{'&' if '?' in name else '?'}broken=skip"
        return [*findings, Finding(name, 0, DAMAGED, f"{share}; replace them, or leave them out: {instead}")]
    where = Path(re.sub(r"\?[a-z]+=.*", "", name.removeprefix("table:")))
    return [*findings, _found(where, images, images.notes)]


def _check_annotations(name: str, data_dir: Path | None) -> Finding:
    """How many rows a set has, and how many of its pictures are there, of those that are looked for."""
    rows = build_rows(name, data_dir)
    train, looked = int(np.count_nonzero(~rows.test)), rows.paths[::EVERY]
    there = sum((rows.root / str(path)).is_file() for path in looked)
    numbers = f"{train:,} training and {len(rows) - train:,} test images of {len(rows.classes):,} classes"
    folder = str(locate(name.partition("?")[0], data_dir))
    detail = f"{numbers}; of {counted(len(looked), 'picture')} looked for, {there:,} are there"
    return Finding(folder, 0, NO_CHECKSUM, detail, rows.notes)
