"""Every recipe: its texts fill in, its settings are possible, its values are the paper's, its runs are shared."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unskew.analysis import parse_measure
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.reproduce import recipe as recipe_module
from unskew.reproduce.cells import Variant, make_cells, name_training, select_cells
from unskew.reproduce.figures import KINDS
from unskew.reproduce.networks import few_examples
from unskew.reproduce.plan import plan_runs, select_part
from unskew.reproduce.recipe import SCALES, find_recipes, load_recipe, parse_value, recipe_names
from unskew.runs.config import OPTIONS, Config, checked

PAPER = Variant("paper")
ASKED = (
    [f"ccvr/table{n}" for n in (1, 2, 3, 4, 5)]
    + [f"ccvr/figure{n}" for n in range(1, 16)]
    + [f"hsu/table{n}" for n in (1, 2, 3, 4, 5)]
    + [f"hsu/figure{n}" for n in (1, 2, 3, "4a", "4b", 5, 6, 7, "8a", "8b", 9, 10)]
    + [f"fedeccr/table{n}" for n in (1, 2, 3, 4)]
    + ["fedeccr/figure2", "fedeccr/figure3", "fedeccr/costs", "fedeccr/features"]
    + ["others/flsim", "others/nvflare"]
)


def test_every_table_and_figure_is_there():
    assert set(ASKED) <= set(recipe_names())


def trainings(name, variant=PAPER):
    """The trainings behind a table, by name."""
    return {job.path.parent.name for job in plan_runs([(load_recipe(name), variant)])}


def cells_of(name):
    """The cells of a table at the paper's scale by row and column."""
    return {(cell.row.name, cell.column.name): cell for cell in make_cells(load_recipe(name), PAPER)}


def check_cells(name, scale, data):
    jobs = plan_runs([(load_recipe(name), Variant(scale, data))])
    assert jobs, f"nothing is done at {scale}"
    for job in jobs:
        checked(job.config)
        for text in job.measures:
            parse_measure(text)


@pytest.mark.parametrize("name", recipe_names())
def test_every_cell_can_be_run_as_published_and_on_the_digits(name):
    check_cells(name, "paper", "")
    check_cells(name, "smoke", "digits")


@pytest.mark.heavy
@pytest.mark.parametrize("name", recipe_names())
def test_every_cell_can_be_run_at_every_scale_on_all_data(name):
    for scale in SCALES:
        for data in ("", *load_recipe(name).stand_ins):
            check_cells(name, scale, data)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_where_its_values_are_from(name):
    one = load_recipe(name)
    assert one.title
    assert one.source
    assert one.paper.reference
    assert one.differences or one.paper.differences
    assert all(spec["kind"] in KINDS for spec in one.figures)
    assert "digits" in one.stand_ins
    names, columns = [row.name for row in one.rows], [column.name for column in one.columns]
    assert len(set(names)) == len(names)
    assert len(set(columns)) == len(columns)
    for row in one.rows:
        assert row.against in ("", *names, *(other.best_of for other in one.rows))
        assert set(row.keeps) <= set(OPTIONS)
        assert len(row.values) in (0, len(columns))
        assert set(row.by_column) <= set(columns)
    left_out = [text for part in one.stand_in.values() for text in part.left_out]
    assert [text for text in left_out if not any(each.startswith(text) for each in one.list_differences())] == []


def test_tables_share_their_trainings():
    assert trainings("ccvr/table3") < trainings("ccvr/table2")
    both = plan_runs([(load_recipe(name), PAPER) for name in ("ccvr/table2", "ccvr/table3")])
    assert len(both) == len(plan_runs([(load_recipe("ccvr/table2"), PAPER)]))
    fedavg = next(job for job in both if "fedavg-dirichlet-alpha-0.1-" in job.path.parent.name)
    assert len([name for name in fedavg.calibrations if name.startswith("ccvr")]) == 5  # M_c of 50 to 2000
    assert "oracle(paper=true)" in fedavg.calibrations


