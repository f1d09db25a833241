"""A measure of one's own, in one file outside the package: from the command line, from Python, and when it is wrong."""

import importlib
import json
import re
import sys
from dataclasses import replace

import pytest

import unskew
from analysis.finished import changed, copied, done, finished_run, known, measured, refused
from unskew.analysis import Comparison, Measure
from unskew.analysis.measure import Choice, Column, Table
from unskew.charts import Bars, Chart
from unskew.core.errors import UserError
from unskew.report.write import make_report


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write a module that only this test can import; its name."""

    def write(code: str, name: str = "mine_in_a_test") -> str:
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return name

    yield write
    sys.modules.pop("mine_in_a_test", None)


def one_fact(**fields) -> str:
    """A module with a small measure, some of its fields replaced by other code."""
    whole = {
        "name": '"fact"', "values": "Fact", "take": "lambda run: Fact(0.5 + knob)", "draw": "draw",
        "findings": 'lambda values: [f"It is {values.fact}."]',
    } | fields  # fmt: skip
    inside = ", ".join(f"{name}={code}" for name, code in whole.items())
    return f"""
from dataclasses import dataclass
import torch
from unskew.extend import Bars, Chart, Line, Measure, Missing

@dataclass(frozen=True)
class Fact:
    fact: float

def draw(values):
    return [Chart("bar", "A bar", "One bar.", [Bars([0], [values.fact])])]

def nothing_there(run):
    raise Missing("this run has no facts")

def number():
    return 3

def fact(knob: int = 1):
    return Measure({inside})
