"""Whatever is given to a public function, the answer is a result or one clear sentence.

The test walks ``unskew.__all__`` and the signatures, so that a new function or parameter is tried too.
"""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import unskew
from unskew import ClassStatistics, Key, Lift, UserError
from unskew.extend import LowRank

ODD = {
    "None": None, "a number": 7, "a negative number": -1, "a huge number": 10**30, "NaN": float("nan"), "True": True,
    "a word": "?", "an empty text": "", "a null byte": "a\0b", "half a character": "\udce9", "a list": [],
    "a nested list": [[1], ["a"]], "a dict": {}, "bytes": b"x", "an object": object(), "a tensor": torch.zeros(2),
}  # fmt: skip

RECORDS = {"Algorithm", "CalibratedClassifier", "Calibration", "ClassStatistics", "ClientFailure", "Key", "Lift",
           "Result", "STOP", "StopRun", "UserError"}  # fmt: skip  # made by the functions below, or raised


def data():
    images = np.arange(30, dtype=np.uint8)[:, None, None] * np.ones((1, 8, 8), np.uint8)
    return images, np.arange(30) % 3, images[:3], np.arange(3)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong-types")
    unskew.run(data=data(), partition="iid", clients=2, rounds=1, epochs=1, engine="loop", out=folder / "run")
    return folder


STATISTICS = ClassStatistics.of_features(torch.randn(30, 4, generator=Key(0).torch()), torch.arange(30) % 3, 3)
TRAINING = {"data": data(), "partition": "iid", "clients": 2, "rounds": 1, "epochs": 1, "engine": "loop"}
SOME = torch.ones(6, 4), [0, 1, 2] * 2
# Each function with sound arguments; a name that starts with @ is a file in the folder. Where a whole run or page would
# be made, the last thing that is looked at is refused (a folder that is in use, an unknown measure): it saves seconds.
CALLS = {
    "run": (unskew.run, {**TRAINING, "out": "@run"}),
    "run_seeds": (unskew.run_seeds, {**TRAINING, "seeds": [0], "lr": -1.0, "out": "@run"}),
    "sweep": (unskew.sweep, {"over": ["lr=0.1"], "data": data(), "out": "@run"}),
    "draw_runs": (unskew.draw_runs, {"paths": ["nowhere"], "sources": "?"}),
    "resume": (unskew.resume, {"path": "@run", "data": data()}),
    "load": (unskew.load, {"path": "@run"}),
    "predict": (unskew.predict, {"path": "@run", "pictures": np.zeros((1, 1, 8, 8), np.uint8)}),
    "export": (unskew.export, {"path": "@run", "form": "safetensors", "out": "@exported"}),
    "calibrate_run": (unskew.calibrate_run, {"path": "@run", "sources": "lda", "data": data()}),
    "analyse": (unskew.analyse, {"path": "@run", "sources": "?"}),
    "compare": (unskew.compare, {"runs": "@run", "columns": "method"}),
    "write_report": (unskew.write_report, {"paths": "@run", "only": ["?"]}),
    "calibrate": (unskew.calibrate, {"classifier": nn.Linear(4, 3), "statistics": STATISTICS, "method": "lda"}),
    "open_logger": (unskew.open_logger, {"name": "tensorboard"}),
    "Lift.of": (Lift.of, {"width": 4, "expand": 3}),
    "Lift.__init__": (Lift, {"weight": torch.ones(4, 3)}),
    "extend.LowRank": (LowRank, {"rank": 3}),
    "Key.number": (lambda seed, path: Key(seed, path).number(), {"seed": 0, "path": ()}),
    "Key.fold": (Key(0).fold, {"parts": "a"}),
    "ClassStatistics.empty": (ClassStatistics.empty, {"classes": 3, "width": 4}),
    "ClassStatistics.of_features": (
        ClassStatistics.of_features, {"features": SOME[0], "labels": SOME[1], "classes": 3}
    ),
    "ClassStatistics.measure": (
        ClassStatistics.measure, {"encoder": nn.Flatten(), "batches": [SOME], "classes": 3}
    ),
    "ClassStatistics.merged": (ClassStatistics.merged, {"parts": [STATISTICS]}),
    "ClassStatistics.load": (ClassStatistics.load, {"path": "@statistics"}),
    "ClassStatistics.save": (STATISTICS.save, {"path": "@statistics"}),
    "ClassStatistics.mean": (STATISTICS.mean, {"label": 1}),
    "ClassStatistics.covariance": (STATISTICS.covariance, {"label": 1}),
}  # fmt: skip


def test_every_public_function_is_tried():
    assert {name for name in unskew.__all__ if name not in RECORDS} == {name for name in CALLS if "." not in name}
    wanted = set()
    for record in (ClassStatistics, Lift, Key):
        for name, member in vars(record).items():
            function = member.__func__ if isinstance(member, staticmethod) else member
            if inspect.isfunction(function) and not name.startswith("_") and name != "forward":
                takes = [each for each in inspect.signature(function).parameters if each != "self"]
                wanted |= {f"{record.__name__}.{name}"} if takes else set()
    assert wanted <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_argument_is_one_clear_sentence(name, here, monkeypatch):
    monkeypatch.chdir(here)
    function, working = CALLS[name]
    parameters = inspect.signature(function).parameters
    for parameter in parameters:
        for words, odd in ODD.items():
            given = {key: _placed(here, value) for key, value in working.items()} | {parameter: odd}
            said = "nothing"
            try:
                _called(function, parameters, given)
            except (UserError, unskew.ClientFailure) as error:
                said = str(error)
            except Exception as error:
                raise AssertionError(f"{name}: {parameter} as {words} gives {error!r}") from error
            assert said.strip(), (name, parameter, words)


def _placed(folder, value):
    return folder / value[1:] if isinstance(value, str) and value.startswith("@") else value


def _called(function, parameters, given):
    several = next((key for key, each in parameters.items() if each.kind is each.VAR_POSITIONAL), None)
    if several is None:
        return function(**given)
    leading = [given.pop(key) for key, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    return function(*leading, given.pop(several), **given)


@pytest.mark.parametrize("classes", [np.int64(3), np.uint8(3), 3])
def test_numbers_of_numpy_are_numbers(classes):
    found = ClassStatistics.of_features(*SOME, classes)
    assert (found.classes, type(found.classes)) == (3, int)
    assert ClassStatistics.measure(nn.Flatten(), [SOME], classes).counts.tolist() == [2, 2, 2]
    assert torch.equal(found.mean(np.int32(1)), found.mean(1))


@pytest.mark.parametrize("classes", [True, 0, -3, 3.0, "3", None, 10**30])
def test_classes_must_be_a_number_of_classes(classes):
    with pytest.raises(UserError, match=r"classes=.*: give a whole number from 1 to"):
        ClassStatistics.of_features(*SOME, classes)


KINDS = ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_any_whole_type_of_numpy_and_torch_are_labels(kind):
    wanted = ClassStatistics.of_features(SOME[0], torch.tensor(SOME[1]), 3)
    array = np.array(SOME[1], dtype=kind)
    for labels in (array, torch.from_numpy(array), list(array), [int(label) for label in array]):
        for found in (
            ClassStatistics.of_features(SOME[0], labels, 3),
            ClassStatistics.measure(nn.Flatten(), [(SOME[0], labels)], 3),
        ):
            assert all(torch.equal(value, wanted.tensors()[name]) for name, value in found.tensors().items())
