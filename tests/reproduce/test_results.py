"""Ours beside the paper's: the difference, the agreement, the gain, what is missing, the files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from made_records import fill, record
from unskew.charts import Words
from unskew.core.errors import UserError
from unskew.reproduce.cells import RunView, Variant, make_cells, parse_reading
from unskew.reproduce.figures import draw_figures
from unskew.reproduce.plan import find_record
from unskew.reproduce.recipe import load_recipe, recipe_names
from unskew.reproduce.records import RunRecord, read_record, record_file, run_folder, write_failure
from unskew.reproduce.results import INSIDE, NEAR, OUTSIDE, read_table
from unskew.reproduce.tables import differences, facts, findings, write_index, write_table
from unskew.runs.config import Config
from unskew.sweeps.tasks import RunFailure, Task

PAPER = Variant("paper")


def written(result):
    return write_table(result, "unskew reproduce this")[0]


@pytest.fixture
def table(tmp_path):
    """CCVR's Table 1 as if our accuracies were 0.58, 0.59, 0.60 by seed, 0.05 more after calibration."""
    fill(tmp_path, "ccvr/table1", PAPER, lambda cell, seed: 0.58 + seed / 100, lambda cell, seed: 0.63 + seed / 100)
    return read_table(load_recipe("ccvr/table1"), PAPER, tmp_path)


def test_a_cell_is_the_mean_over_seeds_beside_the_papers(table):
    cell = table.cell("FedAvg", "α = 0.1")
    assert cell.format() == "59.00 ± 1.00"
    assert cell.difference == pytest.approx(59 - 58.55)
    assert str(cell.paper) == "58.55 ± 0.98"


@pytest.mark.parametrize(
    ("gap", "agreement"), [(0.97, INSIDE), (-0.97, INSIDE), (1.9, NEAR), (-1.9, NEAR), (2.1, OUTSIDE)]
)
def test_agreement_is_by_the_papers_deviation(gap, agreement, tmp_path):
    fill(tmp_path, "ccvr/table1", PAPER, lambda cell, seed: (58.55 + gap) / 100)
    assert read_table(load_recipe("ccvr/table1"), PAPER, tmp_path).cell("FedAvg", "α = 0.1").agreement == agreement


def test_without_the_papers_deviation_ours_is_the_measure(tmp_path):
    fill(tmp_path, "ccvr/table4", PAPER, lambda cell, seed: 0.5794 + (seed - 1) / 100)
    cell = read_table(load_recipe("ccvr/table4"), PAPER, tmp_path).cell("FedAvg", "N = 50")
    assert cell.paper.deviation is None
    assert cell.agreement == INSIDE
    alone = read_table(load_recipe("ccvr/table4"), Variant("paper", seeds=(1,)), tmp_path).cell("FedAvg", "N = 50")
    assert (alone.difference, alone.agreement) == (pytest.approx(0), "")  # one seed has no deviation


def test_other_data_are_not_judged(tmp_path):
    asked = Variant("paper", "digits")
    fill(tmp_path, "ccvr/table1", asked)
    result = read_table(load_recipe("ccvr/table1"), asked, tmp_path)
    assert all(cell.difference is None and not cell.agreement for cell in result.cells)
    assert "differences are not judged" in differences(result)[0]


def test_a_gain_is_paired_over_the_seeds_with_its_interval(table):
    gain = table.gain(table.cell("FedAvg + calibration (whole data)", "α = 0.1"))
    assert (gain.over, gain.paper, gain.ours) == ("FedAvg", pytest.approx(6.15), pytest.approx(5))
    assert gain.interval.low == pytest.approx(5) == gain.interval.high  # the same for each seed
    assert table.gain(table.cell("FedAvg", "α = 0.1")) is None


def test_what_is_missing_says_so(table, tmp_path):
    cell = table.cell("FedAvg + clsnorm", "α = 0.5").cell
    record_file(run_folder(tmp_path, cell.training(), 0)).unlink()
    write_failure(run_folder(tmp_path, cell.training(1), 1), RunFailure("NaN", diverged=True))
    again = read_table(load_recipe("ccvr/table1"), PAPER, tmp_path, {"cifar10": "no data: cifar10"})
    found = again.cell("FedAvg + clsnorm", "α = 0.5")
    assert found.missing == {0: "no data: cifar10", 1: "diverged"}
    assert list(found.values) == [2]
    assert any("Some seeds missing" in sentence for sentence in findings(again))


