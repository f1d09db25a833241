"""Evil files: small on disk, but they claim to be huge, never end, or are not what their name says.

Each is given to the command that reads such files, in a process of its own. It must be refused with one message,
quickly, and within a memory that has nothing to do with what the file claims.
"""

import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from faults.trials import Answer, Trial, refusal, shuffled

PROGRAM = "-c"  # in the place of a command: a Python program
MEMORY = 900 * 2**20  # bytes that the process may take at its peak; the imports alone take about 300 MB
SECONDS = 40  # the imports take three on a quiet machine
GIGABYTES = 3

Words = list[str]
Build = Callable[[Path], Words]


def evil_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """Every evil file there is."""
    for name, build in shuffled(list(FILES.items()), seed):
        yield Trial(name, partial(tried, folder / "evil", build))


def tried(folder: Path, build: Build) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    words = build(folder)
    began = time.monotonic()
    peak = 0
    with open(folder / "said", "w+b") as said:
        start = [sys.executable] if words[0] == PROGRAM else [sys.executable, "-m", "unskew"]
        process = subprocess.Popen([*start, *words], stdout=subprocess.DEVNULL, stderr=said, cwd=folder)
        while process.poll() is None:
            peak = max(peak, _peak_memory(process.pid))
            if time.monotonic() - began > SECONDS:
                process.kill()
                process.wait()
                return f"no answer in {SECONDS} s"
            time.sleep(0.02)
        said.seek(0)
        text = said.read().decode(errors="replace")
    if peak > MEMORY:
        return f"it took {peak / 2**20:.0f} MB"
    if process.returncode == 0:
        return "exit code 0"
    return refusal(Answer(process.returncode, "", text))


