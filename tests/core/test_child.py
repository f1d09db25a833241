"""Child processes: their logs, their messages, their end, and what happens when their parent dies."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import alive
from unskew.core.child import Child, Log, start_worker
from unskew.core.errors import UserError


def python(text, **options):
    return Child("it", [sys.executable, "-c", text], **options)


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Starts a worker whose module has this text."""
    children = []

    def start(text, *descriptors):
        (tmp_path / f"worker{len(children)}.py").write_text(text)
        children.append(start_worker(f"worker{len(children)}", *descriptors))
        return children[-1]

    monkeypatch.syspath_prepend(tmp_path)
    yield start
    for child in children:
        child.end(patience=0)


ECHO = "def main(parent):\n    while (message := parent.receive()) is not None:\n        parent.send([message])\n"
SLEEP = "import time\ndef main(parent):\n    parent.send('on')\n    time.sleep(100)\n"


def test_output_goes_to_the_log_and_to_the_listener_without_colours(tmp_path):
    heard = []
    text = "print('\\x1b[92mhello\\x1b[0m'); print(flush=True); import sys; sys.exit('no')"
    child = python(text, log=Log(tmp_path / "logs" / "it.log"), heard=heard.append)
    assert child.wait() == child.code == 1
    assert child.log_end() == "hello\nno"
    assert heard == ["hello", "no"]
    assert [line.split(" ", 1)[1] for line in (tmp_path / "logs" / "it.log").read_text().splitlines()] == heard
    assert child.exit_reason() == "exit code 1: no"
    child.end()


def test_a_program_that_does_not_exist_is_a_message():
    with pytest.raises(UserError, match="cannot start /nowhere/it: No such file"):
        Child("it", ["/nowhere/it"])


def test_a_child_that_does_not_end_is_killed_with_its_process_group():
    text = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']).pid, flush=True)\n"
        "time.sleep(100)"
    )
    heard = []
    child = python(text, heard=heard.append)
    wait_until(lambda: heard)
    assert alive(int(heard[0]))
    child.terminate()
    child.end(patience=0.2)
    assert child.code == -signal.SIGKILL
    wait_until(lambda: not alive(int(heard[0])))


def test_a_worker_answers_messages_until_its_connection_is_closed(worker):
    child = worker(ECHO)
    child.send({"a": [1, 0.1, "ä\n"]})
    child.send(2)
    with selectors.DefaultSelector() as selector:
        selector.register(child, selectors.EVENT_READ)
        assert selector.select(timeout=60)
    assert child.receive() == [{"a": [1, 0.1, "ä\n"]}]
    assert child.receive() == [2]
    assert not child.pending()
    child.end(patience=60)
    assert child.code == 0


def test_a_worker_inherits_descriptors_and_its_output_does_not_mix_with_messages(worker):
    ours, theirs = os.pipe()
    child = worker("import os\ndef main(parent, given):\n    print('x')\n    os.write(given, b'here')\n", theirs)
    os.close(theirs)
    assert os.read(ours, 10) == b"here"
    os.close(ours)
    assert child.receive() is None
    assert child.exit_reason() == "exit code 0"


def test_the_death_of_a_worker_is_noticed_and_explained(worker):
    child = worker(ECHO)
    assert child.code is None
    os.kill(child.pid, signal.SIGKILL)
    assert child.receive() is None
    assert child.exit_reason() == "signal 9"
    child.send("nobody reads this")
    child = worker("def main(parent):\n    raise ValueError('no luck')\n")
    assert child.receive() is None
    assert child.exit_reason() == "exit code 1: ValueError: no luck"


@pytest.mark.parametrize("ignored", [True, False], ids=["SIGINT ignored", "as usual"])
def test_an_interrupt_is_the_workers_own_decision(worker, ignored):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        deaf = worker(SLEEP)
        handler = "    import signal\n    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        ready = worker(SLEEP.replace("    parent", handler + "    parent"))
    finally:
        signal.signal(signal.SIGINT, before)
    for child in (deaf, ready):
        assert child.receive() == "on"
        child.interrupt()
    assert ready.wait() == 130
    assert deaf.code is None


@pytest.mark.parametrize("moment", ["in main", "during imports"])
def test_a_worker_dies_with_its_parent(tmp_path, moment):
    module = SLEEP if moment == "in main" else "import time\nprint('on')\ntime.sleep(100)\n"
    (tmp_path / "sleeper.py").write_text(module)
    code = (
        "import time\n"
        "from unskew.core.child import start_worker\n"
        "child = start_worker('sleeper')\n"
        f"print(child.pid, {'child.receive()' if moment == 'in main' else '0'}, flush=True)\n"
        "time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline().split()[0])
        parent.kill()
    wait_until(lambda: not alive(pid), seconds=20)


def test_starting_workers_needs_no_pytorch():
    code = "import sys, unskew.core.child; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_log_is_put_aside_while_its_program_runs_has_dates_and_is_its_owners_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("unskew.core.child.MAX_LOG_BYTES", 100)
    path = tmp_path / "a.log"
    log = Log(path)
    for number in range(30):
        log.write(b"line %d of a program that runs on" % number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["a.log", "a.log.1", "a.log.2", "a.log.3"]
    assert "line 29" in path.read_text()
    assert all(file.stat().st_mode & 0o077 == 0 and file.stat().st_size < 200 for file in files)
    assert re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ line", path.read_text())
    assert len(Log(path).write("zwölf ".encode() + b"\xff" * 5000)) == 2000


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="no such groups here")
@pytest.mark.parametrize("grouped", [True, False], ids=["parent in a group", "parent in none"])
def test_a_new_session_keeps_the_priority_of_a_process_that_yields_to_others(grouped):
    words = (
        "from unskew.core.child import inherit_priority; inherit_priority(); print(open('/proc/self/autogroup').read())"
    )
    parent = "" if grouped else "import os; os.getppid = lambda: 1; "  # init is in no group: its file is empty
    nice = ["nice", "-n", "7", sys.executable, "-c", parent + words]
    said = subprocess.run(nice, capture_output=True, text=True, start_new_session=True, check=True).stdout
    if not said.strip():
        pytest.skip("a new session is in no such group here")
    assert int(said.split()[-1]) >= 7
