"""What a run shows in the terminal: its settings, its rounds, its result. Plain lines where output is piped."""

import time
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unskew.calibration.federated import Forecasted, Gathering
from unskew.console.live import View
from unskew.console.progress import StageProgress
from unskew.core import text
from unskew.core.types import EVERYONE, Local
from unskew.core.units import counted, emd_words, format_bytes
from unskew.core.units import format_duration as format_duration
from unskew.data.batches import RESIZED_CROP
from unskew.data.population import sizes_in_words
from unskew.round.driver import Metrics
from unskew.round.local_optimizers import uses_sgd
from unskew.runs.config import Config
from unskew.runs.execute import Event, Stage
from unskew.runs.prepare import InitialModel, Overview
from unskew.runs.result import Result, clients_rows, privacy_rows, start_rows, stopping_rows


def overview_rows(seen: Overview) -> list[tuple[str, str]]:
    """A run's settings and needs, as words and facts."""
    config, images, sizes = seen.config, seen.images, seen.population.sizes
    channels, height, width = images.shape
    kind = "grey" if channels == 1 else "colour"
    return [
        (
            "data",
            f"{images.name}: {_train(seen)}, {_evaluation(seen)}, {len(images.classes):,} classes, "
            f"{width}x{height} {kind}",
        ),
        ("", f"mean {_numbers(images.mean)}, std {_numbers(images.std)}; {_augmented(config)}"),
        *(("", f"note: {note}") for note in (*images.notes, *seen.partition.notes)),
        (
            "partition",
            f"{seen.partition.scheme}: {counted(seen.partition.clients, 'client')} of {_sizes(sizes)}, "
            f"EMD {emd_words(seen.emd)}, hash {seen.partition.hash[:12]}",
        ),
        ("model", f"{config.model}: {seen.parameters:,} parameters"),
        *(("", note) for note in seen.model_notes),
        *([("", f"BatchNorm: {seen.batch_norm}")] if seen.batch_norm else []),
        (
            "method",
            f"{config.method}; {_who_comes(seen)}, epochs {seen.local.epochs}, batch {seen.local.batch}, "
            f"{_steps(seen.local)}"
            if config.rounds
            else f"{config.method}; {_untrained(seen)}",
        ),
        *([("start", f"the classifier of {config.start}")] if config.start else []),
        *(("", f"note: {note}") for note in (*_overruled(seen), *_stopping(config))),
        *_baseline(seen),
        ("engine", f"{seen.engine} ({seen.processes.words}), seed {config.seed}"),
        (
            "needs",
            f"{format_bytes(seen.memory_bytes)} of memory (data {format_bytes(seen.data_bytes)}) and "
            f"{format_bytes(seen.disk_bytes)} on disk",
        ),
        ("run", str(seen.path)),
    ]


def _train(seen: Overview) -> str:
    """How many training images there are, and whether they are somewhere else."""
    here = len(seen.images.train)
    return f"{here:,} train" if here else f"{seen.population.roster.examples:,} train at the nodes"


def _evaluation(seen: Overview) -> str:
    """How many images accuracy is measured on, and which."""
    count = len(seen.images.test)
    if not count:
        return "test images at the nodes"
    return f"{count:,} of them for validation, no test" if seen.config.validation else f"{count:,} test"


def _untrained(seen: Overview) -> str:
    """What a run without rounds does."""
    if seen.algorithm.finish:
        return "rounds 0: nothing is trained, the initial model is calibrated"
    return "rounds 0: nothing is trained, the initial model is evaluated as it is"


def _who_comes(seen: Overview) -> str:
    visits, kept_away = seen.visits, seen.algorithm.available or seen.algorithm.arrive
    take = visits[0].take
    if visits[0].client == EVERYONE:
        return "all examples in one place" if take is None else f"{counted(take, 'example')} a round, all in one place"
    most = "at most " if kept_away else ""
    if take is not None:
        return f"{most}{counted(len(visits), 'visit')} a round of {counted(take, 'example')} each"
    return f"{most}{counted(len(visits), 'client')} a round"


def _overruled(seen: Overview) -> list[str]:
    """The local settings that the method replaces."""
    asked, used = asdict(seen.config.local()), asdict(seen.local)
    return [
        f"the method sets {key.replace('_', ' ')} to {text.spell(used[key])}; --{key.replace('_', '-')} "
        f"{text.spell(asked[key])} has no effect"
        for key in asked
        if asked[key] != used[key]
    ]


def _steps(local: Local) -> str:
    """How clients step, in words: what is as usual is not said."""
    rate = f"lr {local.lr:g}" + ("" if local.schedule == "constant" else f" ({local.schedule})")
    kind = f"momentum {local.momentum:g}" if uses_sgd(local) else local.optimizer
    clip = f"gradients clipped to {local.clip:g}, " if local.clip else ""
    decay = f"weight decay {local.weight_decay:g}" + ("" if local.decay == "all" else " of weights alone")
    return f"{rate}, {kind}, {clip}{decay}"


def _stopping(config: Config) -> list[str]:
    """What --patience will do, and that it looks at the test set."""
    if config.patience is None or not config.rounds:
        return []
    words = f"{counted(config.patience, 'round')} without a better {config.monitor}"
    return [
        f"the run stops after {words}; the best round is chosen with the images that it is evaluated on, so that "
        "its accuracy there is a little too good"
    ]


