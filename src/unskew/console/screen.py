"""What a run shows while it trains: settings, rounds and result, in a terminal, a pipe or a notebook."""

import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from unskew.calibration.federated import Forecasted, Gathering
from unskew.console.progress import StageProgress
from unskew.core import text
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import EVERYONE, Local
from unskew.core.units import counted, emd_words, format_bytes, format_duration
from unskew.data.batches import RESIZED_CROP
from unskew.data.population import describe_sizes
from unskew.round.driver import Metrics
from unskew.round.local_optimizers import uses_sgd
from unskew.round.sampling import draw
from unskew.runs.execute import Event, InitialModel, Stage
from unskew.runs.journal import read_metrics
from unskew.runs.prepare import Overview
from unskew.runs.result import Result, accuracy_picture, measured_on, summary_rows

Point = tuple[float, float]  # round, value

_BRAILLE_DOTS = (
    (0x01, 0x02, 0x04, 0x40),
    (0x08, 0x10, 0x20, 0x80),
)  # of a braille character: left and right column, downwards
_MARKS = ".-'"  # of an ASCII character: the lowest third of its line, the middle, the highest


def curve(
    points: Sequence[Point], width: int, height: int, label: Callable[[float], str], ascii_only: bool
) -> list[str]:
    """The points as ``height`` lines and one for the rounds, none longer than ``width``; ``label`` spells a value."""
    low, high = min(value for _, value in points), max(value for _, value in points)
    margin = max(len(label(low)), len(label(high)))
    across, down = (1, len(_MARKS)) if ascii_only else (len(_BRAILLE_DOTS), len(_BRAILLE_DOTS[0]))
    columns = width - margin - 2
    levels = _levels(points, columns * across, height * down, low, high)
    rows = [[0] * columns for _ in range(height)]  # of each character, its dots or the highest of its marks
    for x, (bottom, top) in enumerate(levels):
        for level in range(bottom, top + 1):
            row, part = divmod(height * down - 1 - level, down)
            if ascii_only:
                rows[row][x] = max(rows[row][x], down - part)
            else:
                rows[row][x // across] |= _BRAILLE_DOTS[x % across][part]
    names = {0: label(high), height - 1: label(low)} if high > low else {height // 2: label(low)}
    side, corner = ("|", "+") if ascii_only else ("│", "└")
    glyphs = _MARKS if ascii_only else [chr(0x2800 + dots) for dots in range(1, 256)]
    drawn = ["".join(glyphs[dots - 1] if dots else " " for dots in row).rstrip() for row in rows]
    lines = [f"{names.get(at, ''):>{margin}} {side}{line}" for at, line in enumerate(drawn)]
    first, last = f"round {points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    end = last if len(points) > 1 else ""
    return [*lines, f"{'':>{margin}} {corner}{first}{end:>{max(1, columns - len(first))}}".rstrip()]


def _levels(points: Sequence[Point], columns: int, levels: int, low: float, high: float) -> list[tuple[int, int]]:
    """For each column of dots the lowest and the highest that is set: columns that touch make a line.

    A column shows the mean of its rounds; one without rounds is interpolated between its neighbours.
    """
    rounds, values = np.array(points, float).T
    if rounds[-1] <= rounds[0]:
        return [(levels // 2, levels // 2)]
    column = np.rint((rounds - rounds[0]) / (rounds[-1] - rounds[0]) * (columns - 1)).astype(int)
    counts = np.bincount(column, minlength=columns)
    known = np.flatnonzero(counts)
    means = np.interp(np.arange(columns), known, np.bincount(column, values, columns)[known] / counts[known])
    heights = [levels // 2] * columns
    if high > low:
        heights = np.rint((means - low) / (high - low) * (levels - 1)).astype(int).tolist()
    return [
        (here, here) if abs(here - before) <= 1 else (min(here, before + 1), max(here, before - 1))
        for before, here in pairwise([heights[0], *heights])
    ]


MIN_SIZE = (60, 16)  # columns and lines; with fewer there is the bar alone
RATE_WIDTH = 80  # columns; with fewer the rate is only in the lines below the bar
HEIGHT = 6  # lines of the curve
PER_SECOND = 4  # how often it is drawn
MEMORY_SECONDS = 1.0  # between two readings of the memory
MAX_CLIENTS_SHOWN = 12  # by number; more are counted


class View:
    """The live view of one run. A round only leaves its figures here; a thread of rich's draws them."""

    def __init__(self, console: Console, seen: Overview) -> None:
        self._console, self._seen = console, seen
        self._algorithm = seen.algorithm
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(
            "rounds", total=seen.config.rounds, completed=seen.first_round - 1, figures=""
        )
        self._losses: list[Point] = []
        self._accuracies: list[Point] = []
        self._best: tuple[float, int] | None = None  # accuracy, round
        self._evaluated: tuple[float, float, int] | None = None  # accuracy, loss, round
        self._last: Metrics | None = None
        self._figures = ""
        self._examples, self._seconds, self._failures = 0, 0.0, 0
        self._memory = (0.0, "")  # when it was read, and its text
        self._drawn: list[int] = []  # the widths of the lines on the screen
        self._width = console.width
        with suppress(UserError):  # the run itself complains about a damaged file
            for row in read_metrics(seen.path):
                if row["round"] < seen.first_round:
                    self._note(row["round"], row.get("train_loss"), row.get("accuracy"), row.get("loss"))
                    self._failures += len(row.get("failures", ()))
        self._live = Live(console=console, refresh_per_second=PER_SECOND, get_renderable=self._draw)
        self._live.start(refresh=True)

    def round(self, row: Metrics, figures: str) -> None:
        """Take in a round; ``figures`` is the text next to the bar."""
        self._note(row.round, row.train_loss, row.accuracy, row.loss)
        self._examples += row.examples or 0
        self._seconds += row.seconds or 0.0
        self._failures += len(row.failures)
        self._last, self._figures = row, figures
        self._progress.update(self._task, completed=row.round)

    def close(self) -> None:
        """Draw the last state and leave it there."""
        self._live.stop()

    def _note(self, number: int, train_loss: float | None, accuracy: float | None, loss: float | None) -> None:
        if train_loss is not None and math.isfinite(train_loss):
            self._losses.append((number, train_loss))
        if accuracy is not None and loss is not None:
            self._accuracies.append((number, accuracy))
            self._evaluated = (accuracy, loss, number)
            if self._best is None or accuracy > self._best[0]:
                self._best = (accuracy, number)

    def _draw(self) -> RenderableType:
        width, height = self._console.size
        self._wipe(width)
        whole_view = width >= MIN_SIZE[0] and height >= MIN_SIZE[1]
        crowded = whole_view and width < RATE_WIDTH
        self._progress.update(self._task, figures=self._figures.rpartition("  ")[0] if crowded else self._figures)
        parts: list[RenderableType] = [self._progress.get_renderable()]
        if whole_view:
            parts += [Text(line, no_wrap=True, overflow="crop") for line in [*self._curve(width - 1), *self._facts()]]
        whole = Group(*parts)
        lines = self._console.render_lines(whole, self._console.options, pad=False)
        self._drawn, self._width = [sum(part.cell_length for part in line) for line in lines], width
        return whole

    def _wipe(self, width: int) -> None:
        """A terminal that became narrower has broken our lines: remove those that rich does not know of."""
        more = sum(-(-drawn // width) - 1 for drawn in self._drawn if drawn > width) if width < self._width else 0
        if more:
            up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up * more))

    def _curve(self, width: int) -> list[str]:
        """Accuracy, or the training loss until a round is evaluated."""
        evaluated = bool(self._accuracies)
        points = list(self._accuracies or self._losses)  # a copy: the run may add to it while this draws
        if not points:
            return []
        name = f"accuracy on {measured_on(bool(self._seen.config.validation))}" if evaluated else "training loss"
        spell = (lambda value: f"{value:.1%}") if evaluated else (lambda value: f"{value:.3f}")
        return [name, *curve(points, width, HEIGHT, spell, self._console.options.ascii_only)]

    def _facts(self) -> list[str]:
        rows = [("clients", self._clients())]
        if (row := self._last) is not None and row.examples is not None and row.seconds is not None:
            now, mean = row.examples / max(row.seconds, 1e-9), self._examples / max(self._seconds, 1e-9)
            rows.append(("rate", f"{now:,.0f} examples/s, {mean:,.0f} on average"))
        if time.monotonic() - self._memory[0] >= MEMORY_SECONDS:
            self._memory = (time.monotonic(), _describe_memory())
        rows.append(("memory", self._memory[1]))
        if self._evaluated is not None and self._best is not None:
            accuracy, loss, number = self._evaluated
            best = f"best {self._best[0]:.2%}, round {self._best[1]}"
            name = "validation" if self._seen.config.validation else "test"
            rows.append((name, f"{accuracy:.2%}, loss {loss:.4f}, round {number}; {best}"))
        return [f"{name:<8}{fact}" for name, fact in rows if fact]

    def _clients(self) -> str:
        config, row = self._seen.config, self._last
        under_way = self._seen.first_round if row is None else row.round + 1
        parts = []
        if under_way <= config.rounds:
            parts.append(f"round {under_way}: {self._who(under_way)}")
        if row is not None:
            failed = f", {len(row.failures)} failed" if row.failures else ""
            away = f", {row.absent:,} did not" if row.absent else ""
            if row.clients is not None:
                parts.append(f"round {row.round}: {row.clients:,} participated{away}{failed}")
        if self._failures:
            parts.append(f"{self._failures:,} failures so far")
        return "; ".join(parts)

    def _who(self, number: int) -> str:
        """The clients of a round, by name where they are few: the sampler depends on the round's number alone."""
        visits, config = self._seen.visits, self._seen.config
        if visits[0].client == EVERYONE or len(visits) > MAX_CLIENTS_SHOWN:
            return "all examples in one place" if visits[0].client == EVERYONE else counted(len(visits), "visit")
        if self._algorithm.released:
            return "participation is not shown"
        roster, per_round = self._seen.population.roster, config.per_round or len(visits)
        names, drawn = self._seen.partition.names, draw(self._algorithm, Key(config.seed), number, roster, per_round)
        return ", ".join(names[one.client] if names else str(one.client) for one in drawn.visits) or "nobody"


def _describe_memory() -> str:
    """The resident memory of this process and its descendants; "" where the system has no /proc."""
    processes, pages = [os.getpid()], 0
    for process in processes:  # the list grows as children are found
        with suppress(OSError, ValueError):  # the process has ended
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
            for thread in os.listdir(f"/proc/{process}/task"):
                processes += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
    total, count = pages * os.sysconf("SC_PAGE_SIZE"), counted(len(processes), "process")
    return f"{format_bytes(total)} resident in {count}" if pages else ""


def overview_rows(seen: Overview) -> list[tuple[str, str]]:
    """A run's settings and needs, as words and facts."""
    config, images, partition, sizes = seen.config, seen.images, seen.partition, seen.population.sizes
    channels, height, width = images.shape
    shape = f"{width}x{height} {'grey' if channels == 1 else 'colour'}"
    here, test = len(images.train), len(images.test)
    train = f"{here:,} train" if here else f"{seen.population.roster.examples:,} train at the nodes"
    evaluated = f"{test:,} held out for validation, no test" if config.validation else f"{test:,} test"
    evaluated = evaluated if test else "test images at the nodes"
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (images.mean, images.std))
    crops = "resized crops" if config.augmentation == RESIZED_CROP else "crops"
    median = "" if sizes.min() == sizes.max() else f" (median {int(np.median(sizes)):,})"
    clients = f"{counted(partition.clients, 'client')} of {describe_sizes(sizes)}{median}"
    if config.rounds:
        local = seen.local
        length = f"epochs {local.epochs}" if local.steps is None else f"steps {local.steps}"
        trained = f"{_participation(seen)}, {length}, batch {local.batch}, {_describe_steps(local)}"
    else:
        then = "calibrated" if seen.algorithm.finish else "evaluated as it is"
        trained = f"rounds 0: nothing is trained, the initial model is {then}"
    others = f"; other settings: {', '.join(seen.unlike_baseline)}" if seen.unlike_baseline else ""
    baseline = seen.baseline and f"{seen.baseline.path}: {seen.baseline.accuracy:.2%}{others}"
    stopping = []
    if config.patience is not None and config.rounds:
        stopping.append(
            f"the run stops after {counted(config.patience, 'round')} without a better {config.monitor}; the best "
            "round is chosen on the images it is evaluated on, so its accuracy there is slightly optimistic"
        )
    memory = f"{format_bytes(seen.memory_bytes)} of memory (data {format_bytes(seen.data_bytes)})"
    rows = [
        ("data", f"{images.name}: {train}, {evaluated}, {len(images.classes):,} classes, {shape}"),
        ("", f"mean {mean}, std {std}; {f'{crops} and flips on' if config.augment else 'no augmentation'}"),
        *(("", f"note: {note}") for note in (*images.notes, *partition.notes)),
        ("partition", f"{partition.scheme}: {clients}, EMD {emd_words(seen.emd)}, hash {partition.hash[:12]}"),
        ("model", f"{config.model}: {seen.parameters:,} parameters"),
        *(("", note) for note in seen.model_notes),
        ("", seen.batch_norm and f"BatchNorm: {seen.batch_norm}"),
        ("method", f"{config.method}; {trained}"),
        ("start", config.start and f"the classifier of {config.start}"),
        *(("", f"note: {note}") for note in (*_overruled(seen), *stopping)),
        ("baseline", baseline),
        ("engine", f"{seen.engine} ({seen.processes.description}), seed {config.seed}"),
        ("needs", f"{memory} and {format_bytes(seen.disk_bytes)} on disk"),
        ("run", str(seen.path)),
    ]
    return [(word, fact) for word, fact in rows if fact]


def _participation(seen: Overview) -> str:
    visits, take = seen.visits, seen.visits[0].take
    if visits[0].client == EVERYONE:
        return (
            "all examples on one client" if take is None else f"{counted(take, 'example')} per round, all on one client"
        )
    most = "at most " if seen.algorithm.available or seen.algorithm.arrive else ""
    if take is not None:
        return f"{most}{counted(len(visits), 'visit')} per round of {counted(take, 'example')} each"
    return f"{most}{counted(len(visits), 'client')} per round"


def _overruled(seen: Overview) -> list[str]:
    asked, used = asdict(seen.config.local()), asdict(seen.local)
    return [
        f"the method sets {key.replace('_', ' ')} to {text.spell(used[key])}; --{key.replace('_', '-')} "
        f"{text.spell(asked[key])} has no effect"
        for key in asked
        if asked[key] != used[key] and not (key == "epochs" and seen.local.steps)
    ]


def _describe_steps(local: Local) -> str:
    """How clients step, without the defaults."""
    rate = f"lr {local.lr:g}" + ("" if local.schedule == "constant" else f" ({local.schedule})")
    kind = f"momentum {local.momentum:g}" if uses_sgd(local) else local.optimizer
    clip = f"gradients clipped to {local.clip:g}, " if local.clip else ""
    decay = f"weight decay {local.weight_decay:g}" + ("" if local.decay == "all" else " on weights only")
    return f"{rate}, {kind}, {clip}{decay}"


class Screen:
    """An observer of a run that shows it on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: View | None = None
        self._rounds = 0
        self._began = 0.0
        self._first = 0
        self._stages: StageProgress | None = None
        self._told = -1  # tenths of the stage that were printed
        self._done = 0  # the last round

    def __call__(self, event: Overview | Metrics | Event) -> None:
        """Show the event."""
        if isinstance(event, Overview):
            self._overview(event)
        elif isinstance(event, Metrics):
            self._round(event)
        elif isinstance(event, Stage):
            self._stage(event)
        else:
            if self._done >= self._rounds:
                self.close()
            for line in calibration_lines(event):
                self._print(line)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._view is not None:
            view, self._view = self._view, None
            view.close()
        if self._stages is not None:
            stages, self._stages = self._stages, None
            stages.__exit__(None, None, None)

    def note(self, text: str) -> None:
        """Print a note."""
        self._print(f"note: {text}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def _stage(self, seen: Stage) -> None:
        """A bar on a terminal; where piped a line for each tenth."""
        if self._console.is_terminal:
            self._stages = self._stages or StageProgress(self._console).__enter__()
            self._stages(seen.activity, seen.done, seen.total)
        elif self._told != (tenth := 10 * seen.done // max(seen.total, 1)):
            self._told = tenth
            so_far = f": {seen.done:,} of {seen.total:,} images" if seen.total else ""
            self._print(f"{seen.activity}{so_far}")

    def _overview(self, seen: Overview) -> None:
        self.close()
        self._console.print(show_facts(overview_rows(seen)))
        config = seen.config
        self._rounds, self._first, self._began = config.rounds, seen.first_round, time.monotonic()
        self._done = seen.first_round - 1
        if seen.first_round > 1:
            self._console.print(f"resuming after round {seen.first_round - 1}")
        if self._rounds and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._view = View(self._console, seen)

    def _round(self, row: Metrics) -> None:
        for failure in row.failures:
            self._print(f"round {row.round}: continued without client {failure.client}: {failure.reason}")
        self._done = row.round
        figures = round_figures(row)
        if self._view is not None:
            self._view.round(row, figures)
        else:
            done = row.round - self._first + 1
            left = (time.monotonic() - self._began) / done * (self._rounds - row.round)
            self._print(f"round {row.round}/{self._rounds}  {figures}  {format_duration(left)} left")


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
    return f"{loss}{spent}{accuracy}{rate}{away}  {row.examples / max(row.seconds, 1e-9):,.0f} examples/s"


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
    return [
        *(f"{row.name}: note: {note}" for note in event.notes),
        f"{row.name}: accuracy {row.accuracy:.2%}, {format_duration(row.seconds)}",
    ]


def summary(result: Result) -> Table:
    """The last table: the result without what the overview said already, accuracies in bold."""
    rows: list[tuple[str, str | Text]] = []
    for word, fact in summary_rows(result):
        accuracy, share, rest = fact.partition("%")
        if word.startswith(("accuracy", "after ")):
            rows.append((word, Text.assemble((accuracy + share, "bold"), rest)))
        elif word not in ("method", "data", "note"):
            rows.append((word, fact))
    return show_facts(rows)


def show_facts(rows: Sequence[tuple[str, str | Text]]) -> Table:
    """Words on the left, facts on the right; brackets in a path are not markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
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
        lines = [
            f"<b>{escape(self._title)}</b>",
            f'<progress value="{done}" max="{self._rounds}"></progress> round {done} of {self._rounds}{remaining}'
            if self._rounds
            else "rounds 0: nothing is trained",
            *map(escape, filter(None, (self._figures, *self._lines))),
        ]
        picture = accuracy_picture(self._rows, on=self._on)
        self._place.update(self._html(f"<div>{'<br>'.join(lines)}<br>{picture}</div>"))
