"""Progress from Python: in a notebook it is drawn below the cell, elsewhere only where it is asked for."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

import unskew
from observers import stop_after
from unskew.console import screen

pytestmark = pytest.mark.usefixtures("in_a_new_folder")
SMALL = {"rounds": 3, "epochs": 1, "clients": 3, "partition": "iid", "engine": "loop"}


@pytest.fixture
def pages(monkeypatch):
    """A notebook that keeps every page that is drawn."""
    drawn = []
    display = ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda page, display_id: SimpleNamespace(update=drawn.append)
    python = ModuleType("IPython")
    python.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return drawn


def test_a_notebook_shows_progress_unless_told_not_to(pages, capsys):
    unskew.run(progress=False, **SMALL)
    assert pages == []
    unskew.run(method="fedavg + lda", **SMALL)
    assert "round 3 of 3" in pages[-1]
    assert "fedavg + lda on digits" in pages[-1]
    assert "lda: accuracy" in pages[-1]
    assert "<svg" in pages[-1]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "drawn"), [(0.0, [0, 1, 2, 3]), (1e9, [0, 3])])
def test_slow_rounds_are_drawn_one_by_one_and_fast_ones_are_not(pages, monkeypatch, seconds, drawn):
    monkeypatch.setattr(screen, "SECONDS", seconds)
    unskew.run(**SMALL)
    assert [number for number in range(4) if any(f"round {number} of 3" in page for page in pages)] == drawn


def test_a_resumed_run_shows_the_rounds_before(pages):
    with pytest.raises(unskew.StopRun):
        unskew.run(out="a", observe=stop_after(2), **SMALL)
    pages.clear()
    unskew.resume("a")
    assert "round 2 of 3" in pages[0]
    assert "round 3 of 3" in pages[-1]


def test_names_cannot_break_the_page(pages):
    unskew.run(method=lambda algorithm: algorithm, **SMALL)
    assert "&lt;lambda&gt;" in pages[-1]
    assert "<lambda>" not in pages[-1]


def test_elsewhere_nothing_is_shown_unless_asked_for(capsys):
    unskew.run(**SMALL)
    assert capsys.readouterr().out == ""
    unskew.run(progress=True, **SMALL)
    assert "round 3/3" in capsys.readouterr().out


def test_a_plain_terminal_with_ipython_is_not_a_notebook(monkeypatch):
    python = ModuleType("IPython")
    python.get_ipython = lambda: None
    monkeypatch.setitem(sys.modules, "IPython", python)
    assert not screen.in_notebook()
    python.get_ipython = lambda: SimpleNamespace(config={})
    assert not screen.in_notebook()


def test_progress_and_an_observer_see_the_same_rounds_and_the_observer_still_stops(pages):
    seen = []

    def observe(event):
        seen.append(getattr(event, "round", None))
        return unskew.STOP if seen[-1] == 1 else None

    with pytest.raises(unskew.StopRun):
        unskew.run(observe=observe, **SMALL)
    assert seen == [None, 1]
    assert "round 1 of 3" in pages[-1]