def _sizes(sizes: npt.NDArray[np.int64]) -> str:
    same = sizes.min() == sizes.max()
    return sizes_in_words(sizes) + ("" if same else f" (median {int(np.median(sizes)):,})")


def _baseline(seen: Overview) -> list[tuple[str, str]]:
    if seen.baseline is None:
        return []
    others = f"; other settings: {', '.join(seen.unlike_baseline)}" if seen.unlike_baseline else ""
    return [("baseline", f"{seen.baseline.path}: {seen.baseline.accuracy:.2%}{others}")]


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _augmented(config: Config) -> str:
    kind = "resized crops" if config.augmentation == RESIZED_CROP else "crops"
    return f"{kind} and flips on" if config.augment else "no augmentation"


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
                self._console.print(line, markup=False, soft_wrap=True)

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
        self._console.print(f"note: {text}", markup=False, soft_wrap=True)

    def _stage(self, seen: Stage) -> None:
        """A bar on a terminal; where piped a line for each tenth."""
        if self._console.is_terminal:
            self._stages = self._stages or StageProgress(self._console).__enter__()
            self._stages(seen.words, seen.done, seen.total)
        elif self._told != (tenth := 10 * seen.done // max(seen.total, 1)):
            self._told = tenth
            so_far = f": {seen.done:,} of {seen.total:,} images" if seen.total else ""
            self._console.print(f"{seen.words}{so_far}", markup=False, soft_wrap=True)

    def _overview(self, seen: Overview) -> None:
        self.close()
        self._console.print(_facts(overview_rows(seen)))
        config = seen.config
        self._rounds, self._first, self._began = config.rounds, seen.first_round, time.monotonic()
        self._done = seen.first_round - 1
        if seen.first_round > 1:
            self._console.print(f"resuming after round {seen.first_round - 1}")
        if self._rounds and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._view = View(self._console, seen)

    def _round(self, row: Metrics) -> None:
        for failure in row.failures:
            self._console.print(
                f"round {row.round}: continued without client {failure.client}: {failure.reason}",
                markup=False,
                soft_wrap=True,
            )
        self._done = row.round
        figures = round_figures(row)
        if self._view is not None:
            self._view.round(row, figures)
        else:
            done = row.round - self._first + 1
            left = (time.monotonic() - self._began) / done * (self._rounds - row.round)
            self._console.print(
                f"round {row.round}/{self._rounds}  {figures}  {format_duration(left)} left", soft_wrap=True
            )


def round_figures(row: Metrics) -> str:
    """A round's loss, accuracy where evaluated, and rate."""
    accuracy = "" if row.accuracy is None else f"  accuracy {row.accuracy:.2%}"
    if row.void is not None:
        return f"does not count: {row.void}{accuracy}"
    if not row.clients and row.epsilon is None:
        return f"nobody came{accuracy}"
    loss = f"{row.clients} came" if row.train_loss is None else f"loss {row.train_loss:.3f}"
    spent = "" if row.epsilon is None else f"  ε {row.epsilon:.4g}"
    rate = "" if row.lr is None else f"  lr {row.lr:.4g}"
    away = f"  {row.clients} came, {row.absent} did not" if row.absent else ""
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
        words = f"{event.method}: class Gaussians are {seen.separability:.3g} apart (mean sliced Wasserstein distance)"
        if seen.before is None or seen.after is None:
            return [words]
        gain = (
            f"the classifier gets {seen.before:.1%} of features drawn from them right, a discriminant {seen.after:.1%}"
        )
        return [f"{words}; {gain}"]
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
    """The last table: the result, and the run folder."""
    accuracy = Text.assemble((f"{result.accuracy:.2%}", "bold"), f" on {result.measured_on}, loss {result.loss:.4f}")
    rows: list[tuple[str, str | Text]] = [("accuracy", accuracy)]
    if result.relative_accuracy is not None:
        rows.append(
            ("relative", f"{result.relative_accuracy:.2%} of {result.baseline_accuracy:.2%}, {result.baseline}")
        )
    for name, row in result.calibrations.items():
        cost = f", loss {row.loss:.4f}; {format_bytes(row.bytes_up)} up, {format_duration(row.seconds)}"
        rows.append((f"after {name}", Text.assemble((f"{row.accuracy:.2%}", "bold"), cost)))
    rows += clients_rows(result)
    rows += privacy_rows(result)
    rows += start_rows(result)
    rows += [
        (
            "trained",
            f"{counted(result.rounds, 'round')}, {result.examples:,} examples, "
            f"{result.examples_per_second:,.0f} a second",
        ),
        ("time", format_duration(result.seconds)),
        ("sent", f"{format_bytes(result.bytes_up)} up, {format_bytes(result.bytes_down)} down"),
    ]
    rows += stopping_rows(result)
    if result.failures:
        rows.append(("failed", f"{counted(result.failures, 'visit')}; metrics.jsonl says which"))
    rows += [("weights", f"sha256 {result.weights_sha256}"), ("run", str(result.path))]
    return _facts(rows)


def _facts(rows: Sequence[tuple[str, str | Text]]) -> Table:
    """Words on the left, facts on the right; brackets in a path are not markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for word, fact in rows:
        table.add_row(Text(word), Text(fact) if isinstance(fact, str) else fact)
    return table
