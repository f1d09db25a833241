"""--patience: which round is the best, when a run stops, and that stopping it by force changes nothing."""

import shutil

import pytest

from observers import stop_after
from unskew.analysis import analyse
from unskew.core.errors import UserError
from unskew.core.tensors import sha256
from unskew.runs import execute, train
from unskew.runs.checkpoint import load_state, state_file
from unskew.runs.execute import best_row, is_better
from unskew.runs.finished import FinishedRun, calibrate_run
from unskew.runs.folder import read_model
from unskew.runs.result import read_result

# digits, four clients; these accuracies are put in the place of the real ones
ACCURACIES = [0.2, 0.5, 0.4, 0.5, 0.45, 0.3, 0.9, 0.1]
OPTIONS = {"clients": 4, "partition": "iid", "rounds": 8, "epochs": 1, "lr": 0.05, "checkpoint_seconds": 0,
           "patience": 3}  # fmt: skip


@pytest.fixture
def scripted(monkeypatch):
    """Evaluation gives the round's scripted accuracy, and one minus it as the loss; calibrations keep their own."""
    real = execute.evaluate
    numbers = {}  # the round after which the server had this model

    def use(accuracies):
        def evaluate(engine, model, count, key, **more):
            score = real(engine, model, count, key, **more)
            if more.get("job") is not None:  # of a calibrated classifier
                return score
            accuracy = accuracies[numbers[sha256(model)] - 1]
            return type(score)(**{**score.__dict__, "accuracy": accuracy, "loss": 1 - accuracy})

        monkeypatch.setattr(execute, "evaluate", evaluate)

    run_round = execute.driver.run

    def counting(*words, **options):
        for state, row in run_round(*words, **options):
            numbers[sha256(state.tensors)] = state.round
            yield state, row

    monkeypatch.setattr(execute.driver, "run", counting)
    use(ACCURACIES)
    return use


# Which round is the best


def rows(*values, monitor="accuracy"):
    return [{"round": n, monitor: v} if v is not None else {"round": n} for n, v in enumerate(values, 1)]


def test_the_best_round_is_the_first_of_equal_ones_and_unevaluated_rounds_and_nan_do_not_count():
    nan = float("nan")
    assert best_row(rows(None, 0.3, 0.5, None, 0.5, nan, 0.4), "accuracy")["round"] == 3
    assert best_row(rows(2.0, 0.5, nan, 0.5, monitor="loss"), "loss")["round"] == 2
    assert best_row(rows(None, None), "accuracy") is best_row([], "accuracy") is None
    assert not any(is_better(nan, 0.5, monitor) for monitor in ("accuracy", "loss"))


# A run


def test_a_run_stops_when_patience_has_run_out_and_ends_with_the_best_rounds_model(tmp_path, scripted):
    result = train.run(out=tmp_path / "run", **OPTIONS)
    assert (result.best_round, result.stopped_at, result.rounds, result.final_round) == (2, 5, 5, 2)
    assert [file.name for file in (tmp_path / "run" / "states").iterdir()] == ["round-000002.safetensors"]
    assert (result.accuracy, result.loss) == (0.5, 0.5)
    assert [row["round"] for row in result.history] == [1, 2, 3, 4, 5]
    two = train.run(out=tmp_path / "two", **(OPTIONS | {"rounds": 2, "patience": None}))
    assert result.weights_sha256 == two.weights_sha256
    assert read_result(tmp_path / "run") == result
    assert "stopped after round 5; the model is from the best round, 2" in str(result)
    assert (two.best_round, two.stopped_at) == (None, None)
    assert "stopping" not in str(two)


@pytest.mark.parametrize(
    ("accuracies", "options", "best", "stopped"),
    [
        (ACCURACIES, {"patience": 8}, 7, None),
        ([0.0, 0.6, 0.0, 0.5, 0.0, 0.4, 0.0, 0.9], {"monitor": "loss", "evaluate_every": 2}, 2, 6),
    ],
    ids=["patience that does not run out", "rare evaluations of the loss: round 5 was not evaluated"],
)
def test_a_run_ends_with_its_best_round(tmp_path, scripted, accuracies, options, best, stopped):
    scripted(accuracies)
    result = train.run(out=tmp_path / "run", **(OPTIONS | options))
    assert (result.best_round, result.stopped_at, result.rounds) == (best, stopped, stopped or 8)
    assert result.accuracy == accuracies[best - 1]
    assert ("ran to its last round; the model is from the best round, 7" in str(result)) == (stopped is None)


def test_stopped_by_hand_or_killed_it_resumes_to_the_same_bits(tmp_path, scripted, monkeypatch):
    """Killed: the folder as it is when the best state is written and the checkpoint is not."""
    options = OPTIONS | {"method": "scaffold + fedavgm(0.5) + lda"}
    real, calls = execute.checkpoints.save_checkpoint, []

    def copying(path, state, progress):
        calls.append(state.round)
        if path.name == "whole" and state.round in (3, 5):
            shutil.copytree(path, tmp_path / f"before{state.round}")
        real(path, state, progress)

    monkeypatch.setattr(execute.checkpoints, "save_checkpoint", copying)
    whole = train.run(out=tmp_path / "whole", **options)
    assert calls == [1, 2, 3, 4, 5]
    with pytest.raises(train.StopRun):
        train.run(out=tmp_path / "cut5", observe=stop_after(5), **options)
    for name in ("before3", "before5", "cut5"):
        resumed = train.resume(tmp_path / name)
        assert resumed.weights_sha256 == whole.weights_sha256, name
        assert (resumed.best_round, resumed.stopped_at) == (2, 5)
        assert [row["accuracy"] for row in resumed.history] == ACCURACIES[:5]
        assert resumed.calibrations["lda"].accuracy == whole.calibrations["lda"].accuracy


def test_a_lost_or_foreign_best_state_is_refused_in_a_sentence(tmp_path, scripted):
    path = tmp_path / "run"
    with pytest.raises(train.StopRun):
        train.run(out=path, observe=stop_after(4), **OPTIONS)
    file = state_file(path, 2)
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(UserError, match=r"round-000002.safetensors is damaged or missing .*or delete .*checkpoint"):
        train.resume(path)
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match="is damaged or missing"):
        train.resume(path)
    file.write_bytes((path / "checkpoint" / "state.safetensors").read_bytes())
    with pytest.raises(UserError, match="it is from another round or run"):
        train.resume(path)
    other = tmp_path / "other"
    with pytest.raises(train.StopRun):
        train.run(out=other, observe=stop_after(4), **(OPTIONS | {"seed": 1}))
    shutil.copy(state_file(other, 2), file)
    with pytest.raises(UserError, match="it is from another round or run"):
        train.resume(path)
    file.write_bytes(content)
    assert train.resume(path).best_round == 2


def test_a_stopped_run_is_calibrated_and_looked_at_as_of_its_best_round(tmp_path, scripted):
    path = tmp_path / "run"
    result = train.run(out=path, **OPTIONS)
    assert calibrate_run(path, "lda").accuracy > 0
    study = FinishedRun(path)
    assert study.number(-1) == 2
    kept = load_state(state_file(path, 2))[0]
    assert all((kept.tensors[name] == value).all() for name, value in study.state(2).tensors.items())
    assert study.state(5).round == 5  # later rounds can be looked at too
    with pytest.raises(UserError, match="the run has rounds 1 to 5"):
        study.state(6)
    assert len(study.local_models(None, 2)) == 2
    assert result.weights_sha256
    assert read_model(path)
    analyse(path, "curves")
