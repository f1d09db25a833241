"""What a run shows: plain lines when piped, a bar on a terminal, and nothing that a name or an error can break."""

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from federation import image_set
from unskew.console.progress import PlainConsole, StageProgress
from unskew.console.screen import Screen, summary
from unskew.core.types import EVERYONE, Failure, Visit
from unskew.core.units import format_duration
from unskew.data.population import Partition, Population
from unskew.engines import processes
from unskew.round.algorithm import Algorithm
from unskew.round.driver import Metrics
from unskew.runs.config import Config
from unskew.runs.prepare import Overview
from unskew.runs.result import Calibration, Result

ROW = Metrics(
    round=1, clients=3, examples=600, train_loss=1.23456, batches_max=4, bytes_up=10, bytes_down=20, seconds=0.5
)
RESULT = Result(
    path=Path("runs/a"), method="fedavg", data="digits", partition="iid", clients=2, per_round=2, rounds=3, seed=0,
    engine="loop", accuracy=0.5, loss=1.25, emd=0.0, examples=1234, seconds=75.0, examples_per_second=16.0,
    bytes_up=1_500, bytes_down=2_500_000, weights_sha256="0123456789abcdef" * 4, model="tiny-cnn",
    partition_hash="", data_sha256="",
)  # fmt: skip


def overview(**changes):
    images = image_set(12)
    partition = Partition(np.array([0] * 9 + [1] * 3, np.int32), 2, "by hand", 0, notes=("a note",))
    config = replace(Config(), rounds=3, per_round=2, model="tiny-cnn", augment=False)
    seen = Overview(
        path=Path("runs/a"), config=config, images=images, partition=partition,
        population=Population.from_partition(partition), emd=0.5, engine="loop", processes=processes("loop", 0),
        parameters=13_706, first_round=1, local=config.local(), visits=(Visit(0, 9.0), Visit(1, 3.0)),
        algorithm=Algorithm(), data_bytes=2_000, memory_bytes=3_000_000, disk_bytes=999,
    )  # fmt: skip
    return replace(seen, **changes)


def printed(result, width=200):
    out = io.StringIO()
    Console(file=out, width=width).print(summary(result))
    return out.getvalue()


def overview_text(**changes):
    return " ".join(shown(overview(**changes), width=300).split())


def shown(*events, terminal=False, **options):
    """What the console got; on a terminal with all its control characters."""
    out = io.StringIO()
    screen = Screen(PlainConsole(file=out, force_terminal=terminal, **options))
    for event in events:
        screen(event)
    screen.close()
    return out.getvalue()


def test_piped_output_is_plain_lines_a_line_a_round():
    text = shown(overview(), ROW, replace(ROW, round=2, accuracy=0.875, loss=0.4), replace(ROW, round=3))
    assert "\x1b" not in text
    assert "\r" not in text
    rounds = [line for line in text.split("\n") if line.startswith("round ")]
    assert re.fullmatch(r"round 1/3  loss 1\.235  1,200 examples/s  \d+\.\d s left", rounds[0])
    assert re.fullmatch(r"round 2/3  loss 1\.235  accuracy 87\.50%  1,200 examples/s  \d+\.\d s left", rounds[1])
    assert rounds[2].endswith("0.0 s left")
    assert len(rounds) == 3


@pytest.mark.parametrize(
    ("visits", "words"),
    [
        ((Visit(1, 3.0),), "1 client per round"),
        ((Visit(0, 1.0, take=256), Visit(0, 1.0, take=256, repeat=1)), "2 visits per round of 256 examples each"),
        ((Visit(EVERYONE, 12.0),), "all examples on one client"),
        ((Visit(EVERYONE, 12.0, take=6),), "6 examples per round on one client"),
    ],
)
def test_the_overview_says_who_comes(visits, words):
    assert f"fedavg; {words}, epochs 5" in overview_text(visits=visits)


LOCAL = {"schedule": "cosine(warmup=5)", "optimizer": "adamw(beta2=0.99)", "clip": 2.0, "decay": "weights"}


@pytest.mark.parametrize(
    ("asked", "used", "words", "overruled"),
    [
        ({}, {}, "lr 0.01, momentum 0.9, weight decay 1e-05 engine", 0),
        (
            LOCAL,
            LOCAL,
            "lr 0.01 (cosine(warmup=5)), adamw(beta2=0.99), gradients clipped to 2, weight decay 1e-05 on",
            0,
        ),
        ({"epochs": 4}, {"epochs": 1}, "note: the method sets epochs to 1; --epochs 4 has no effect", 1),
        ({"epochs": 4}, {"epochs": 4}, "epochs 4", 0),
    ],
)
def test_how_clients_step_is_said_where_it_is_unusual_and_what_the_method_replaces(asked, used, words, overruled):
    config = replace(overview().config, **asked)
    text = overview_text(config=config, local=replace(config.local(), **used))
    assert words in text
    assert text.count("has no effect") == overruled


