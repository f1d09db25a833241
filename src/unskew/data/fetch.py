"""Fetches a published image set into the data folder: what is downloaded from where, and what is kept of it."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unskew.core.errors import UserError
from unskew.data import sources
from unskew.data.archives import unpack_members, unpack_tree
from unskew.data.builders import BUILDERS, build_rows, is_built
from unskew.data.builders import locate as locate_rows
from unskew.data.check import check
from unskew.data.download import DiskError, Report, Say, download, on_disk

EVERY = 25_000  # files between two lines on how far unpacking is
WHOLE = {"cinic10": "?valid=train", "omniglot": "?part=all"}  # where the set by itself has only a part of its pictures


@dataclass(frozen=True)
class Download:
    """Where a set is published, and what of it is kept in which folder.

    The files themselves are kept; of archives with ``members`` these alone, of one with ``tree`` all files below
    that folder inside it.
    """

    base: str
    folder: str
    files: dict[str, str]  # name -> MD5
    members: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()  # tried in turn where the base does not have it
    tree: str | None = None


def _idx(base: str, name: str, *mirrors: str) -> Download:
    files = {file: md5 for file, md5 in sources.SOURCES[name].md5.items() if file.endswith(".gz")}
    return Download(base, name, files, mirrors=mirrors)


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_GOOGLE = "https://storage.googleapis.com/"
_EMNIST = Download(
    "https://biometrics.nist.gov/cs_links/EMNIST/",
    "emnist",
    {"gzip.zip": "58c8d27c78d21e728a6bc7b3cc06412e"},
    tuple(
        f"gzip/{file}.gz"
        for source in sources.SOURCES.values()
        if source.name.startswith("emnist")
        for file in (*source.layouts[0].train, *source.layouts[0].test)
    ),
)
DOWNLOADS = {
    "cifar10": Download(
        _TORONTO,
        "cifar-10-batches-bin",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        (*(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)), "cifar-10-batches-bin/test_batch.bin"),
    ),
    "cifar100": Download(
        _TORONTO,
        "cifar-100-binary",
        {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
    ),
    "mnist": _idx("https://ossci-datasets.s3.amazonaws.com/mnist/", "mnist", f"{_GOOGLE}cvdf-datasets/mnist/"),
    "fashion-mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "fashion-mnist",
        f"{_GOOGLE}tensorflow/tf-keras-datasets/",
    ),
    **{name: _EMNIST for name in sources.SOURCES if name.startswith("emnist")},
    "cinic10": Download(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/",
        "CINIC-10",
        {"CINIC-10.tar.gz": "6ee4d0c996905fe93221de577967a372"},
        mirrors=("https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/",),
        tree="",
    ),
    "tiny-imagenet": Download(
        "http://cs231n.stanford.edu/",
        "tiny-imagenet-200",
        {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
        tree="tiny-imagenet-200/",
    ),
    "omniglot": Download(
        "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
        "omniglot",
        {
            "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
            "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
        },
        mirrors=("https://github.com/brendenlake/omniglot/raw/master/python/",),
        tree="",
    ),
}


def fetch(name: str, data_dir: Path, *, mirror: str | None, report: Report, say: Say = lambda words: None) -> Path:
    """Download a set below ``data_dir`` and give its folder; what is there and reads whole is left alone.

    ``mirror`` replaces the published addresses up to the file's name. ``report`` starts again with every file, ``say``
    is told what goes wrong on the way and what is tried next.
    """
    if name == "digits" or name.startswith(tuple(sources.OWN)):
        where = "it is inside scikit-learn" if name == "digits" else "it is read from where it is"
        raise UserError(f"{name}: there is nothing to fetch, {where}; use it as --data {name}")
    if name not in DOWNLOADS and is_built(name):
        origin = BUILDERS[name.partition("?")[0]].origin.split()[-1]
        raise UserError(f"{name}: it is not fetched here, get it from {origin}; then pass --data-dir DIR")
    if name not in DOWNLOADS:
        sources.find(name)
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise UserError(f"mirror {mirror!r} is not a web address; give one that starts with http:// or https://")
    wanted = DOWNLOADS[name]
    with _alone(data_dir, wanted.folder):
        there = _there(name, data_dir)
        return _fetched(wanted, data_dir, mirror, report, say) if there is None else there


def _fetched(wanted: Download, data_dir: Path, mirror: str | None, report: Report, say: Say) -> Path:
    """The folder with what was downloaded."""
    bases = [wanted.base, *wanted.mirrors] if mirror is None else [mirror]
    folder = data_dir / wanted.folder
    place = folder if wanted.tree is None else folder.with_name(f"{folder.name}.part")
    with on_disk(place):
        place.mkdir(parents=True, exist_ok=True)
    for file, md5 in wanted.files.items():
        urls = [f"{base.rstrip('/')}/{file}" for base in bases]
        path = place / file if wanted.tree is None else folder.with_name(f"{folder.name}.{file}")
        download(urls, path, md5, report=report, say=say)
        if wanted.members or wanted.tree is not None:
            _unpack(path, file, wanted, place, say)
    if place != folder:
        with on_disk(folder):
            place.rename(folder)
    return folder


def _unpack(archive: Path, file: str, wanted: Download, place: Path, say: Say) -> None:
    """What is kept of an archive; the archive itself goes, unless the disk was at fault."""
    try:
        if wanted.tree is None:
            unpack_members(archive, file, wanted.members, place)
        else:
            say(f"unpacking {file}")
            unpack_tree(archive, file, place, inside=wanted.tree, report=partial(_unpacked, file, say))
    except DiskError:
        raise
    except UserError:
        archive.unlink(missing_ok=True)
        if wanted.tree is not None:
            shutil.rmtree(place, ignore_errors=True)
        raise
    archive.unlink(missing_ok=True)


def _unpacked(file: str, say: Say, count: int) -> None:
    if count % EVERY == 0:
        say(f"unpacking {file}: {count:,} files")


@contextmanager
def _alone(data_dir: Path, folder: str) -> Iterator[None]:
    """One process at a time fetches into a folder: two would write to the same files."""
    lock = data_dir / f".{folder}.lock"
    with on_disk(lock):
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is fetching {folder} into {data_dir}; wait for its end") from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _there(name: str, data_dir: Path) -> Path | None:
    """Where the set already is, if all of it reads whole; a folder of pictures that is not whole is left alone."""
    if is_built(name):
        return _pictures_there(name, data_dir)
    try:
        files = sources.locate(sources.find(name), data_dir)
    except UserError:
        return None
    return files.folder if all(f.whole for f in check(name, data_dir)) else None


def _pictures_there(name: str, data_dir: Path) -> Path | None:
    folder = data_dir / DOWNLOADS[name].folder
    with suppress(UserError):
        folder = locate_rows(name, data_dir)
    if not folder.exists():
        return None
    try:
        build_rows(f"{name}{WHOLE.get(name, '')}", data_dir)
    except UserError as error:
        raise UserError(
            f"{folder} is there and is not the whole set ({error}); move it away and fetch again"
        ) from error
    return folder