def test_other_data_may_have_more_at_a_scale_than_photographs_allow():
    """A drawn population trains in seconds: three seeds and all rows, where photographs have one seed and half."""
    one = load_recipe("hsu/table4")
    assert one.extent("small").seeds == (0,)
    assert one.extent("small", "population").seeds == one.extent("small", "frozen").seeds == (0, 1, 2)
    assert one.extent("small", "digits") == one.extent("small")  # it says nothing of that scale
    assert one.extent("smoke", "population") == one.extent("smoke")
    photographs, drawn = (make_cells(one, Variant("small", data)) for data in ("", "population"))
    photographs, drawn = ([cell for cell in some if cell.row.name != "Centralized"] for some in (photographs, drawn))
    assert {cell.config.rounds for cell in photographs} == {16}
    assert {cell.config.rounds for cell in drawn} == {400}
    assert {cell.reading.text for cell in drawn} == {"at-round(80)", "at-round(200)", "at-round(400)"}
    assert all(cell.done for cell in drawn)
    assert not all(cell.done for cell in photographs)


def test_a_training_is_named_by_all_that_decides_it_but_the_seed():
    name = name_training(Config())
    assert name_training(Config(seed=7, data_dir="/somewhere", during="norms", engine="pool")) == name
    assert name_training(Config(lr=0.02)) != name
    assert re.fullmatch(r"[a-z0-9.-]+", name_training(Config(method="fedavg + clsprox(mu=0.1)", clients=10)))


def test_each_part_has_its_own_runs_and_together_they_are_all():
    jobs = plan_runs([(load_recipe("ccvr/table2"), Variant("small"))])
    parts = [select_part(jobs, f"{place}/5") for place in range(1, 6)]
    assert sorted(job.path for part in parts for job in part) == sorted(job.path for job in jobs)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for wrong in ("0/4", "5/4", "1", "a/b", "-1/2", "1/0", ""):
        with pytest.raises(UserError, match="--cells"):
            select_part(jobs, wrong)


def test_rows_and_columns_may_be_chosen():
    one = load_recipe("ccvr/table2")
    asked = Variant("paper", rows=("FedAvg*",), columns=("alpha = 0.1",))
    chosen = select_cells(make_cells(one, asked), asked)
    rows = {f"{method}{after}" for method in ("FedAvg", "FedAvgM") for after in ("", " + CCVR", " + oracle")}
    assert {(cell.row.name, cell.column.name) for cell in chosen} == {(row, "α = 0.1") for row in rows}


def test_the_ccvr_papers_hyperparameters_are_its_table_8():
    cells = cells_of("ccvr/table2")
    assert cells["MOON", "α = 0.05"].config.method == "moon(mu=5)"
    assert cells["FedProx", "α = 0.05"].config.method == "fedprox(mu=0.01)"
    knobs = "relu=true, tukey=0.5"
    assert cells["FedAvg + CCVR", "α = 0.5"].after == f"ccvr(per_class=100, epochs=30, {knobs})"
    assert cells["FedAvgM + CCVR", "α = 0.5"].after == f"ccvr(per_class=100, epochs=50, {knobs})"
    assert cells["FedAvg + CCVR", "CIFAR-100"].after == f"ccvr(per_class=500, epochs=30, lr=1e-05, {knobs})"
    assert cells["FedAvg", "CINIC-10"].config.batch == 512
    config = cells["FedAvg", "α = 0.1"].config
    assert (config.rounds, config.epochs, config.lr, config.momentum, config.weight_decay) == (100, 10, 0.01, 0.9, 1e-5)