def test_the_files_tell_the_same(table, tmp_path):
    files = {file.suffix: file for file in written(table)}
    told = json.loads(files[".json"].read_text())
    cell = next(each for each in told["cells"] if (each["row"], each["column"]) == ("FedAvg", "α = 0.1"))
    assert (cell["ours"]["mean"], cell["by_seed"]["0"]) == pytest.approx((59, 58))
    assert cell["agreement"] == INSIDE
    assert cell["settings"]["partition"] == "dirichlet(alpha=0.1, cap=true)"
    markdown, page = files[".md"].read_text(), files[".html"].read_text()
    assert "59.00 ± 1.00" in markdown
    assert "(+0.45)](" in markdown
    assert '<td class="number inside" data-value="59.0"' in page
    for text in ("unskew reproduce this", "58.55 ± 0.98", "Ours is capped"):
        assert text in markdown
        assert text in page
    kept = record_file(run_folder(tmp_path, table.cell("FedAvg", "α = 0.1").cell.training(), 0))
    assert kept.samefile(files[".json"].parent / cell["runs"][0])


SOME = ("ccvr/table4", "ccvr/figure6", "ccvr/figure7", "fedeccr/figure3", "hsu/table5", "hsu/figure4a", "hsu/figure8a")


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.heavy) for name in recipe_names()]
)
def test_every_recipe_writes_its_files(name, tmp_path):
    one, asked = load_recipe(name), Variant("smoke", "digits")
    fill(tmp_path, name, asked)
    result = read_table(one, asked, tmp_path)
    assert all(file.stat().st_size for file in written(result))
    readings = ("accuracy", "relative", "gain")
    plain = [cell for cell in result.cells if cell.cell.reading.text.partition("(")[0] in readings]
    assert all(cell.values for cell in plain if cell.cell.done)


@pytest.mark.parametrize("name", ["ccvr/table2", "ccvr/figure6", "hsu/figure8a", "fedeccr/figure3"])
def test_a_table_is_written_before_anything_was_run(name, tmp_path):
    result = read_table(load_recipe(name), PAPER, tmp_path)
    assert all(cell.reason == "not run yet" for cell in result.cells)
    assert "not run yet" in written(result)[0].read_text()


def test_a_record_outlives_its_run_folder(tmp_path):
    config, norms = Config(rounds=4, seed=3), {"norms": {"server": [1.0, 3.0]}}
    made = record(tmp_path, config, 0.4, {"lda": 0.7}, silhouettes=[(2, 0.1), (4, 0.2)], measures=norms)
    found = read_record(run_folder(tmp_path, made.training, 3))
    assert isinstance(found, RunRecord)
    assert found.result == replace(made.result, path=run_folder(tmp_path, made.training, 3))
    assert (list(found.silhouettes), found.curve, found.measures) == (made.silhouettes, made.curve, made.measures)
    assert read_record(run_folder(tmp_path, made.training, 4)) is None
    for calibrations, measures, complete in ((("lda",), ("norms",), 1), (("ccvr",), (), 0), ((), ("cka",), 0)):
        task = Task(config, made.result.path, calibrations, measures)
        assert find_record(task) == (found if complete else None)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"unskew": 1}', '{"unskew": 99, "result": {}}', '{"unskew": 1, "result": {}, "curve": 1}'],
)
def test_a_damaged_record_is_one_message(content, tmp_path):
    file = record_file(run_folder(tmp_path, "one", 0))
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(UserError, match=r"seed0\.json"):
        read_record(run_folder(tmp_path, "one", 0))


