"""Runs without rounds, and runs that start from the classifier of a calibration."""

import json

import pytest
import torch
from torch import nn

import unskew
from analysis.finished import done, metrics, refused
from unskew.calibration.federated import Gathering
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.round.driver import Metrics
from unskew.runs.execute import Calibrated, InitialModel
from unskew.runs.finished import FinishedRun

SMALL = {"data": "digits", "clients": 5, "epochs": 1, "engine": "loop", "lr": 0.0001}


def run(out, **options):
    return unskew.run(out=out, **{**SMALL, **options})


def told(path):
    """All of a result that a repetition must have too: no seconds, no place."""
    values = json.loads((path / "result.json").read_text())
    for row in (values, *values["calibrations"], values.get("start", {})):
        row.pop("seconds", None)
        row.pop("examples_per_second", None)
    return values


def without_bias(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes, bias=False))


class Stop(Exception):
    pass


def stopping_at(kind):
    def watch(event):
        if isinstance(event, kind):
            raise Stop

    return watch


# no rounds


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("untrained") / "run", rounds=0, method="fedavg + lda + ridge")


def test_a_run_of_0_rounds_evaluates_and_calibrates_the_initial_model(untrained):
    images = unskew.load(untrained.path)
    initial = FinishedRun(untrained.path)
    state = initial.state(0)
    assert untrained.rounds == untrained.examples == untrained.bytes_up == untrained.bytes_down == 0
    assert torch.equal(images.classifier.weight, state.tensors["params/classifier.weight"])
    assert untrained.accuracy < 0.3 < 0.8 < untrained.calibrations["lda"].accuracy
    assert untrained.calibrations["ridge"].bytes_up > 0
    assert (untrained.path / "metrics.jsonl").read_bytes() == b""
    assert untrained.history == []
    initial.close()


def test_all_that_reads_a_run_reads_one_without_rounds(untrained, tmp_path, capsys):
    assert "after ridge" in untrained._repr_html_()
    assert "0 rounds" in str(untrained)
    path = untrained.path
    other = run(tmp_path / "trained", rounds=1, method="fedavg + lda")
    for form in ("table", "markdown", "csv", "latex", "json"):
        done(capsys, "compare", path, other.path, "--format", form)
    done(capsys, "check", path)
    done(capsys, "analyse", path, "norms", "confusion")
    done(capsys, "report", path, "--only", "curves", "--only", "skew", "--out", tmp_path / "one.html")
    done(capsys, "report", path, other.path, "--out", tmp_path / "two.html")
    assert "there is no curve" in (tmp_path / "one.html").read_text()
    assert "the run has no rounds (--rounds 0)" in refused(capsys, "analyse", path, "curves")


@pytest.mark.parametrize("kind", [Gathering, Calibrated])
def test_stopped_while_it_calibrates_a_run_of_0_rounds_resumes_to_the_same(untrained, tmp_path, kind):
    with pytest.raises(Stop):
        run(tmp_path / "run", rounds=0, method="fedavg + lda + ridge", observe=stopping_at(kind))
    unskew.resume(tmp_path / "run")
    wanted = told(untrained.path)
    wanted["calibrations"] = [row for row in wanted["calibrations"] if row["name"] in ("lda", "ridge")]
    assert told(tmp_path / "run") == wanted


# a start


STARTED = {"rounds": 3, "start": "ridge", "method": "moon + fedavgm(0.5) + prototypes"}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    events = []
    return run(tmp_path_factory.mktemp("started") / "run", **STARTED, observe=events.append), events


def test_training_starts_from_the_calibrated_classifier_of_the_initial_model(started):
    result, events = started
    with FinishedRun(result.path) as seen:
        first = seen.state(0)
        side = seen.side
        side.load(first.tensors, training=False)
        with torch.no_grad():
            images, labels = side.train.batch(torch.arange(len(side.labels)))
            features = side.network.encoder(images)
        pooled = ClassStatistics.of_features(features, labels, 10, "shared")
        wanted = unskew.calibrate(side.network.classifier, pooled, "ridge").head
    assert torch.allclose(first.tensors["params/classifier.weight"], wanted.weight, rtol=1e-3, atol=1e-2)
    begun = next(event for event in events if isinstance(event, InitialModel))
    assert begun.start == result.start
    assert begun.accuracy == result.start.accuracy > 0.7
    assert result.settings["start"] == "ridge"


def test_its_bytes_are_in_the_result_and_in_the_first_round(started, tmp_path):
    result, _ = started
    plain = run(tmp_path / "plain", rounds=2, method="moon + fedavgm(0.5) + prototypes")
    first, second = (row["bytes_up"] for row in result.history[:2])
    assert plain.history[0]["bytes_up"] == plain.history[1]["bytes_up"] == second
    assert first == second + result.start.bytes_up
    assert result.bytes_up == sum(row["bytes_up"] for row in result.history)
    alone = run(tmp_path / "alone", rounds=0, start="lda")
    assert alone.bytes_up == alone.start.bytes_up > 0
    assert alone.accuracy == alone.start.accuracy > 0.8
    assert alone.start.bytes_up == result.start.bytes_up  # the same statistics


@pytest.mark.parametrize("kind", [Gathering, InitialModel, Metrics])
def test_stopped_at_any_time_a_started_run_resumes_to_the_same(started, tmp_path, kind):
    result, _ = started
    with pytest.raises(Stop):
        run(tmp_path / "run", **STARTED, observe=stopping_at(kind))
    unskew.resume(tmp_path / "run")
    assert told(tmp_path / "run") == told(result.path)
    assert metrics(tmp_path / "run") == metrics(result.path)


def test_loop_and_pool_start_alike(started, tmp_path):
    result, _ = started
    other = run(tmp_path / "run", **STARTED, engine="pool", workers=1)
    assert other.weights_sha256 == result.weights_sha256


CANNOT = "cannot become the network's classifier; give lda, ridge or ccvr without .*, and a method without clsnorm"
UNFIT = ("lda(layers=2)", "ridge(expand=5)", "ccvr(relu=true, tukey=0.5)", "oracle", "lda + ridge",
         "lda + private(epsilon=1, clip=1)")  # fmt: skip
SECURE = {"method": "fedavg + ridge + secure"}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        *((text, {}, CANNOT) for text in UNFIT),
        ("lda", {"method": "clsnorm"}, CANNOT),
        ("fedprox", {}, "give only calibrations"),
        ("secure", {}, "give only calibrations"),
        ("nonsense", {}, "no method is called 'nonsense'"),
        ("lda", SECURE, r"without secure, which the method uses; give --start .lda \+ secure.$"),
        ("lda", {"model": without_bias}, "the network's has none; add one to it"),
    ],
)
def test_what_cannot_become_the_classifier_is_refused_by_name_before_a_folder_is_made(text, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", rounds=1, start=text, **options)
    assert not (tmp_path / "run").exists()


def test_a_start_is_masked_where_the_method_masks_its_statistics(tmp_path):
    found = run(tmp_path / "run", rounds=0, start="lda + secure", **SECURE)
    assert found.start.name == "lda + secure"
