"""What a run shows while it trains: settings, rounds and result, in a terminal, a pipe or a notebook."""

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from unskew.calibration.federated import Forecasted, Gathering
from unskew.charts.builders import accuracy_picture
from unskew.console.progress import PlainConsole, StageProgress
from unskew.core import language
from unskew.core.types import EVERYONE, Local
from unskew.core.units import counted, format_bytes, format_duration, format_emd, format_rate
from unskew.data.batches import RESIZED_CROP
from unskew.data.population import describe_sizes
from unskew.round.driver import Metrics
from unskew.round.local_optimizers import uses_sgd
from unskew.runs.execute import Event, InitialModel, Stage
from unskew.runs.journal import read_metrics
from unskew.runs.prepare import Overview
from unskew.runs.result import Result, measured_on, summary_rows


def overview_rows(seen: Overview) -> list[tuple[str, str]]:
    """A run's settings and needs, as words and facts."""
    config, images, partition, sizes = seen.config, seen.images, seen.partition, seen.population.sizes
    channels, height, width = images.shape
    shape = f"{width}x{height} {'gray' if channels == 1 else 'color'}"
    here, test = len(images.train), len(images.test)
    train = f"{here:,} train" if here else f"{seen.population.roster.examples:,} train at the nodes"
    held_out = f"{test:,} {'held out for validation, no test' if config.validation else 'test'}"
    evaluated = held_out if test else "test images at the nodes"
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (images.mean, images.std))
    crops = "resized crops" if config.augmentation == RESIZED_CROP else "crops"
    median = "" if sizes.min() == sizes.max() else f" (median {int(np.median(sizes)):,})"
    clients = f"{counted(partition.clients, 'client')} of {describe_sizes(sizes)}{median}"
    then = "calibrated" if seen.algorithm.finish else "evaluated as it is"
    trained = f"rounds 0: nothing is trained, the initial model is {then}"
    if config.rounds:
        trained = f"{_participation(seen)}, {_describe_steps(seen.local)}"
    others = f"; other settings: {', '.join(seen.unlike_baseline)}" if seen.unlike_baseline else ""
    baseline = seen.baseline and f"{seen.baseline.path}: {seen.baseline.accuracy:.2%}{others}"
    method_notes = _overruled(seen)
    if config.patience is not None and config.rounds:
        method_notes.append(
            f"the run stops after {counted(config.patience, 'round')} without a better {config.monitor}; the best "
            "round is chosen on the images it is evaluated on, so its accuracy there is slightly optimistic"
        )
    memory = f"{format_bytes(seen.memory_bytes)} of memory (data {format_bytes(seen.data_bytes)})"
    rows = [
        ("data", f"{images.name}: {train}, {evaluated}, {len(images.classes):,} classes, {shape}"),
        ("", f"mean {mean}, std {std}; {f'{crops} and flips on' if config.augment else 'no augmentation'}"),
        *(("", f"note: {note}") for note in (*images.notes, *partition.notes)),
        ("partition", f"{partition.scheme}: {clients}, EMD {format_emd(seen.emd)}, hash {partition.hash[:12]}"),
        ("model", f"{config.model}: {seen.parameters:,} parameters"),
        *(("", note) for note in seen.model_notes),
        ("", seen.batch_norm and f"BatchNorm: {seen.batch_norm}"),
        ("method", f"{config.method}; {trained}"),
        ("start", config.start and f"the classifier of {config.start}"),
        *(("", f"note: {note}") for note in method_notes),
        ("baseline", baseline),
        ("engine", f"{seen.engine} ({seen.processes.description}), seed {config.seed}"),
        ("needs", f"{memory} and {format_bytes(seen.disk_bytes)} on disk"),
        ("run", str(seen.path)),
    ]
    return [(word, fact) for word, fact in rows if fact]


def _participation(seen: Overview) -> str:
    visits, take = seen.visits, seen.visits[0].take
    if visits[0].client == EVERYONE:
        return f"{'all examples' if take is None else f'{take:,} examples per round'} on one client"
    most = "at most " if seen.algorithm.available or seen.algorithm.arrive else ""
    if take is not None:
        return f"{most}{counted(len(visits), 'visit')} per round of {counted(take, 'example')} each"
    return f"{most}{counted(len(visits), 'client')} per round"


def _overruled(seen: Overview) -> list[str]:
    used, notes = asdict(seen.local), []
    for key, value in asdict(seen.config.local()).items():
        if value != used[key] and not (key == "epochs" and seen.local.steps):
            flag = f"--{key.replace('_', '-')} {language.spell(value)}"
            notes.append(
                f"the method sets {key.replace('_', ' ')} to {language.spell(used[key])}; {flag} has no effect"
            )
    return notes


def _describe_steps(local: Local) -> str:
    """How clients train, without the defaults."""
    length = f"epochs {local.epochs}" if local.steps is None else f"steps {local.steps}"
    rate = f"lr {local.lr:g}" + ("" if local.schedule == "constant" else f" ({local.schedule})")
    kind = f"momentum {local.momentum:g}" if uses_sgd(local) else local.optimizer
    clip = f"gradients clipped to {local.clip:g}, " if local.clip else ""
    decay = f"weight decay {local.weight_decay:g}" + ("" if local.decay == "all" else " on weights only")
    return f"{length}, batch {local.batch}, {rate}, {kind}, {clip}{decay}"