def test_readings_read_what_they_say(tmp_path):
    norms = {"server": [1.0, 3.0], "calibrated": {"lda": [2.0, 2.0]}, "rounds": [{"asked": True, "correlation": 0.5}]}
    skew = {"sizes": [10, 30], "clients": 2, "total": [5, 0, 35], "counts": [[5, 0, 5], [0, 0, 30]], "ranked": {}}
    measures = {
        "norms": norms, "norms(round=0)": {**norms, "rounds": [{"asked": True, "correlation": 0.7}]}, "skew": skew,
        "cka(activated=true)": {"layers": ["conv1", "classifier"], "means": [0.9, 0.4]}, "separability": {"mean": 1.5},
        "features": {"shifts": [[1.0, 3.0]], "held": [[True, False]]}, "places": {"counts": [2, 3]},
    }  # fmt: skip
    config, silhouettes = Config(rounds=10), [(1, 0.1), (5, 0.4), (10, 0.3)]
    one = record(tmp_path, config, 0.5, {"lda": 0.7}, silhouettes=silhouettes, measures=measures)
    central = record(tmp_path, replace(config, method="centralised"), 0.8)
    central = replace(central, result=replace(central.result, seconds=8.0))

    def read(text, after="", run=one):
        return parse_reading(text).read(RunView(run, after, central))

    expected = {
        "accuracy": 50, "best": 50, "emd": 1.5, "places": 5, "separability": 1.5, "unevenness": 0.5,
        "at-round(4)": 20, "at-round(11)": None,  # the run ended before
        "at-batch(8)": 10, "at-batch(41)": None,  # four batches a round
        "rounds-to(10)": 2, "rounds-to(50)": 8, "rounds-ratio(50)": 4,  # half of 80 %
        "rounds-to(90)": None, "rounds-ratio(90)": None,
        "relative": 62.5, "relative(round=4)": 25, "seconds": 10, "extra-seconds": 2, "gain": None, "overhead": None,
        "silhouette": 0.3, "silhouette(best=true)": 0.4, "cka": 0.4, "cka(layer=conv1)": 0.9, "cka(layer=fc9)": None,
        "correlation": 0.5, "correlation(first=true)": 0.7,
        "skew(clients)": 2, "skew(classes)": 2, "skew(examples)": 40, "skew(imbalance)": 0.5, "skew(per-client)": 1.5,
        "features": 2, "features(held=true)": 1, "features(held=false)": 3,
    }  # fmt: skip
    assert {text: read(text) for text in expected} == pytest.approx(expected)
    after = {"accuracy": 70, "gain": 20, "overhead": 40, "seconds": 2, "unevenness": 0}
    assert {text: read(text, "lda") for text in after} == pytest.approx(after)
    assert read("accuracy", "ccvr") is None
    rising = [{"round": n, "accuracy": a, "batches_max": 1} for n, a in ((10, 0.1), (20, 0.4), (30, 0.3), (60, 0.7))]
    assert read("volatility", run=replace(one, curve=rising)) == pytest.approx(
        100 * ((0.2**2 + 0.25**2) / 2 / 1.5) ** 0.5
    )
    for wrong in ("nothing", "at-round", "at-round(x=1)", ""):
        with pytest.raises(UserError, match="reading"):
            parse_reading(wrong)


def test_a_run_without_what_is_read_has_no_value(tmp_path):
    one = record(tmp_path, Config(rounds=2), 0.5, curve=[])
    readings = "relative silhouette separability cka unevenness correlation best at-round(1) at-batch(1)"
    assert [text for text in readings.split() if parse_reading(text).read(RunView(one)) is not None] == []


def test_a_curve_relative_to_a_baseline_waits_for_the_baseline(tmp_path):
    asked = Variant("smoke", "digits")
    for cell in make_cells(load_recipe("hsu/figure9"), asked):
        if cell.done:
            record(tmp_path, cell.config, 0.5)
    assert draw_figures(read_table(load_recipe("hsu/figure9"), asked, tmp_path)) == []


def test_cells_of_a_figure_have_the_variables_of_their_rows():
    cells = make_cells(load_recipe("hsu/figure8a"), PAPER)
    assert {float(cell.variables["rate"]) for cell in cells} == {0.001, 0.003162, 0.01, 0.03162, 0.1, 0.3162, 1}
    one = next(cell for cell in cells if (cell.variables["rate"], cell.variables["keep"]) == (0.1, 0.1))
    assert (one.config.lr, one.config.method) == (0.01, "fedavgm(beta=0.9)")
    assert Path(one.training()).name == one.training()


def test_the_index_names_a_table_that_cannot_be_read(table, tmp_path):
    broken = written(table).pop().with_name("broken.json")
    broken.write_text("{")
    write_index(tmp_path)
    text = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert "[ccvr/table1](tables/paper/ccvr/table1.md)" in text
    assert "broken.json cannot be read" in text


@pytest.mark.parametrize(("data", "where"), [("", ""), ("digits", ", on data other than the paper's")])
def test_signs_of_gains_are_counted_on_all_data_and_what_the_seeds_support(data, where, tmp_path):
    asked = Variant("paper", data)
    noisy = {0: 0.01, 1: 0.2, 2: -0.15}  # a gain of two points on average, of which three seeds say nothing
    fill(tmp_path, "ccvr/table4", asked, lambda cell, seed: 0.5,
         lambda cell, seed: 0.6 if cell.column.name == "N = 10" else 0.5 + noisy[seed])  # fmt: skip
    said = " ".join(findings(read_table(load_recipe("ccvr/table4"), asked, tmp_path)))
    clear = "for 3 of these the 95 % interval over the seeds excludes zero."
    assert f"9 of 9 gains of one row over another have the paper's sign{where}; {clear}" in said


