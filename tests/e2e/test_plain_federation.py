"""The recipe of a federation that Unskew does not train, as a user starts it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from unskew import ClassStatistics

RECIPE = Path(__file__).parents[2] / "recipes" / "plain_federation.py"


def started(*words, cwd):
    return subprocess.run([sys.executable, RECIPE, *words], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The recipe from beginning to end: what it said, and the folder it was started in."""
    folder = tmp_path_factory.mktemp("federation")
    done = started(cwd=folder)
    assert done.returncode == 0, done.stderr
    return done, folder


@pytest.fixture
def copied(whole, tmp_path):
    """A folder of one's own with what the clients wrote."""
    shutil.copytree(whole[1] / "federation", tmp_path / "federation")
    return tmp_path


def test_calibration_makes_the_plain_federation_more_accurate_and_the_server_alone_finds_the_same(whole, copied):
    done, _ = whole
    found = {name: float(share.rstrip("%")) for name, share in map(str.split, done.stdout.splitlines())}
    assert list(found) == ["before", "ccvr", "lda"]
    assert min(found["ccvr"], found["lda"]) > found["before"]
    again = started("server", cwd=copied)
    assert (again.stdout, again.stderr, done.stderr) == (done.stdout, "", "")


def test_every_client_leaves_a_statistics_file(whole):
    _, folder = whole
    files = sorted((folder / "federation").glob("client-*"))
    assert [file.name for file in files] == [f"client-{client}.safetensors" for client in range(10)]
    parts = [ClassStatistics.load(file) for file in files]
    assert all(2 <= len(part.held) <= 4 for part in parts)
    assert int(ClassStatistics.merged(parts).counts.sum()) == 1438


def test_a_spoilt_file_stops_the_server_and_is_named(copied):
    file = copied / "federation" / "client-3.safetensors"
    with safe_open(file, framework="pt") as content:
        about = content.metadata()
        values = {name: content.get_tensor(name).clone() for name in content.keys()}  # noqa: SIM118
    values["second"][0, 0] = float("nan")
    save_file(values, file, metadata=about)
    done = started("server", cwd=copied)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert str(Path("federation") / "client-3.safetensors") in line
    assert "second contains NaN or infinity" in line
