"""Loggers: observers that write a run's metrics for TensorBoard, Weights & Biases or MLflow.

Logs are written to ``logs/`` in the run directory; nothing goes over a network unless the user sets WANDB_MODE or
MLFLOW_TRACKING_URI. Steps are rounds; a resumed run continues the same log, with each round in it once.
"""

import os
import re
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from unskew.core import language
from unskew.core.errors import UserError, accepts, nearest
from unskew.core.files import write_whole
from unskew.core.plugins import load_function, require_extra
from unskew.round.driver import Metrics
from unskew.runs.execute import Calibrated, Event, InitialModel
from unskew.runs.folder import calibration_file
from unskew.runs.journal import read_metrics
from unskew.runs.prepare import Overview

Facts = Mapping[str, str | int | float | bool]  # about the run, by name
Figures = Mapping[str, float]  # of a round, by name


class Backend(Protocol):
    """Where the figures go. Its constructor imports its packages, so that a missing one is reported before the run."""

    def start(self, folder: Path, overview: Overview, facts: Facts) -> Container[int]:
        """Open or continue the log of a run; returns the rounds that it already has, which are not sent again.

        ``folder`` is the log's folder in the run directory; ``facts`` are the configuration and facts about the data.
        """
        ...

    def write(self, step: int, figures: Figures) -> None:
        """Write figures so that a crash of this process does not lose them."""
        ...

    def close(self, finished: bool) -> None:
        """End the log; a run that is not ``finished`` may be resumed."""
        ...


def read_or_create(file: Path, make: Callable[[], str]) -> str:
    """The file's text, without spaces; if it does not exist, ``make`` creates its content."""
    if not file.exists():
        write_whole(file, make().encode())
    return re.sub(r"\s", "", file.read_text())


class TensorBoard:
    """Event files. When a run is resumed, TensorBoard drops the rounds that are sent again."""

    def __init__(self) -> None:
        require_extra("tensorboard", "tensorboard")
        self._torch = require_extra("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, folder: Path, overview: Overview, facts: Facts) -> Container[int]:
        """Open the event file. The last round is sent again, because the calibrations logged with it are repeated."""
        known = any(folder.glob("events.out.tfevents.*"))
        logged = range(1, min(overview.first_round, overview.config.rounds)) if known else range(1, 1)
        self._writer = self._torch.SummaryWriter(str(folder), purge_step=logged[-1] + 1 if logged else 0)
        if not known:
            lines = ["| name | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())]
            self._writer.add_text("run", "\n".join(lines), 0)
            final = {"final/accuracy": 0.0, "final/loss": 0.0}  # only the names count
            for summary in self._torch.summary.hparams(dict(facts), final):
                self._writer.file_writer.add_summary(summary)
            self._writer.flush()
        return logged

    def write(self, step: int, figures: Figures) -> None:
        """One scalar per figure, flushed so that a killed process loses none."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of wandb, offline unless WANDB_MODE is set; its id is stored, so that a resumed run continues it.

    An offline run cannot be continued, so it is replaced by a new one with the rounds of metrics.jsonl.
    """

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        self._alone = "wandb" not in sys.modules  # nobody else uses its service process
        self._wandb = require_extra("wandb", "wandb")
        self._run: Any = None

    def start(self, folder: Path, overview: Overview, facts: Facts) -> Container[int]:
        """Start the run. Online, rounds that the server has are not sent again; offline, all are."""
        mode = os.environ.get("WANDB_MODE") or "offline"
        identity = read_or_create(folder / "run-id", lambda: uuid.uuid4().hex[:12])
        old = set(folder.resolve().glob(f"offline-run-*-{identity}"))
        hooks = sys.exit, sys.excepthook  # wandb replaces them
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "unskew"), name=overview.path.name, id=identity,
                config=dict(facts), dir=str(folder.parent), mode=mode, resume="allow" if mode == "online" else None,
                reinit="create_new",
                settings=self._wandb.Settings(
                    console="off", silent=True, disable_git=True, save_code=False, disable_job_creation=True,
                    x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
                ),
            )  # fmt: skip
        finally:
            sys.exit, sys.excepthook = hooks
        if mode == "online":
            return range(1, self._run.step)
        for run in old - {Path(self._run.dir).resolve().parent}:
            shutil.rmtree(run)
        return ()

    def write(self, step: int, figures: Figures) -> None:
        """Log a step; figures of an earlier step go to the summary."""
        if step < self._run.step:
            self._run.summary.update(dict(figures))
        else:
            self._run.log(dict(figures), step=step)

    def close(self, finished: bool) -> None:
        """End the run, and the service process if we started it."""
        if self._run is not None:
            self._run.finish(exit_code=0 if finished else 1)
        if self._alone:
            self._wandb.teardown()


