"""MLflow: a database in the run folder, or the user's tracking server."""

import os
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from unskew.core.plugins import require_extra
from unskew.loggers.logger import Facts, Figures, kept
from unskew.runs.prepare import Overview


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
        place = None if self._uri else (folder.absolute() / "artifacts").as_uri()
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(name, artifact_location=place)
        )
        created: str = self._client.create_run(number, run_name=seen.path.name).info.run_id
        return created
