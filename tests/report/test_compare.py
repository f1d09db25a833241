"""Several runs side by side: every format says the same."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from unskew.report.compare import as_table, as_text, rows
from unskew.results import Calibration, Result, read_result, to_json
from unskew.runs import write_json

PLAIN = Result(
    path=Path("runs/a"), method="fedavg", data="digits", partition="dirichlet(alpha=0.1)", clients=10, per_round=5,
    rounds=20, seed=0, engine="loop", accuracy=0.91234, loss=0.30406, emd=1.2345, examples=1000, seconds=12.34,
    examples_per_second=81.0, bytes_up=1_540_000, bytes_down=3_050_000, weights_sha256="a" * 64, model="tiny-cnn",
    partition_hash="b" * 64, data_sha256="c" * 64,
)  # fmt: skip
CALIBRATED = replace(
    PLAIN,
    path=Path("runs/b"),
    method='fedavgm(0.9) + odd("a, b")',
    seed=1,
    calibrations={"ccvr": Calibration("ccvr", 0.955, 0.2, 12, 0.5), "oracle": Calibration("oracle", 1.0, 0.0, 0, 1.5)},
)
OTHER = replace(PLAIN, path=Path("runs/c"), seed=2, calibrations={"uscc": Calibration("uscc", 0.0, 9.0, 1, 1.0)})

COLUMNS = [
    *("run", "method", "data", "partition", "clients", "per_round", "rounds", "seed", "emd", "accuracy"),
    *("loss", "MB up", "MB down", "seconds"),
]


def shown(results, width=400):
    out = io.StringIO()
    Console(file=out, width=width).print(as_table(results))
    return out.getvalue()


def test_a_row_holds_what_the_run_was_and_what_came_out():
    (row,) = rows([PLAIN])
    assert list(row) == COLUMNS
    assert list(row.values()) == [
        *("runs/a", "fedavg", "digits", "dirichlet(alpha=0.1)", "10", "5", "20", "0", "1.23", "91.23"),
        *("0.3041", "1.5", "3.0", "12.3"),
    ]


def test_every_calibration_that_any_run_has_is_a_column_and_those_without_are_blank():
    found = rows([PLAIN, CALIBRATED, OTHER])
    after = ["after ccvr", "after oracle", "after uscc"]
    place = COLUMNS.index("accuracy") + 1
    assert all(list(row) == [*COLUMNS[:place], *after, *COLUMNS[place:]] for row in found)
    assert [[row[key] for key in after] for row in found] == [["", "", ""], ["95.50", "100.00", ""], ["", "", "0.00"]]


@pytest.mark.parametrize("results", [[PLAIN], [CALIBRATED], [PLAIN, CALIBRATED, OTHER]])
def test_csv_parses_back_to_the_rows(results):
    assert list(csv.DictReader(io.StringIO(as_text(results, "csv")))) == rows(results)


@pytest.mark.parametrize("results", [[PLAIN], [PLAIN, CALIBRATED, OTHER]])
def test_markdown_has_a_head_a_rule_and_as_many_cells_in_every_line(results):
    lines = [line.strip("|").split("|") for line in as_text(results, "markdown").split("\n")]
    head, rule, *body = [[cell.strip() for cell in line] for line in lines]
    assert head == list(rows(results)[0])
    assert set(rule) == {"---"}
    assert len(rule) == len(head)
    assert body == [list(row.values()) for row in rows(results)]


def test_a_bar_in_a_name_does_not_break_markdown():
    text = as_text([replace(PLAIN, path=Path("runs/a|b"))], "markdown")
    assert "| runs/a\\|b | fedavg |" in text


def test_json_holds_the_whole_results():
    found = json.loads(as_text([PLAIN, CALIBRATED], "json"))
    assert [row.pop("run") for row in found] == ["runs/a", "runs/b"]
    assert found == [to_json(PLAIN), to_json(CALIBRATED)]
    assert found[1]["calibrations"][0] == {
        "name": "ccvr", "accuracy": 0.955, "loss": 0.2, "bytes_up": 12, "seconds": 0.5,
    }  # fmt: skip
    assert json.loads(as_text([], "json")) == []


def test_a_result_comes_back_from_its_folder(tmp_path):
    for result in (PLAIN, CALIBRATED):
        write_json(tmp_path / "result.json", to_json(result))
        assert read_result(tmp_path) == replace(result, path=tmp_path)


def test_the_table_shows_once_in_the_caption_what_all_runs_share():
    text = shown([PLAIN, CALIBRATED])
    assert text.count("digits") == 1
    assert "data digits; partition dirichlet(alpha=0.1); clients 10; per_round 5; rounds 20" in text
    head = next(line for line in text.split("\n") if "accuracy" in line)
    assert "method" in head
    assert "clients" not in head


def test_a_table_of_one_run_stands_upright_and_has_every_figure():
    text = shown([PLAIN])
    assert all(any(line.split()[1:2] == column.split()[:1] for line in text.split("\n")) for column in COLUMNS)


def test_a_table_of_equal_runs_still_tells_them_apart():
    text = shown([PLAIN, replace(PLAIN, path=Path("runs/z"))])
    assert "runs/a" in text
    assert "runs/z" in text


@pytest.mark.parametrize("name", ["runs/[old]", "runs/[/x]", "runs/[bold]b"])
def test_brackets_in_a_name_are_shown_as_they_are(name):
    assert name in shown([replace(PLAIN, path=Path(name))])


def test_a_table_on_a_narrow_screen_drops_nothing_of_a_cell():
    folded = shown([PLAIN, replace(OTHER, path=Path("runs/a-long-name-that-somebody-chose"))], width=60)
    assert "…" not in folded
