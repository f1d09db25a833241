"""The live view: what it shows of a run, on which terminals, and that rounds do not wait for it."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_screen import ROW, overview

from federation import federation
from unskew import engines
from unskew.console import screen
from unskew.console.screen import Screen, View, curve
from unskew.core.key import Key
from unskew.core.types import EVERYONE, Failure, Visit
from unskew.round import driver
from unskew.runs.config import Config

BRAILLE = re.compile("[\u2801-\u28ff]")


def percent(value):
    return f"{value:.0%}"


def test_a_rising_line_is_drawn_from_corner_to_corner():
    """Two characters of two by four dots: heights 0, 1, 2, 3 over four columns. In ASCII a third of a line each."""
    lines = curve([(1, 0.0), (4, 1.0)], len("100% │") + 2, 1, percent, ascii_only=False)
    left = 0x40 | 0x20  # the lowest dot on the left, the second on the right
    right = 0x02 | 0x08  # the third on the left, the highest on the right
    assert lines[0] == f"  0% │{chr(0x2800 + left)}{chr(0x2800 + right)}"
    assert curve([(1, 0.0), (3, 1.0)], len("100% |") + 3, 1, percent, ascii_only=True)[0] == "  0% |.-'"


def test_the_axes_name_lowest_and_highest_and_the_rounds():
    lines = curve([(3, 0.25), (4, 0.75), (9, 0.5)], 40, 5, percent, ascii_only=False)
    assert [line.split(" ")[0] for line in lines] == ["75%", "", "", "", "25%", ""]
    assert lines[5] == "    └round 3" + "9".rjust(40 - 5 - len("round 3"))
    assert BRAILLE.search(lines[0])


def test_a_jump_is_drawn_as_a_line_without_holes():
    """From the lowest dot to the highest from one column to the next: the second column is full, down to the first."""
    lines = curve([(1, 0.0), (2, 1.0)], len("100% │") + 1, 2, percent, ascii_only=False)
    right = 0x08 | 0x10 | 0x20 | 0x80
    assert [line[-1] for line in lines[:2]] == [chr(0x2800 + right), chr(0x2800 + (right & ~0x80 | 0x40))]


def test_one_value_and_equal_values_are_drawn_in_the_middle():
    for points in ([(7, 0.5)], [(7, 0.5), (8, 0.5)]):
        lines = curve(points, 20, 3, percent, ascii_only=False)
        assert [bool(BRAILLE.search(line)) for line in lines] == [False, True, False, False]
        assert lines[1].startswith("50% │")
    assert curve([(7, 0.5)], 20, 3, percent, ascii_only=False)[-1].endswith("└round 7")


def test_more_rounds_than_columns_show_means():
    """A saw of 0 and 1 around 1/2 with one round at the end that stands out is a line in the middle, and a peak."""
    points = [(number, float(number % 2)) for number in range(1, 1001)] + [(1001, 1.0)]
    lines = curve(points, 26, 5, percent, ascii_only=True)
    drawn = [line.partition("|")[2] for line in lines[:-1]]
    assert len(drawn[2].strip()) >= 18
    assert not drawn[4].strip()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(30, 200), st.integers(1, 9), st.booleans())
def test_a_curve_keeps_to_its_place_and_has_no_holes(values, width, height, ascii_only):
    lines = curve([(3 * n, value) for n, value in enumerate(values)], width, height, lambda v: f"{v:.3f}", ascii_only)
    assert len(lines) == height + 1
    assert max(map(len, lines)) <= width
    if ascii_only:
        assert "".join(lines).isascii()
    side = "|" if ascii_only else "│"
    drawn = [line.partition(side)[2].ljust(width) for line in lines[:-1]]
    used = ["".join(column).strip() != "" for column in zip(*drawn, strict=True)]
    count = used.index(False)
    assert not any(used[count:])
    assert count == (1 if len(values) == 1 else width - len(lines[0].partition(side)[0]) - 1)


def console(width=100, height=30, **options):
    return Console(file=io.StringIO(), force_terminal=True, highlight=False, width=width, height=height, **options)


def evaluated(number, accuracy, **changes):
    return replace(ROW, round=number, accuracy=accuracy, loss=1 - accuracy, **changes)


def last_view(terminal, *events):
    """What stands on the terminal after the last drawing."""
    screen = Screen(terminal)
    for event in events:
        screen(event)
    screen.close()
    drawn = re.split("\x1b\\[\\?25l|\x1b\\[2K", terminal.file.getvalue())[-1]
    return re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", drawn)


def test_the_view_shows_bar_curve_clients_rate_memory_and_the_best():
    rows = [evaluated(1, 0.25), evaluated(2, 0.75, seconds=0.25), evaluated(3, 0.5, examples=1200)]
    text = last_view(console(), overview(), *rows)
    lines = text.strip().split("\n")
    assert lines[0].startswith("round 3/3 ")
    assert lines[1] == "accuracy on the test set"
    assert lines[2].startswith("75.0% │")
    assert lines[7].startswith("25.0% │")
    assert BRAILLE.search(text)
    assert lines[8].startswith("      └round 1")
    assert "clients round 3: 3 participated" in lines
    assert "rate    2,400 examples/s, 1,920 on average" in lines  # 2400 examples in 1.25 s
    assert "test    50.00%, loss 0.5000, round 3; best 75.00%, round 2" in lines
    assert re.search(r"^memory  [\d.]+ [MG]B resident in \d+ process", text, re.MULTILINE)
    assert len(lines) <= 14
    assert max(map(len, lines)) <= 100


def test_until_something_is_evaluated_the_curve_is_the_loss_of_training():
    text = last_view(console(), overview(), replace(ROW, train_loss=2.5), replace(ROW, round=2, train_loss=1.5))
    assert "training loss\n2.500 │" in text
    assert "\n1.500 │" in text
    assert "\ntest " not in text
    assert "accuracy on the test set" in last_view(console(), overview(), ROW, evaluated(2, 0.5))


def test_a_run_that_has_just_begun_shows_who_comes():
    lines = last_view(console(), overview()).split("\n")
    assert lines[0].startswith("round 0/3 ")
    assert lines[1] == "clients round 1: 0, 1"


def test_many_clients_are_counted_and_centralised_training_has_none():
    many = tuple(Visit(0, 1.0, repeat=number) for number in range(13))
    assert "clients round 1: 13 visits\n" in last_view(console(), overview(visits=many))
    alone = overview(visits=(Visit(EVERYONE, 12.0),))
    assert "clients round 1: all examples in one place\n" in last_view(console(), alone)


def test_the_clients_shown_are_those_that_come():
    """The view asks the sampler itself; it must say what the driver is about to do, in every round."""
    small = federation(sizes=(40, 30, 1, 20, 9))
    engine = engines.open_engine("loop", engines.EngineSetup(small.blueprint, small.data, 1))
    came, work = [], engine.visit

    def watched(job, shared, visits, key):
        came.append([visit.client for visit in visits])
        return work(job, shared, visits, key)

    engine.visit, state = watched, small.state()
    for _ in range(4):
        state, _ = driver.run_round(small.algorithm, engine, state, Key(3), per_round=2)
    config = replace(Config(), rounds=4, per_round=2, seed=3)
    seen = overview(config=config, population=engine._side.population, visits=(Visit(0, 1.0), Visit(1, 1.0)))
    for number, clients in enumerate(came, 1):
        view = View(console(), replace(seen, first_round=number))
        view.close()
        assert f"clients round {number}: {clients[0]}, {clients[1]}" in view._console.file.getvalue()
    assert len({tuple(clients) for clients in came}) > 1


def test_failures_are_noted_above_the_view_and_counted_in_it():
    terminal = console()
    rows = [replace(ROW, failures=(Failure(7, "lost"), Failure(8, "lost"))), replace(ROW, round=2)]
    text = last_view(terminal, overview(), *rows)
    assert "clients round 3: 0, 1; round 2: 3 participated; 2 failures so far" in text
    assert "continued without" not in text
    assert "round 1: continued without client 7: lost" in terminal.file.getvalue()
    assert "round 1: 3 participated, 1 failed" in last_view(
        console(), overview(), replace(ROW, failures=(Failure(7, "x"),))
    )


def test_a_note_is_printed_above_the_view():
    terminal = console()
    screen = Screen(terminal)
    screen(overview())
    screen.note("the [log] failed")
    screen.close()
    text = terminal.file.getvalue()
    assert text.index("note: the [log] failed") < text.rindex("clients round 1")


def test_a_resumed_run_shows_the_rounds_before(tmp_path):
    common = {"clients": 2, "examples": 10, "batches_max": 1, "train_loss": 2.0, "seconds": 1.0, "loss": 0.5}
    common |= {"bytes_up": 1, "bytes_down": 1}
    rows = [
        {**common, "round": number, "accuracy": accuracy, "failures": [{"client": 1, "reason": "x"}]}
        for number, accuracy in ((1, 0.9), (2, 0.3), (3, 0.3))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = last_view(console(), overview(path=tmp_path, first_round=3), evaluated(3, 0.4))
    assert "test    40.00%, loss 0.6000, round 3; best 90.00%, round 1" in text
    assert "\n90.0% │" in text
    assert "└round 1" in text
    assert "2 failures so far" in text
    (tmp_path / "metrics.jsonl").write_text("{]\n")
    assert "└round 3" in last_view(console(), overview(path=tmp_path, first_round=3), evaluated(3, 0.4))


@pytest.mark.parametrize("size", [(59, 30), (100, 15), (20, 5)])
def test_a_small_terminal_gets_the_bar_alone(size):
    text = last_view(console(*size), overview(), evaluated(1, 0.5))
    assert len(text.strip().split("\n")) == 1
    assert "clients" not in text
    assert not BRAILLE.search(text)


@pytest.mark.parametrize("size", [(60, 16), (60, 40), (300, 16)])
def test_the_view_fits_every_larger_terminal(size):
    lines = last_view(console(*size), overview(), evaluated(1, 0.5), evaluated(2, 0.75)).strip("\n").split("\n")
    assert len(lines) == 13
    assert max(map(len, lines)) <= size[0]
    assert lines[0].startswith("round 2/3 ")
    assert "…" not in lines[0]


def test_without_utf8_everything_is_ascii():
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    terminal = Console(file=out, force_terminal=True, width=100, height=30)
    screen = Screen(terminal)
    for event in (overview(), evaluated(1, 0.25), evaluated(2, 0.5)):
        screen(event)
    screen.close()
    out.flush()
    assert out.buffer.getvalue().isascii()
    assert b"50.0% |" in out.buffer.getvalue()


def test_a_dumb_terminal_gets_plain_lines():
    terminal = console(_environ={"TERM": "dumb"})
    text = last_view(terminal, overview(), ROW, replace(ROW, round=2))
    assert "\x1b" not in terminal.file.getvalue()
    assert re.search(r"^round 1/3  loss 1\.235  1,200 examples/s", text, re.MULTILINE)


def test_rounds_do_not_draw(monkeypatch):
    """A thread draws now and then; what a round does is a few assignments, however fast the rounds come."""
    drawn = []
    monkeypatch.setattr(View, "_draw", lambda self: drawn.append(1) or "")
    monkeypatch.setattr("unskew.console.screen.PER_SECOND", 1e-3)
    screen = Screen(console())
    screen(overview(config=replace(overview().config, rounds=5000)))
    begun = len(drawn)
    for number in range(1, 5001):
        screen(replace(ROW, round=number))
    assert len(drawn) == begun
    screen.close()
    assert len(drawn) == begun + 1


def test_lines_that_a_narrower_terminal_broke_are_taken_away():
    terminal = console(width=100)
    view = View(terminal, overview())
    for number in (1, 2):
        view.round(evaluated(number, 0.25 * number), "figures")
    view._live.refresh()
    widths = list(view._drawn)
    assert max(widths) > 70
    terminal.file.truncate(0)
    terminal.size = (70, 30)
    view._live.refresh()
    ups = terminal.file.getvalue().count("\x1b[1A")
    assert ups == len(widths) - 1 + sum(width > 70 for width in widths)
    view.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_is_that_of_this_process_and_those_below_it(monkeypatch):
    def count():
        return int(re.fullmatch(r"[\d.]+ [MG]B resident in (\d+) process(es)?", screen._describe_memory())[1])

    alone = count()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as below:
        assert count() == alone + 1
        below.communicate(b"\n")
    monkeypatch.setattr(screen.os, "getpid", lambda: 2**30)
    assert screen._describe_memory() == ""
