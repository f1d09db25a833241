"""The folder of a sweep: sweep.json says what it tries and what failed; below ``runs`` each setting has its runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_json, write_whole
from unskew.runs import config as configs
from unskew.runs.config import CONFIG, OPTIONS, Config
from unskew.runs.folder import json_bytes, locked_folder
from unskew.sweeps.space import Dimension, parse_over
from unskew.sweeps.work import Failure, Task

ABOUT, RUNS, TABLE, BEST = "sweep.json", "runs", "table.csv", "best.toml"


@dataclass(frozen=True)
class Asked:
    """What a sweep was asked for."""

    base: Config  # what all settings share; varied options and the seed do not count
    over: tuple[Dimension, ...]
    seeds: tuple[int, ...]
    by: str
    trials: int | None = None  # None: the whole grid

    @property
    def searched(self) -> bool:
        """Whether settings are chosen from what earlier ones came to."""
        return self.trials is not None


@contextmanager
def opened(path: Path, asked: Asked) -> Iterator[dict[str, Failure]]:
    """The sweep's folder, locked for this process, with the failures that are known by run; another's is refused."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder; choose another --out")
    there = (path / ABOUT).exists()
    if path.exists() and not there and any(each.name != ".lock" for each in path.iterdir()):
        raise UserError(f"{path} exists and is not the folder of a sweep; choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {path} cannot be made: {error.strerror}") from error
    with locked_folder(path):
        failures = _failures(path, asked) if there else {}
        write_about(path, asked, failures)
        yield failures


def write_about(path: Path, asked: Asked, failures: Mapping[str, Failure]) -> None:
    """Write sweep.json: what is tried, and which runs diverged."""
    kept = {run: failure.reason for run, failure in failures.items() if failure.diverged}
    write_whole(path / ABOUT, json_bytes({**_described(asked), "diverged": kept}))


def check_run(path: Path, task: Task, asked: Asked) -> None:
    """Refuse a run folder whose varied options, seed or validation part are not the task's."""
    if not (path / CONFIG).exists():
        return
    found = configs.read_run(path)
    for name in ("seed", "validation", *(each.option for each in asked.over)):
        there, here = getattr(found, name), getattr(task.config, name)
        if OPTIONS[name].kind is not str and here is not None and there != here:
            raise UserError(f"{path} has a run with {name} {there}, not {here}; move it away, or choose another --out")


def _described(asked: Asked) -> dict[str, Any]:
    varied = {"seed", *(each.option for each in asked.over)}
    return {
        "settings": {name: value for name, value in configs.deciding(asked.base).items() if name not in varied},
        "over": [each.text for each in asked.over],
        "seeds": list(asked.seeds),
        "by": asked.by,
        "trials": asked.trials,
    }


def _failures(path: Path, asked: Asked) -> dict[str, Failure]:
    """The failures in a folder that has this sweep already; more values, seeds and trials may be asked for now."""
    found, now = read_json(path / ABOUT), _described(asked)
    try:
        settings, over, kept = found["settings"], found["over"], found["diverged"]
        names = [each.option for each in parse_over(over)]
        failures = {run: Failure(str(reason), diverged=True) for run, reason in kept.items()}
    except (LookupError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{path / ABOUT} is damaged: {error!r}; restore it from a copy, or delete it") from error
    asked_names = [each.option for each in asked.over]
    same = over == now["over"] and found.get("by") == asked.by if asked.searched else set(names) == set(asked_names)
    if not same or (found.get("trials") is None) == asked.searched:
        raise UserError(f"{path} has another sweep, over {'; '.join(map(str, over))}; choose another --out")
    if odd := [name for name in {**settings, **now["settings"]} if settings.get(name) != now["settings"].get(name)]:
        said = ", ".join(f"{name} {settings.get(name, 'left out')} there" for name in odd)
        raise UserError(f"{path} has another sweep: {said}; choose another --out")
    return failures
