"""``unskew.run``, ``run_seeds``, ``resume`` and ``sweep``: training from Python, with typed options."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.utils.data import Dataset

from unskew.charts.files import check_format
from unskew.core.errors import accepts
from unskew.core.files import working_directory
from unskew.core.machine import neutral
from unskew.core.types import Engine, ImageSet
from unskew.data.population import Partition
from unskew.round.algorithm import Algorithm
from unskew.runs import train as runs
from unskew.runs.config import OPTIONS
from unskew.runs.execute import Observer
from unskew.runs.result import Result
from unskew.runs.seeds import SeedRuns, plan_runs
from unskew.sweeps.sweep import Sweep, write_summary
from unskew.sweeps.sweep import sweep as sweep_settings

Function = TypeVar("Function", bound=Callable[..., Any])
Outcome = TypeVar("Outcome")
Text = str | PathLike[str]
Data = Text | ImageSet | Mapping[str, Any] | Sequence[Any] | Dataset[Any] | Callable[..., Any]
Model = Text | Callable[..., nn.Module]
Step = str | Callable[..., Any]
Method = Step | Algorithm | Sequence[Step]
Clients = Text | Partition | npt.NDArray[np.integer[Any]] | Sequence[int] | Callable[..., Any]

VALUES = {  # what an option accepts from Python in addition to a text
    "data": "Also an ImageSet, a dict or tuple of arrays (x_train, y_train, x_test, y_test), one or two Datasets.",
    "partition": "Also the client number of each training example, or a Partition.",
    "method": "Also an Algorithm, a function from Algorithm to Algorithm, a Finisher, or a list of these and texts.",
    "model": "Also a function (shape, classes) -> nn.Module.",
    "engine": "Also an importable function from an EngineSetup to an Engine.",
}


def describe_options(function: Function, default: str | None = None) -> Function:
    """Replace ``{options}`` in a docstring by the descriptions of the function's parameters that are options.

    ``default`` describes the defaults, if they are not the options' own.
    """
    lines = []
    for name in inspect.signature(function).parameters:
        if option := OPTIONS.get(name):
            text = re.sub(r"--([a-z][a-z-]+)", lambda flag: f"``{flag[1].replace('-', '_')}``", option.help)
            text = f"{text.removesuffix('.')} (default: {default or option.default_text}). {VALUES.get(name, '')}"
            lines += [f"    {name}", textwrap.fill(text, 120, initial_indent=" " * 8, subsequent_indent=" " * 8)]
    function.__doc__ = (function.__doc__ or "").replace("    {options}", "\n".join(lines))
    return function


@describe_options
@accepts
def run(
    recipe: Text | None = None,
    *,
    out: Text | None = None,
    observe: Observer | None = None,
    progress: bool | None = None,
    trust: bool = False,
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
    steps: int | None = None,
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
    partition_seed: int | None = None,
    validation: float | None = None,
    evaluate_every: int | None = None,
    on_failure: str | None = None,
    checkpoint_seconds: float | None = None,
    baseline: Text | None = None,
    during: str | None = None,
    device: str | None = None,
) -> Result:
    """Train, evaluate and calibrate; write the run directory.

    An option that is None is as in the recipe, or has its default. The options are those of ``unskew run``.

    Parameters
    ----------
    recipe
        A TOML recipe; options given here override it.
    out
        The run directory (default: runs/<name>).
    observe
        Called with an Overview before the first round, with the Metrics of each round, and with an event for each
        calibration. If it returns ``unskew.STOP`` or raises ``unskew.StopRun``, the run stops after that round with its
        checkpoint written; the message of StopRun contains the command to resume it.
    progress
        Whether to show the run while it trains (default: only in a notebook).
    trust
        Whether plug-ins may run if the recipe is the config.toml of somebody else's run directory.
    {options}

    Returns
    -------
    Result
        Accuracy, loss, calibrations, cost, and the path of the run directory.
    """
    parameters = locals()
    options = {name: parameters[name] for name in OPTIONS if parameters[name] is not None}
    options |= {"out": out, "home": working_directory(), "trust": trust}
    return _show(progress, observe, lambda watch: runs.run(recipe, observe=watch, **options))


@accepts
@neutral()
def run_seeds(
    recipe: Text | None = None,
    *,
    seeds: str | Iterable[int] | None = None,
    out: Text | None = None,
    observe: Observer | None = None,
    progress: bool | None = None,
    trust: bool = False,
    **options: Any,
) -> SeedRuns:
    """Run one setting with several seeds, each in its own run directory: ``out/seed0``, ``out/seed1``, …

    Finished runs are kept and interrupted ones continue if their settings are the same; a folder with other runs is
    refused.

    Parameters
    ----------
    recipe
        A TOML recipe; options given here override it.
    seeds
        Whole numbers, or a text such as ``"0-4"`` (default: the ``seeds`` of the recipe). Without
        ``partition_seed`` the seed also decides the partition.
    out
        The folder of the run directories (default: runs/<name>).
    observe, progress, trust, options
        As for ``unskew.run``; ``seed`` is not among the options.

    Returns
    -------
    SeedRuns
        The results, and mean and deviation over the seeds.
    """
    options |= {"seeds": seeds, "out": out, "home": working_directory(), "trust": trust}
    plan = plan_runs(recipe, **options)[0]

    def complete(watch: Observer | None) -> SeedRuns:
        return SeedRuns(plan.path, tuple(plan.complete(seed, watch) for seed in plan.states))

    return _show(progress, observe, complete)


@partial(describe_options, default="the run's")
@accepts
def resume(
    path: Text,
    *,
    observe: Observer | None = None,
    progress: bool | None = None,
    trust: bool = False,
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
    """Continue a stopped run; the result equals that of a run that never stopped.

    An option that is None is as in the run. Values that were passed from Python (listed in config.toml) must be passed
    again.

    Parameters
    ----------
    path
        The run directory.
    observe, progress
        As for ``unskew.run``.
    trust
        Whether plug-ins named in somebody else's run directory may run.
    {options}

    Returns
    -------
    Result
        As from ``unskew.run``.
    """
    parameters = locals()
    options = {name: parameters[name] for name in (*runs.WORK, "trust", "data", "model", "method")}
    folder = working_directory() / path
    return _show(progress, observe, lambda watch: runs.resume(folder, observe=watch, **options))


@accepts
def sweep(
    recipe: Text | None = None,
    *,
    over: str | Sequence[str],
    seeds: str | Iterable[int] | None = None,
    trials: int | None = None,
    validation: float | None = None,
    by: str = "accuracy",
    jobs: int | None = None,
    out: Text | None = None,
    form: str = "svg",
    trust: bool = False,
    **options: Any,
) -> Sweep:
    """Try many settings on held-out training images; write a table, charts and best.toml.

    Called again with the same folder, the sweep continues where it stopped. Test images are never used.

    Parameters
    ----------
    recipe
        A TOML recipe; options given here override it.
    over
        The options to try and their values, such as ``"lr=0.01,0.1"``; with ``trials`` also a range,
        ``"lr=0.001..0.3 log"``.
    seeds
        Seeds for each setting: whole numbers, or a text such as ``"0-4"`` (default: 0).
    trials
        Let Optuna choose this many settings instead of trying all.
    validation
        The share of the training images to judge settings on (default: 0.15).
    by
        The score of a setting: accuracy, loss or the name of a calibration.
    jobs
        Runs at the same time, one core each (default: one per core).
    out
        The sweep's folder (default: runs/sweep-<name>).
    form
        The format of the charts: svg, png or pdf.
    trust
        As for ``unskew.run``.
    options
        Options of ``unskew.run``, as texts and numbers.

    Returns
    -------
    Sweep
        Every setting with its score, and the best one.
    """
    check_format(form)
    options |= {"seeds": seeds, "trials": trials, "validation": validation, "by": by, "jobs": jobs, "out": out}
    options |= {"over": [over] if isinstance(over, str) else over, "home": working_directory(), "trust": trust}
    result = sweep_settings(recipe, **options)
    write_summary(result, form)
    return result


def _show(progress: bool | None, observe: Observer | None, work: Callable[[Observer | None], Outcome]) -> Outcome:
    """Do the work and, if requested, show its progress in the notebook or terminal."""
    from unskew.console.progress import PlainConsole
    from unskew.console.screen import NotebookView, Screen, in_notebook

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
