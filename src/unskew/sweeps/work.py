"""One run of several: trained, resumed or found finished, then calibrated and measured; what fails is a result too."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.core.errors import ClientFailure, UserError
from unskew.round.driver import Metrics
from unskew.runs import train
from unskew.runs.config import CONFIG, Config
from unskew.runs.finished import calibrate_run
from unskew.runs.result import RESULT, read_result

OVERFLOW = "NaN or infinity"  # in the message of a client or server whose numbers have grown beyond all bounds

Say = Callable[[int], None]  # the round that is done


@dataclass(frozen=True)
class Task:
    """A run to be done: its configuration, its folder, and what is made of it when it is trained."""

    config: Config
    path: Path
    calibrations: tuple[str, ...] = ()  # in their plainest spelling, as results have them
    measures: tuple[str, ...] = ()  # "cka(clients=20)"


@dataclass(frozen=True)
class RunFailure:
    """Why a run has no result. One that ``diverged`` would do so again; others are tried again the next time."""

    reason: str
    diverged: bool = False


def do(task: Task, say: Say | None = None) -> RunFailure | None:
    """Do the run, or what is left of it; None where it has all that was asked for then."""
    failure = None if (task.path / RESULT).exists() else _train(task, say)
    return failure or _add(task)


def _train(task: Task, say: Say | None) -> RunFailure | None:
    def observe(event: object) -> None:
        if say is not None and isinstance(event, Metrics):
            say(event.round)

    try:
        if (task.path / CONFIG).exists():
            train.resume(task.path, observe=observe, **{name: getattr(task.config, name) for name in train.WORK})
        else:
            train.run(task.config, out=task.path, observe=observe)
    except (ClientFailure, UserError, OSError) as error:
        if (task.path / RESULT).exists():  # it was trained, and a calibration was not possible
            return None
        return RunFailure(str(error), OVERFLOW in str(error))
    return None


def _add(task: Task) -> RunFailure | None:
    """Add the calibrations and measures that the run does not have yet; one that fails does not stop the others."""
    failures = _calibrate(task) if task.calibrations else []
    if task.measures:
        failures += _measure(task)
    return RunFailure("; ".join(failures)) if failures else None


def _calibrate(task: Task) -> list[str]:
    """Make the calibrations that are not there, those of one exchange together; the reasons of those that fail."""
    failures: list[str] = []
    left = [name for name in task.calibrations if name not in read_result(task.path).calibrations]
    while left:
        try:
            calibrate_run(task.path, *left, **_where(task))
            return failures
        except (ClientFailure, UserError) as error:
            failures.append(str(error))
        made = read_result(task.path).calibrations
        left = [name for name in left if name not in made][1:]  # the first of these failed
    return failures


def _measure(task: Task) -> list[str]:
    """Take the measures that are not stored; the reasons of those that cannot be taken."""
    from unskew.analysis import parse_measure  # here: a sweep takes none, and they need scikit-learn
    from unskew.analysis.measure import load_or_take
    from unskew.runs.finished import FinishedRun

    failures = []
    with FinishedRun(task.path, **_where(task)) as run:
        for text in task.measures:
            try:
                load_or_take(run, parse_measure(text))
            except UserError as error:
                failures.append(f"{text}: {error}")
    return failures


def _where(task: Task) -> dict[str, Any]:
    """How a finished run is worked on: as it is trained here, its data where they are now."""
    config = task.config
    return {"engine": config.engine, "workers": config.workers, "data_dir": config.data_dir, "device": config.device}