class Screen:
    """An observer of a run that shows it on a console."""

    def __init__(self, console: PlainConsole) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._stages: StageProgress | None = None
        self._rounds = self._first = self._done = 0  # all rounds, the first of this process, the last that is done
        self._began = 0.0

    def __call__(self, event: Overview | Metrics | Event) -> None:
        """Show the event."""
        if isinstance(event, Overview):
            self._show_overview(event)
        elif isinstance(event, Metrics):
            self._show_round(event)
        elif isinstance(event, Stage):
            self._stages = self._stages or StageProgress(self._console).__enter__()
            self._stages(event.activity, event.done, event.total)
        else:
            if self._done >= self._rounds:
                self.close()
            self._console.say(*calibration_lines(event))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
        if self._stages is not None:
            self._stages.__exit__()
        self._bar = self._stages = None

    def note(self, text: str) -> None:
        """Print a note."""
        self._console.say(f"note: {text}")

    def _show_overview(self, seen: Overview) -> None:
        self.close()
        self._console.print(show_facts(overview_rows(seen)))
        self._rounds, self._first, self._began = seen.config.rounds, seen.first_round, time.monotonic()
        self._done = self._first - 1
        if self._done:
            self._console.print(f"resuming after round {self._done}")
        if self._rounds and self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[figures]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._bar.add_task("rounds", total=self._rounds, completed=self._done, figures="")
            self._bar.start()

    def _show_round(self, row: Metrics) -> None:
        for failure in row.failures:
            self._console.say(f"round {row.round}: continued without client {failure.client}: {failure.reason}")
        self._done = row.round
        figures = round_figures(row)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=row.round, figures=figures)
        else:
            done = row.round - self._first + 1
            left = (time.monotonic() - self._began) / done * (self._rounds - row.round)
            self._console.say(f"round {row.round}/{self._rounds}  {figures}  {format_duration(left)} left")


def round_figures(row: Metrics) -> str:
    """A round's loss, accuracy where evaluated, and rate."""
    accuracy = "" if row.accuracy is None else f"  accuracy {row.accuracy:.2%}"
    if row.void is not None:
        return f"void: {row.void}{accuracy}"
    if row.clients == 0 and row.epsilon is None:
        return f"no client participated{accuracy}"
    loss = f"{row.clients} participated" if row.train_loss is None else f"loss {row.train_loss:.3f}"
    spent = "" if row.epsilon is None else f"  ε {row.epsilon:.4g} for every {row.unit}"
    rate = "" if row.lr is None else f"  lr {row.lr:.4g}"
    if row.examples is None or row.seconds is None:  # a release
        return f"{spent}{accuracy}{rate}".strip()
    away = f"  {row.clients} participated, {row.absent} did not" if row.absent else ""
    return f"{loss}{spent}{accuracy}{rate}{away}  {format_rate(row.examples / max(row.seconds, 1e-9))} examples/s"


def calibration_lines(event: Event) -> list[str]:
    """A calibration in words: before it is made, and after."""
    if isinstance(event, Stage):
        return []
    if isinstance(event, Gathering):
        who = f"{counted(event.clients, 'client')} {'sends' if event.clients == 1 else 'send'}"
        return [f"{event.method}: {who} {format_bytes(event.bytes_up)}, {event.what}"]
    if isinstance(event, Forecasted):
        seen = event.forecast
        words = f"{event.method}: mean sliced Wasserstein distance between class Gaussians {seen.separability:.3g}"
        if seen.before is None or seen.after is None:
            return [words]
        right = f"{seen.before:.1%} by the classifier, {seen.after:.1%} by a linear discriminant"
        return [f"{words}; features drawn from them classified correctly: {right}"]
    if isinstance(event, InitialModel):
        made = event.start
        name = "before training" if made is None else f"start {made.name}"
        took = "" if made is None else f", {format_duration(made.seconds)}"
        return [*(f"{name}: note: {note}" for note in event.notes), f"{name}: accuracy {event.accuracy:.2%}{took}"]
    row = event.result
    line = f"{row.name}: accuracy {row.accuracy:.2%}, {format_duration(row.seconds)}"
    return [*(f"{row.name}: note: {note}" for note in event.notes), line]


def summary(result: Result) -> Table:
    """The last table: the result without what the overview already shows, accuracies in bold."""
    rows: list[tuple[str, str | Text]] = []
    for word, fact in summary_rows(result):
        accuracy, share, rest = fact.partition("%")
        if word.startswith(("accuracy", "after ")):
            rows.append((word, Text.assemble((accuracy + share, "bold"), rest)))
        elif word not in ("method", "data", "note"):
            rows.append((word, fact))
    return show_facts(rows)


def show_facts(rows: Sequence[tuple[str, str | Text]], width: int | None = None) -> Table:
    """Words on the left, facts on the right; brackets in a path are not markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=width)
    table.add_column(overflow="fold")
    for word, fact in rows:
        table.add_row(Text(word), Text(fact) if isinstance(fact, str) else fact)
    return table


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
        self._title, self._figures, self._on = "", "", measured_on(False)
        self._rounds, self._first, self._began, self._drawn = 0, 1, 0.0, 0.0
        self._rows, self._lines = list[dict[str, Any]](), list[str]()

    def __call__(self, event: Overview | Metrics | Event) -> None:
        """Record the event, and draw if the last drawing is old enough."""
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
            self._figures = f"{event.activity}: {event.done:,} of {event.total:,}" if event.total else event.activity
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
        state = f'<progress value="{done}" max="{self._rounds}"></progress> round {done} of {self._rounds}{remaining}'
        lines = [f"<b>{escape(self._title)}</b>", state if self._rounds else "rounds 0: nothing is trained"]
        lines += map(escape, filter(None, (self._figures, *self._lines)))
        picture = accuracy_picture(self._rows, on=self._on)
        self._place.update(self._html(f"<div>{'<br>'.join(lines)}<br>{picture}</div>"))
