"""Output that cannot have every character, and the first moments of a command."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from unskew.console import main as commands
from unskew.console.main import plain_spelling

SOURCE = Path(commands.__file__).parent.parent.parent


def test_signs_and_greek_letters_become_words_and_all_others_escapes():
    assert [plain_spelling(letter) for letter in "θΣ…←²"] == ["theta", "Sigma", "...", "<-", "^2"]
    assert plain_spelling("é") == "\\u00e9"
    assert plain_spelling("😀") == "\\U0001f600"
    assert plain_spelling("\udce9") == "\\udce9"


@pytest.mark.parametrize(
    "words", [["methods", "fedavg"], ["methods", "ccvr"], ["methods", "feddyn"], ["run", "--data", "folder:é"]]
)
def test_a_terminal_without_unicode_gets_words(words, monkeypatch):
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
        assert b"theta <- theta - gamma*g" in stream.buffer.getvalue()
    if ending.value.code:
        assert b"\\u00e9" in errors.buffer.getvalue()


def test_nothing_slow_is_imported_before_an_interrupt_is_understood():
    code = (
        f"import os, sys; sys.path.insert(0, {str(SOURCE)!r}); before = set(sys.modules)\n"
        "import unskew.__main__; print(*sorted(set(sys.modules) - before))"
    )
    seen = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(seen.split()) == {"unskew", "unskew.__main__"}
