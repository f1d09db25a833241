"""Runs that differ in the seed alone as one row, in every format."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
from rich.console import Console

from console.test_comparison import CENTRAL, PLAIN, compared, rounds, seeded
from unskew.report.table import group_by_setting, make_table
from unskew.runs.result import Calibration

ONE, TWO = seeded("one", [0.5, 0.51, 0.55]), seeded("two", [0.4])
BOTH = compared(*ONE, *TWO)


def test_runs_of_one_setting_are_one_row_with_mean_deviation_and_how_many():
    one, two = make_table(BOTH).rows()
    assert (one["run"], one["n"], one["accuracy"]) == ("runs/one", "3", f"52.00 ± {stdev([50, 51, 55]):.2f}")
    assert (two["run"], two["n"], two["accuracy"]) == ("runs/two/seed0", "1", "40.00")
    assert "seed" not in one
    assert one["seeds"] == "0 1 2"


def test_what_is_the_same_in_all_rows_is_behind_them():
    sheet = make_table(BOTH)
    assert "data" in sheet.same
    assert "method" not in sheet.same
    assert sheet.columns[-len(sheet.same) :] == sheet.same


@pytest.mark.parametrize("changes", [{"path": Path("runs/copy")}, {"seed": 1, "data_sha256": "e" * 64}])
def test_the_same_seed_twice_or_other_data_under_the_same_name_are_not_one_setting(changes):
    assert group_by_setting(compared(PLAIN, replace(PLAIN, **changes))) == [[0], [1]]


def test_a_calibration_that_some_runs_lack_says_of_how_many_it_is():
    runs = seeded("one", [0.5, 0.6, 0.7])
    after = {"ccvr": Calibration("ccvr", 0.8, 0.1, 10, 1.0)}
    runs[0], runs[2] = (replace(each, calibrations=after) for each in (runs[0], runs[2]))
    assert make_table(compared(*runs)).rows()[0]["after ccvr"] == "80.00 ± 0.00 (2 of 3)"


def test_rounds_to_a_share_are_averaged_over_the_runs_that_reached_it():
    metrics = [rounds(0.05, 0.5), rounds(0.5, 0.5), rounds(0.5, 0.95)]
    (row,) = make_table(compared(*ONE, metrics=metrics, baseline=CENTRAL)).rows()
    assert row["to 50 %"] == "1.3 ± 0.6"
    assert row["to 90 %"] == "2.0 (1 of 3)"
    (never,) = make_table(compared(*ONE, metrics=[rounds(0.1)] * 3, baseline=CENTRAL)).rows()
    assert never["to 90 %"] == "-"


def test_csv_has_the_deviation_in_a_column_behind_the_mean():
    lines = list(csv.DictReader(io.StringIO(make_table(BOTH).text("csv"))))
    assert [line["accuracy"] for line in lines] == ["52.00", "40.00"]
    assert [line["accuracy ±"] for line in lines] == [f"{stdev([50, 51, 55]):.2f}", ""]
    head = list(lines[0])
    assert head.index("accuracy ±") == head.index("accuracy") + 1
    assert not any("±" in cell for line in lines for cell in line.values())


@pytest.mark.parametrize(("form", "sign"), [("markdown", "52.00 ± 2.65"), ("latex", r"52.00 $\pm$ 2.65")])
def test_other_formats_write_the_sign(form, sign):
    text = make_table(BOTH).text(form)
    assert sign in text
    assert len({line.count("&") for line in text.splitlines() if line.endswith("\\\\")}) <= 1


def test_json_keeps_a_record_for_each_run_and_adds_what_its_setting_comes_to():
    found = json.loads(make_table(BOTH).text("json"))
    assert [each["run"] for each in found] == [str(one.path) for one in (*ONE, *TWO)]
    told = found[0]["over_seeds"]
    assert told == found[2]["over_seeds"]
    assert told["accuracy"] == {
        "mean": pytest.approx(0.52),
        "deviation": pytest.approx(stdev([0.5, 0.51, 0.55])),
        "n": 3,
    }
    assert (told["seeds"], found[3]["over_seeds"]["accuracy"]["deviation"]) == ([0, 1, 2], None)


def test_the_table_fits_the_terminal():
    out = io.StringIO()
    Console(file=out, width=80).print(make_table(BOTH).render(80))
    assert "52.00 ± 2.65" in out.getvalue()
    assert "…" not in out.getvalue()