class MLflow:
    """A run of MLflow, in a database in the run directory unless MLFLOW_TRACKING_URI is set; its id is stored."""

    SECONDS = 1.0  # between writes, which are transactions; resuming writes what a crash lost
    BATCH = 1000  # figures that MLflow accepts at once

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # both are read when mlflow is imported
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        self._uri = os.environ.get("MLFLOW_TRACKING_URI")
        for module in () if self._uri else ("sqlalchemy", "alembic"):
            require_extra(module, "mlflow")
        self._mlflow = require_extra("mlflow", "mlflow")
        self._client: Any = None
        self._id = ""
        self._calibrations: frozenset[str] = frozenset()  # figures of calibrations that are already logged
        self._waiting: list[Any] = []
        self._written = 0.0

    def start(self, folder: Path, overview: Overview, facts: Facts) -> Container[int]:
        """Start the run. Rounds in the database are not sent again, not even those after the checkpoint."""
        self._client = self._mlflow.MlflowClient(self._uri or f"sqlite:///{folder.absolute() / 'mlflow.db'}")
        known = (folder / "run-id").exists()
        self._id = read_or_create(folder / "run-id", lambda: self._create_run(folder, overview))
        if not known:
            params = [self._mlflow.entities.Param(name, str(value)) for name, value in facts.items()]
            self._client.log_batch(self._id, params=params)
            return ()
        self._client.update_run(self._id, status="RUNNING")
        names = self._client.get_run(self._id).data.metrics
        self._calibrations = frozenset(name for name in names if name.startswith("calibration-"))
        return {metric.step for metric in self._client.get_metric_history(self._id, "examples")}

    def write(self, step: int, figures: Figures) -> None:
        """Queue the figures, and write the queue once a second."""
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        new = [metric(name, value, now, step) for name, value in figures.items() if name not in self._calibrations]
        if len(self._waiting) + len(new) > self.BATCH:  # a round is written in one transaction
            self._flush()
        self._waiting += new
        if time.monotonic() - self._written >= self.SECONDS:
            self._flush()

    def close(self, finished: bool) -> None:
        """Write the queue and set the run's status."""
        if self._id:
            self._flush()
            self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _flush(self) -> None:
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting)
        self._waiting, self._written = [], time.monotonic()

    def _create_run(self, folder: Path, overview: Overview) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "unskew")
        if experiment := self._client.get_experiment_by_name(name):
            number = experiment.experiment_id
        else:
            location = None if self._uri else (folder.absolute() / "artifacts").as_uri()
            number = self._client.create_experiment(name, artifact_location=location)
        return str(self._client.create_run(number, run_name=overview.path.name).info.run_id)


