"""What is being done: plain lines where output is piped, a bar that goes away on a terminal."""

import io

import pytest
from rich.console import Console

from unskew.console.progress import StageProgress


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, markup=False)


def test_piped_output_has_one_plain_line_a_stage():
    out = console(False)
    with StageProgress(out) as busy:
        for done in range(5):
            busy("cka", done, 5)
        busy("t-SNE", 0, 0)
        busy("t-SNE", 0, 0)
        busy("cka", 0, 5)
    assert out.file.getvalue() == "cka …\nt-SNE …\ncka …\n"


def test_piped_output_is_not_broken_into_lines_however_long():
    out = console(False)
    with StageProgress(out) as busy:
        busy("x" * 300, 0, 0)
    assert out.file.getvalue() == "x" * 300 + " …\n"


def test_a_terminal_shows_the_stage_and_how_far_it_is():
    out = console(True)
    with StageProgress(out) as busy:
        busy("making local models", 1, 4)
        busy("making local models", 3, 4)
        (task,) = busy._progress.tasks
        assert (task.description, task.completed, task.total) == ("making local models", 3, 4)
        busy("t-SNE", 0, 0)
        (task,) = busy._progress.tasks
        assert (task.description, task.total) == ("t-SNE", None)
        busy("t-SNE", 2, 7)
        assert (task.completed, task.total) == (2, 7)
    assert busy._progress.finished or not busy._progress.live.is_started
    assert "making local models …" not in out.file.getvalue()


def test_nothing_said_is_nothing_shown():
    out = console(False)
    with StageProgress(out):
        pass
    assert out.file.getvalue() == ""


def test_the_terminal_is_given_back_after_an_error():
    out = console(True)
    busy = StageProgress(out)
    with pytest.raises(ZeroDivisionError):
        spoilt(busy)
    assert not busy._progress.live.is_started
    assert "\x1b[?25h" in out.file.getvalue()  # the cursor is shown again


def spoilt(busy):
    with busy:
        busy("cka", 0, 3)
        raise ZeroDivisionError
