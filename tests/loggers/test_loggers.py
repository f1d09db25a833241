"""Loggers: each round once with the figures of metrics.jsonl, however often the run was stopped; never at its cost."""

import json
import os
import shutil
import signal
import struct
import sys
from pathlib import Path

import pytest

import unskew
from analysis.finished import refused
from unskew import loggers
from unskew.loggers import Logger
from unskew.round.driver import Metrics
from unskew.runs.execute import Calibrated

FAST = {"rounds": 5, "epochs": 1, "engine": "loop", "checkpoint_seconds": 0.0, "evaluate_every": 2}
NAMES = ("train_loss", "accuracy", "loss", "clients", "examples", "bytes_up", "bytes_down", "seconds")

# mlflow with SQLAlchemy 2.1
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def tensorboard_events(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def tensorboard_log(run: Path):
    events = tensorboard_events(run)
    return {tag: [(row.step, row.value) for row in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_facts(run: Path):
    events = tensorboard_events(run)
    (text,) = events.Tensors("run/text_summary")  # once, also in a resumed run
    rows = [line.strip("| ").split(" | ") for line in text.tensor_proto.string_val[0].decode().splitlines()]
    assert b"partition_hash" in events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    return {row[0]: row[1] for row in rows[2:]}


def wandb_records(run: Path):
    """What lies in a .wandb file: a header of 7 bytes, then records in blocks as LevelDB's log has them."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # a run that is finished may still be on its way to the disk, in wandb's service process
    (file,) = (run / "logs" / "wandb").glob("offline-run-*/*.wandb")  # one, also of a resumed run
    data, place, part = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""


def wandb_log(run: Path):
    found = {}
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                if not key.startswith("_"):
                    found.setdefault(key, []).append((record.history.step.num, json.loads(item.value_json)))
    return found


def wandb_facts(run: Path):
    (record,) = (found for found in wandb_records(run) if found.WhichOneof("record_type") == "run")
    return {item.key: str(json.loads(item.value_json)) for item in record.run.config.update}


def mlflow_run(run: Path):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.absolute() / 'logs' / 'mlflow' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("unskew").experiment_id])  # one, also of a resumed run
    return client, found


def mlflow_log(run: Path):
    client, found = mlflow_run(run)
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: sorted((row.step, row.value) for row in rows) for name, rows in history.items()}


READ = {
    "tensorboard": (tensorboard_log, tensorboard_facts),
    "wandb": (wandb_log, wandb_facts),
    "mlflow": (mlflow_log, lambda run: mlflow_run(run)[1].data.params),
}


@pytest.fixture(params=READ)
def name(request, monkeypatch):
    """A logger that is installed; the lock file has TensorBoard, the others are large (CONTRIBUTING)."""
    pytest.importorskip(request.param, reason=f'pip install "unskew[{request.param}]" to test it')
    for variable in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    return request.param


def metrics(run: Path):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def stopped(run: Path, name: str | None, at, *, behind: int | None = None, **options):
    """A run that an interrupt ends when ``at`` holds of an event; ``behind``: its checkpoint is of that round."""
    log = loggers.open_logger(name) if name else None

    def observe(event):
        if log is not None:
            log(event)
        if behind is not None and isinstance(event, Metrics) and event.round == behind + 1:
            shutil.copytree(run / "checkpoint", run.parent / "older")
        if at(event):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unskew.run(out=run, observe=observe, **{**FAST, **options})
    if behind is not None:  # as if the machine had stopped before anything later was written
        shutil.rmtree(run / "checkpoint")
        (run.parent / "older").rename(run / "checkpoint")
    if log is not None:
        log.close()


def resumed(run: Path, name: str):
    with unskew.open_logger(name) as log:
        return unskew.resume(run, observe=log)


def agrees(log, rows):
    """Each round of metrics.jsonl stands in the log once, in order, with its figures and the sums up to it."""
    for key in NAMES:
        wanted = [(row["round"], row[key]) for row in rows if key in row]
        assert [step for step, _ in log[key]] == [step for step, _ in wanted], key
        if key != "seconds":  # of a round that came again they are other seconds
            assert [value for _, value in log[key]] == pytest.approx([value for _, value in wanted], rel=1e-6)
    for key in ("bytes_up", "bytes_down"):
        sums = [sum(row[key] for row in rows[: place + 1]) for place in range(len(rows))]
        assert [value for _, value in log[f"total/{key}"]] == pytest.approx(sums)
    rates = [row["examples"] / row["seconds"] for row in rows]
    assert len(log["examples_per_second"]) == len(rates)
    assert log["final/accuracy"] == [(len(rows), pytest.approx(rows[-1]["accuracy"]))]
    assert log["final/loss"] == [(len(rows), pytest.approx(rows[-1]["loss"]))]


def test_every_round_is_logged_once_with_the_figures_of_the_run(tmp_path, name):
    read, facts = READ[name]
    with unskew.open_logger(name) as log:
        result = unskew.run(out=tmp_path / "a", observe=log, method="fedavg + ccvr", **FAST)
    found, rows = read(tmp_path / "a"), metrics(tmp_path / "a")
    agrees(found, rows)
    assert found["seconds"] == [(row["round"], pytest.approx(row["seconds"], rel=1e-6)) for row in rows]
    assert found["examples_per_second"][0][1] == pytest.approx(rows[0]["examples"] / rows[0]["seconds"], rel=1e-6)
    for figure in ("accuracy", "loss", "bytes_up"):
        value = getattr(result.calibrations["ccvr"], figure)
        assert found[f"calibration-ccvr/{figure}"] == [(5, pytest.approx(value))]
    said = facts(tmp_path / "a")
    names = ("method", "data", "engine", "partition_hash")
    assert {name: said[name] for name in names} == {name: getattr(result, name) for name in names}
    assert float(said["emd"]) == pytest.approx(result.emd)


def test_a_run_that_crashed_behind_its_log_is_resumed_without_a_round_twice_or_missing(tmp_path, name):
    run = tmp_path / "a"
    stopped(run, name, lambda event: isinstance(event, Metrics) and event.round == 4, behind=2)
    result = resumed(run, name)
    agrees(READ[name][0](run), metrics(run))
    assert READ[name][1](run)["partition_hash"] == result.partition_hash


def test_a_log_that_begins_when_a_run_is_resumed_holds_the_rounds_before(tmp_path, name):
    run = tmp_path / "a"
    stopped(run, None, lambda event: isinstance(event, Metrics) and event.round == 3)
    resumed(run, name)
    agrees(READ[name][0](run), metrics(run))


def test_calibrations_of_a_run_stopped_among_them_are_logged_once(tmp_path, name):
    run = tmp_path / "a"
    stopped(run, name, lambda event: isinstance(event, Calibrated), method="fedavg + ccvr + lda")
    result = resumed(run, name)
    log = READ[name][0](run)
    agrees(log, metrics(run))
    for calibration in ("ccvr", "lda"):
        accuracy = result.calibrations[calibration].accuracy
        assert log[f"calibration-{calibration}/accuracy"] == [(5, pytest.approx(accuracy))]


def test_wandb_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason='pip install "unskew[wandb]" to test it')
    monkeypatch.delenv("WANDB_MODE", raising=False)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH)
    before = [signal.getsignal(number) for number in signals], sys.exit, sys.excepthook, sys.stdout, sys.stderr
    seen = []

    def observe(event):
        log(event)
        seen.append(([signal.getsignal(n) for n in signals], sys.exit, sys.excepthook, sys.stdout, sys.stderr))

    with unskew.open_logger("wandb") as log:
        unskew.run(out=tmp_path / "a", observe=observe, **FAST)
    assert all(state == before for state in seen)


def test_mlflow_says_how_the_run_ended(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason='pip install "unskew[mlflow]" to test it')
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    stopped(tmp_path / "a", "mlflow", lambda event: isinstance(event, Metrics) and event.round == 2)
    assert mlflow_run(tmp_path / "a")[1].info.status == "KILLED"
    resumed(tmp_path / "a", "mlflow")
    assert mlflow_run(tmp_path / "a")[1].info.status == "FINISHED"


class Paper:
    """A backend that keeps what it is told, and fails where it is asked to."""

    def __init__(self, fails="", error: BaseException | None = None, held=()):
        self.fails, self.error, self.held = fails, error or OSError(28, "No space left\non device"), held
        self.log, self.ended, self.facts = {}, [], {}

    def start(self, folder, seen, facts):
        self._maybe("start")
        assert folder == seen.path / "logs" / "paper"
        self.facts = facts
        return self.held

    def write(self, step, figures):
        self._maybe("write")
        for key, value in figures.items():
            self.log.setdefault(key, []).append((step, value))

    def close(self, finished):
        self.ended.append(finished)
        self._maybe("close")

    def _maybe(self, place):
        if self.fails == place:
            raise self.error


def logged(run: Path, backend, **options):
    notes = []
    with Logger("paper", backend, notes.append) as log:
        result = unskew.run(out=run, observe=log, **{**FAST, **options})
    return result, notes


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without a logger."""
    return unskew.run(out=tmp_path_factory.mktemp("plain") / "a", **FAST)


def test_a_logger_changes_nothing_in_a_run(tmp_path, plain):
    backend = Paper()
    result, notes = logged(tmp_path / "a", backend)
    assert result.weights_sha256 == plain.weights_sha256
    for file in ("config.toml", "partition.npz", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (plain.path / file).read_bytes()
    assert (notes, backend.ended) == ([], [True])
    agrees(backend.log, metrics(tmp_path / "a"))
    assert [step for step, _ in backend.log["accuracy"]] == [2, 4, 5]


@pytest.mark.parametrize("place", ["start", "write", "close"])
def test_a_logger_that_fails_is_told_once_and_the_run_goes_on(tmp_path, plain, place):
    backend = Paper(place)
    result, notes = logged(tmp_path / "a", backend)
    assert backend.ended[0] is (place == "close")
    what = "OSError: [Errno 28] No space left on device"
    assert notes == [f"the paper log failed ({what}); the run continues without it"]
    assert result.weights_sha256 == plain.weights_sha256
    assert (tmp_path / "a" / "result.json").exists()


def test_without_anybody_to_tell_a_failure_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(loggers.LOGGERS, "paper", lambda: Paper("start"))
    with pytest.warns(UserWarning, match="the paper log failed"), unskew.open_logger("paper") as log:
        unskew.run(out=tmp_path / "a", observe=log, **FAST)


def test_an_interrupt_in_a_logger_is_an_interrupt(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        logged(tmp_path / "a", Paper("write", KeyboardInterrupt()))
    assert (tmp_path / "a" / "checkpoint" / "state.safetensors").exists()


def test_rounds_that_a_log_holds_are_not_written_again_but_counted(tmp_path):
    run, backend = tmp_path / "a", Paper(held={1, 2, 4})
    stopped(run, None, lambda event: isinstance(event, Metrics) and event.round == 2)
    with Logger("paper", backend, pytest.fail) as log:
        unskew.resume(run, observe=log)
    rows = metrics(run)
    assert [step for step, _ in backend.log["train_loss"]] == [3, 5]
    assert backend.log["total/bytes_up"][0] == (3, sum(row["bytes_up"] for row in rows[:3]))


def test_failures_of_clients_are_counted(tmp_path):
    options = {"method": "outside_methods:raises(on=26)", "on_failure": "skip"}
    backend = Paper()
    result, _ = logged(tmp_path / "a", backend, **options)
    assert result.failures
    assert backend.log["total/failures"][-1] == (5, result.failures)
    assert sum(value for _, value in backend.log["failures"]) == result.failures


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
@pytest.mark.parametrize("command", [["run", "--rounds", "1"], ["resume", "a"]], ids=lambda words: words[0])
def test_a_missing_package_is_named_before_anything_is_made(tmp_path, monkeypatch, capsys, package, command):
    monkeypatch.chdir(tmp_path)
    for module in ("tensorboard", "wandb", "mlflow", "sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    error = refused(capsys, *command, "--log", package)
    assert f'is not installed; pip install "unskew[{package}]"' in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_what_was_before_the_first_round_is_step_0_and_the_end_of_a_run_without_rounds(tmp_path):
    backend = Paper()
    result, _ = logged(tmp_path / "run", backend, rounds=0, start="lda", method="fedavg + ridge", clients=2)
    for part in ("start", "final"):
        assert backend.log[f"{part}/accuracy"] == [(0, result.accuracy)]
        assert backend.log[f"{part}/loss"] == [(0, result.loss)]
    assert backend.log["calibration-ridge/accuracy"] == [(0, result.calibrations["ridge"].accuracy)]
    assert backend.ended == [True]
