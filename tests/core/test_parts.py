"""Parts of files that a kill left behind are cleared away; those that are being written are not."""

import os
import subprocess
import sys
import time

import pytest

from unskew.core.files import FORGOTTEN_SECONDS, clear_parts, is_part, part_beside


@pytest.fixture
def ended():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def part_of(folder, process, machine=None):
    own = part_beside(folder / "result.json").name
    name = own.replace(f".{os.getpid()}.part", f".{process}.part")
    file = folder / (name if machine is None else f"result.json.{machine}.{process}.part")
    file.write_bytes(b"half")
    return file


def test_a_part_of_a_process_that_has_ended_goes_and_one_of_a_live_process_stays(tmp_path, ended):
    dead, own, parent = part_of(tmp_path, ended), part_of(tmp_path, os.getpid()), part_of(tmp_path, os.getppid())
    clear_parts(tmp_path, tmp_path / "nowhere")
    assert not dead.exists()
    assert own.exists()
    assert parent.exists()


def test_a_number_that_another_process_has_got_since_does_not_keep_a_part(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    try:
        file = part_of(tmp_path, process.pid)
        clear_parts(tmp_path)
        assert file.exists()
        os.utime(file, (time.time() - 3600,) * 2)  # before the process began
        clear_parts(tmp_path)
        assert not file.exists()
    finally:
        process.kill()
        process.wait()


def test_another_machine_s_part_stays_for_a_day(tmp_path, ended):
    file = part_of(tmp_path, ended, machine="elsewhere-7")
    clear_parts(tmp_path)
    assert file.exists()
    os.utime(file, (time.time() - FORGOTTEN_SECONDS - 60,) * 2)
    clear_parts(tmp_path)
    assert not file.exists()


def test_other_files_are_left_alone(tmp_path, ended):
    names = ["a.part", f"a.{ended}.part.txt", "cifar-10.tar.gz.part", "part", f"{ended}.part"]
    for name in names:
        (tmp_path / name).touch()
    clear_parts(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert not any(map(is_part, names))
    assert is_part(part_beside(tmp_path / "a").name)
