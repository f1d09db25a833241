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

Facts = Mapping[str, str | int | float | bool]  # what a run is, by name
Figures = Mapping[str, float]  # of a round, by name


class Backend(Protocol):
    """Where the figures go. Its constructor imports what it needs, so that a missing package shows before the run."""

    def start(self, folder: Path, seen: Overview, facts: Facts) -> Container[int]:
        """Open the log of a run, or continue it; the answer is the rounds that it has and that are not sent again.

        ``folder`` is a folder for the log in the run folder; ``facts`` are the configuration and what the data say.
        """
        ...

    def write(self, step: int, figures: Figures) -> None:
        """Write figures so that a crash of this process does not lose them."""
        ...

    def close(self, finished: bool) -> None:
        """End the log, of a run that is ``finished`` or may be resumed."""
        ...


def kept(file: Path, make: Callable[[], str]) -> str:
    """The file's text; where there is no file yet, what ``make`` gives is written to it first."""
    if not file.exists():
        write_whole(file, make().encode())
    return re.sub(r"\s", "", file.read_text())


class TensorBoard:
    """Event files. A resumed run makes TensorBoard drop the rounds that are sent again."""

    def __init__(self) -> None:
        require_extra("tensorboard", "tensorboard")
        self._torch = require_extra("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, folder: Path, seen: Overview, facts: Facts) -> Container[int]:
        """The last round is sent again too: the calibrations are logged with it, and they are made again."""
        known = any(folder.glob("events.out.tfevents.*"))
        held = range(1, min(seen.first_round, seen.config.rounds)) if known else range(1, 1)
        self._writer = self._torch.SummaryWriter(str(folder), purge_step=held[-1] + 1 if held else 0)
        if not known:
            lines = ["| name | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())]
            self._writer.add_text("run", "\n".join(lines), 0)
            final = {"final/accuracy": 0.0, "final/loss": 0.0}  # names only: where to find the final figures
            for summary in self._torch.summary.hparams(dict(facts), final):
                self._writer.file_writer.add_summary(summary)
            self._writer.flush()
        return held

    def write(self, step: int, figures: Figures) -> None:
        """One scalar for each figure; flushed, so that a killed process loses none."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of wandb, offline unless WANDB_MODE says otherwise; its id is kept, so that a resumed run has the same.

    An offline run cannot be continued: it is replaced by a new one, written from metrics.jsonl.
    """

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        self._alone = "wandb" not in sys.modules  # then no other code needs its service process
        self._wandb = require_extra("wandb", "wandb")
        self._run: Any = None

    def start(self, folder: Path, seen: Overview, facts: Facts) -> Container[int]:
        """Online the rounds that the server has are not sent again; offline all are."""
        mode = os.environ.get("WANDB_MODE") or "offline"
        identity = kept(folder / "run-id", lambda: uuid.uuid4().hex[:12])
        old = set(folder.resolve().glob(f"offline-run-*-{identity}"))
        hooks = sys.exit, sys.excepthook  # wandb replaces them
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "unskew"), name=seen.path.name, id=identity, config=dict(facts),
                dir=str(folder.parent), mode=mode, resume="allow" if mode == "online" else None, reinit="create_new",
                settings=self._wandb.Settings(
                    console="off", silent=True, disable_git=True, save_code=False, disable_job_creation=True,
                    x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
                ),
            )  # fmt: skip
        finally:
            sys.exit, sys.excepthook = hooks
        if mode == "online":
            return range(1, self._run.step)
        for former in old - {Path(self._run.dir).resolve().parent}:
            shutil.rmtree(former)
        return ()

    def write(self, step: int, figures: Figures) -> None:
        """A step of its history; figures of a past step go to the summary."""
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
    """A run of MLflow, in a database in the run folder unless MLFLOW_TRACKING_URI names another; its id is kept."""

    SECONDS = 1.0  # between writes: each is a transaction; resuming writes what a crash lost
    BATCH = 1000  # figures that MLflow takes at once, at most

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # both are read when mlflow is imported
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        self._uri = os.environ.get("MLFLOW_TRACKING_URI")
        for module in () if self._uri else ("sqlalchemy", "alembic"):
            require_extra(module, "mlflow")
        self._mlflow = require_extra("mlflow", "mlflow")
        self._client: Any = None
        self._id = ""
        self._once: frozenset[str] = frozenset()  # names of calibrations that are there already
        self._waiting: list[Any] = []
        self._written = 0.0

    def start(self, folder: Path, seen: Overview, facts: Facts) -> Container[int]:
        """Rounds in the database are not sent again, also those after the checkpoint: they would be the same."""
        self._client = self._mlflow.MlflowClient(self._uri or f"sqlite:///{folder.absolute() / 'mlflow.db'}")
        known = (folder / "run-id").exists()
        self._id = kept(folder / "run-id", lambda: self._created(folder, seen))
        if not known:
            params = [self._mlflow.entities.Param(name, str(value)) for name, value in facts.items()]
            self._client.log_batch(self._id, params=params)
            return ()
        self._client.update_run(self._id, status="RUNNING")
        names = self._client.get_run(self._id).data.metrics
        self._once = frozenset(name for name in names if name.startswith("calibration-"))
        return {metric.step for metric in self._client.get_metric_history(self._id, "examples")}

    def write(self, step: int, figures: Figures) -> None:
        """Queue the figures, and write the queue once a second."""
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        news = [metric(name, value, now, step) for name, value in figures.items() if name not in self._once]
        if len(self._waiting) + len(news) > self.BATCH:  # a round is written as a whole or not at all
            self._flush()
        self._waiting += news
        if time.monotonic() - self._written >= self.SECONDS:
            self._flush()

    def close(self, finished: bool) -> None:
        """Write the queue and say how the run ended."""
        if self._id:
            self._flush()
            self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _flush(self) -> None:
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting)
        self._waiting, self._written = [], time.monotonic()

    def _created(self, folder: Path, seen: Overview) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "unskew")
        experiment = self._client.get_experiment_by_name(name)
        location = None if self._uri else (folder.absolute() / "artifacts").as_uri()
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(name, artifact_location=location)
        )
        created: str = self._client.create_run(number, run_name=seen.path.name).info.run_id
        return created
