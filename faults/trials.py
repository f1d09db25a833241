"""What a trial is: something is broken on purpose, a command is given, and one of three things may follow.

``same``: the result is that of the sound folder, to the last bit. ``refused``: one message and exit code 2.
Anything else is a surprise: another result, a traceback, a crash, a message that does not name what is wrong, or
silence for longer than the limit.
"""

import contextlib
import hashlib
import io
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

SAME, REFUSED = "same", "refused"
LIMIT = 120  # seconds for one trial


@dataclass(frozen=True)
class Trial:
    """One fault: what it is called, so that it can be tried again, and the work, which gives its verdict."""

    name: str
    work: Callable[[], str]
    limit: float = LIMIT  # seconds


@dataclass(frozen=True)
class Section:
    """A kind of fault. ``trials`` gives them in the order that a seed decides; a section with none says why."""

    name: str
    what: str
    trials: Callable[[Path, int], Iterator[Trial]]
    share: float = 1.0  # of the time


@dataclass
class Tally:
    """What came of a section's trials."""

    name: str
    what: str
    same: int = 0
    refused: int = 0
    surprises: list[str] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False  # whether every trial there is was done

    @property
    def trials(self) -> int:
        return self.same + self.refused + len(self.surprises)


class Slow(BaseException):
    """A trial took longer than the limit; no code that catches what a client raises may catch this."""


@dataclass(frozen=True)
class Answer:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


def command(*words: object) -> Answer:
    """``unskew`` in this process; a traceback becomes the exit code 1, as it would in a shell."""
    from unskew.console.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except Slow:
            raise
        except BaseException:  # whatever it is, a user would see it as a traceback
            err.write(traceback.format_exc())
            code = 1
    return Answer(code, out.getvalue(), err.getvalue())


def refusal(answer: Answer, named: str = "") -> str:
    """The verdict on an answer that is not a success."""
    lines = [line for line in answer.err.strip().splitlines() if line and not line.startswith("note:")]
    if answer.code != 2 or "Traceback" in answer.err:
        return f"exit code {answer.code}: {' / '.join(lines[-3:])[-300:]}"
    if not lines or not lines[0].startswith("unskew: "):
        return f"exit code 2 without a message: {answer.err[:200]!r}"
    if named and named not in answer.err:
        return f"the message does not name {named}: {lines[0][:300]}"
    return REFUSED


def conduct(section: Section, folder: Path, seed: int, seconds: float, most: int | None = None) -> Tally:
    """Try as many of a section's faults as fit into the time, at least one; say what came of them."""
    tally = Tally(section.name, section.what)
    began = time.monotonic()
    for trial in islice(section.trials(folder, seed), most):
        if tally.trials and time.monotonic() - began > seconds:
            break
        verdict = _verdict(trial)
        if verdict == SAME:
            tally.same += 1
        elif verdict == REFUSED:
            tally.refused += 1
        else:
            tally.surprises.append(f"{trial.name}: {verdict}")
            print(f"  surprise: {trial.name}: {verdict}", file=sys.stderr, flush=True)
    else:
        tally.complete = True
    tally.seconds = time.monotonic() - began
    return tally


def _verdict(trial: Trial) -> str:
    def too_slow(*_: object) -> None:
        raise Slow

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_REAL, trial.limit)
    try:
        return trial.work()
    except Slow:
        return f"no answer in {trial.limit:.0f} s"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def digest(*parts: object) -> str:
    """One short text for whatever a result consists of."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part if isinstance(part, bytes) else repr(part).encode())
    return total.hexdigest()[:16]


def shuffled(items: list, seed: int) -> list:
    """The items in the order that the seed decides."""
    import numpy as np

    return [items[place] for place in np.random.default_rng(seed).permutation(len(items))]