def test_gains_of_the_other_sign_are_counted_as_carefully(tmp_path):
    after = {"N = 10": 0.8, "N = 50": 0.6, "N = 100": 0.7}
    fill(tmp_path, "ccvr/table4", PAPER, lambda cell, seed: 0.7, lambda cell, seed: after[cell.column.name])
    said = " ".join(findings(read_table(load_recipe("ccvr/table4"), PAPER, tmp_path)))
    assert "3 of 6 gains of one row over another have the paper's sign; for 3 of these" in said
    assert "excludes zero, and for 3 of the 3 with the opposite sign." in said
    assert "in the paper or here: 3 pairs." in said
    assert "judged by the paper's ±, or ours where it gives none:" in said


def test_a_rate_that_diverges_everywhere_keeps_its_row_in_the_grid(tmp_path):
    asked = Variant("small")
    fill(tmp_path, "hsu/figure8b", asked)
    for cell in make_cells(load_recipe("hsu/figure8b"), asked):
        if cell.done and cell.variables["rate"] == 1:
            shutil.rmtree(record_file(run_folder(tmp_path, cell.training(), 0)).parent)
    (chart,) = draw_figures(read_table(load_recipe("hsu/figure8b"), asked, tmp_path))
    assert [name for _, name in chart.y.ticks] == ["1", "0.1"]
    assert sum(isinstance(mark, Words) and mark.text == "×" for mark in chart.marks) == 2


def test_seeds_are_those_that_were_run(tmp_path):
    one = load_recipe("ccvr/table4")
    assert dict(facts(read_table(one, PAPER, tmp_path)))["seeds"] == "none yet"
    cell = make_cells(one, PAPER)[0]
    record(tmp_path, replace(cell.config, seed=0), 0.5)
    assert dict(facts(read_table(one, PAPER, tmp_path)))["seeds"] == "0 (not yet 1, 2)"
    fill(tmp_path, "ccvr/table4", PAPER)
    assert dict(facts(read_table(one, PAPER, tmp_path)))["seeds"] == "0, 1, 2"


def test_a_chart_of_a_measure_has_the_calibrations_of_the_table_alone(tmp_path):
    asked = Variant("paper")
    cell = next(each for each in make_cells(load_recipe("ccvr/figure10"), asked) if each.after)
    norms = {"classes": ["a", "b"], "total": [1, 1], "server": [1.0, 2.0], "rounds": [], "counts": [], "clients": [],
             "calibrated": {"oracle(paper=true)": [1.0, 9.0], cell.after: [1.0, 1.0]}}  # fmt: skip
    record(tmp_path, cell.config, 0.5, {cell.after: 0.6}, measures={"norms(local=false)": norms})
    (chart,) = draw_figures(read_table(load_recipe("ccvr/figure10"), asked, tmp_path))
    assert "before 0.333, FedAvg + CCVR 0.000." in chart.alt
    assert "oracle" not in chart.alt


@pytest.mark.heavy
def test_of_candidates_the_table_shows_the_best_in_each_column(tmp_path):
    """Figure 4 is the best of Figure 8's grid: here the middle rate is best, and one column has the highest."""
    best = {"α = 100": 0.01, "α = 0": 1}

    def accuracy(cell, seed):
        return 0.6 if float(cell.variables["rate"]) == best.get(cell.column.name, 0.1) else 0.4

    fill(tmp_path, "hsu/figure4a", PAPER, accuracy)
    result = read_table(load_recipe("hsu/figure4a"), PAPER, tmp_path)
    assert len(result.cells) == 2 * 8
    for column, rate in best.items():
        one = result.cell("FedAvg", column)
        assert (one.cell.config.lr, one.format()) == (rate, "75.0")
    assert result.gain(result.cell("FedAvgM", "α = 1")).over == "FedAvg"
    assert "FedAvg, η_eff" not in "".join(str(row) for row in written(result)[0].read_text().splitlines()[:20])


COIN = "which a coin would give with a probability of 0.12: no evidence"


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ((0,), f". That is 3 of 3 trainings with 1 seed, {COIN}."),
        ((0, 1, 2), "; for 3 of these the 95 % interval over the seeds excludes zero."),
    ],
)
def test_signs_that_a_coin_would_give_are_no_evidence(seeds, said, tmp_path):
    asked = Variant("paper", seeds=seeds, rows=("FedAvg", "FedAvg + CCVR"))
    fill(tmp_path, "ccvr/table4", asked)
    for file in (tmp_path / "records").glob("*/*.json"):
        if "fedavg" not in file.parent.name:
            file.unlink()
    found = " ".join(findings(read_table(load_recipe("ccvr/table4"), asked, tmp_path)))
    assert f"3 of 3 gains of one row over another have the paper's sign{said}" in found
