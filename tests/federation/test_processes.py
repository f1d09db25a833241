"""Programs that are started, watched and ended."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from faults.live import until
from unskew.core.errors import UserError
from unskew.federation.processes import MARK, WATCHER, ProcessGroup, claim, end_all, marked

ENVIRONMENT = {"PATH": os.environ["PATH"]}


def python(text):
    return [sys.executable, "-c", text]


def test_leaving_the_block_ends_programs_and_what_they_started_in_sessions_of_their_own(tmp_path):
    inner = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        "print('on', flush=True)\n"
        "time.sleep(100)\n"
    )
    heard = []
    with ProcessGroup(f"test:{tmp_path}", tmp_path, tmp_path) as group:
        group.start("it", python(inner), ENVIRONMENT, heard.append)
        until(lambda: heard == ["on"] and len(marked(group.mark)) == 2)
    assert marked(group.mark) == []


def test_the_first_program_is_ended_last(tmp_path):
    text = (
        "import os, signal, sys, time\n"  # print() fails while another print() is running
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'end %f\\n' % time.time()), sys.exit()))\n"
        "print('on', flush=True)\n"
        "time.sleep(100)\n"
    )
    first, second = [], []
    with ProcessGroup(f"test:{tmp_path}", tmp_path, tmp_path) as group:
        group.start("first", python(text), ENVIRONMENT, first.append)
        group.start("second", python(text), ENVIRONMENT, second.append)
        until(lambda: first == second == ["on"])
    until(lambda: len(first) == len(second) == 2)
    assert float(second[1].split()[1]) <= float(first[1].split()[1])


def test_a_signal_while_programs_are_being_ended_leaves_none_running(tmp_path):
    """An error has ended the block, and then somebody stops the command: the first program must not outlive it."""
    plain = "import time; print('on', flush=True); time.sleep(100)"
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {plain}"
    heard, before = [], signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it was disturbed"))
    group = ProcessGroup(f"test:{tmp_path}", tmp_path, tmp_path, patience=2.0)
    try:
        group.start("first", python(plain), ENVIRONMENT, heard.append)
        group.start("second", python(stubborn), ENVIRONMENT, heard.append)
        until(lambda: heard == ["on", "on"])
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        group.__exit__(None, None, None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert marked(group.mark) == []


def test_a_command_whose_reader_is_gone_goes_on_and_ends_with_its_terminal(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup\n"
    code += "from unskew.federation import __main__ as command\n"
    code += "command.watch = lambda words: [(command.say('a line'), time.sleep(0.05)) for _ in range(400)]\n"
    code += "command.main()"
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"a line\n"
        running.stdout.close()
        with pytest.raises(subprocess.TimeoutExpired, match="timed out"):
            running.wait(1)
        running.send_signal(signal.SIGHUP)
        assert b"Traceback" not in running.stderr.read()
    assert running.returncode in (0, 120)  # 120: Python could not write what was left


def test_what_a_killed_watcher_left_running_is_found_by_its_mark_and_ended(tmp_path):
    mark, said = f"test:{tmp_path}", []
    left = subprocess.Popen(python("import time; time.sleep(100)"), env={**ENVIRONMENT, MARK: mark})
    other = subprocess.Popen(python("import time; time.sleep(100)"), env={**ENVIRONMENT, MARK: f"{mark}2"})
    try:
        until(lambda: marked(mark) == [left.pid])
        claim(mark, "it", said.append)
        assert left.wait(5) == -signal.SIGTERM
        assert said == ["ended 1 program that a killed process had left running"]
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
        with pytest.raises(UserError, match=f"the server is already running as process {watcher.pid}; stop it with"):
            claim(mark, "the server", print)
        assert watcher.poll() is None
    finally:
        assert end_all(mark) == 1
        watcher.wait()