def test_patience_says_that_it_peeks_and_the_summary_which_round_the_model_is_of():
    text = overview_text(config=replace(overview().config, patience=1, monitor="loss"))
    assert "note: the run stops after 1 round without a better loss; the best round is chosen on the images" in text
    text = printed(replace(RESULT, best_round=1, stopped_at=3))
    assert "stopped after round 3; the model is from the best round, 1" in text


def test_the_overview_says_what_the_run_will_be():
    text = overview_text(baseline=RESULT, unlike_baseline=("lr 0.1 there",))
    for words in (
        "data random: 12 train, 4 test, 4 classes, 8x8 gray",
        "mean 0.4000, std 0.2000; no augmentation",
        "note: a note",
        "by hand: 2 clients of 3 to 9 examples (median 6), EMD 0.50, hash",
        "tiny-cnn: 13,706 parameters",
        "fedavg; 2 clients per round, epochs 5, batch 64, lr 0.01, momentum 0.9, weight decay 1e-05",
        "loop (this process), seed 0",
        "3.0 MB of memory (data 2.0 kB)",
        "999 B on disk",
        "run runs/a",
        "baseline runs/a: 50.00%; other settings: lr 0.1 there",
    ):
        assert words in text
    assert "resuming" not in text
    assert "pool (4 workers)" in overview_text(engine="pool", processes=processes("pool", 4))


def test_a_resumed_run_says_so_and_counts_its_time_from_there():
    text = shown(overview(first_round=3), replace(ROW, round=3))
    assert "resuming after round 2" in text
    assert "round 3/3" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_metrics_without_accuracy_or_time_or_examples_are_shown(terminal):
    empty = replace(ROW, examples=0, seconds=0.0, train_loss=0.0)
    assert "loss 0.000  0 examples/s" in shown(overview(), empty, terminal=terminal, width=200)


def test_a_note_is_printed_above_the_bar():
    out = io.StringIO()
    screen = Screen(PlainConsole(file=out, force_terminal=True, width=80))
    screen(overview())
    screen.note("the [log] failed")
    screen.close()
    assert out.getvalue().index("note: the [log] failed") < out.getvalue().rindex("0/3")


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("reason", ["KeyError: [a]", "ValueError: [/x] is not here", "IndexError: [0, 1]"])
def test_a_clients_error_is_shown_as_it_is(reason, terminal):
    """Its text is not ours: brackets in it are no markup and must not end the run."""
    text = shown(overview(), replace(ROW, failures=(Failure(7, reason),)), terminal=terminal, width=200)
    assert f"round 1: continued without client 7: {reason}" in text


@pytest.mark.parametrize("name", ["runs/[old]/a", "runs/[/x]"])
def test_brackets_in_names_are_shown_as_they_are(name):
    assert name in shown(overview(path=Path(name)))
    assert name in printed(replace(RESULT, path=Path(name)))


def test_the_summary_says_what_came_out():
    result = replace(RESULT, failures=2, calibrations={"ccvr": Calibration("ccvr", 0.75, 0.5, 10, 1.0)})
    text = " ".join(printed(result).split())
    for words in (
        "accuracy 50.00% on the test set, loss 1.2500",
        "after ccvr 75.00%, loss 0.5000",
        "trained 3 rounds, 1,234 examples, 1 min 15 s, 16 examples per second",
        "sent 1.5 kB up, 2.5 MB down",
        "failed 2 visits",
        f"sha256 {RESULT.weights_sha256}",
        "run runs/a",
    ):
        assert words in text
    assert "failed" not in printed(RESULT)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (0, "0.0 s"), (0.04, "0.0 s"), (59.9, "59.9 s"), (59.97, "1 min 00 s"), (60, "1 min 00 s"),
        (61.4, "1 min 01 s"), (119.6, "2 min 00 s"), (3599, "59 min 59 s"), (3599.7, "1 h 00 min"),
        (3600, "1 h 00 min"), (3661, "1 h 01 min"), (360_000, "100 h 00 min"),
    ],
)  # fmt: skip
def test_times_are_shown_as_people_say_them(seconds, wanted):
    assert format_duration(seconds) == wanted


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, markup=False)


def test_a_slow_rate_is_not_rounded_to_zero():
    assert "0.43 examples/s" in shown(replace(ROW, examples=48, seconds=112.0))
    assert "1,200 examples/s" in shown(ROW)


def test_piped_output_has_a_plain_line_for_each_tenth():
    out = console(False)
    with StageProgress(out) as busy:
        for done in range(30):
            busy("cka", done, 100)
        busy("t-SNE", 0, 0)
        busy("t-SNE", 0, 0)
        busy("cka", 0, 5)
    assert out.file.getvalue() == "cka …\ncka: 10 %\ncka: 20 %\nt-SNE …\ncka …\n"


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


def test_the_terminal_is_given_back_after_an_error():
    out = console(True)
    busy = StageProgress(out)
    with pytest.raises(KeyError, match="cka"), busy:
        raise KeyError("cka")
    assert not busy._progress.live.is_started
    assert "\x1b[?25h" in out.file.getvalue()  # the cursor is shown again
