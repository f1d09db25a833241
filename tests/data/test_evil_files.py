"""Small files that claim to be large, and files that are not files: refused at once, with little memory taken."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from photo_tables import hollow_png, load_arrays, load_folder
from unskew.calibration.statistics import ClassStatistics
from unskew.core import limits
from unskew.core.errors import UserError
from unskew.data import arrays, fetch, partition_files, published
from unskew.data.decode import decode
from unskew.data.partition import partition_from

MB = 10**6


@pytest.fixture(autouse=True)
def a_low_limit(monkeypatch):
    """2 MB: what breaks the limits is then small, and quickly made."""
    monkeypatch.setenv(limits.UNPACK_VARIABLE, "2MB")


@contextmanager
def refused(message, most=MB):
    """A UserError, and less memory at any moment than ``most`` bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message) as error:
            yield error
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


# .npz


def test_an_npz_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x_train=np.zeros((100, 200, 200), np.uint8), y_train=np.zeros(100, np.int64))
    assert path.stat().st_size < 20_000
    with refused(rf"unpacks to 4\.0 MB .* set {limits.UNPACK_VARIABLE}=5MB"):
        load_arrays(str(path))


def header(shape, descr="|u1"):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": descr, "fortran_order": False, "shape": shape})
    return content.getvalue()


def write_npz(path, name="x_train", content=b"", **about):
    with zipfile.ZipFile(path, "w", **about) as archive:
        archive.writestr(f"{name}.npy", content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header((10**10,)) + b"x" * 100, "not have the size that its header declares"),
        (header((3,)) + b"x" * 100, "not have the size that its header declares"),
        (header((2**40,), "<U0"), "unpacks to 1.1 TB"),
        (header((-2, -3)) + b"x" * 6, "not an .npz"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"-" * 9000, "not an .npz"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"[" * 9000, "not an .npz"),
        (b"\x93NUMPY\x09\x00" + struct.pack("<H", 9) + b"{}       ", "not an .npz"),
        (header((1,), "|O") + pickle.dumps([print]), "Python objects|not an .npz"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, content, message):
    with warnings.catch_warnings(), refused(message, most=5 * MB):
        warnings.simplefilter("ignore")  # the parser's, on nonsense
        load_arrays(str(write_npz(tmp_path / "evil.npz", content=content)))


def test_a_directory_that_claims_less_than_is_packed_is_refused(tmp_path):
    whole, small = header((3_000_000,)) + bytes(3_000_000), header((3,)) + b"abc"
    path = write_npz(tmp_path / "evil.npz", content=whole, compression=zipfile.ZIP_DEFLATED)
    raw = path.read_bytes().replace(struct.pack("<I", len(whole)), struct.pack("<I", len(small)))
    path.write_bytes(raw)
    with refused("Bad CRC-32"):
        load_arrays(str(path))


# gzip and plain files


def test_a_gzip_is_refused_by_its_header_and_never_unpacked_beyond_it(tmp_path):
    images = gzip.compress(struct.pack(">IIII", 0x803, 4, 1000, 1000) + bytes(4 * MB))
    labels = gzip.compress(struct.pack(">II", 0x801, 10) + bytes(8 * MB))
    with refused(r"images\.gz unpacks to 4\.0 MB"):
        published.idx(images, tmp_path / "images.gz")
    with refused("more than the declared 10 bytes"):
        published.idx(labels, tmp_path / "labels.gz")


