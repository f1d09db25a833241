"""From a plan to records: what is not there is trained, calibrated and measured on all cores, and written down."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.machine import cores, resolve_device
from unskew.report.write import write_report
from unskew.reproduce.plan import Job
from unskew.reproduce.records import make_record, write_failure
from unskew.runs.result import RESULT
from unskew.sweeps.jobs import do_all
from unskew.sweeps.work import Failure

SHOWN = ("skew", "curves")  # what the report of a run shows: what costs next to nothing

Finished = Callable[
    [Job, Failure | None, int, int], None
]  # a run, why it has no result, how many are done, of how many
Rounds = Callable[[int, int], None]  # rounds that are done, of how many


@dataclass(frozen=True)
class Told:
    """Who is told of what."""

    finished: Finished | None = None
    rounds: Rounds | None = None


def carry_out(
    jobs: Sequence[Job], out: Path, *, data_dir: str | None = None, at_once: int | None = None, told: Told | None = None
) -> dict[tuple[str, int], Failure]:
    """Do these runs, as many at the same time as there are cores; why some have no result, by training and seed.

    An interrupted run goes on where it stopped when this is called again.
    """
    told = told or Told()
    tasks = [job.task(out, data_dir) for job in jobs]
    rounds, whole = dict.fromkeys(range(len(jobs)), 0), sum(max(job.config.rounds, 1) for job in jobs)
    failures: dict[tuple[str, int], Failure] = {}
    done = 0

    def ended(place: int, failure: Failure | None) -> None:
        nonlocal done
        job, done = jobs[place], done + 1
        if failure is not None:
            failures[job.training, job.seed] = failure
        if (tasks[place].path / RESULT).exists():
            make_record(out, job.training, job.seed, job.measures, failure.reason if failure else "")
            with suppress(UserError):  # a page beside the figures; the table is made without it
                write_report(tasks[place].path, only=SHOWN)
        elif failure is not None and failure.diverged:
            write_failure(out, job.training, job.seed, failure)
        if told.finished is not None:
            told.finished(job, failure, done, len(jobs))

    def progressed(place: int, number: int) -> None:
        rounds[place] = number
        if told.rounds is not None:
            told.rounds(sum(rounds.values()), whole)

    if jobs:
        do_all(tasks, at_once or _at_once(jobs), ended, progressed)
    return failures


def _at_once(jobs: Sequence[Job]) -> int:
    """One for each core; on a GPU one at a time."""
    return cores() if resolve_device(jobs[0].config.device).type == "cpu" else 1


def check_out(out: Path) -> None:
    """Make the folder, or refuse one that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}; choose another") from error
