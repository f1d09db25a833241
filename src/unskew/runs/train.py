"""Running and resuming: from a configuration to a prepared federation and its run directory."""

import re
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from unskew import engines
from unskew.core.errors import UserError
from unskew.core.files import usable_path
from unskew.core.machine import neutral
from unskew.core.plugins import remember
from unskew.data import partition_files
from unskew.round.driver import Metrics
from unskew.runs import config as configs
from unskew.runs import folder as folders
from unskew.runs.config import CONFIG, Config
from unskew.runs.execute import Event, Observer, Stage, execute, remove_private_files
from unskew.runs.prepare import Overview, Prepared, prepare, rehearse
from unskew.runs.python_values import match_values, split_values
from unskew.runs.result import RESULT, Result, read_result


class Stop:
    """The type of STOP."""

    def __repr__(self) -> str:
        return "unskew.STOP"


STOP: Final = Stop()  # an observer returns this to end the run after the current round


class StopRun(Exception):
    """An observer ended the run, whose directory is ``path``, after ``round``. An observer may also raise it."""

    def __init__(self, path: str = "", round: int | None = None, values: Sequence[str] = ()) -> None:
        self.path, self.round = path, round
        when = "" if round is None else f" after round {round}"
        call = f"unskew.resume({', '.join([repr(path), *(f'{name}=…' for name in values)])})"
        super().__init__(f"the run was stopped{when}; resume it with: {call}" if path else "stop the run")


# The options that may change when a run is resumed
WORK = ("on_failure", "device", "engine", "workers", "data_dir", "cache_dir", "cache_disk", "cache_memory", "baseline")


@neutral()
def run(
    recipe: str | PathLike[str] | Config | None = None,
    *,
    out: str | PathLike[str] | None = None,
    observe: Observer | None = None,
    home: Path = Path(),
    trust: bool = False,
    **options: Any,
) -> Result:
    """Train, evaluate, write the run directory: ``unskew.run``, with ``out`` resolved against ``home``."""
    observe = observe or (lambda event: None)
    base = recipe if isinstance(recipe, Config) else Config()
    if recipe and not isinstance(recipe, Config):
        base, seeds = configs.read_recipe(Path(recipe), trust=trust)
        if seeds and options.get("seed") is None:
            raise UserError(f"{recipe} lists seeds for several runs; use unskew.run_seeds, or give seed=… for one run")
    directory = usable_path(out) if out else None
    texts, values = split_values(options)
    config = configs.checked(configs.with_values(base, texts, "run"))
    engines.serve_rank_zero(config.engine)
    prepared = prepare(config, values=values, say=lambda *stage: observe(Stage(*stage)))
    del values  # so that a partition of millions of examples is in memory once
    rehearse(prepared)
    path = home / directory if directory else folders.unused_path(home / "runs", slug(prepared.config))
    folders.create_run_folder(path)
    with folders.locked_folder(path):
        if (path / CONFIG).exists():
            raise UserError(f"another process has just started a run in {path}; choose another --out")
        plugins = configs.plugin_texts(prepared.config).values()
        remember([*plugins, *(finisher.text for finisher in prepared.algorithm.finish)])
        config_text = configs.to_toml(prepared.config).encode()
        folders.start_manifest(path, {CONFIG: config_text, folders.PARTITION: _partition_bytes(prepared)})
        return execute(prepared, path, _stopping(observe, path, prepared.config))


@neutral()
def resume(path: str | Path, *, observe: Observer | None = None, trust: bool = False, **changes: Any) -> Result:
    """Continue where a run stopped, with new values for the options in ``WORK`` and the objects passed to ``run``."""
    observe = observe or (lambda event: None)
    engines.serve_rank_zero(changes.get("engine"))
    path = usable_path(path)
    config = configs.read_own_run(path, trust=trust)
    with folders.locked_folder(path):
        if folders.read_sealed(path, RESULT) is not None:
            if read_result(path).released:
                remove_private_files(path)  # in case of a crash just before
            raise UserError(f"{path} is finished: it has a result.json; start another with: unskew run {path / CONFIG}")
        config = replace(config, engine=engines.default_engine(config.engine))
        work = {name: value for name in WORK if (value := changes.pop(name, None)) is not None}
        config = configs.with_values(config, work, "resume")
        values = match_values(changes, config)
        folders.require_sealed(path, folders.PARTITION)
        partition = (path / folders.PARTITION).absolute()
        saved = f"file:{partition}" if partition.exists() else None
        prepared = prepare(configs.checked(config), saved, values, say=lambda *stage: observe(Stage(*stage)))
        if saved is None:
            folders.write_sealed(path, {folders.PARTITION: _partition_bytes(prepared)})
        rehearse(prepared)
        return execute(prepared, path, _stopping(observe, path, prepared.config))


def _stopping(observe: Observer, path: Path, config: Config) -> Observer:
    """An observer that turns the user's STOP into a StopRun that explains how to resume."""
    objects = [name for name in configs.described_options(config) if name != "partition"]  # partition.npz has that

    def watch(event: Overview | Metrics | Event) -> None:
        try:
            if observe(event) is STOP:
                raise StopRun
        except StopRun as error:
            raise StopRun(str(path), getattr(event, "round", None), objects) from error

    return watch


def _partition_bytes(prepared: Prepared) -> bytes:
    labels, classes = prepared.images.train.labels, len(prepared.images.classes)
    return folders.arrays_bytes(partition_files.to_arrays(prepared.partition, labels, classes))


def slug_of(text: str) -> str:
    """A text as part of a folder's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")[:80]


def slug(config: Config, *, seed: bool = True) -> str:
    """A name for a run's folder."""
    data = config.data.removeprefix(configs.FROM_PYTHON).partition(",")[0]
    method = "method-from-python" if configs.from_python(config.method) else config.method
    name = slug_of(f"{Path(data).stem}-{method}")
    return f"{name}-seed{config.seed}"[:80] if seed else name[:80]
