"""A sweep: judged on validation images, resumable, the same in parallel, failures as results."""

import csv
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import unskew
from analysis.finished import command
from commands import flags
from unskew.core.errors import UserError
from unskew.runs import config as configs
from unskew.runs.config import Config
from unskew.sweeps import sweep as sweep_module
from unskew.sweeps.sweep import effective_rate, sweep
from unskew.sweeps.tasks import RunFailure, Task, run_task

SMALL = {"rounds": 1, "epochs": 1, "clients": 3, "partition": "iid", "engine": "loop", "jobs": 1}
OVER = ["lr=0.3,1000", "momentum=0,0.9"]


def weights(made):
    return {each.name: [getattr(run, "weights_sha256", run) for run in each.runs] for each in made.outcomes}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return unskew.sweep(over=OVER, out=tmp_path_factory.mktemp("sweep") / "all", **SMALL)


def test_a_setting_that_diverges_is_a_result_and_the_best_is_the_best(made):
    assert len(made.outcomes) == 4
    assert [each.failure for each in made.outcomes] == ["", "", "diverged", "diverged"]
    assert made.best.score.mean == max(each.score.mean for each in made.outcomes if each.score)
    assert made.ranked[-1].score is None


def test_the_test_images_are_never_used(made):
    for each in made.outcomes[:2]:
        assert each.runs[0].evaluated_on == "validation"
        assert each.runs[0].settings["validation"] == 0.15


def test_each_run_is_the_run_alone(made, tmp_path):
    options = {name: value for name, value in SMALL.items() if name != "jobs"}
    alone = unskew.run(out=tmp_path / "run", lr=0.3, momentum=0.9, validation=0.15, **options)
    assert alone.weights_sha256 == made.outcomes[1].runs[0].weights_sha256


def test_the_best_setting_is_a_recipe_without_validation(made, tmp_path):
    found = tomllib.loads((made.path / "best.toml").read_text())
    assert (found["lr"], found["momentum"]) == (0.3, made.best.values["momentum"])
    assert "validation" not in found
    assert configs.read(made.path / "best.toml").seed == 0
    assert unskew.run(made.path / "best.toml", out=tmp_path / "run").evaluated_on == "test"


def test_the_table_has_every_setting_best_first_with_its_effective_rate(made):
    rows = list(csv.DictReader((made.path / "table.csv").read_text().splitlines()))
    assert [row["failed"] for row in rows] == ["", "", "diverged", "diverged"]
    assert float(rows[0]["accuracy"]) >= float(rows[1]["accuracy"])
    assert {(row["lr"], row["momentum"], row["effective lr"]) for row in rows} == {
        ("0.3", "0", "0.3"), ("0.3", "0.9", "3"), ("1000", "0", "1000"), ("1000", "0.9", "1e+04"),
    }  # fmt: skip
    names = ["sweep-effective-rate", "sweep-lr", "sweep-lr-momentum", "sweep-momentum"]
    assert sorted(file.stem for file in (made.path / "figures").glob("*.svg")) == names


def test_started_again_nothing_is_trained_and_more_values_may_be_added(made, monkeypatch):
    asked = []
    monkeypatch.setattr(sweep_module, "run_tasks", lambda tasks, *rest: asked.append([task.path for task in tasks]))
    again = sweep(over=OVER, out=made.path, **SMALL)
    assert asked == [[]]
    assert weights(again) == weights(made)
    with pytest.raises(KeyError):  # the new setting's run was not done
        sweep(over=["lr=0.3,1000,0.1", OVER[1]], out=made.path, **SMALL)
    assert [path.parent.name for path in asked[1]] == ["lr-0.1_momentum-0", "lr-0.1_momentum-0.9"]


