"""What an input file may cost: the limits, how they are raised, and what is not a file."""

import os

import pytest

from unskew.core import limits
from unskew.core.errors import UserError


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch):
    monkeypatch.delenv(limits.UNPACK_VARIABLE, raising=False)
    monkeypatch.setattr(limits, "physical_memory", lambda: 64e9)


def test_a_file_may_unpack_to_a_hundred_times_its_size_or_256_mb_and_half_of_the_memory(monkeypatch):
    assert limits.unpack_limit(4096) == 256 * 10**6
    assert limits.unpack_limit(10**7) == 10**9
    assert limits.unpack_limit(10**9) == 32 * 10**9
    assert limits.unpack_limit(10**9, at_once=False) == 10**11
    monkeypatch.setattr(limits, "physical_memory", lambda: 1e8)
    assert limits.unpack_limit(4096) == 5 * 10**7


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("8GB", 8 * 10**9), ("500 mb", 5 * 10**8), ("12", 12), ("3kB", 3000), ("7b", 7), (" 1TB ", 10**12)],
)
def test_the_variable_sets_another_limit(monkeypatch, text, bytes_):
    monkeypatch.setenv(limits.UNPACK_VARIABLE, text)
    assert limits.unpack_limit(10**6) == limits.unpack_limit(1, at_once=False) == bytes_


def test_the_message_says_how_to_raise_the_limit_and_that_is_enough(monkeypatch):
    limits.check_unpacked(256 * 10**6, 4096, "small.npz")
    with pytest.raises(
        UserError, match=r"small\.npz unpacks to 3\.0 GB from 2\.9 MB on disk.*set (\S+)=(\S+)"
    ) as error:
        limits.check_unpacked(3 * 10**9 - 1, 2_900_000, "small.npz")
    name, _, value = str(error.value).rpartition(" ")[2].partition("=")
    monkeypatch.setenv(name, value)
    limits.check_unpacked(3 * 10**9 - 1, 2_900_000, "small.npz")


def test_the_holes_of_a_sparse_file_do_not_count(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(10**12)
    assert limits.size_on_disk([path]) < 10**6
    with pytest.raises(UserError, match=r"unpacks to 1\.0 TB"):
        limits.read_plain(path)


def test_whatever_is_not_a_file_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "to pipe").symlink_to(tmp_path / "pipe")
    for name, kind in (("pipe", "not a regular file"), ("to pipe", "not a regular file"), (".", "a folder")):
        with pytest.raises(UserError, match=f"it is {kind}; give a file"):
            limits.check_plain(tmp_path / name)
    with pytest.raises(UserError, match="not a regular file"):
        limits.read_plain(limits.Path("/dev/zero"))
    with pytest.raises(UserError, match="cannot be read"):
        limits.read_plain(tmp_path / "loop")
    limits.check_plain(tmp_path / "nothing there")


@pytest.mark.parametrize("name", ["a\0b", "n" * 5000, "d/" * 5000, "\ud800"])
def test_a_path_that_cannot_be_one_is_refused_in_a_short_message(tmp_path, name):
    with pytest.raises(UserError, match=r"^the path .* cannot be used: .*; give another$") as error:
        limits.check_plain(tmp_path / name)
    assert len(str(error.value)) < 500
