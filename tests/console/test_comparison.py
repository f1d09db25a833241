"""Several runs side by side: every format says the same."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from analysis.finished import command as unskew
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.report.table import compare, make_table, side_by_side
from unskew.runs.folder import json_bytes
from unskew.runs.result import Calibration, ClientSpread, Result, read_result, to_json

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
    *("run", "method", "data", "partition", "clients", "per_round", "rounds", "seed", "model", "emd"),
    *("accuracy", "loss", "MB up", "MB down", "seconds"),
]
REACHED = ["relative", "to 10 %", "to 50 %", "to 90 %"]

CENTRAL = replace(PLAIN, path=Path("runs/central"), partition="iid", clients=1, per_round=1, emd=0.0, accuracy=0.95)


def rounds(*accuracies, steps=10):
    """Lines of metrics.jsonl; a round without accuracy was not evaluated."""
    same = {"clients": 1, "examples": 1, "seconds": 0.1, "bytes_up": 1, "bytes_down": 1, "batches_max": steps}
    scores = [{} if accuracy is None else {"accuracy": accuracy, "loss": 1.0} for accuracy in accuracies]
    return [{"round": number, **same, **score} for number, score in enumerate(scores, 1)]


def compared(*results, metrics=None, **knobs):
    """Without metrics: runs whose metrics.jsonl is missing."""
    return side_by_side(results, [[]] * len(results) if metrics is None else metrics, **knobs)


def rows(found):
    return make_table(found, each=True).rows()


def as_text(found, form):
    return make_table(found, each=True).text(form)


def shown(*results, width=400, **knobs):
    out = io.StringIO()
    Console(file=out, width=width).print(make_table(compared(*results, **knobs), each=True).render(width))
    return out.getvalue()


def folder(path, result, metrics):
    path.mkdir()
    write_whole(path / "result.json", json_bytes(to_json(result)))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return str(path)


def test_a_row_holds_what_the_run_was_and_what_came_out():
    (row,) = rows(compared(PLAIN))
    assert list(row) == COLUMNS
    assert list(row.values()) == [
        *("runs/a", "fedavg", "digits", "dirichlet(alpha=0.1)", "10", "5", "20", "0", "tiny-cnn", "1.23"),
        *("91.23", "0.3041", "1.5", "3.0", "12.3"),
    ]


def test_every_calibration_that_any_run_has_is_a_column_and_those_without_are_blank():
    found = rows(compared(PLAIN, CALIBRATED, OTHER))
    names = ("ccvr", "oracle", "uscc")
    after, sent = [f"after {name}" for name in names], [f"MB up ({name})" for name in names]
    outcome = ["accuracy", *after, "loss", "MB up", *sent, "MB down", "seconds"]
    same = ["data", "partition", "clients", "per_round", "rounds", "model", "emd"]
    assert all(list(row) == ["method", "seed", *outcome, "run", *same] for row in found)
    assert all(bool(row[f"after {name}"]) == bool(row[f"MB up ({name})"]) for row in found for name in ("ccvr", "uscc"))
    assert [[row[key] for key in after] for row in found] == [["", "", ""], ["95.50", "100.00", ""], ["", "", "0.00"]]


@pytest.mark.parametrize("results", [[PLAIN], [CALIBRATED], [PLAIN, CALIBRATED, OTHER]])
def test_csv_parses_back_to_the_rows(results):
    found = compared(*results, metrics=[rounds(None, 0.4)] * len(results), baseline=CENTRAL)
    assert list(csv.DictReader(io.StringIO(as_text(found, "csv")))) == [
        {key: "" if text == "-" else text for key, text in row.items()} for row in rows(found)
    ]


@pytest.mark.parametrize("results", [[PLAIN], [PLAIN, CALIBRATED, OTHER]])
def test_markdown_has_a_head_a_rule_and_as_many_cells_in_every_line(results):
    found = compared(*results, metrics=[rounds(None, 0.4)] * len(results), baseline=CENTRAL)
    lines = [line.strip("|").split("|") for line in as_text(found, "markdown").split("\n")]
    head, rule, *body = [[cell.strip() for cell in line] for line in lines]
    same = [] if len(results) == 1 else ["data", "partition", "clients", "per_round", "rounds", "model", "emd"]
    assert head == [key for key in rows(found)[0] if key not in same]
    assert rule == ["---" if key in ("run", "method", "data", "partition", "model") else "---:" for key in head]
    plain = [[cell.replace("**", "") for cell in line] for line in body[: len(results)]]
    assert plain == [[row[key] for key in head] for row in rows(found)]
    below = " ".join(" ".join(line) for line in body[len(results) :])
    assert all(f"{key} {rows(found)[0][key]}" in below for key in same)
    assert bool(below.strip()) == bool(same)


SET = {"epochs": 5, "lr": 0.01, "augment": False}
OPTIONED = [
    replace(PLAIN, settings=SET),
    replace(PLAIN, path=Path("runs/d"), settings=SET | {"lr": 0.1, "augment": True}),
]


@pytest.mark.parametrize("form", ["csv", "markdown", "latex"])
def test_every_option_that_differs_is_a_column_and_what_is_the_same_is_not_among_them(form):
    text = as_text(compared(*OPTIONED), form)
    marks = {"csv": ",", "markdown": "|", "latex": "&"}
    head = next(line for line in text.split("\n") if "accuracy" in line)
    names = [word.strip(" \\") for word in head.strip("|").split(marks[form])]
    assert names[:3] == ["lr", "augment", "accuracy"]
    if form != "latex":  # its caption has the most important ones alone
        assert "epochs" in (names[-8:] if form == "csv" else text.split("\n")[-1])
        assert text.count("epochs") == 1
    assert "0.1" in text
    assert "True" in text


def test_a_run_that_lacks_an_option_leaves_its_cell_empty():
    found = rows(compared(OPTIONED[0], replace(PLAIN, path=Path("runs/old"))))
    assert [row["lr"] for row in found] == ["0.01", ""]


def test_latex_is_a_table_of_booktabs_with_a_caption_the_best_in_bold_and_its_signs_escaped():
    one = replace(PLAIN, method="50 % & more", accuracy=0.95)
    text = as_text(compared(one, replace(OTHER, seed=0)), "latex")
    assert "\\begin{tabular}{lrr}\n\\toprule\nmethod & accuracy & after uscc \\\\\n\\midrule\n" in text
    assert r"50 \% \& more & \textbf{95.00} &  \\" in text
    assert r"\caption{Accuracy in \% on the test set. Best in bold. In all rows: data digits, partition" in text
    lines = [line for line in text.split("\n") if line.endswith("\\\\")]
    assert {line.replace("\\&", "").count("&") for line in lines} == {2}
    assert len(lines) == 3


def test_the_best_of_a_column_is_bold_only_where_there_is_one():
    table = make_table(compared(PLAIN, CALIBRATED, replace(OTHER, loss=0.1)), each=True)
    assert (table.best("accuracy"), table.best("loss"), table.best("seconds")) == (set(), {2}, set())
    assert "**0.1000**" in table.text("markdown")


def test_columns_are_chosen_by_their_names_or_how_these_begin():
    found = compared(PLAIN, CALIBRATED)
    table = make_table(found, columns=["method", "after"])
    assert list(table.rows(table.shown)[0]) == ["method", "after ccvr", "after oracle"]
    assert table.text("csv").splitlines()[0] == "method,after ccvr,after oracle"
    with pytest.raises(UserError, match="--columns acuracy: there is no such column; did you mean 'accuracy'"):
        make_table(found, columns=["acuracy"])


def test_a_table_displays_itself_and_is_a_frame(tmp_path):
    paths = [folder(tmp_path / "a", PLAIN, rounds(0.1)), folder(tmp_path / "b", CALIBRATED, rounds(0.2))]
    table = compare(*paths)
    assert "95.50" in repr(table)
    assert "<b>20.00</b>" in table._repr_html_()  # at the first round
    assert "<td>95.50</td>" in table._repr_html_()
    frame = pytest.importorskip("pandas") and table.frame()
    assert list(frame["accuracy"]) == pytest.approx([91.234, 91.234])
    assert frame["after ccvr"].isna().tolist() == [True, False]
    again = compare(read_result(tmp_path / "a"), paths[1:])
    assert [one.result for one in again.runs] == [one.result for one in table.runs]
    with pytest.raises(UserError, match="an int cannot be compared"):
        compare(3)
    with pytest.raises(UserError, match="nothing to compare: give results"):
        compare()


def seeded(method, accuracies):
    return [
        replace(PLAIN, path=Path(f"runs/{method}/seed{seed}"), method=method, seed=seed, accuracy=accuracy)
        for seed, accuracy in enumerate(accuracies)
    ]


def test_the_table_ends_with_a_winner_only_where_the_seeds_support_one():
    clear = shown(*seeded("one", [0.5, 0.51, 0.52]), *seeded("two", [0.4, 0.42, 0.41]))
    assert "one is the clear winner: 51.00 ± 1.00% over 3 seeds" in clear
    unclear = shown(*seeded("one", [0.5, 0.41, 0.52]), *seeded("two", [0.4, 0.52, 0.41]))
    assert "No clear winner" in unclear
    single = shown(*seeded("one", [0.5]), *seeded("two", [0.4]))
    assert "Too few seeds to name a winner (one seed each): one 50.00%; two 40.00%." in single
    assert "ahead" not in unclear + single


def test_json_holds_the_whole_results():
    found = json.loads(as_text(compared(PLAIN, CALIBRATED), "json"))
    assert [row.pop("run") for row in found] == ["runs/a", "runs/b"]
    assert [row.pop("over_seeds")["seeds"] for row in found] == [[0], [1]]
    nothing = {f"accuracy_at_{unit}": {unit: None, "accuracy": None} for unit in ("round", "batch")}
    assert found == [to_json(PLAIN) | nothing, to_json(CALIBRATED) | nothing]
    assert found[1]["calibrations"][0] == {
        "name": "ccvr", "accuracy": 0.955, "loss": 0.2, "bytes_up": 12, "seconds": 0.5,
    }  # fmt: skip
    assert json.loads(as_text([], "json")) == []


@pytest.mark.parametrize(
    ("results", "head", "below"),
    [
        (OPTIONED, {"lr", "augment"}, "epochs 5"),
        ([PLAIN, CALIBRATED], {"method"}, "partition dirichlet(alpha=0.1); clients 10; per_round 5; rounds 20"),
    ],
)
def test_the_table_has_what_differs_and_shows_once_in_the_caption_what_all_runs_share(results, head, below):
    text = shown(*results)
    names = set(next(line for line in text.split("\n") if "accuracy" in line).split())
    assert head <= names
    assert not {"clients", "epochs"} & names
    assert text.count("digits") == text.count(below) == 1


def test_a_table_of_one_run_stands_upright_and_has_every_figure():
    text = shown(PLAIN)
    assert all(any(line.split()[1:2] == column.split()[:1] for line in text.split("\n")) for column in COLUMNS)


@pytest.mark.parametrize("name", ["runs/[old]", "runs/[/x]", "runs/[bold]b"])
def test_brackets_in_a_name_are_shown_as_they_are(name):
    assert name in shown(replace(PLAIN, path=Path(name)))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_drops_nothing_of_a_cell_whatever_the_width(width):
    long = replace(OTHER, path=Path("runs/a-long-name-that-somebody-chose"), rounds=30)
    metrics = [rounds(0.01, 0.2), rounds(0.5, None, 0.9, steps=2000)]
    text = shown(PLAIN, long, width=width, metrics=metrics, baseline=CENTRAL)
    assert "…" not in text
    assert max(len(line) for line in text.split("\n")) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_one_table_fits_and_names_the_columns_that_did_not(width):
    metrics = [rounds(0.01, 0.2), rounds(0.5, None, 0.9, steps=2000)]
    text = shown(PLAIN, CALIBRATED, width=width, metrics=metrics, baseline=CENTRAL)
    assert text.count("───") > 0
    lines = text.splitlines()
    head = next(line for line in lines if "accuracy" in line)
    assert head.split()[:3] == ["method", "seed", "accuracy"]
    hidden = " ".join(lines).partition("Not shown: ")[2].partition(";")[0]
    for name in ("after oracle", "acc@round 2", "acc@batch 20", *REACHED, "MB down", "seconds"):
        assert (f" {name} " in f"{head} ") != (name in hidden)


@pytest.mark.parametrize(
    ("second", "knobs", "cells"),
    [
        (rounds(0.5, 0.6, steps=14), {}, {"acc@round 2": ["20.00", "60.00"], "acc@batch 28": ["20.00", "60.00"]}),
        (
            rounds(None, 0.6),
            {"at_round": 1, "at_batch": 5860},
            {"acc@round 1": ["10.00", ""], "acc@batch 5,860": ["30.00", "60.00"]},
        ),
    ],
    ids=["where all came to", "chosen, before the first evaluation"],
)
def test_runs_of_different_length_are_compared_at_one_round_and_batch_count(second, knobs, cells):
    found = rows(compared(PLAIN, OTHER, metrics=[rounds(0.1, 0.2, 0.3), second], **knobs))
    assert {name: [row[name] for row in found] for name in cells} == cells


def test_a_figure_that_is_the_accuracy_again_is_hidden_in_the_table_and_other_formats_keep_it():
    results = [replace(PLAIN, accuracy=0.2), replace(OTHER, accuracy=0.6)]
    metrics = [rounds(0.1, 0.2), rounds(0.5, 0.6)]
    assert "acc@" not in shown(*results, metrics=metrics)
    assert "acc@round 2,acc@batch 20" in as_text(compared(*results, metrics=metrics), "csv")


def test_a_baseline_gives_relative_accuracy_and_the_rounds_to_shares_of_it():
    found = compared(PLAIN, metrics=[rounds(0.05, 0.1, None, 0.5)], baseline=CENTRAL)
    assert [rows(found)[0][key] for key in REACHED] == ["96.04", "2", "4", "-"]  # 0.91234 / 0.95; 0.095, 0.475, 0.855
    assert "| 96.04 | 2 | 4 | - |" in as_text(found, "markdown")
    assert ",96.04,2,4,,0.3041," in as_text(found, "csv")
    (whole,) = json.loads(as_text(found, "json"))
    assert whole["accuracy_at_round"] == {"round": 4, "accuracy": 0.5}
    assert whole["accuracy_at_batch"] == {"batch": 40, "accuracy": 0.5}
    assert whole["relative_accuracy"] == 0.91234 / 0.95
    assert whole["rounds_to"] == {"10": 2, "50": 4, "90": None}
    assert (whole["baseline"], whole["baseline_accuracy"]) == (str(Path("runs/central").absolute()), 0.95)
    without = compared(PLAIN, metrics=[rounds(0.1)])
    assert not set(REACHED) & set(rows(without)[0])
    assert not {"relative_accuracy", "rounds_to"} & set(json.loads(as_text(without, "json"))[0])


def test_a_runs_own_baseline_gives_way_to_another_and_runs_without_one_are_blank():
    stored = replace(PLAIN, baseline="/old", baseline_accuracy=0.5, relative_accuracy=2.0)
    (row,) = rows(compared(stored, metrics=[rounds(0.1)], baseline=CENTRAL))
    assert row["relative"] == "96.04"
    found = rows(compared(stored, OTHER, metrics=[rounds(0.2), rounds(0.2)]))
    assert [[row[key] for key in REACHED] for row in found] == [["182.47", "1", "-", "-"], ["", "", "", ""]]


def test_a_run_without_metrics_is_blank_and_holds_up_no_other():
    found = compared(PLAIN, OTHER, metrics=[[], rounds(0.2, 0.4)], baseline=CENTRAL)
    blank = ["acc@round 2", "acc@batch 20", *REACHED[1:]]
    assert [rows(found)[0][key] for key in blank] == [""] * 5
    assert [rows(found)[1][key] for key in blank] == ["40.00", "40.00", "1", "-", "-"]
    assert json.loads(as_text(found, "json"))[0]["accuracy_at_round"] == {"round": 2, "accuracy": None}


def test_a_baseline_on_other_data_is_refused_and_both_runs_are_named():
    message = r"runs/c \(digits\) and its baseline runs/central \(mnist\) use different data"
    with pytest.raises(UserError, match=message):
        compared(OTHER, baseline=replace(CENTRAL, data="mnist", data_sha256="d" * 64))


@pytest.mark.parametrize("accuracy", [0.0, float("nan"), float("inf"), -1.0])
def test_a_baseline_that_nothing_can_be_relative_to_is_refused(accuracy):
    with pytest.raises(UserError, match=r"the baseline of runs/a, .*runs/central, must have an accuracy above 0"):
        compared(PLAIN, baseline=replace(CENTRAL, accuracy=accuracy))
    with pytest.raises(UserError, match="the baseline of runs/a, /old, must have an accuracy above 0"):
        compared(replace(PLAIN, baseline="/old", baseline_accuracy=accuracy))


def test_the_command_compares_folders_with_a_baseline(capsys, tmp_path):
    a = folder(tmp_path / "a", PLAIN, rounds(0.1, 0.5, 0.91234))
    b = folder(tmp_path / "b", OTHER, rounds(None, 0.2))
    central = folder(tmp_path / "central", CENTRAL, rounds(0.95))
    _, text, _ = unskew(capsys, "compare", a, b, "--baseline", central, "--format", "csv", "--each")
    found = list(csv.DictReader(io.StringIO(text)))
    assert [[row[key] for key in ("acc@round 2", "acc@batch 20", *REACHED)] for row in found] == [
        ["50.00", "50.00", "96.04", "1", "2", "3"],
        ["20.00", "20.00", "96.04", "2", "", ""],
    ]
    Path(b, "metrics.jsonl").unlink()
    _, text, _ = unskew(capsys, "compare", a, b, "--at-round", "1", "--format", "csv", "--each")
    assert [row["acc@round 1"] for row in csv.DictReader(io.StringIO(text))] == ["10.00", ""]
    assert unskew(capsys, "compare", a, b)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--at-round", "0"], "--at-round 0: give a whole number of at least 1"),
        (["--at-round", "-3"], "--at-round -3: give a whole number of at least 1"),
        (["--at-batch", "0"], "--at-batch 0: give a whole number of at least 1"),
        (["--baseline", "nowhere"], "nowhere does not exist"),
    ],
)
def test_a_mistake_of_the_user_is_one_message(capsys, tmp_path, words, message):
    code, _, error = unskew(capsys, "compare", folder(tmp_path / "a", PLAIN, rounds(0.1)), *words)
    assert (code, error) == (2, f"unskew: {message}\n")


def test_accuracy_over_clients_has_the_worst_the_tenth_fairness_and_own_images_where_known():
    own = ClientSpread(3, 0, 0, 0.1, 0.2, 0.4, 0.6, 0.4, 0.4, 0.1, 0.75)
    told = replace(own, worst=0.3, p10=0.35, jain=0.9, own_images=own)
    made = replace(CALIBRATED.calibrations["ccvr"], clients_accuracy=replace(told, jain=0.98765, own_images=None))
    one, other = rows(compared(replace(CALIBRATED, clients_accuracy=told, calibrations={"ccvr": made}), PLAIN))
    names = ("worst", "p10", "fairness", "worst on own images")
    assert [one[name] for name in names] == ["30.00", "35.00", "0.900", "10.00"]
    assert (one["fairness (ccvr)"], one["worst on own images (ccvr)"]) == ("0.988", "")
    assert (other["worst"], other["fairness"], other["worst on own images"]) == ("", "", "")
    assert "worst on own images" not in rows(compared(replace(PLAIN, clients_accuracy=own)))[0]