def test_a_sparse_file_is_refused_by_its_size(tmp_path):
    for name in ("data_batch_1.bin", "split.csv", "statistics.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10**12)
    with refused("unpacks to 1.0 TB"):
        published.read_file(tmp_path / "data_batch_1.bin")
    with refused("unpacks to 1.0 TB"):
        partition_files.read_partition(tmp_path / "split.csv", np.zeros(3, np.int64), 1, seed=0)
    with refused("unpacks to 1.0 TB"):
        ClassStatistics.load(tmp_path / "statistics.safetensors")


def test_a_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (
        lambda path: load_arrays(str(path)),
        published.read_file,
        lambda path: partition_files.read_partition(path, np.zeros(3, np.int64), 1, seed=0),
        lambda path: partition_files.read_partition(f'{path}(ids="{path}")', np.zeros(3, np.int64), 1, seed=0),
        partition_files.read_holdings,
        ClassStatistics.load,
        arrays.read_npz,
    ):
        with refused("pipe cannot be read: it is not a regular file"):
            read(tmp_path / "pipe")


# Pictures


@pytest.fixture
def pictures(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(6):
            Image.new("L", (8, 8), number).save(tmp_path / name / f"{number}.png")
    decode(tmp_path / "cat" / "0.png", None)  # Pillow's plug-ins are loaded before memory is measured
    return tmp_path


def test_one_picture_beyond_what_pillow_opens_is_named(pictures):
    (pictures / "cat" / "huge.png").write_bytes(hollow_png(20_000))
    with refused(r"huge\.png is damaged .Image size"):
        load_folder(str(pictures))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path)], ids=["pipe", "loop"])
def test_what_is_not_a_file_among_pictures_is_named_and_does_not_hang(pictures, make):
    make(pictures / "cat" / "9.png")
    with refused(r"9\.png cannot be read"):
        load_folder(str(pictures))


# Partitions, statistics, pickles, archives


def artefact(tmp_path, **changes):
    labels = np.arange(20) % 2
    whole = partition_from(labels, labels, 2, 0, "mine")
    made = partition_files.replace(whole, **changes)
    kept = {**partition_files.to_arrays(whole, labels, 2), "clients": np.array(made.clients)}
    np.savez(tmp_path / "p.npz", **{**kept, "hash": np.array(made.hash)})
    return tmp_path / "p.npz", labels


@pytest.mark.parametrize("clients", [2**31, 2**62, 1_000_001])
def test_a_partition_that_claims_more_clients_than_it_can_have_is_refused(tmp_path, clients):
    path, labels = artefact(tmp_path, clients=clients)
    with refused(rf"has {clients:,} clients for 20 examples; the limit is 1,000,000"):
        partition_files.read_partition(path, labels, 2, seed=0)
    with refused(rf"has {clients:,} clients"):
        partition_files.read_holdings(path)


def test_statistics_that_claim_sixteen_million_classes_are_refused(tmp_path):
    tensors = {"held": torch.tensor([0, 1]), "number": torch.tensor([2, 2]),
               "sums": torch.zeros(2, 3).double(), "squares": torch.zeros(2, 3).double()}  # fmt: skip
    about = '{"statistics": 2, "classes": %d, "form": "diagonal"}'
    save_file(tensors, tmp_path / "s.safetensors", metadata={"unskew": about % 2**24})
    with refused("the number of classes must be from 1 to 1,000,000"):
        ClassStatistics.load(tmp_path / "s.safetensors")
    save_file(tensors, tmp_path / "s.safetensors", metadata={"unskew": about % 10**6})
    assert ClassStatistics.load(tmp_path / "s.safetensors").counts.sum() == 4


def test_a_dense_covariance_of_very_many_features_is_refused():
    wide = ClassStatistics.of_features(torch.ones(4, 10**6), torch.tensor([0, 0, 1, 1]), 2, "diagonal")
    for ask in (wide.within, lambda: wide.covariance(0)):
        with refused("covariances of 1,000,000 features need"):
            ask()


def test_archives_are_refused_by_what_they_say_they_hold(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        entry = tarfile.TarInfo("beside")
        entry.size = 5 * MB
        tar.addfile(entry, io.BytesIO(bytes(5 * MB)))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("beside", bytes(5 * MB))
    for name in ("a.tar.gz", "a.zip"):
        with refused(f"{name} unpacks to 5.0 MB"):
            fetch.unpack(tmp_path / name, name, tmp_path, members=("wanted",))
