"""unskew reproduce from end to end, on the digits: trains once, goes on, is spread, is shown again from records."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import unskew
from analysis.finished import done, refused
from unskew.console.main import main
from unskew.reproduce import plan as carrying
from unskew.reproduce.cells import Variant, name_training
from unskew.reproduce.plan import (
    DataSize,
    Speeds,
    count_examples,
    do_runs,
    estimate_all,
    explain_missing_data,
    find_missing_data,
    find_record,
    find_size,
    plan_runs,
)
from unskew.reproduce.recipe import load_recipe, recipe_names
from unskew.reproduce.records import RunRecord, read_record, run_folder
from unskew.runs.config import Config
from unskew.runs.result import read_result
from unskew.sweeps.tasks import Task

TABLE = ("fedeccr/costs", "--data", "digits", "--jobs", "1")
SMALL = Config(rounds=2, epochs=1, clients=3, partition="iid", engine="loop", batch=64)


def planned(out, config, *more):
    return Task(config, run_folder(out, name_training(config), config.seed), *more)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The smallest table, reproduced once for all tests that look at it."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["reproduce", *TABLE, "--out", str(out)])
    return out


def test_a_table_is_reproduced_on_the_digits_and_says_what_it_is(made, capsys):
    out = done(capsys, "reproduce", *TABLE, "--out", made)
    assert "2 runs, 2 already done" in out
    for words in ("fedeccr/costs", "Known differences", "scikit-learn's digits", "rounds 3 instead of 100"):
        assert words in out
    folder = made / "tables" / "smoke-digits" / "fedeccr"
    told = json.loads((folder / "costs.json").read_text())
    assert [cell["by_seed"].keys() == {"0"} for cell in told["cells"]] == [True] * 5
    for cell in told["cells"]:
        assert (folder / cell["runs"][0]).is_file()
        assert cell["runs"][0].endswith("report.html")


def test_one_training_serves_all_cells_and_equals_the_run_alone(made, tmp_path):
    trained = sorted(path.name for path in (made / "runs").iterdir())
    assert len(trained) == 2
    jobs = plan_runs([(load_recipe("fedeccr/costs"), Variant("smoke", "digits"))])
    job = next(job for job in jobs if job.calibrations)
    found = read_result(made / "runs" / job.path.parent.name / "seed0")
    settings = {name: value for name, value in vars(job.config).items() if value is not None}
    settings |= {"method": f"{job.config.method} + uscc", "out": tmp_path / "alone", "engine": "loop"}
    alone = unskew.run(**settings)
    assert alone.weights_sha256 == found.weights_sha256
    assert alone.calibrations["uscc"].accuracy == found.calibrations["uscc"].accuracy


def test_a_part_trains_its_own_runs_alone(tmp_path, capsys):
    out = done(capsys, "reproduce", *TABLE, "--cells", "2/2", "--set", "rounds=1", "--out", tmp_path)
    assert "1/1" in out
    assert len(list((tmp_path / "records").iterdir())) == 1
    assert "not run yet" in out
    assert "Changed by --set: rounds = 1" in out


def test_without_data_one_message_says_how_to_get_them_or_to_do_without(tmp_path, capsys):
    err = refused(capsys, "reproduce", "ccvr/table2", "--out", tmp_path / "out")
    assert "unskew data fetch cifar10 --data-dir DIR" in err
    assert "unskew reproduce ccvr/table2 --scale smoke --out" in err
    assert "--data digits" in err
    assert not (tmp_path / "out" / "runs").exists()
    err = refused(capsys, "reproduce", "hsu/table2", "--scale", "paper")
    assert "inaturalist must be downloaded by hand" in err
    assert "--data population" in err


def test_data_that_are_partly_there_are_used(tmp_path):
    (tmp_path / "cinic10" / "train" / "airplane").mkdir(parents=True)
    missing = find_missing_data(["cifar10", "cinic10", "digits", "mine:data", "table:x.csv"], str(tmp_path))
    assert list(missing) == ["cifar10"]
    assert "unskew data fetch cifar10" in explain_missing_data(["cifar10"], "unskew reproduce x", ["digits"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ccvr/tabel2",), "ccvr/table2"),
        (("ccvr/table2", "--scale", "big"), "smoke"),
        ((*TABLE, "--cells", "3/2"), "--cells"),
        ((*TABLE, "--rows", "nothing"), "no such rows"),
        ((*TABLE, "--columns", "nothing"), "no such columns"),
        ((*TABLE, "--seeds", "x"), "is not a seed"),
        ((*TABLE, "--set", "rate=1"), "no option is called 'rate'"),
        ((*TABLE, "--set", "lr=1,2"), "give a single value"),
        (("--claim", "--out", "nowhere"), "no results to compare"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "reproduce", *words)


def test_interrupted_it_goes_on_where_it_stopped(tmp_path, monkeypatch):
    jobs = [planned(tmp_path, replace(SMALL, checkpoint_seconds=0.0), ("lda",), ("skew",))]

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        do_runs(jobs, at_once=1, progress=interrupt)
    path = jobs[0].path
    assert (path / "checkpoint").exists()
    assert not (path / "result.json").exists()
    begun = []
    monkeypatch.setattr(carrying, "write_report", lambda path, only: begun.append(only))
    assert do_runs(jobs, at_once=1) == {}
    found = read_record(jobs[0].path)
    assert isinstance(found, RunRecord)
    assert list(found.result.calibrations) == ["lda"]
    assert list(found.measures) == ["skew"]
    assert begun == [("skew", "curves")]
    settings = {name: value for name, value in vars(SMALL).items() if value is not None}
    whole = unskew.run(out=tmp_path / "whole", **settings)
    assert found.result.weights_sha256 == whole.weights_sha256
    assert find_record(jobs[0]) == found


def test_more_calibrations_are_added_to_a_run_that_is_there(tmp_path):
    one = planned(tmp_path, SMALL)
    do_runs([one], at_once=1)
    before = read_record(one.path)
    more = planned(tmp_path, SMALL, ("lda",))
    assert find_record(more) is None
    do_runs([more], at_once=1)
    after = read_record(one.path)
    assert after.result.weights_sha256 == before.result.weights_sha256
    assert list(after.result.calibrations) == ["lda"]
    assert find_record(one) == after  # what has more is enough


def test_a_run_that_is_repeated_keeps_the_calibrations_of_its_record(tmp_path):
    one = planned(tmp_path, SMALL, ("lda",))
    do_runs([one], at_once=1)
    shutil.rmtree(tmp_path / "runs")
    do_runs([planned(tmp_path, SMALL, (), ("skew",))], at_once=1)
    found = read_record(one.path)
    assert list(found.result.calibrations) == ["lda"]
    assert list(found.measures) == ["skew"]


def test_a_run_that_diverges_is_written_down_and_not_tried_again(tmp_path):
    job = planned(tmp_path, replace(SMALL, lr=1e6))
    failures = do_runs([job], at_once=1)
    assert failures[job.path].diverged
    assert find_record(job).diverged


def test_a_measure_that_cannot_be_taken_is_said_and_the_rest_is_kept(tmp_path):
    job = planned(tmp_path, SMALL, ("lda",), ("cka(clients=1)",))
    failures = do_runs([job], at_once=1)
    assert "two clients" in failures[job.path].reason
    found = read_record(job.path)
    assert "two clients" in found.failure
    assert "lda" in found.result.calibrations


def test_times_are_counted_from_what_is_trained():
    size = find_size("cifar10")
    assert size == DataSize(50_000, 10_000, 10, (3, 32, 32))
    assert count_examples(Config(rounds=100, epochs=10, clients=10), size) == 50_000_000
    assert count_examples(Config(rounds=10, epochs=1, clients=100, per_round=10), size) == 50_000
    assert count_examples(Config(rounds=10, method="fedavg + fedvc(size=256)", per_round=10), size) == 25_600
    assert find_size("inaturalist(size=299)").shape == (3, 299, 299)
    assert find_size("table:mine.csv") is None
    assert find_size("cifar100", "unskew.reproduce.networks:few_examples(examples=1000, alpha=0.5)").train == 1000
    assert find_size("unskew.data.synthetic_set:population(users=5, examples=70)").train == 70


def test_a_frozen_part_is_counted_once_for_all_runs(monkeypatch):
    monkeypatch.setattr(carrying, "time_example", lambda *_: 0.001)
    monkeypatch.setattr(carrying, "count_at_once", lambda config: 1)

    def estimate(*changes):
        base = Config(data="cifar10", model="simple-cnn", rounds=1, epochs=1)
        return estimate_all([Task(replace(base, **one), Path("x")) for one in changes], Speeds(lambda *_: None))

    assert 50 < estimate({}) < 70
    assert estimate({"method": "moon(mu=1)"}) > 1.5 * estimate({})
    assert estimate({"data": "table:mine.csv"}) is None
    frozen, other = {"train": "classifier"}, {"train": "last(2)"}
    assert 20 < estimate(frozen) < estimate(frozen, frozen) < 25 < 40 < estimate(frozen, other)


def test_the_list_has_every_table_with_what_it_takes(capsys, monkeypatch):
    monkeypatch.setattr("unskew.reproduce.plan.time_example", lambda *_: 0.001)
    monkeypatch.setenv("COLUMNS", "200")
    out = done(capsys, "reproduce")
    for name in recipe_names():
        assert name in out
    assert "days" in out
    assert "cifar10" in out.partition("Not on this machine:")[2]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "data"),
    [
        *((name, "digits") for name in recipe_names() if name not in ("fedeccr/costs", "hsu/figure1")),
        *((name, "population") for name in ("hsu/figure1", "hsu/table2", "hsu/table5", "hsu/figure6")),
    ],
)
def test_every_table_is_reproduced_on_other_data(name, data, tmp_path, capsys):
    out = done(capsys, "reproduce", name, "--data", data, "--out", tmp_path)
    assert "not run yet" not in out
    assert "failed" not in out
