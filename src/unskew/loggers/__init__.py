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
    """An observer that writes a log. If the log fails, one note reports it and the run continues without it."""

    def __init__(self, name: str, backend: Backend, note: Callable[[str], None]) -> None:
        self._name, self._note = name, note
        self._backend: Backend | None = backend
        self._path: Path | None = None  # of the run, once it has begun
        self._rounds = 0
        self._held: Container[int] = ()
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
        except Exception as error:  # noqa: BLE001  others' code, a full disk, a lost server: the run must not fail for it
            self._backend = None
            with suppress(Exception):
                backend.close(False)
            what = " ".join(f"{type(error).__name__}: {error}".split())
            self._note(f"the {self._name} log failed ({what}); the run continues without it")

    def _log(self, backend: Backend, event: Overview | Metrics | Event) -> None:
        if isinstance(event, Overview):
            self._path, self._rounds = event.path, event.config.rounds
            folder = event.path / "logs" / self._name
            folder.mkdir(parents=True, exist_ok=True)
            self._held = backend.start(folder, event, facts_of(event))
            for row in earlier(event):
                self._round(backend, row)
        elif isinstance(event, Metrics):
            self._round(backend, asdict(event))
        elif isinstance(event, InitialModel):
            figures = {"accuracy": event.accuracy, "loss": event.loss}
            final = {f"final/{name}": value for name, value in figures.items()} if not self._rounds else {}
            backend.write(0, {f"start/{name}": value for name, value in figures.items()} | final)
        elif isinstance(event, Calibrated):
            made, name = event.result, calibration_file(Path(), event.result.name).stem
            figures = {"accuracy": made.accuracy, "loss": made.loss, "bytes_up": float(made.bytes_up)}
            backend.write(self._rounds, {f"{name}/{key}": value for key, value in figures.items()})

    def _round(self, backend: Backend, row: Mapping[str, Any]) -> None:
        number, figures = row["round"], figures_of(row)
        for name in TOTALS:
            if name in figures:
                self._totals[name] += figures[name]
                figures[f"total/{name}"] = self._totals[name]
        if number == self._rounds:
            figures |= {f"final/{name}": figures[name] for name in ("accuracy", "loss") if name in figures}
        if number not in self._held:
            backend.write(number, figures)


def facts_of(seen: Overview) -> dict[str, str | int | float | bool]:
    """The configuration, and what is known of the data before the first round."""
    options = {key: value for key, value in asdict(seen.config).items() if value is not None}
    private = {
        **({} if seen.emd is None else {"emd": seen.emd}),
        "partition_hash": seen.partition.hash,
        "train_examples": len(seen.images.train) or seen.population.roster.examples,
    }
    known = {
        "engine": seen.engine,
        "workers": seen.processes.count - 1,
        **({} if seen.algorithm.released else private),
        "parameters": seen.parameters,
        "test_examples": len(seen.images.test),
        "classes": len(seen.images.classes),
    }
    return options | known


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers under the names they have in metrics.jsonl, with its rate and how many visits failed."""
    numbers = {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("round", "released")
    }
    if "examples" not in numbers:  # a release
        return numbers
    rate = numbers["examples"] / max(numbers["seconds"], 1e-9)
    return numbers | {"examples_per_second": rate, "failures": float(len(row.get("failures", ())))}


def earlier(seen: Overview) -> list[dict[str, Any]]:
    """The rounds that were done before, from metrics.jsonl."""
    return [row for row in read_metrics(seen.path) if row["round"] < seen.first_round]


@accepts
def open_logger(name: str, note: Callable[[str], None] | None = None) -> Logger:
    """A logger to pass as ``observe``.

    Parameters
    ----------
    name
        tensorboard, wandb, mlflow, or ``package.module:function(knobs)``, which returns a Backend.
    note
        Called with a message if the log fails; by default that is a warning.

    Returns
    -------
    The logger, also a context manager that closes the log.
    """
    make = _outside(name) if ":" in name else LOGGERS.get(name)
    if make is None:
        raise UserError(f"--log {name}: {nearest(name, LOGGERS)}; or give package.module:function")
    folder = re.sub(r"[^\w.-]+", "-", name)
    return Logger(folder, _opened(name, make), note or (lambda text: warnings.warn(text, stacklevel=2)))


def _outside(name: str) -> Callable[[], Backend]:
    calls = text.parse_calls(name, "--log")
    if len(calls) > 1:
        raise text.complain(name, calls[1].start, "give one --log per logger")
    return partial(text.apply, calls[0], load_function(calls[0].name, "--log"), "--log")


def _opened(name: str, make: Callable[[], Backend]) -> Backend:
    try:
        backend = make()
    except UserError:
        raise
    except Exception as error:  # someone else's code may raise anything
        raise UserError(f"--log {name} cannot be opened: {type(error).__name__}: {error}") from error
    missing = [part for part in ("start", "write", "close") if not callable(getattr(backend, part, None))]
    if missing:
        raise UserError(
            f"--log {name}: it returns {a_kind(backend)} without {', '.join(missing)}; "
            "return an object with start, write and close"
        )
    return backend