def test_an_interrupted_sweep_goes_on_and_ends_like_one_that_never_stopped(made, tmp_path, capsys, monkeypatch):
    whole = sweep_module.run_tasks

    def cut(tasks, jobs, done, progress):
        whole(tasks[:1], jobs, done, progress)
        raise KeyboardInterrupt

    words = ["sweep", "--over", OVER[0], "--over", OVER[1], *flags(**SMALL), "--out", tmp_path / "cut"]
    monkeypatch.setattr(sweep_module, "run_tasks", cut)
    code, _, error = command(capsys, *words)
    assert (code, error) == (
        130, f"unskew: interrupted; to continue, repeat the command with --out {tmp_path / 'cut'}\n",
    )  # fmt: skip
    monkeypatch.setattr(sweep_module, "run_tasks", whole)
    code, said, _ = command(capsys, *words)
    assert code == 0
    assert "best: lr 0.3, momentum" in said
    assert weights(sweep(over=OVER, out=tmp_path / "cut", **SMALL)) == weights(made)
    assert (tmp_path / "cut" / "table.csv").read_text() == (made.path / "table.csv").read_text()


@pytest.mark.parametrize(
    "changes", [{"epochs": 2}, {"validation": 0.2}, {"over": ["lr=0.3,1000", "batch=8,16"]}, {"trials": 3}]
)
def test_the_folder_of_another_sweep_is_refused(made, changes):
    before = (made.path / "sweep.json").read_bytes()
    with pytest.raises(UserError, match=r"contains a different sweep \(over lr=.*; momentum=0,0.9\)"):
        sweep(**{"over": OVER, "out": made.path, **SMALL, **changes})
    assert (made.path / "sweep.json").read_bytes() == before


