"""A run as its user watches it: in a terminal, through a pipe, in a log that outlives a kill."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios

from test_runs_from_the_shell import FAST

from analysis.finished import result
from commands import UNSKEW, shell

SECONDS = 300  # after which a terminal that says nothing more is given up


class Terminal:
    """A command in a terminal of 100 columns and 30 lines, and all it has written there."""

    def __init__(self, *words, cwd, **environment):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        surroundings = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
        self.process = subprocess.Popen(
            [*UNSKEW, *words], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, env=surroundings,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._ours, self.text = ours, ""

    def until(self, words: str) -> None:
        """Read until the words are there, or the command has ended."""
        while words not in self.text:
            if not select.select([self._ours], [], [], SECONDS)[0]:
                raise AssertionError(f"no {words!r} in {self.text}")
            try:
                self.text += os.read(self._ours, 65536).decode()
            except OSError:  # the other side is closed
                os.close(self._ours)
                return

    def end(self) -> int:
        self.until("\0")
        return self.process.wait(timeout=SECONDS)


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def test_a_terminal_shows_a_bar_and_keeps_it_above_the_result(tmp_path):
    terminal = Terminal("run", *FAST, "--out", "a", cwd=tmp_path)
    assert terminal.end() == 0, terminal.text
    last = plain(terminal.text[terminal.text.rindex("12/12") :])
    assert "on the test set, loss" in last  # the summary comes after the bar
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")  # the cursor is back
    whole = shell("run", *FAST, "--out", "b", cwd=tmp_path).stdout
    assert result(tmp_path / "a")["weights_sha256"] == result(tmp_path / "b")["weights_sha256"]
    assert "\x1b" not in whole
    assert len(re.findall(r"^round \d+/12  loss", whole, re.MULTILINE)) == 12


def test_an_interrupt_leaves_the_terminal_tidy(tmp_path):
    words = ["run", *FAST, "--rounds", "4000", "--engine", "pool", "--workers", "1", "--log", "tensorboard"]
    terminal = Terminal(*words, "--out", "a", cwd=tmp_path)
    terminal.until("accuracy")
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 130
    last = plain(terminal.text)
    assert re.search(r"/4000 .*\n+unskew: interrupted; resume it with: .*resume a\n$", last)
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")
