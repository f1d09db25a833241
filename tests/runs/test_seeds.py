"""Several seeds: a run folder each, kept where finished, resumed where begun, refused where something else is there."""

import pytest

import unskew
from analysis.finished import command, done, refused
from commands import flags
from observers import stop_after
from unskew.core.errors import UserError
from unskew.runs import config as configs
from unskew.runs import seeds as seeding
from unskew.runs.train import run

SMALL = {"rounds": 2, "epochs": 1, "clients": 3, "engine": "loop", "partition": "iid"}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return unskew.run_seeds(seeds="0-2", out=tmp_path_factory.mktemp("seeds") / "all", **SMALL)


def test_seeds_are_listed_or_counted():
    found = {"0,1,2": (0, 1, 2), "0-4": (0, 1, 2, 3, 4), "7": (7,), " 3 , 1-2 ": (3, 1, 2)}
    assert {text: seeding.parse_seeds(text) for text in found} == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((text, "is not a seed or a range") for text in ("", "a", "4-0")),
        ("0-99999", "give 1 to 1,000 different seeds"),
        ("1,1", "different seeds"),
        ("9" * 19, "--seed .*less than 2"),
        ([], "different seeds"),
        (["0"], "must be a whole number"),
        ([-1], "--seed -1: give 0 or more"),
    ],
)
def test_what_is_not_a_list_of_seeds_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        seeding.parse_seeds(given)


def test_each_run_is_that_of_its_seed_alone(three, tmp_path):
    assert [each.path.name for each in three.results] == ["seed0", "seed1", "seed2"]
    alone = run(out=tmp_path / "alone", seed=1, **SMALL)
    assert alone.weights_sha256 == three.results[1].weights_sha256
    assert len({each.partition_hash for each in three.results}) == 3  # the seed decides the partition too


def test_mean_and_sample_deviation_are_those_of_the_runs_and_unknown_values_do_not_count(three):
    values = [each.accuracy for each in three.results]
    mean = sum(values) / 3
    assert three.accuracy.mean == pytest.approx(mean)
    assert three.accuracy.deviation == pytest.approx((sum((value - mean) ** 2 for value in values) / 2) ** 0.5)
    assert "3 runs of fedavg" in repr(three)
    assert seeding.spread_over_seeds([0.5]).format() == "0.50"
    assert seeding.spread_over_seeds([0.5, None, float("nan")]).count == 1
    assert seeding.spread_over_seeds([None]) is None


def test_started_again_finished_runs_are_kept_and_a_new_seed_is_added(three):
    before = {each.path: (each.path / "result.json").stat().st_mtime_ns for each in three.results}
    plan = seeding.plan_runs(seeds=[0, 1, 2, 5], out=three.path, **SMALL)[0]
    assert plan.states == {**dict.fromkeys((0, 1, 2), seeding.FINISHED), 5: seeding.NEW}
    again = unskew.run_seeds(seeds=[2, 0], out=three.path, **SMALL)
    assert [each.seed for each in again.results] == [2, 0]
    assert before == {path: (path / "result.json").stat().st_mtime_ns for path in before}


def test_a_folder_with_runs_of_other_settings_is_refused_and_they_are_named(three):
    with pytest.raises(UserError, match=r"with other settings: lr is 0.01 there and 0.1 here; choose"):
        unskew.run_seeds(seeds="0,9", out=three.path, **SMALL, lr=0.1)
    assert not (three.path / "seed9").exists()


def test_an_interrupted_run_goes_on_and_ends_as_if_it_never_stopped(three, tmp_path):
    with pytest.raises(unskew.StopRun):
        unskew.run_seeds(seeds="0,1", out=tmp_path / "cut", observe=stop_after(1), **SMALL)
    plan = seeding.plan_runs(seeds="0,1", out=tmp_path / "cut", **SMALL)[0]
    assert plan.states == {0: seeding.BEGUN, 1: seeding.NEW}
    whole = unskew.run_seeds(seeds="0,1", out=tmp_path / "cut", **SMALL)
    assert [each.weights_sha256 for each in whole.results] == [each.weights_sha256 for each in three.results[:2]]


def test_without_a_folder_other_settings_get_another_one_and_the_same_ones_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = unskew.run_seeds(seeds=[0], **SMALL)
    assert one.path.name == "digits-fedavg"
    assert unskew.run_seeds(seeds=[0, 1], **SMALL).path == one.path
    other = seeding.plan_runs(seeds=[0], home=tmp_path, **SMALL | {"rounds": 3})[0]
    assert other.path.name == "digits-fedavg-2"


def test_a_recipe_lists_seeds(three, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('partition = "iid"\nrounds = 2\nepochs = 1\nclients = 3\nseeds = [0, 2]\n')
    assert seeding.plan_runs(recipe, out=three.path)[0].states == dict.fromkeys((0, 2), seeding.FINISHED)
    with pytest.raises(UserError, match=r"lists seeds for several runs; use unskew\.run_seeds, or give seed"):
        unskew.run(recipe)
    assert unskew.run(recipe, seed=1, out=tmp_path / "one").seed == 1
    for text in ("seeds = 3", "seed = 1\nseeds = [1, 2]"):
        recipe.write_text(text)
        with pytest.raises(UserError, match="give either seed for one run, or a list"):
            configs.read_recipe(recipe)


def test_the_command_trains_each_seed_and_ends_with_mean_and_deviation(three, capsys):
    said = done(capsys, "run", *flags(**SMALL), "--seeds", "0-2", "--out", three.path, "--report")
    assert "3 seeds, 3 finished already" in said
    assert three.accuracy.format(100) in said
    assert "3 runs compared" in (three.path / "report.html").read_text()
    assert "seed and seeds were both given" in refused(capsys, "run", "--seeds", "0", "--seed", "1")


def test_compare_takes_the_folder_and_shows_one_row_unless_each_is_asked_for(three, capsys):
    head, row = (line.split(",") for line in done(capsys, "compare", three.path, "--format", "csv").splitlines())
    cells = dict(zip(head, row, strict=True))
    assert (cells["n"], cells["seeds"], cells["run"]) == ("3", "0 1 2", str(three.path))
    assert cells["accuracy"] == f"{100 * three.accuracy.mean:.2f}"
    assert cells["accuracy ±"] == f"{100 * three.accuracy.deviation:.2f}"
    assert len(done(capsys, "compare", three.path, "--format", "csv", "--each").splitlines()) == 4


def test_folders_are_looked_into_and_what_is_not_finished_is_left_out(three, tmp_path, capsys):
    assert seeding.finished_runs([tmp_path, tmp_path / "nowhere"]) == ([tmp_path, tmp_path / "nowhere"], [])
    (tmp_path / "all" / "begun").mkdir(parents=True)
    (tmp_path / "all" / "begun" / "config.toml").write_text("")
    with pytest.raises(UserError, match=r"has no finished run; finish one with: unskew resume .*begun"):
        seeding.finished_runs([tmp_path / "all"])
    begun = three.path / "seed77"
    begun.mkdir()
    (begun / "config.toml").write_text("")
    try:
        found, left = seeding.finished_runs([three.results[0].path, three.path])
        assert [each.name for each in found] == ["seed0", "seed1", "seed2"]
        assert left == [begun]
        assert "1 run left out: not finished" in command(capsys, "compare", three.path)[2]
    finally:
        (begun / "config.toml").unlink()
        begun.rmdir()
