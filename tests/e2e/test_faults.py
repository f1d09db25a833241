"""A short part of the fault campaign; `make faults` tries far more."""

import pytest

from faults.contexts import context_trials
from faults.damage import finished_trials, interrupted_trials
from faults.evil import FILES, tried
from faults.kills import kill_trials, resource_trials, worker_trials
from faults.nemesis import nemesis_trials
from faults.processes import process_trials
from faults.storage import storage_trials
from faults.texts import text_trials
from faults.trials import REFUSED, SAME, Answer, Section, Trial, conduct, refusal

QUICK = {"finished": (finished_trials, 12), "interrupted": (interrupted_trials, 12), "texts": (text_trials, 25),
         "storage": (storage_trials, 3)}  # fmt: skip
LONG = {"contexts": (context_trials, 2), "federation": (nemesis_trials, 22)}
SLOW = {"kills": (kill_trials, 2), "workers": (worker_trials, 2), "resources": (resource_trials, 3),
        "processes": (process_trials, 2)}  # fmt: skip
QUICK_FILES = ("a recipe of nested tables", "a named pipe among pictures")


def surprises(trials, most, folder):
    return conduct(Section("", "", trials), folder, seed=1, seconds=600, most=most).surprises


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.heavy) for name in LONG)])
def test_nothing_is_silently_wrong(name, tmp_path):
    assert surprises(*(QUICK | LONG)[name], tmp_path) == []


@pytest.mark.heavy
@pytest.mark.parametrize("name", SLOW)
def test_what_dies_is_resumed_to_the_same_bits(name, tmp_path):
    assert surprises(*SLOW[name], tmp_path) == []


@pytest.mark.parametrize("name", QUICK_FILES)
def test_an_evil_file_is_refused(name, tmp_path):
    assert tried(tmp_path / "evil", FILES[name]) == REFUSED


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name in FILES if name not in QUICK_FILES])
def test_every_evil_file_is_refused(name, tmp_path):
    assert tried(tmp_path / "evil", FILES[name]) == REFUSED


# The campaign itself notices


def test_the_campaign_counts_a_surprise_and_goes_on(tmp_path):
    def crashes():
        raise ZeroDivisionError("x")

    def trials(folder, seed):
        made = {"a": lambda: SAME, "b": crashes, "c": lambda: "another", "d": lambda: REFUSED}
        yield from (Trial(name, make) for name, make in made.items())

    tally = conduct(Section("s", "", trials), tmp_path, 0, 60)
    assert (tally.same, tally.refused, tally.trials, tally.complete) == (1, 1, 4, True)
    assert tally.surprises == ["b: ZeroDivisionError: x", "c: another"]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (Answer(2, "", "unskew: result.json is damaged\n"), REFUSED),
        (Answer(2, "", "note: unsealed\nunskew: result.json is damaged\n"), REFUSED),
        (Answer(2, "", "unskew: something is damaged\n"), "the message does not name result.json"),
        (Answer(2, "", ""), "exit code 2 without a message"),
        (Answer(1, "", "Traceback …\nValueError: x"), "exit code 1"),
    ],
)
def test_a_refusal_is_one_message_that_names_the_file(answer, verdict):
    assert refusal(answer, "result.json").startswith(verdict)