@pytest.mark.parametrize(
    ("name", "row", "column", "value"),
    [
        ("ccvr/table1", "FedAvg + clsnorm + clsprox", "α = 0.05", "52.39 ± 0.24"),
        ("ccvr/table2", "MOON + oracle", "CINIC-10", "73.38 ± 0.23"),
        ("ccvr/table3", "MOON + CCVR, M_c = 500", "α = 0.05", "55.02 ± 0.75"),
        ("ccvr/table4", "FedProx + CCVR", "N = 100", "59.04"),
        ("ccvr/table5", "FedProx + 100 samples a class", "α = 0.1", "63.21 ± 0.92"),
        ("hsu/table2", "User-120k, FedAvgM + FedVC", "50k batches", "54.6"),
        ("hsu/table3", "FedAvgM + FedVC, K = 100", "5k rounds", "57.2"),
        ("hsu/table4", "FedAvgM + FedIR, K = 100", "all layers, 5k", "65.9"),
        ("hsu/table1", "Landmarks-User-160k, two layers", "centralized accuracy", "40.27"),
        ("hsu/table3", "Centralized", "5k rounds", "57.9"),
        ("hsu/table5", "FedAvg, scratch, K = 10", "90 %", "> 50000"),
        ("hsu/table5", "FedAvgM, pretrained, K = 100", "90 %, times", "6.9"),
        ("fedeccr/costs", "first stage: prototypes", "CIFAR-10", "982.6"),
        ("fedeccr/table2", "FedECCR", "β = 0.1", "65.49 ± 0.2"),
        ("fedeccr/table3", "MOON", "100 clients", "62.99 ± 0.1"),
        ("fedeccr/table4", "FedProx + USCC", "CIFAR-10", "69.70"),
        ("fedeccr/figure3", "FedECCR", "CIFAR-10", "0.0809"),
        ("others/flsim", "SCAFFOLD", "Dirichlet 0.1", "79.92"),
        ("others/nvflare", "central", "α = 0.1", "88.76"),
    ],
)  # fmt: skip
def test_values_are_the_papers(name, row, column, value):
    assert str(cells_of(name)[row, column].paper) == value


def test_the_gains_that_the_ccvr_paper_prints_follow_from_the_values():
    """(↑ 4.13) and so on: a value that was mistyped would show."""
    printed = {"FedAvg + CCVR": [2.41, 4.13, 2.62, 0.35, 9.79], "FedProx + CCVR": [1.92, 3.67, 2.79, 0.30, 9.53],
               "FedAvgM + CCVR": [2.49, 3.42, 2.59, 0.28, 10.41], "MOON + CCVR": [0.81, 4.86, 5.69, 0.15, 3.75],
               "FedAvg + oracle": [3.89, 6.15, 5.20, 0.59, 13.27], "FedProx + oracle": [3.19, 5.70, 4.33, 0.37, 12.58],
               "FedAvgM + oracle": [4.30, 5.02, 5.13, 0.51, 12.42],
               "MOON + oracle": [1.57, 7.58, 8.23, 0.54, 7.71]}  # fmt: skip
    rows = {row.name: row for row in load_recipe("ccvr/table2").rows}
    for name, gains in printed.items():
        after, before = ([parse_value(v).mean for v in rows[row].values] for row in (name, rows[name].against))
        assert [round(a - b, 2) for a, b in zip(after, before, strict=True)] == gains


def test_values_are_read_as_papers_print_them():
    assert parse_value("68.62±0.77").deviation == 0.77
    assert (parse_value("> 50000").beyond, parse_value(57.9).mean) == (True, 57.9)
    assert parse_value("") is None
    for wrong in ("about 5", "5 ± x", "±", "1,5"):
        with pytest.raises(UserError, match="is not a value"):
            parse_value(wrong)