def _peak_memory(process: int) -> int:
    """Bytes that the process has taken at most so far; what wait4 tells includes the process that started it."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _run(data: object, *more: str) -> Words:
    return ["run", "--data", str(data), "--rounds", "1", "--epochs", "1", "--clients", "2", "--out", "run", *more]


# Arrays


def _npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    return header.getvalue()


def _npz(file: Path, members: dict[str, tuple[bytes, int]]) -> None:
    """An .npz whose members are a header and then that many zeros."""
    zeros = bytes(2**20)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (header, count) in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(header)
                for start in range(0, count, len(zeros)):
                    member.write(zeros[: count - start])


def _large_npz(folder: Path) -> Words:
    count = GIGABYTES * 10**9 // 3072
    images = (_npy_header((count, 32, 32, 3), "|u1"), count * 3072)
    labels = (_npy_header((count,), "|u1"), count)
    _npz(folder / "large.npz", {"x_train": images, "y_train": labels})
    return _run(f"arrays:{folder}/large.npz")


def _lying_npz(folder: Path) -> Words:
    """The header says 45 images; what follows it is three gigabytes."""
    images = (_npy_header((45, 8, 8), "|u1"), GIGABYTES * 10**9)
    _npz(folder / "lying.npz", {"x_train": images, "y_train": (_npy_header((45,), "|u1"), 45)})
    return _run(f"arrays:{folder}/lying.npz")


def _claiming_npz(folder: Path) -> Words:
    """The header says 2⁴⁰ images; nothing follows it."""
    _npz(
        folder / "claim.npz",
        {"x_train": (_npy_header((2**40, 8, 8), "|u1"), 100), "y_train": (_npy_header((9,), "|u1"), 9)},
    )
    return _run(f"arrays:{folder}/claim.npz")


def _negative_npz(folder: Path) -> Words:
    header = _npy_header((99, 8, 8), "|u1").replace(b"(99,", b"(-9,")
    _npz(folder / "negative.npz", {"x_train": (header, 64), "y_train": (_npy_header((1,), "|u1"), 1)})
    return _run(f"arrays:{folder}/negative.npz")


def _object_npz(folder: Path) -> Words:
    np.savez(folder / "objects.npz", x_train=np.array([{"a": 1}, None], object), y_train=np.array([0, 1]))
    return _run(f"arrays:{folder}/objects.npz")


def _many_members(folder: Path) -> Words:
    with zipfile.ZipFile(folder / "many.npz", "w") as archive:
        for number in range(20_000):
            archive.writestr(f"{number}.npy", b"")
    return _run(f"arrays:{folder}/many.npz")


# Files of the published data sets


def _gzip_of_zeros(file: Path, start: bytes, gigabytes: float) -> None:
    zeros = bytes(2**20)
    with gzip.open(file, "wb", compresslevel=1) as packed:
        packed.write(start)
        for _ in range(int(gigabytes * 1000)):
            packed.write(zeros)


def _idx(folder: Path, images: bytes) -> Words:
    """MNIST's four files, of which one is evil."""
    place = folder / "mnist"
    place.mkdir()
    label = struct.pack(">II", 2049, 10) + bytes(range(10))
    image = struct.pack(">IIII", 2051, 10, 28, 28) + bytes(10 * 784)
    for name in ("train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz"):
        (place / name).write_bytes(gzip.compress(image))
    for name in ("train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        (place / name).write_bytes(gzip.compress(label))
    _gzip_of_zeros(place / "train-images-idx3-ubyte.gz", images, 2)
    return _run("mnist", "--data-dir", str(folder))


def _long_gzip(folder: Path) -> Words:
    return _idx(folder, struct.pack(">IIII", 2051, 60000, 28, 28))


def _claiming_idx(folder: Path) -> Words:
    return _idx(folder, struct.pack(">IIII", 2051, 2**31, 2**15, 2**15))


def _wrong_pickle(folder: Path) -> Words:
    place = folder / "cifar-10-batches-py"
    place.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (place / name).write_bytes(b"\x80\x04cos\nsystem\n(S'echo harm > harm'\ntR.")
    return _run("cifar10", "--data-dir", str(folder))


# Pictures


def _png(width: int, height: int, body: bytes = b"") -> bytes:
    """A PNG that claims this size; what it holds is far less."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(body or bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _pictures(folder: Path, content: bytes, count: int) -> Words:
    for part in ("a", "b"):
        place = folder / "pictures" / part
        place.mkdir(parents=True)
        for number in range(count):
            (place / f"{number}.png").write_bytes(content)
    return _run(f"folder:{folder}/pictures")


def _large_pictures(folder: Path) -> Words:
    return _pictures(folder, _png(12_000, 12_000), 200)


def _huge_picture(folder: Path) -> Words:
    return _pictures(folder, _png(2**31 - 1, 2**31 - 1), 1)


def _no_picture(folder: Path) -> Words:
    return _pictures(folder, b"\x89PNG\r\n\x1a\nthis is not a picture", 3)


def _among_pictures(add: Callable[[Path], None]) -> Build:
    """Five good pictures, and what ``add`` puts into the folder of a class."""

    def build(folder: Path) -> Words:
        words = _pictures(folder, _png(8, 8, bytes(8 * 25)), 5)
        add(folder / "pictures" / "a")
        return words

    return build


# Partitions, statistics, recipes, runs


def _partition(first: int, clients: int, folder: Path) -> Words:
    """Everything belongs to client 0 but the first example; ``clients`` is what the file claims."""
    client = np.zeros(1438, np.int32)
    client[0] = first
    about = {"scheme": np.array("x"), "seed": np.array(0), "hash": np.array("0"), "counts": np.zeros((1, 3), np.int32)}
    np.savez(folder / "evil.npz", client=client, clients=np.array(clients), **about)
    return _run("digits", "--partition", f"file:{folder}/evil.npz")


def _csv_of_a_large_row(folder: Path) -> Words:
    (folder / "evil.csv").write_text("user_id,image_id,class\n0,99999999999999999999,0\n" + "1" * 200_000 + ",1,1\n")
    return _run("digits", "--partition", f"file:{folder}/evil.csv")


def _pipe_as(words: Callable[[Path], Words]) -> Build:
    def build(folder: Path) -> Words:
        os.mkfifo(folder / "pipe")
        return words(folder / "pipe")

    return build


def _deep(opening: str, closing: str, words: Callable[[Path], Words]) -> Build:
    def build(folder: Path) -> Words:
        (folder / "deep.toml").write_text("rounds = " + opening * 200_000 + closing * 200_000)
        return words(folder / "deep.toml")

    return build


def _sparse(words: Callable[[Path], Words]) -> Build:
    """A file of 8 GB that takes no room on the disk."""

    def build(folder: Path) -> Words:
        with open(folder / "sparse", "wb") as file:
            file.truncate(8 * 10**9)
        return words(folder / "sparse")

    return build


def _finished(folder: Path, change: Callable[[Path], None], *words: str) -> Words:
    """A folder that looks like a finished run, for the commands that read one."""
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text('data = "digits"\n')
    (run / "metrics.jsonl").write_text("")
    (run / "result.json").write_text("{}")
    change(run)
    return [words[0], str(run), *words[1:]]


def _deep_result(folder: Path) -> Words:
    return _finished(folder, lambda run: run.joinpath("result.json").write_text("[" * 10**6) and None, "compare")


def _long_number(folder: Path) -> Words:
    content = '{"accuracy": ' + "9" * 10**6 + "}"
    return _finished(folder, lambda run: run.joinpath("result.json").write_text(content) and None, "compare")


def _header_of_a_terabyte(folder: Path) -> Words:
    def change(run: Path) -> None:
        (run / "checkpoint").mkdir()
        (run / "checkpoint" / "state.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
        (run / "result.json").unlink()

    return _finished(folder, change, "resume")


def _statistics_of_many_classes(folder: Path) -> Words:
    """Sound statistics of three classes, under a header that claims 2²⁴ of them."""
    import torch
    from safetensors.torch import save_file

    import unskew

    sound = unskew.ClassStatistics.of_features(torch.eye(3).repeat(3, 1), torch.arange(9) % 3, 3)
    about = {"statistics": 1, "classes": 2**24, "form": "full"}
    save_file(sound.tensors(), folder / "statistics.safetensors", metadata={"unskew": json.dumps(about)})
    head = "import torch; classifier = torch.nn.Linear(3, 3)\n"
    program = (
        f"import sys, unskew\n{head}"
        "try:\n    unskew.calibrate(classifier, unskew.ClassStatistics.load('statistics.safetensors'), 'ccvr')\n"
        "except unskew.UserError as error:\n    print(f'unskew: {error}', file=sys.stderr)\n    sys.exit(2)\n"
    )
    return [PROGRAM, program]


# Archives


def _archive(folder: Path, fill: Callable[[tarfile.TarFile], None]) -> Words:
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
        fill(archive)
    return _run("cifar10", "--data-dir", str(folder))


def _archive_of_links(folder: Path) -> Words:
    def fill(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)

    return _archive(folder, fill)


FILES: dict[str, Build] = {
    "an npz of 3 MB that holds 3 GB": _large_npz,
    "an npz whose header lies": _lying_npz,
    "an npz that claims 2^40 images": _claiming_npz,
    "an npz with a negative shape": _negative_npz,
    "an npz of pickled objects": _object_npz,
    "an npz of 20,000 members": _many_members,
    "a gzip that holds 2 GB": _long_gzip,
    "an idx that claims 2^31 images": _claiming_idx,
    "a pickle that calls a program": _wrong_pickle,
    "400 pictures that claim 12,000 x 12,000": _large_pictures,
    "a picture that claims 2^31 x 2^31": _huge_picture,
    "pictures that are not pictures": _no_picture,
    "a named pipe among pictures": _among_pictures(lambda place: os.mkfifo(place / "pipe.png")),
    "a link in a circle among pictures": _among_pictures(lambda place: (place / "me.png").symlink_to("me.png")),
    "a device among pictures": _among_pictures(lambda place: (place / "zero.png").symlink_to("/dev/zero")),
    "a partition that claims 2^31 clients": partial(_partition, 0, 2**31),
    "a partition with client number 2^31 - 1": partial(_partition, 2**31 - 1, 2**31 - 1),
    "a CSV with huge numbers": _csv_of_a_large_row,
    "a named pipe as arrays": _pipe_as(lambda file: _run(f"arrays:{file}")),
    "a named pipe as a partition": _pipe_as(lambda file: _run("digits", "--partition", f"file:{file}")),
    "a named pipe as a recipe": _pipe_as(lambda file: ["run", str(file)]),
    "a recipe of nested lists": _deep("[", "]", lambda file: ["run", str(file)]),
    "a recipe of nested tables": _deep("{a=", "}", lambda file: ["run", str(file)]),
    "a sparse file as arrays": _sparse(lambda file: _run(f"arrays:{file}")),
    "a sparse file as a partition": _sparse(lambda file: _run("digits", "--partition", f"file:{file}")),
    "a sparse file as a recipe": _sparse(lambda file: ["run", str(file)]),
    "a result of nested lists": _deep_result,
    "a result with a number of a million digits": _long_number,
    "a checkpoint whose header claims 2^40 bytes": _header_of_a_terabyte,
    "statistics that claim 2^24 classes": _statistics_of_many_classes,
    "an archive of links": _archive_of_links,
}
