"""Values from Python: what a run makes of them, where they may go, and how it is resumed."""

import functools
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import outside_methods
import outside_models
import unskew
from federation import image_set
from observers import stop_after
from unskew import methods
from unskew.core.types import Local
from unskew.data.population import Partition
from unskew.methods.fedprox import fedprox
from unskew.round.algorithm import Algorithm
from unskew.runs.python_values import describe_function, import_name, parse_method_value, split_values

pytestmark = pytest.mark.usefixtures("in_a_new_folder")
SMALL = {"rounds": 2, "epochs": 1, "clients": 3, "partition": "iid"}


def config_of(result):
    return tomllib.loads((result.path / "config.toml").read_text())


def small_model(shape, classes):
    return outside_models.linear(shape, classes)


def test_a_function_of_a_module_becomes_its_text_and_crosses_processes():
    texts, given = split_values({"model": outside_models.linear, "method": ["fedavg", outside_methods.raises]})
    assert texts == {"model": "outside_models:linear", "method": "fedavg + outside_methods:raises"}
    assert given.crosses
    result = unskew.run(model=outside_models.linear, engine="pool", workers=1, **SMALL)
    again = unskew.run(result.path / "config.toml", engine="loop")
    assert result.model == "outside_models:linear"
    assert again.weights_sha256 == result.weights_sha256


@pytest.mark.parametrize("value", [lambda shape, classes: None, functools.partial(small_model), nn.Identity().forward])
def test_what_no_process_can_import_has_no_text(value):
    assert import_name(value) is None


def test_a_lambda_gives_the_same_run_as_its_name_in_the_loop_engine():
    named = unskew.run(model="outside_models:linear", method="fedprox(0.1)", engine="loop", **SMALL)
    live = unskew.run(model=lambda shape, classes: outside_models.linear(shape, classes), method=fedprox(0.1), **SMALL)
    assert live.weights_sha256 == named.weights_sha256
    assert live.engine == "loop"
    said = config_of(live)
    assert said["model"].startswith("python:")
    assert "mu=0.1" in said["method"]


@pytest.mark.parametrize("option", [{"model": lambda shape, classes: None}, {"method": lambda algorithm: algorithm}])
def test_what_cannot_cross_is_refused_for_the_pool_with_advice(option, tmp_path):
    with pytest.raises(unskew.UserError, match=r"--engine pool with .*another process; give --engine loop, or define"):
        unskew.run(**option, engine="pool", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_run_with_values_is_resumed_with_the_same_values_only():
    images = image_set(60)
    whole = unskew.run(data=images, method=fedprox(0.1), out="whole", **{**SMALL, "rounds": 3})
    with pytest.raises(
        unskew.StopRun, match=r"after round 1; .*unskew.resume\('.*/part', data=…, method=…\)"
    ) as stopped:
        unskew.run(data=images, method=fedprox(0.1), out="part", observe=stop_after(1), **{**SMALL, "rounds": 3})
    assert (Path(stopped.value.path), stopped.value.round) == (Path("part").absolute(), 1)
    with pytest.raises(unskew.UserError, match=r"data was passed from Python .*; pass it again"):
        unskew.resume("part")
    with pytest.raises(unskew.UserError, match=r"mu=0.2.*but the run was started with .*mu=0.1"):
        unskew.resume("part", data=images, method=fedprox(0.2))
    other = replace(images, train=replace(images.train, images=images.train.images[::-1].copy()))
    with pytest.raises(unskew.UserError, match=r"changed after .*part was started"):
        unskew.resume("part", data=other, method=fedprox(0.1))
    assert unskew.resume("part", data=images, method=fedprox(0.1)).weights_sha256 == whole.weights_sha256


def test_an_observer_may_raise_stop_run_as_well():
    def stop(event):
        if getattr(event, "round", 0) == 2:
            raise unskew.StopRun

    with pytest.raises(unskew.StopRun, match="after round 2"):
        unskew.run(out="a", observe=stop, **{**SMALL, "rounds": 4})
    assert len((unskew.resume("a")).history) == 4


def test_arrays_are_a_data_set_and_cross_processes():
    images = image_set(60)
    arrays = {"x_train": images.train.images, "y_train": images.train.labels,
              "x_test": images.test.images, "y_test": images.test.labels}  # fmt: skip
    one = unskew.run(data=arrays, engine="loop", **SMALL)
    two = unskew.run(data=arrays, engine="pool", workers=1, **SMALL)
    assert one.weights_sha256 == two.weights_sha256
    assert one.data.startswith("python:dict, 60 train")


def test_a_partition_is_an_array_or_a_partition():
    owner = np.arange(1438) % 4
    one = unskew.run(partition=owner, out="one", rounds=1, epochs=1)
    two = unskew.run(partition=Partition(owner.astype(np.int32), 4, "mine", 0), rounds=1, epochs=1)
    three = unskew.run(partition="file:one/partition.npz", rounds=1, epochs=1)
    assert (one.clients, one.partition) == (4, "python:array of 1,438 client numbers")
    assert one.weights_sha256 == two.weights_sha256 == three.weights_sha256
    assert two.partition == "python:mine"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3, int), "for each of the 1,438 examples"),
        (np.zeros(1438), "array of float64"),
        (np.full(1438, -1), "give a client number from 0 on"),
        (lambda labels: labels, "must be an importable function, or one client number"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(value, message, tmp_path):
    with pytest.raises(unskew.UserError, match=message):
        unskew.run(partition=value, rounds=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": nn.Linear(2, 2)}, r"from \(shape, classes\) .*not a Linear"),
        ({"model": 3}, "to an nn.Module, not an int"),
        ({"method": []}, "names and functions that take one, not "),
        ({"method": ["fedavg", 3]}, "names and functions that take one, not "),
        ({"method": ["fedavg", "fedprx"]}, "did you mean 'fedprox'"),
        ({"method": lambda algorithm: None}, "must return a function from Algorithm to Algorithm"),
        ({"method": ["fedavgm", lambda a: replace(a, server=Algorithm().server)]}, "both claim the server slot"),
        ({"data": 3}, "data is an int; give an ImageSet"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_before_a_folder_is_made(options, message, tmp_path):
    with pytest.raises(unskew.UserError, match=message):
        unskew.run(**options, rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_an_algorithm_keeps_the_settings_that_it_changes_and_takes_the_others_from_the_run():
    _, given = split_values({"method": replace(Algorithm(), local=Local(epochs=2))})
    _, make = parse_method_value(given, "python:…")
    assert make(Local(epochs=7, lr=0.5)).local == Local(epochs=2, lr=0.5)


def test_an_algorithm_gives_the_run_of_its_text():
    algorithm = methods.parse_method("fedprox(0.1) + lda")
    one = unskew.run(method=algorithm, **SMALL)
    two = unskew.run(method="fedprox(0.1) + lda", **SMALL)
    assert one.weights_sha256 == two.weights_sha256
    assert one.calibrations["lda"].accuracy == two.calibrations["lda"].accuracy
    assert "mu=0.1" in one.method


def test_descriptions_tell_knobs_apart_and_are_the_same_for_the_same():
    assert describe_function(fedprox(0.1)) == describe_function(fedprox(0.1)) != describe_function(fedprox(0.2))
    assert describe_function(functools.partial(small_model, classes=3)).endswith("small_model(classes=3)")
    assert "0x" not in describe_function(lambda value, other=nn.Identity: value)