def test_a_folder_of_something_else_or_with_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a sweep folder"):
        sweep(over=OVER, out=tmp_path, **SMALL)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "sweep.json").write_text('{"over": 3}')
    with pytest.raises(UserError, match="is damaged"):
        sweep(over=OVER, out=damaged, **SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"over": ["method=fedavg,fedavgn"]}, "with method fedavgn: .*no method is called 'fedavgn'"),
        ({"over": ["per_round=1,9"]}, "with per round 9: --per-round 9: there are only 3 clients"),
        ({"lr": 0.1}, "lr is both fixed and varied"),
        ({"validation": 0.0}, "a sweep never uses the test images"),
        ({"by": "ccvr", "method": "fedavg + lda"}, r"--by ccvr: fedavg \+ lda has only the calibrations \['lda'\]"),
        (
            {"over": ["method=fedavg,scaffold", "optimizer=sgd,adam"]},
            "with method scaffold, optimizer adam: scaffold n",
        ),
        ({"over": ["rounds=2,9", "schedule=constant,constant(warmup=5)"]}, "with rounds 2, schedule .*warm-up of 5"),
        ({"by": "speed"}, "no method is called 'speed'"),
        ({"trials": 0}, "--trials 0"),
        ({"seeds": "x"}, "is not a seed"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(tmp_path, changes, message):
    varied = " ".join(changes.get("over", ()))
    rest = {name: value for name, value in SMALL.items() if f"{name}=" not in varied}
    with pytest.raises(UserError, match=message):
        sweep(**{"over": OVER, "out": tmp_path / "new", **rest, **changes})
    assert not (tmp_path / "new").exists()


def test_seeds_are_averaged_and_one_failure_fails_the_setting(tmp_path, monkeypatch):
    found = unskew.sweep(over=["lr=0.3"], seeds=[0, 1], out=tmp_path / "two", by="loss", **SMALL)
    (only,) = found.outcomes
    losses = [run.loss for run in only.runs]
    assert only.score.mean == pytest.approx(sum(losses) / 2)
    assert only.score.count == 2
    assert "seeds = [0, 1]" in (found.path / "best.toml").read_text()
    half = type(only)(only.name, only.values, only.config, (only.runs[0], RunFailure("out of memory")), "loss")
    assert (half.score, half.failure) == (None, "out of memory")
    lost = replace(only, runs=(only.runs[0], replace(only.runs[1], loss=float("inf"))))
    assert (lost.score, lost.failure) == (None, "no finite loss")


def test_a_search_is_the_same_for_the_same_seed_and_goes_on(tmp_path):
    pytest.importorskip("optuna")
    over = ["lr=0.01..1 log", "epochs=1..2", "momentum=0,0.9"]
    options = {name: value for name, value in SMALL.items() if name != "epochs"}
    first = unskew.sweep(over=over, trials=2, out=tmp_path / "search", **options)
    assert all(0.01 <= each.values["lr"] <= 1 and each.values["epochs"] in (1, 2) for each in first.outcomes)
    more = sweep(over=over, trials=3, out=tmp_path / "search", **options)
    assert [each.values for each in more.outcomes[:2]] == [each.values for each in first.outcomes]
    assert len(more.outcomes) == 3
    with pytest.raises(UserError, match="contains a different sweep"):
        sweep(over=["lr=0.01..2 log", *over[1:]], trials=3, out=tmp_path / "search", **options)


@pytest.mark.heavy
def test_several_jobs_give_the_same_bits(made, tmp_path):
    """Two worker processes: the slow part is their start."""
    several = sweep(over=["lr=0.3,1000", "momentum=0.9"], out=tmp_path / "jobs", **{**SMALL, "jobs": 2})
    assert weights(several) == {name: weights(made)[name] for name in weights(several)}
    assert [each.failure for each in several.outcomes] == ["", "diverged"]
    about = json.loads((tmp_path / "jobs" / "sweep.json").read_text())
    assert list(about["diverged"]) == ["lr-1000_momentum-0.9/seed0"]


@pytest.mark.heavy
def test_a_process_that_dies_is_one_failure_and_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text(
        "import os\nfrom pathlib import Path\n\n"
        "def method():\n    if not Path('alive').exists():\n        os._exit(9)\n"
        "    return lambda algorithm: algorithm\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("alive").touch()
    told = []

    def finished(outcome, done, total):
        told.append(outcome.failure)

    options = {**SMALL, "jobs": 2, "over": ["lr=0.1,0.3"], "method": "deadly:method", "out": tmp_path / "sweep"}
    monkeypatch.setattr("unskew.sweeps.sweep._check_settings", lambda *_: Path("alive").unlink(missing_ok=True))
    sweep(finished=finished, **options)
    assert told == ["its process ended with exit code 9"] * 2
    monkeypatch.setattr("unskew.sweeps.sweep._check_settings", lambda *_: Path("alive").touch())
    assert sweep(**options).best is not None


@pytest.mark.parametrize(
    ("method", "rate", "momentum"),
    [
        ("fedprox(mu=0.1)", 0.2, "momentum 0.5"),
        ("fedavg(lr=0.5) + ccvr", 0.1, "momentum 0.5"),
        ("fedavgm", 2.0, "momentum 0.5, server's 0.9"),
        ("fedir + fedavgm(0.5, lr=2)", 0.8, "momentum 0.5, server's 0.5"),
        ("fedavgm(0.9, damped=true)", 0.2, "momentum 0.5, server's 0.9"),
    ],
)
def test_the_effective_rate_is_the_rate_over_one_minus_each_momentum(method, rate, momentum):
    assert effective_rate(Config(lr=0.1, momentum=0.5, method=method)) == (pytest.approx(rate), momentum)


def test_adam_has_no_momentum_and_other_servers_no_effective_rate():
    assert effective_rate(Config(lr=0.1, momentum=0.5, optimizer="adam")) == (0.1, "momentum 0")
    assert effective_rate(Config(method="fedyogi")) is None


def test_a_run_goes_on_with_the_work_options_of_now_and_a_full_disk_is_a_failure(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr("unskew.runs.train.resume", lambda path, observe, **work: seen.update(work))
    (tmp_path / "config.toml").touch()
    assert run_task(Task(Config(cache_dir="elsewhere", device="cpu"), tmp_path)) is None
    assert (seen["cache_dir"], seen["device"], seen["cache_memory"]) == ("elsewhere", "cpu", "1GB")

    def full(path, **_):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("unskew.runs.train.resume", full)
    failed = run_task(Task(Config(), tmp_path))
    assert "No space left" in failed.reason
    assert not failed.diverged