def test_tables_are_asked_for_by_name_paper_or_pattern():
    assert find_recipes(["hsu/figure4"]) == ["hsu/figure4a", "hsu/figure4b"]
    assert find_recipes(["fedeccr", "fedeccr/table1"])[0] == "fedeccr/table1"
    assert len(find_recipes(["fedeccr", "fedeccr/table1"])) == len(find_recipes(["fedeccr"]))
    assert find_recipes(["ccvr/figure1?"])[0] == "ccvr/figure10"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('title = "x"\nsource = "y"\nnonsense = 1', "nonsense"),
        ('title = "x"\nsource = "y"\n[[rows]]\nname = "a"\n[settings]\nrate = 1', "no option is called 'rate'"),
        ('title = "x"\nsource = "y"\n[scale.huge]', "matching regex '^(smoke|small|paper)$'"),
        ('title = "x"\nsource = "y"\n[stand_in.digits.scale.huge]', "matching regex"),
        ('title = "x"\nsource = "y"\n[stand_in.digits]\nseeds = [0]', "`seeds`"),
        ('title = "x"\nsource = "y"\ncolumns = ["nowhere"]', "no column"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_wrong_is_refused_by_name(text, said, tmp_path, monkeypatch):
    folder = tmp_path / "recipes" / "mine"
    folder.mkdir(parents=True)
    (folder / "paper.toml").write_text('reference = "r"\n[scale.smoke]\n[scale.small]\n[scale.paper]\n')
    (folder / "table1.toml").write_text(text)
    monkeypatch.setattr(recipe_module, "files", lambda _: Path(tmp_path))
    load_recipe.cache_clear()
    with pytest.raises(UserError, match=re.escape(said)):
        make_cells(load_recipe("mine/table1"), Variant("smoke"))


def test_table_5_has_a_baseline_for_each_start_and_weights_reach_the_pretrained_rows_alone():
    network = "mobilenet-v2(norm=group)"
    asked = Variant("paper", changes={"pretrained": "weights.pth", "model": network})
    cells = make_cells(load_recipe("hsu/table5"), asked)
    for cell in cells:
        start = "weights.pth" if "pretrained" in cell.row.name else None
        assert (cell.config.pretrained, cell.baseline.pretrained) == (start, start)
        assert (cell.config.model, cell.baseline.model) == (network, network)
        assert (cell.baseline.rounds, cell.baseline.method) == (100, "centralised")
        assert cell.config.evaluate_every == (1 if start else 10)
    trained = trainings("hsu/table5")
    assert len(trained & trainings("hsu/table1")) == 1  # centralized training from random weights is Table 1's run
    assert trained == trainings("hsu/figure9")


def test_the_photographs_tables_share_their_runs():
    names = ("table1", "table2", "table3", "table4", "figure4a", "figure5", "figure6", "figure7", "figure8a")
    plans = {name: trainings(f"hsu/{name}") for name in names}
    assert plans["table2"] <= plans["figure6"]
    assert len(plans["table1"] & plans["table2"] & plans["table3"] & plans["figure6"]) == 1  # Centralized
    assert len(plans["table1"] & plans["table4"]) == 2  # two layers and all
    assert len(plans["table2"] & plans["table3"]) == 3  # FedVC with K = 10 too
    assert plans["figure5"] <= plans["table3"] | plans["table4"]
    assert plans["figure7"] <= plans["table4"]
    assert plans["figure4a"] == plans["figure8a"]


def test_the_grid_of_appendix_a1_is_whole():
    rates, keeps = ([10 ** (n / 2) for n in range(low, 1)] for low in (-6, -5))
    for name in ("hsu/figure8a", "hsu/figure8b"):
        one = load_recipe(name)
        assert len(one.columns) == 8
        pairs = {(row.variables["rate"], row.variables["keep"]) for row in one.rows}
        assert len(pairs) == len(one.rows) == 42
        for rate in rates:
            for keep in keeps:
                assert any((a, b) == (pytest.approx(rate, 1e-3), pytest.approx(keep, 1e-3)) for a, b in pairs)


def test_at_the_papers_scale_all_seeds_share_one_partition_and_seed_0_is_the_run_without_the_option():
    for name in ("ccvr/table2", "fedeccr/table2", "ours/calibrations"):
        cell = make_cells(load_recipe(name), PAPER)[0]
        plain = replace(cell.config, partition_seed=None)
        assert cell.config.partition_seed == 0
        assert cell.training(0) == name_training(plain)
        assert cell.training(1) == cell.training(2) != name_training(plain)
        jobs = {job.config.seed: job.config for job in plan_runs([(load_recipe(name), PAPER)]) if job.config.rounds}
        assert [jobs[seed].partition_seed for seed in (0, 1, 2)] == [None, 0, 0]
        assert make_cells(load_recipe(name), Variant("small"))[0].config.partition_seed is None


def test_few_examples_leave_the_others_to_nobody():
    labels = np.repeat(np.arange(100), 50)
    client, again, other = (few_examples(labels, 10, Key(seed), examples=1000) for seed in (0, 0, 1))
    assert (client >= 0).sum() == 1000
    assert set(client.tolist()) == set(range(-1, 10))
    assert (client == again).all()
    assert (client != other).any()
