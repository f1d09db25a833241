"""What is recorded while a run trains, and what a finished run's model makes of images, follow the device."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from placed import name_of, on, side_of, small

from analysis.finished import finished, runs_of
from unskew.core.key import Key
from unskew.engines.loop import Loop
from unskew.round import driver
from unskew.runs.finished import FinishedRun
from unskew.runs.recording import RECORDED, Recorder, parse_recording

__all__ = ["finished", "runs_of"]

CPU = torch.device("cpu")


def lines(federated, recording):
    """What is written down of three rounds."""
    side = side_of(federated)
    recorder = Recorder(parse_recording(recording), 3, side, Key(0))
    engine = Loop(side_of(federated))
    state, written = federated.state(), []
    while state.round < 3:
        state, _ = driver.run_round(
            federated.algorithm, engine, state, federated.key, per_round=4, rounds=3,
            watch=recorder.watched(state.round + 1), record=recorder.record,
        )  # fmt: skip
        written.append(recorder.line(state))
    return written


@pytest.mark.parametrize("method", ["fedavg", "clsnorm"])
@pytest.mark.parametrize("recording", [*RECORDED, " + ".join(RECORDED)])
def test_every_recording_is_the_same_as_on_the_cpu(home, recording, method):
    here = small(method)
    written = lines(on(home.device, here), recording)
    assert written == lines(here, recording)
    assert any(written) == (recording != "model")


@contextmanager
def opened(path, device):
    """A finished run, looked at on that device."""
    with FinishedRun(path, engine="loop") as run:
        prepared = run.prepared
        run.__dict__["prepared"] = replace(prepared, blueprint=replace(prepared.blueprint, device=name_of(device)))
        yield run


def test_a_finished_run_has_the_same_outputs_states_and_local_models_there(each_home, finished):
    with opened(finished, "cpu") as here, opened(finished, each_home.device) as there:
        assert there.side.device == each_home.device
        outputs, others = here.outputs, there.outputs
        assert {others.features.device, others.labels.device, *(p.device for p in others.predicted.values())} == {CPU}
        assert torch.equal(outputs.features, others.features)
        assert torch.equal(outputs.labels, others.labels)
        assert len(outputs.predicted) == 4  # the run's own classifier and three calibrated ones
        assert all(torch.equal(predicted, others.predicted[name]) for name, predicted in outputs.predicted.items())
        for number in (0, 1, 3):
            states = [run.state(number).tensors for run in (here, there)]
            assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
        models = [run.local_models(1, 2) for run in (here, there)]
        assert list(models[0]) == list(models[1])
        for client, model in models[0].items():
            assert all(torch.equal(value, models[1][client][name]) for name, value in model.items())
