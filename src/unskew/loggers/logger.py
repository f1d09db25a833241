"""A run's events as figures by name and round, for any backend."""

import re
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from unskew.core.files import write_whole
from unskew.round.driver import Metrics
from unskew.runs.execute import Calibrated, Event
from unskew.runs.folder import calibration_file
from unskew.runs.journal import read_metrics
from unskew.runs.prepare import InitialModel, Overview

Facts = Mapping[str, str | int | float | bool]  # what a run is, by name
Figures = Mapping[str, float]  # of a round, by name

TOTALS = ("bytes_up", "bytes_down", "failures")  # also logged as sums over the rounds so far


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


class Logger:
    """An observer that writes a log. If the log fails, one note says so and the run continues without it."""

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
            self._totals[name] += figures[name]
            figures[f"total/{name}"] = self._totals[name]
        if number == self._rounds:
            figures |= {f"final/{name}": figures[name] for name in ("accuracy", "loss") if name in figures}
        if number not in self._held:
            backend.write(number, figures)


def facts_of(seen: Overview) -> dict[str, str | int | float | bool]:
    """The configuration, and what is known of the data before the first round."""
    options = {key: value for key, value in asdict(seen.config).items() if value is not None}
    known = {
        "engine": seen.engine,
        "workers": seen.processes.count - 1,
        **({} if seen.emd is None else {"emd": seen.emd}),
        "partition_hash": seen.partition.hash,
        "parameters": seen.parameters,
        "train_examples": len(seen.images.train) or seen.population.roster.examples,
        "test_examples": len(seen.images.test),
        "classes": len(seen.images.classes),
    }
    return options | known


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers under the names they have in metrics.jsonl, with its rate and how many visits failed."""
    numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "round"}
    rate = numbers["examples"] / max(numbers["seconds"], 1e-9)
    return numbers | {"examples_per_second": rate, "failures": float(len(row.get("failures", ())))}


def earlier(seen: Overview) -> list[dict[str, Any]]:
    """The rounds that were done before, from metrics.jsonl."""
    return [row for row in read_metrics(seen.path) if row["round"] < seen.first_round]


def kept(file: Path, make: Callable[[], str]) -> str:
    """The file's text; where there is no file yet, what ``make`` gives is written to it first."""
    if not file.exists():
        write_whole(file, make().encode())
    return re.sub(r"\s", "", file.read_text())
