"""The live view of a run in a terminal: rounds and time left, a curve, the clients of the round, rate, memory."""

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import ControlType
from rich.text import Text

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import EVERYONE
from unskew.core.units import counted, format_bytes
from unskew.round.driver import Metrics
from unskew.round.sampling import draw
from unskew.runs.journal import read_metrics
from unskew.runs.prepare import Overview
from unskew.runs.result import measured_on

Point = tuple[float, float]  # round, value

MAX_POINTS = 2048  # kept of a series: more than a terminal has dots
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: left and right column, downwards
_MARKS = ".-'"  # of an ASCII character: the lowest third of its line, the middle, the highest


class Series:
    """Values over rounds. Many are thinned out: neighbours become their mean, the first and the last stay."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, number: int, value: float) -> None:
        """Add a round's value; one that is not finite cannot be drawn and is left out."""
        if not math.isfinite(value):
            return
        self.points = [*_thinned(self.points)] if len(self.points) >= MAX_POINTS else self.points
        self.points.append((number, value))


def curve(
    points: Sequence[Point], width: int, height: int, label: Callable[[float], str], ascii_only: bool
) -> list[str]:
    """The points as ``height`` lines and one for the rounds, none longer than ``width``; ``label`` spells a value."""
    low, high = min(value for _, value in points), max(value for _, value in points)
    margin = max(len(label(low)), len(label(high)))
    across, down = (1, len(_MARKS)) if ascii_only else (len(_DOTS), len(_DOTS[0]))
    columns = width - margin - 2
    levels = _levels(points, columns * across, height * down, low, high)
    rows = [[0] * columns for _ in range(height)]  # of each character, its dots or the highest of its marks
    for x, (bottom, top) in enumerate(levels):
        for level in range(bottom, top + 1):
            row, part = divmod(height * down - 1 - level, down)
            if ascii_only:
                rows[row][x] = max(rows[row][x], down - part)
            else:
                rows[row][x // across] |= _DOTS[x % across][part]
    names = {0: label(high), height - 1: label(low)} if high > low else {height // 2: label(low)}
    side, corner = ("|", "+") if ascii_only else ("│", "└")
    lines = [
        f"{names.get(place, ''):>{margin}} {side}{''.join(_character(dots, ascii_only) for dots in row).rstrip()}"
        for place, row in enumerate(rows)
    ]
    first, last = f"round {points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    end = last if len(points) > 1 else ""
    return [*lines, f"{'':>{margin}} {corner}{first}{end:>{max(1, columns - len(first))}}".rstrip()]


def _levels(points: Sequence[Point], columns: int, levels: int, low: float, high: float) -> list[tuple[int, int]]:
    """For each column of dots the lowest and the highest that is set: columns that touch make a line.

    A column shows the mean of its rounds; one without rounds is interpolated between its neighbours.
    """
    first, last = points[0][0], points[-1][0]
    if last <= first:
        return [(levels // 2, levels // 2)]
    sums, counts = [0.0] * columns, [0] * columns
    for number, value in points:
        place = round((number - first) / (last - first) * (columns - 1))
        sums[place] += value
        counts[place] += 1
    known = [place for place in range(columns) if counts[place]]
    means = [0.0] * columns
    for left, right in pairwise(known):
        start, end = sums[left] / counts[left], sums[right] / counts[right]
        for place in range(left, right + 1):
            means[place] = start + (end - start) * (place - left) / (right - left)
    span = high - low
    heights = [round((mean - low) / span * (levels - 1)) if span else levels // 2 for mean in means]
    reach = [heights[0], *heights]  # each column begins beside the one before it
    return [
        (here, here) if abs(here - before) <= 1 else (min(here, before + 1), max(here, before - 1))
        for before, here in zip(reach, heights, strict=False)
    ]


def _character(dots: int, ascii_only: bool) -> str:
    if not dots:
        return " "
    return _MARKS[dots - 1] if ascii_only else chr(0x2800 + dots)


def _thinned(points: Sequence[Point]) -> list[Point]:
    inner = points[1:-1]
    pairs = zip(inner[::2], inner[1::2], strict=False)
    return [points[0], *(((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs), points[-1]]


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
        self._losses, self._accuracies = Series(), Series()
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
        """Take in a round; ``figures`` is the text beside the bar."""
        self._note(row.round, row.train_loss, row.accuracy, row.loss)
        self._examples += row.examples
        self._seconds += row.seconds
        self._failures += len(row.failures)
        self._last, self._figures = row, figures
        self._progress.update(self._task, completed=row.round)

    def close(self) -> None:
        """Draw the last state and leave it there."""
        self._live.stop()

    def _note(self, number: int, train_loss: float | None, accuracy: float | None, loss: float | None) -> None:
        if train_loss is not None:
            self._losses.add(number, train_loss)
        if accuracy is not None and loss is not None:
            self._accuracies.add(number, accuracy)
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
        evaluated = bool(self._accuracies.points)
        points = list(self._accuracies.points or self._losses.points)  # a copy: the run may add to it while this draws
        if not points:
            return []
        name = f"accuracy on {measured_on(bool(self._seen.config.validation))}" if evaluated else "training loss"
        spell = (lambda value: f"{value:.1%}") if evaluated else (lambda value: f"{value:.3f}")
        return [name, *curve(points, width, HEIGHT, spell, self._console.options.ascii_only)]

    def _facts(self) -> list[str]:
        rows = [("clients", self._clients())]
        if (row := self._last) is not None:
            now, mean = row.examples / max(row.seconds, 1e-9), self._examples / max(self._seconds, 1e-9)
            rows.append(("rate", f"{now:,.0f} examples/s, {mean:,.0f} on average"))
        if time.monotonic() - self._memory[0] >= MEMORY_SECONDS:
            self._memory = (time.monotonic(), _resident())
        rows.append(("memory", self._memory[1]))
        if self._evaluated is not None and self._best is not None:
            accuracy, loss, number = self._evaluated
            best = f"best {self._best[0]:.2%}, round {self._best[1]}"
            rows.append(
                (
                    "validation" if self._seen.config.validation else "test",
                    f"{accuracy:.2%}, loss {loss:.4f}, round {number}; {best}",
                )
            )
        return [f"{word:<8}{fact}" for word, fact in rows if fact]

    def _clients(self) -> str:
        """The clients of the current round, and how many came to the last."""
        config, row = self._seen.config, self._last
        under_way = self._seen.first_round if row is None else row.round + 1
        parts = []
        if under_way <= config.rounds:
            parts.append(f"round {under_way}: {self._who(under_way)}")
        if row is not None:
            failed = f", {len(row.failures)} failed" if row.failures else ""
            away = f", {row.absent:,} did not" if row.absent else ""
            parts.append(f"round {row.round}: {row.clients:,} came{away}{failed}")
        if self._failures:
            parts.append(f"{self._failures:,} failures so far")
        return "; ".join(parts)

    def _who(self, number: int) -> str:
        """The clients of a round, by number where they are few: the sampler depends on the round's number alone."""
        visits, config = self._seen.visits, self._seen.config
        if visits[0].client == EVERYONE or len(visits) > MAX_CLIENTS_SHOWN:
            return "all examples in one place" if visits[0].client == EVERYONE else counted(len(visits), "visit")
        roster, per_round = self._seen.population.roster, config.per_round or len(visits)
        coming = draw(self._algorithm, Key(config.seed), number, roster, per_round).visits
        return ", ".join(str(visit.client) for visit in coming) or "nobody"


def _resident() -> str:
    """The memory of this process and its children, where the system tells it."""
    with suppress(OSError, ValueError):
        pages = {number: _pages(number) for number in _family(os.getpid())}
        total = sum(pages.values()) * os.sysconf("SC_PAGE_SIZE")
        return f"{format_bytes(total)} resident in {len(pages)} process{'es' if len(pages) > 1 else ''}"
    return ""


def _family(number: int) -> list[int]:
    """The process and its descendants; one that ends during the search is left out."""
    processes = [number]
    for process in processes:  # it grows as children are added
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                processes += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
    return processes


def _pages(number: int) -> int:
    try:
        return int(Path(f"/proc/{number}/statm").read_text().split()[1])
    except OSError:
        if number == os.getpid():
            raise
        return 0
