"""Downloads a published image set: the only module that opens a network connection, and only when asked to.

A file comes as ``NAME.part``, is compared with its published checksum, and takes its name only when whole.
"""

import hashlib
import http.client
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from unskew.core.errors import UserError
from unskew.core.limits import check_unpacked, size_on_disk
from unskew.data import sources
from unskew.data.builders import BUILDERS, is_built
from unskew.data.catalogue import Source

Report = Callable[[int, int | None], None]  # bytes so far and in all, of the file on its way; None: not said

TIMEOUT = 60.0  # seconds without a byte
MAX_BYTES = 4 * 10**9  # of a download: the largest published archive has 0.6 GB
_BLOCK = 1 << 18
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Download:
    """Where a set is published, and what of it is kept in which folder."""

    base: str
    folder: str
    files: dict[str, str]  # name -> MD5
    members: tuple[str, ...] = ()  # of the one archive; none: the files themselves are kept


def _idx(base: str, name: str) -> Download:
    return Download(base, name, {file: md5 for file, md5 in sources.SOURCES[name].md5.items() if file.endswith(".gz")})


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
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
    "mnist": _idx("https://ossci-datasets.s3.amazonaws.com/mnist/", "mnist"),
    "fashion-mnist": _idx("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", "fashion-mnist"),
    **{name: _EMNIST for name in sources.SOURCES if name.startswith("emnist")},
}


def fetch(name: str, data_dir: Path, *, mirror: str | None, report: Report) -> Path:
    """Download a set below ``data_dir`` and give its folder; what is there and reads whole is left alone.

    ``mirror`` replaces the published address up to the file's name. ``report`` starts again with every file.
    """
    if name == "digits" or name.startswith(tuple(sources.OWN)):
        where = "it is inside scikit-learn" if name == "digits" else "it is read from where it is"
        raise UserError(f"{name}: there is nothing to fetch, {where}; use it as --data {name}")
    if is_built(name) and name not in DOWNLOADS:
        origin = BUILDERS[name.partition("?")[0]].origin.split()[-1]
        raise UserError(f"{name}: it is too large to be fetched here, get it from {origin}; then pass --data-dir DIR")
    source = sources.find(name)
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise UserError(f"mirror {mirror!r} is not a web address; give one that starts with http:// or https://")
    if (there := _there(source, data_dir)) is not None:
        return there
    download = DOWNLOADS[name]
    base = (download.base if mirror is None else mirror).rstrip("/")
    folder = data_dir / download.folder
    with _disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for file, md5 in download.files.items():
        with _part(folder / file) as part:
            _download(f"{base}/{file}", part, md5, report)
            if download.members:
                _unpack(part, file, download.members, folder)
            else:
                with _disk(folder):
                    part.replace(folder / file)
    return folder


def _there(source: Source, data_dir: Path) -> Path | None:
    """Where the set already is, if all of it reads whole."""
    try:
        files = sources.locate(source, data_dir)
    except UserError:
        return None
    return files.folder if all(f.whole for f in sources.check(source.name, data_dir)) else None


@contextmanager
def _part(path: Path) -> Iterator[Path]:
    """The name under which a file is written; whatever happens, nothing of that name stays behind."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; give another --data-dir") from error


def _download(url: str, part: Path, md5: str, report: Report) -> None:
    """Stream ``url`` into ``part`` and compare its length and checksum with what was announced."""
    digest, done = hashlib.md5(usedforsecurity=False), 0
    with _disk(part), part.open("wb") as out, _open(url) as answer:
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isascii() and length.isdigit() else None
        report(0, total)
        while block := _read(answer, url):
            out.write(block)
            digest.update(block)
            done += len(block)
            report(done, total)
            if done > MAX_BYTES:
                raise UserError(f"{url} goes on after {MAX_BYTES / 1e9:.0f} GB: it is not the published file")
    if total is not None and done != total:
        raise UserError(f"{url} broke off after {done:,} of {total:,} bytes; try again")
    if digest.hexdigest() != md5:
        raise UserError(
            f"{url} is not the published file: its MD5 is {digest.hexdigest()}, {md5} was expected; "
            "nothing was kept; try again, or another --mirror"
        )


def _open(url: str) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "unskew", "Accept-Encoding": "identity"})
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise UserError(
            f"{url}: the server answered {error.code} {error.reason}; give a --mirror that has it"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"{url} cannot be reached: {reason}; check the network, or give a --mirror") from error
    return answer


def _read(stream: IO[bytes] | http.client.HTTPResponse, name: str) -> bytes:
    try:
        return stream.read(_BLOCK)
    except (OSError, http.client.HTTPException, *_BROKEN) as error:
        raise UserError(f"{name} broke off: {error or type(error).__name__}; fetch it again") from error


def _unpack(archive: Path, name: str, members: tuple[str, ...], folder: Path) -> None:
    """Copy the expected members, and nothing else, into ``folder`` under their last names."""
    missing = set(members)
    try:
        for member, stream in _members(archive, name):
            if member in missing:
                missing.remove(member)
                _keep(stream, folder / member.rpartition("/")[2], name)
    except (OSError, *_BROKEN) as error:
        raise UserError(f"{name} is damaged inside ({error}); fetch it again") from error
    if missing:
        raise UserError(f"{name} lacks {', '.join(sorted(missing)[:3])}; it is not the published archive")


def _members(archive: Path, name: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and contents of each plain file in a tar or zip archive."""
    if name.endswith(".zip"):
        with zipfile.ZipFile(archive) as held:
            unpacked = sum(info.file_size for info in held.infolist())
            check_unpacked(unpacked, size_on_disk([archive]), name, at_once=False)
            for info in held.infolist():
                with held.open(info) as stream:
                    yield info.filename, stream
        return
    with tarfile.open(archive, "r:gz") as tar:
        unpacked = 0
        for entry in tar:
            unpacked += entry.size
            check_unpacked(unpacked, size_on_disk([archive]), name, at_once=False)
            content = tar.extractfile(entry) if entry.isfile() else None
            if content is not None:
                yield entry.name, content


def _keep(stream: IO[bytes], path: Path, name: str) -> None:
    with _part(path) as part, _disk(path):
        with part.open("wb") as out:
            while block := _read(stream, name):
                out.write(block)
        part.replace(path)