LOGGERS: dict[str, Callable[[], Backend]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
TOTALS = ("bytes_up", "bytes_down", "failures")  # also logged as sums over the rounds so far


class Logger:
    """An observer that writes a log. If logging fails, a note reports it and the run continues without the log."""

    def __init__(self, name: str, backend: Backend, note: Callable[[str], None]) -> None:
        self._name, self._note = name, note
        self._backend: Backend | None = backend
        self._path: Path | None = None  # of the run, once it has begun
        self._rounds = 0
        self._logged: Container[int] = ()
        self._totals = dict.fromkeys(TOTALS, 0.0)

    def __call__(self, event: Overview | Metrics | Event) -> None:
        """Log the event."""
        self._safely(lambda backend: self._log(backend, event))

    def close(self) -> None:
        """End the log; later events are not logged."""
        path = self._path
        if path is not None:
            self._safely(lambda backend: backend.close((path / "result.json").exists()))
        self._backend = None

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _safely(self, work: Callable[[Backend], None]) -> None:
        backend = self._backend
        if backend is None:
            return
        try:
            work(backend)
        except Exception as error:  # noqa: BLE001  whatever fails in a logger, the run must continue
            self._backend = None
            with suppress(Exception):
                backend.close(False)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._note(f"the {self._name} log failed ({reason}); the run continues without it")

    def _log(self, backend: Backend, event: Overview | Metrics | Event) -> None:
        if isinstance(event, Overview):
            self._path, self._rounds = event.path, event.config.rounds
            folder = event.path / "logs" / self._name
            folder.mkdir(parents=True, exist_ok=True)
            self._logged = backend.start(folder, event, list_facts(event))
            for row in read_metrics(event.path):
                if row["round"] < event.first_round:
                    self._round(backend, row)
        elif isinstance(event, Metrics):
            self._round(backend, asdict(event))
        elif isinstance(event, InitialModel):
            parts = ("start",) if self._rounds else ("start", "final")
            figures = {"accuracy": event.accuracy, "loss": event.loss}
            backend.write(0, {f"{part}/{name}": value for part in parts for name, value in figures.items()})
        elif isinstance(event, Calibrated):
            result, name = event.result, calibration_file(Path(), event.result.name).stem
            figures = {"accuracy": result.accuracy, "loss": result.loss, "bytes_up": float(result.bytes_up)}
            backend.write(self._rounds, {f"{name}/{key}": value for key, value in figures.items()})

    def _round(self, backend: Backend, row: Mapping[str, Any]) -> None:
        number, figures = row["round"], list_figures(row)
        for name in TOTALS:
            if name in figures:
                self._totals[name] += figures[name]
                figures[f"total/{name}"] = self._totals[name]
        if number == self._rounds:
            figures |= {f"final/{name}": figures[name] for name in ("accuracy", "loss") if name in figures}
        if number not in self._logged:
            backend.write(number, figures)


def list_facts(overview: Overview) -> dict[str, str | int | float | bool]:
    """The configuration, and the facts about the data before the first round."""
    images = overview.images
    facts: dict[str, Any] = asdict(overview.config) | {"engine": overview.engine, "parameters": overview.parameters}
    facts |= {
        "workers": overview.processes.count - 1,
        "test_examples": len(images.test),
        "classes": len(images.classes),
    }
    if not overview.algorithm.released:  # these follow from the clients' labels
        examples = len(images.train) or overview.population.roster.examples
        facts |= {"partition_hash": overview.partition.hash, "train_examples": examples, "emd": overview.emd}
    return {name: value for name, value in facts.items() if value is not None}


def list_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers named as in metrics.jsonl, with its rate and the number of failed visits."""
    left_out = ("round", "released")
    numbers = {k: float(value) for k, value in row.items() if isinstance(value, int | float) and k not in left_out}
    if "examples" not in numbers:  # a release
        return numbers
    rate = numbers["examples"] / max(numbers["seconds"], 1e-9)
    return numbers | {"examples_per_second": rate, "failures": float(len(row.get("failures", ())))}


@accepts
def open_logger(name: str, note: Callable[[str], None] | None = None) -> Logger:
    """A logger to pass as ``observe``.

    Parameters
    ----------
    name
        tensorboard, wandb, mlflow, or ``package.module:function(knobs)``, which returns a Backend.
    note
        Called with a message if logging fails; by default it issues a warning.

    Returns
    -------
    The logger, also a context manager that closes the log.
    """
    make = LOGGERS.get(name)
    if ":" in name:
        call, *others = language.parse_calls(name, "--log")
        if others:
            raise others[0].error("give one --log per logger")
        make = partial(language.apply, call, load_function(call.name, "--log"), "--log")
    if make is None:
        raise UserError(f"--log {name}: {nearest(name, LOGGERS)}; or give package.module:function")
    try:
        backend = make()
    except UserError:
        raise
    except Exception as error:  # plug-ins may raise anything
        raise UserError(f"--log {name} cannot be opened: {type(error).__name__}: {error}") from error
    if not all(hasattr(backend, part) for part in ("start", "write", "close")):
        raise UserError(f"--log {name}: return an object with start, write and close")
    folder = re.sub(r"[^\w.-]+", "-", name)
    return Logger(folder, backend, note or (lambda text: warnings.warn(text, stacklevel=2)))
