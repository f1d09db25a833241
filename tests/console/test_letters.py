"""Output that cannot have every character, and the first moments of a command."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from unskew.console import main as commands

SOURCE = Path(commands.__file__).parent.parent.parent


@pytest.mark.parametrize("words", [["methods", "fedavg"], ["run", "--data", "folder:é"]])
def test_a_terminal_without_unicode_gets_escapes(words, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    errors = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", errors)
    with pytest.raises(SystemExit) as ending:
        commands.main(words)
    stream.flush()
    errors.flush()
    assert ending.value.code == (0 if words[0] == "methods" else 2)
    if words[-1] == "fedavg":
        assert b"\\u03b8 \\u2190" in stream.buffer.getvalue()
    if ending.value.code:
        assert b"\\xe9" in errors.buffer.getvalue()


def test_nothing_slow_is_imported_before_an_interrupt_is_understood():
    code = (
        f"import os, sys; sys.path.insert(0, {str(SOURCE)!r}); before = set(sys.modules)\n"
        "import unskew.__main__; print(*sorted(set(sys.modules) - before))"
    )
    seen = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(seen.split()) == {"unskew", "unskew.__main__"}
