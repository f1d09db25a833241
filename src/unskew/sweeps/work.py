"""One run of a sweep: trained, resumed or found finished; what fails is a result too."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unskew.core.errors import ClientFailure, UserError
from unskew.round.driver import Metrics
from unskew.runs import train
from unskew.runs.config import CONFIG, Config
from unskew.runs.result import RESULT

OVERFLOW = "NaN or infinity"  # in the message of a client or server whose numbers have grown beyond all bounds

Say = Callable[[int], None]  # the round that is done


@dataclass(frozen=True)
class Task:
    """A run to be done: its configuration and its folder."""

    config: Config
    path: Path


@dataclass(frozen=True)
class Failure:
    """Why a run has no result. One that ``diverged`` would do so again; others are tried again the next time."""

    reason: str
    diverged: bool = False


def do(task: Task, say: Say | None = None) -> Failure | None:
    """Do the run, or what is left of it; None where it has its result then."""

    def observe(event: object) -> None:
        if say is not None and isinstance(event, Metrics):
            say(event.round)

    if (task.path / RESULT).exists():
        return None
    try:
        if (task.path / CONFIG).exists():
            train.resume(task.path, observe=observe, **{name: getattr(task.config, name) for name in train.WORK})
        else:
            train.run(task.config, out=task.path, observe=observe)
    except (ClientFailure, UserError, OSError) as error:
        if (task.path / RESULT).exists():  # it was trained, and a calibration was not possible
            return None
        return Failure(str(error), OVERFLOW in str(error))
    return None
