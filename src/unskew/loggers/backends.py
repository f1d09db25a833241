"""TensorBoard, Weights & Biases and MLflow as backends of a logger."""

import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Protocol

from unskew.core.files import write_whole
from unskew.core.plugins import require_extra
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
