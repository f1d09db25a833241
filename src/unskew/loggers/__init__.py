"""Loggers: observers that write a run's metrics for TensorBoard, Weights & Biases or MLflow.

Logs are written to ``logs/`` in the run directory; nothing goes over a network unless the user sets WANDB_MODE or
MLFLOW_TRACKING_URI. Steps are rounds; a resumed run continues the same log, with each round in it once.
"""

import re
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from unskew.core import text
from unskew.core.errors import UserError, a_kind, accepts, nearest
from unskew.core.plugins import load_function
from unskew.loggers.backends import Backend as Backend
from unskew.loggers.backends import MLflow, TensorBoard, WeightsAndBiases
from unskew.round.driver import Metrics
from unskew.runs.execute import Calibrated, Event, InitialModel
from unskew.runs.folder import calibration_file
from unskew.runs.journal import read_metrics
from unskew.runs.prepare import Overview

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
            figures = {"accuracy": event.accuracy, "loss": event.loss}
            final = {f"final/{name}": value for name, value in figures.items()} if not self._rounds else {}
            backend.write(0, {f"start/{name}": value for name, value in figures.items()} | final)
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
    options = {key: value for key, value in asdict(overview.config).items() if value is not None}
    private = {
        **({} if overview.emd is None else {"emd": overview.emd}),
        "partition_hash": overview.partition.hash,
        "train_examples": len(overview.images.train) or overview.population.roster.examples,
    }
    return options | {
        "engine": overview.engine,
        "workers": overview.processes.count - 1,
        **({} if overview.algorithm.released else private),
        "parameters": overview.parameters,
        "test_examples": len(overview.images.test),
        "classes": len(overview.images.classes),
    }


def list_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers named as in metrics.jsonl, with its rate and the number of failed visits."""
    numbers = {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("round", "released")
    }
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
    make = _load_plugin(name) if ":" in name else LOGGERS.get(name)
    if make is None:
        raise UserError(f"--log {name}: {nearest(name, LOGGERS)}; or give package.module:function")
    folder = re.sub(r"[^\w.-]+", "-", name)
    return Logger(folder, _open_backend(name, make), note or (lambda text: warnings.warn(text, stacklevel=2)))


def _load_plugin(name: str) -> Callable[[], Backend]:
    calls = text.parse_calls(name, "--log")
    if len(calls) > 1:
        raise text.complain(name, calls[1].start, "give one --log per logger")
    return partial(text.apply, calls[0], load_function(calls[0].name, "--log"), "--log")


def _open_backend(name: str, make: Callable[[], Backend]) -> Backend:
    try:
        backend = make()
    except UserError:
        raise
    except Exception as error:  # plug-ins may raise anything
        raise UserError(f"--log {name} cannot be opened: {type(error).__name__}: {error}") from error
    if missing := [part for part in ("start", "write", "close") if not callable(getattr(backend, part, None))]:
        raise UserError(
            f"--log {name}: it returns {a_kind(backend)} without {', '.join(missing)}; "
            "return an object with start, write and close"
        )
    return backend