"""


# By its name and as a value


def test_it_is_taken_and_drawn_from_the_command_line(run, capsys, mine):
    name = mine(one_fact())
    said = done(capsys, "analyse", run, f"{name}:fact", f"{name}:fact(knob=5)")
    assert re.search(rf"^{name}:fact: It is 1\.5\.$", said, re.M)
    files = {file.name for file in (run / "figures").iterdir()}
    assert files == {f"{name}-fact{knobs}{end}" for knobs in ("", "-knob-5") for end in (".json", "-bar.svg")}
    assert json.loads((run / "figures" / f"{name}-fact-knob-5.json").read_text())["values"] == {"fact": 5.5}


def test_it_is_a_section_of_the_report_after_the_others(run, capsys, mine):
    name = mine(one_fact(title='"A fact"'))
    assert "It is 1.5." in done(capsys, "report", run, "--only", f"{name}:fact", "--only", "skew")
    page = (run / "report.html").read_text()
    assert page.index('id="skew"') < page.index(">A fact</h2>") < page.index("One bar.")


def test_from_python_it_is_a_text_or_a_value(run, mine):
    name = mine(one_fact())
    text = f"{name}:fact(knob=5)"
    by_name = unskew.analyse(run, text)[text]
    measure = importlib.import_module(name).fact(knob=5)
    by_value = unskew.analyse(run, measure)["fact"]
    assert by_name.values.fact == by_value.values.fact == 5.5
    assert by_name.findings == by_value.findings
    assert [chart.name for chart in by_value.charts] == ["fact-bar"]
    _, made = make_report(run, only=[measure], out=run / "mine.html")
    assert [section.name for section in made.sections] == ["fact", "probabilities", "cost", "made"]


def test_its_values_are_stored_and_used_until_its_file_changes(run, mine):
    text = f"{mine(one_fact())}:fact"
    with finished_run(run) as opened:
        first = measured(opened, text)
        assert known(opened, text).values == first.values
        changed(run / "figures" / "mine_in_a_test-fact.json", lambda content: content.update(notes=["seen before"]))
        assert measured(opened, text, again=False).notes == ("seen before",)
        file = run.parent / "mine_in_a_test.py"
        file.write_text(file.read_text() + "\n# one more line\n")
        assert known(opened, text) is None
        assert measured(opened, text, again=False).notes == ()


# What a measure can say of itself


def a_measure(**fields) -> Measure:
    module = {}
    exec(compile(one_fact(), "fact", "exec"), {"__name__": "fact"} | module, module)
    values = module["Fact"]
    whole = {"name": "fact", "values": values, "take": lambda run: values(1.5)}
    return Measure(**(whole | fields))


def test_choices_and_tables_are_on_its_page_and_charts_have_its_name(run):
    chart = Chart("bar", "A bar", "One bar.", [Bars([0], [1])])
    table = Table("Facts", [Column("fact")], [["true"]])
    measure = a_measure(show=lambda run, values: [chart, Choice("kind", {"a": chart}), table])
    _, made = make_report(run, only=[measure], out=run / "page.html")
    bar, choice, shown = made.sections[0].elements
    assert bar.name == choice.options["a"].name == "fact-bar"
    assert shown is table


def test_it_compares_runs_if_it_says_how(run, finished, tmp_path):
    other = copied(finished, tmp_path, "other")
    alone = a_measure()
    with pytest.raises(UserError, match="--only fact: this measure cannot compare runs; these can: skew"):
        unskew.write_report(run, other, only=[alone], out=tmp_path / "both.html")
    together = Comparison(
        title="Facts", text="", draw=lambda runs: [Chart("facts", "Facts", ", ".join(runs), [Bars([0], [1])])],
        findings=lambda runs: [f"{len(runs)} facts."],
    )  # fmt: skip
    _, made = make_report(run, other, only=[replace(alone, compare=together)], out=tmp_path / "both.html")
    assert made.sections[-1].title == "Facts"
    assert made.sections[-1].elements[0].alt == "run, other"
    assert made.findings[-1] == "2 facts."


def test_a_run_that_lacks_something_is_said_on_the_page_and_by_analyse(run, capsys, mine):
    name = f"{mine(one_fact(take='nothing_there'))}:fact"
    assert "this run has no facts" in refused(capsys, "analyse", run, name)
    assert "not shown: fact: this run has no facts" in done(capsys, "report", run, "--only", name)


# When it is wrong

WRONG = {
    "take raises": ({"take": "lambda run: 1 / 0"}, r'(?s)take failed: ZeroDiv.*mine_in_a_test.py", line \d+'),
    "take gives something else": ({"take": "lambda run: 3"}, "take returns an int, but values is declared as Fact"),
    "draw gives no list": ({"draw": "lambda values: 3"}, "draw must return a list of Chart, not 3"),
    "draw gives words": ({"draw": "lambda values: ['a']"}, "draw must return a list of Chart, not"),
    "a chart cannot be drawn": (
        {"draw": "lambda values: [Chart('a', 'A', '', [Line([0], ['high'])])]"},
        "findings or draw failed: ",
    ),
    "two charts of one name": ({"draw": "lambda values: 2 * draw(values)"}, "two charts are named"),
    "findings is one text": ({"findings": "lambda values: 'It is so.'"}, "findings must return a list of str, not"),
    "findings raises": ({"findings": "lambda values: values[0]"}, "findings failed: TypeError"),
    "NaN in a list": ({"take": "lambda run: Fact([1, {'a': float('inf')}])"}, "a value is NaN or infinite"),
    "a tensor": ({"take": "lambda run: Fact(torch.zeros(2))"}, "values may contain only numbers, strings, lists"),
    "no dataclass": ({"values": "int"}, "values a dataclass"),
    "no function": ({"take": "3"}, "take, draw, findings and show functions"),
    "a name of two words": ({"name": "'two words'"}, "its name must be one lower-case word"),
    "an unknown field": ({"colour": "3"}, "fact raises TypeError: .*colour"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_with_it_is_one_message_and_nothing_is_stored(run, capsys, mine, how):
    fields, message = WRONG[how]
    name = mine(one_fact(**fields))
    error = refused(capsys, "analyse", run, f"{name}:fact")
    assert re.search(message, error), error
    assert f"{name}:fact" in error
    assert not list((run / "figures").glob("*.json")) if (run / "figures").exists() else True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine_in_a_test:facts", "cannot be imported"),
        ("no_such_module:fact", "cannot be imported"),
        ("mine_in_a_test:number", "it returns an int, not a Measure"),
        ("mine_in_a_test:fact(knobs=3)", "has no knob 'knobs'; did you mean 'knob'?"),
        ("mine_in_a_test:fact(knob=high)", "knob must be a whole number, not high"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(run, capsys, mine, text, message):
    mine(one_fact())
    assert message in refused(capsys, "analyse", run, text)


def test_a_value_may_not_take_the_name_of_a_measure_of_ours(run):
    with pytest.raises(UserError, match="measure skew: a built-in measure already has this name"):
        unskew.analyse(run, a_measure(name="skew"))
    with pytest.raises(UserError, match="returns an int, not a Measure"):
        unskew.analyse(run, 3)


def test_a_page_shows_a_measure_once(run):
    with pytest.raises(UserError, match=r"cka\(clients=3\): cka is already chosen"):
        unskew.write_report(run, only=["cka", "cka(clients=3)"])
    assert not (run / "report.html").exists()
