"""A run as it goes, in a notebook: a bar, the last figures and the accuracy so far, in one place that is drawn over."""

import importlib
import sys
import time
from html import escape
from typing import Any

from unskew.console.screen import calibration_lines, round_figures
from unskew.core.units import format_duration
from unskew.round.driver import Metrics
from unskew.runs.execute import Event, Stage
from unskew.runs.journal import read_metrics
from unskew.runs.prepare import Overview
from unskew.runs.result import accuracy_picture, measured_on

SECONDS = 0.5  # between two drawings


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


class NotebookView:
    """An observer of a run that shows it below the notebook's cell."""

    def __init__(self) -> None:
        show: Any = importlib.import_module("IPython.display")  # a notebook's kernel has it
        self._html = show.HTML
        self._place = show.display(show.HTML(""), display_id=True)
        self._title, self._rounds, self._first = "", 0, 1
        self._began, self._drawn = 0.0, 0.0
        self._rows: list[dict[str, Any]] = []
        self._figures, self._on = "", measured_on(False)
        self._lines: list[str] = []

    def __call__(self, event: Overview | Metrics | Event) -> None:
        """Take the event in, and draw if the last drawing is old enough."""
        if isinstance(event, Overview):
            config = event.config
            self._title = f"{config.method} on {event.images.name}, {config.model}, {event.engine} engine"
            self._on = measured_on(bool(config.validation))
            self._rounds, self._first, self._began = config.rounds, event.first_round, time.monotonic()
            self._rows = [row for row in read_metrics(event.path) if row["round"] < event.first_round]
        elif isinstance(event, Metrics):
            self._rows.append({"round": event.round, "accuracy": event.accuracy})
            self._figures = round_figures(event)
        elif isinstance(event, Stage):
            self._figures = f"{event.words}: {event.done:,} of {event.total:,}" if event.total else event.words
        else:
            self._lines += calibration_lines(event)
        last = isinstance(event, Metrics) and event.round == self._rounds
        if last or not isinstance(event, Metrics | Stage) or time.monotonic() - self._drawn >= SECONDS:
            self._draw()

    def close(self) -> None:
        """Draw the last state and leave it there."""
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        done = self._rows[-1]["round"] if self._rows else 0
        trained = done - self._first + 1
        left = (self._drawn - self._began) / trained * (self._rounds - done) if trained > 0 else 0.0
        remaining = f", {format_duration(left)} left" if trained > 0 and done < self._rounds else ""
        lines = [
            f"<b>{escape(self._title)}</b>",
            f'<progress value="{done}" max="{self._rounds}"></progress> round {done} of {self._rounds}{remaining}'
            if self._rounds
            else "rounds 0: nothing is trained",
            *map(escape, filter(None, (self._figures, *self._lines))),
        ]
        picture = accuracy_picture(self._rows, on=self._on)
        self._place.update(self._html(f"<div>{'<br>'.join(lines)}<br>{picture}</div>"))
