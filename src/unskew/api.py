"""``unskew.run`` and ``unskew.resume``: a run from Python, every option a typed parameter, with progress if wanted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.utils.data import Dataset

from unskew.console.progress import PlainConsole
from unskew.console.screen import NotebookView, Screen, in_notebook
from unskew.core.errors import COUNT, FLAG, FUNCTION, NUMBER, PATH, SEVERAL, TEXT, accepts, optional
from unskew.core.types import Engine, ImageSet
from unskew.data.population import Partition
from unskew.round.algorithm import Algorithm
from unskew.runs import seeds as seeded
from unskew.runs import train as runs
from unskew.runs.config import OPTIONS
from unskew.runs.execute import Observer
from unskew.runs.result import Result
from unskew.runs.seeds import SeedRuns
from unskew.sweeps.outcomes import Sweep, check_format, write_summary
from unskew.sweeps.sweep import sweep as sweep_settings

Outcome = TypeVar("Outcome")
Text = str | PathLike[str]
Data = Text | ImageSet | Mapping[str, Any] | Sequence[Any] | Dataset[Any] | Callable[..., Any]
Model = Text | Callable[..., nn.Module]
Step = str | Callable[..., Any]
Method = Step | Algorithm | Sequence[Step]
Clients = Text | Partition | npt.NDArray[np.integer[Any]] | Sequence[int] | Callable[..., Any]


@accepts(recipe=optional(PATH), out=optional(PATH), observe=optional(FUNCTION), progress=optional(FLAG))
def run(
    recipe: Text | None = None,
    *,
    out: Text | None = None,
    observe: Observer | None = None,
    progress: bool | None = None,
    data: Data | None = None,
    data_dir: Text | None = None,
    cache_dir: Text | None = None,
    cache_disk: str | None = None,
    cache_memory: str | None = None,
    partition: Clients | None = None,
    clients: int | None = None,
    per_round: int | None = None,
    method: Method | None = None,
    model: Model | None = None,
    pretrained: Text | None = None,
    train: str | None = None,
    resize: int | None = None,
    normalise: str | None = None,
    views: int | None = None,
    rounds: int | None = None,
    start: str | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    schedule: str | None = None,
    optimizer: str | None = None,
    clip: float | None = None,
    decay: str | None = None,
    patience: int | None = None,
    monitor: str | None = None,
    augment: bool | None = None,
    augmentation: str | None = None,
    engine: str | Callable[..., Engine] | None = None,
    workers: int | None = None,
    seed: int | None = None,
    validation: float | None = None,
    evaluate_every: int | None = None,
    on_failure: str | None = None,
    checkpoint_seconds: float | None = None,
    baseline: Text | None = None,
    during: str | None = None,
    device: str | None = None,
) -> Result:
    """Train, evaluate, calibrate, write the run folder.

    The options are those of ``unskew run``; docs/runs.md lists them with their defaults. None leaves an option as the
    recipe has it, or at its default. Beside texts these take values:

    - ``data``: an ImageSet, a dict or tuple of arrays (x_train, y_train, x_test, y_test), a torch Dataset or two
    - ``model``: a function (shape, classes) -> nn.Module
    - ``method``: an Algorithm, a function from Algorithm to Algorithm, a Finisher, or a list of texts and these
    - ``partition``: the client's number for each training example, or a Partition
    - ``engine``: a function of a module that takes an EngineSetup and gives an Engine

    ``observe`` is called with an Overview before the first round, with the Metrics of each round and with what there is
    to say of each calibration; before all that with Stages, where the output of a frozen part is computed. If it
    returns ``unskew.STOP`` or raises ``unskew.StopRun``, the run ends after the round with its checkpoint written, and
    StopRun says how to resume it. ``progress`` shows the run as it goes, by default in a notebook only.
    """
    given = locals()
    options = {name: given[name] for name in OPTIONS if given[name] is not None}
    place = None if recipe is None else Path(recipe)
    folder, home = None if out is None else Path(out), Path.cwd()
    return _shown(progress, observe, lambda watch: runs.run(place, out=folder, observe=watch, home=home, **options))


@accepts(
    recipe=optional(PATH), seeds=optional(SEVERAL), out=optional(PATH), observe=optional(FUNCTION),
    progress=optional(FLAG),
)  # fmt: skip
def run_seeds(
    recipe: Text | None = None, *, seeds: str | Iterable[int] | None = None, out: Text | None = None,
    observe: Observer | None = None, progress: bool | None = None, **options: Any,
) -> SeedRuns:  # fmt: skip
    """Run one setting with several seeds, a run folder each: ``out/seed0``, ``out/seed1``, …

    ``seeds`` are whole numbers, or a text such as ``"0-4"``; None takes the ``seeds`` of the recipe. ``options`` are
    those of ``unskew.run``, without ``seed``. Runs that are finished are kept, and one that was interrupted goes on, if
    their settings are these; other runs in the folder are refused. The seed decides the partition too.
    """
    folder, home = None if out is None else Path(out), Path.cwd()
    place = None if recipe is None else Path(recipe)

    def work(watch: Observer | None) -> SeedRuns:
        return seeded.run_seeds(place, seeds=seeds, out=folder, observe=watch, home=home, **options)

    return _shown(progress, observe, work)


@accepts(
    path=PATH, observe=optional(FUNCTION), progress=optional(FLAG), on_failure=optional(TEXT), device=optional(TEXT),
    engine=optional(TEXT), workers=optional(COUNT), data_dir=optional(PATH), cache_dir=optional(PATH),
    cache_disk=optional(TEXT), cache_memory=optional(TEXT), baseline=optional(PATH),
)  # fmt: skip
def resume(
    path: Text,
    *,
    observe: Observer | None = None,
    progress: bool | None = None,
    on_failure: str | None = None,
    device: str | None = None,
    engine: str | None = None,
    workers: int | None = None,
    data_dir: Text | None = None,
    cache_dir: Text | None = None,
    cache_disk: str | None = None,
    cache_memory: str | None = None,
    baseline: Text | None = None,
    data: Data | None = None,
    model: Model | None = None,
    method: Method | None = None,
) -> Result:
    """Continue where a run stopped; the result equals that of a run that never stopped.

    A run that was given values from Python (config.toml says which) needs the same values again.
    """

    def work(watch: Observer | None) -> Result:
        return runs.resume(
            Path(path).absolute(), observe=watch, on_failure=on_failure, device=device, engine=engine, workers=workers,
            data_dir=None if data_dir is None else str(data_dir), baseline=None if baseline is None else str(baseline),
            cache_dir=None if cache_dir is None else str(cache_dir), cache_disk=cache_disk, cache_memory=cache_memory,
            data=data, model=model, method=method,
        )  # fmt: skip

    return _shown(progress, observe, work)


@accepts(
    recipe=optional(PATH), over=SEVERAL, seeds=optional(SEVERAL), trials=optional(COUNT), validation=optional(NUMBER),
    by=TEXT, jobs=optional(COUNT), out=optional(PATH), form=TEXT,
)  # fmt: skip
def sweep(
    recipe: Text | None = None, *, over: str | Sequence[str], seeds: str | Iterable[int] | None = None,
    trials: int | None = None, validation: float | None = None, by: str = "accuracy", jobs: int | None = None,
    out: Text | None = None, form: str = "svg", **options: Any,
) -> Sweep:  # fmt: skip
    """Try many settings on a validation part of the training images, and write table, charts and best.toml.

    ``over`` is one text or several, such as ``"lr=0.01,0.1"``; with ``trials`` also a range, ``"lr=0.001..0.3 log"``,
    and Optuna chooses. ``by`` is accuracy, loss or a calibration's name. ``options`` are those of ``unskew.run`` as
    texts and numbers. Called again with the same folder, the sweep goes on where it stopped.
    """
    check_format(form)
    made = sweep_settings(
        None if recipe is None else Path(recipe), over=[over] if isinstance(over, str) else over, seeds=seeds,
        trials=trials, validation=validation, by=by, jobs=jobs, out=None if out is None else Path(out),
        home=Path.cwd(), **options,
    )  # fmt: skip
    write_summary(made, form)
    return made


def _shown(progress: bool | None, observe: Observer | None, work: Callable[[Observer | None], Outcome]) -> Outcome:
    """Do the work with a view of it beside the observer, in a notebook or on the terminal."""
    if not (in_notebook() if progress is None else progress):
        return work(observe)
    view: NotebookView | Screen = NotebookView() if in_notebook() else Screen(PlainConsole())

    def watch(event: Any) -> Any:
        view(event)
        return None if observe is None else observe(event)

    try:
        return work(watch)
    finally:
        view.close()
