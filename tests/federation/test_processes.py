"""Programs that are started, watched and ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unskew.core.errors import UserError
from unskew.federation.processes import MARK, WATCHER, Group, Log, claim, end_all, marked

ENVIRONMENT = {"PATH": os.environ["PATH"]}


def python(text):
    return [sys.executable, "-c", text]


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def group(tmp_path):
    with Group(f"test:{tmp_path}", tmp_path / "logs", tmp_path) as made:
        yield made
    assert marked(made.mark) == []


def test_what_a_program_prints_is_heard_and_in_its_log_without_colours(group, tmp_path):
    heard = []
    child = group.start(
        "it",
        python("print('\\x1b[92mhello\\x1b[0m'); print(flush=True); import sys; sys.exit('no')"),
        ENVIRONMENT,
        heard.append,
    )
    until(lambda: child.code is not None)
    assert child.code == 1
    assert child.last_words() == "hello\nno"
    assert heard == ["hello", "no"]
    assert [line.split(" ", 1)[1] for line in (tmp_path / "logs" / "it.log").read_text().splitlines()] == heard


def test_leaving_the_block_ends_programs_and_what_they_started_in_sessions_of_their_own(tmp_path):
    inner = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        "print('on', flush=True)\n"
        "time.sleep(100)\n"
    )
    heard = []
    with Group(f"test:{tmp_path}", tmp_path, tmp_path) as group:
        group.start("it", python(inner), ENVIRONMENT, heard.append)
        until(lambda: heard == ["on"] and len(marked(group.mark)) == 2)
    assert marked(group.mark) == []


def test_the_first_program_is_ended_last(tmp_path):
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('end', time.time(), flush=True), sys.exit()))\n"
        "print('on', flush=True)\n"
        "time.sleep(100)\n"
    )
    first, second = [], []
    with Group(f"test:{tmp_path}", tmp_path, tmp_path) as group:
        group.start("first", python(text), ENVIRONMENT, first.append)
        group.start("second", python(text), ENVIRONMENT, second.append)
        until(lambda: first == second == ["on"])
    until(lambda: len(first) == len(second) == 2)
    assert float(second[1].split()[1]) <= float(first[1].split()[1])


def test_a_program_that_does_not_end_is_ended_by_force(tmp_path):
    text = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(100)"
    )
    heard = []
    group = Group(f"test:{tmp_path}", tmp_path, tmp_path)
    child = group.start("it", python(text), ENVIRONMENT, heard.append)
    until(lambda: heard)
    child.ask_to_end()
    child.end(patience=0.2)
    assert child.code == -signal.SIGKILL


def test_what_a_killed_watcher_left_running_is_found_by_its_mark_and_ended(tmp_path):
    mark, said = f"test:{tmp_path}", []
    left = subprocess.Popen(python("import time; time.sleep(100)"), env={**ENVIRONMENT, MARK: mark})
    other = subprocess.Popen(python("import time; time.sleep(100)"), env={**ENVIRONMENT, MARK: f"{mark}2"})
    try:
        until(lambda: marked(mark) == [left.pid])
        claim(mark, "it", said.append)
        assert left.wait(5) == -signal.SIGTERM
        assert said == ["ended 1 program left over from before"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_second_watcher_over_the_same_folder_is_refused(tmp_path):
    mark = f"test:{tmp_path}"
    text = "import time; time.sleep(100)"
    watcher = subprocess.Popen([sys.executable, "-c", text, WATCHER.decode()], env={**ENVIRONMENT, MARK: mark})
    try:
        until(lambda: marked(mark))
        with pytest.raises(UserError, match=f"the server is running already, as process {watcher.pid}; end it with"):
            claim(mark, "the server", print)
        assert watcher.poll() is None
    finally:
        assert end_all(mark) == 1
        watcher.wait()


def test_a_program_that_is_not_there_is_a_message(group):
    with pytest.raises(UserError, match="/nowhere/it cannot be started: No such file"):
        group.start("it", ["/nowhere/it"], ENVIRONMENT)


def test_a_long_log_begins_anew_and_the_old_one_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("unskew.federation.processes.MOST_BYTES", 10)
    path = tmp_path / "a.log"
    Log(path).write(b"the first of them\n")
    Log(path).write("zwölf ".encode() + b"\xff" * 5000)
    assert "the first" in Path(f"{path}.1").read_text()
    assert path.read_text().startswith("zwölf", 9)
    assert len(path.read_text()) < 2100


def test_a_log_that_cannot_be_written_is_a_message(tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"):
        Log(tmp_path / "logs" / "a.log")
