"""A command that trains: what it shows, what it logs, and how to resume it if it did not finish."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from unskew.console.plain import PlainConsole
from unskew.console.screen import Screen, summary
from unskew.core.errors import ClientFailure, LostMemory, UserError
from unskew.loggers import open_logger
from unskew.runs.execute import Observer
from unskew.runs.result import Result

out = PlainConsole()


def watched(log: Sequence[str] | None, work: Callable[[Observer], Result], again: str = "") -> Result:
    """Run with the screen and these loggers as observers, then show the result.

    ``again`` says how to go on after an interrupt, where that is not ``unskew resume``.
    """
    screen, place = Screen(out), list[Path]()
    loggers = [open_logger(name, screen.note) for name in dict.fromkeys(log or ())]

    def observe(event: Any) -> None:
        if hasattr(event, "path"):
            place.append(event.path)
        for logger in loggers:
            logger(event)
        screen(event)

    def close() -> None:
        screen.close()
        for logger in loggers:
            logger.close()

    try:
        result = work(observe)
    except (KeyboardInterrupt, ClientFailure, UserError) as error:
        close()
        if place and not isinstance(error, LostMemory) and not (place[0] / "result.json").exists():
            interrupted = isinstance(error, KeyboardInterrupt)
            what = "interrupted" if interrupted else str(error)
            hint = f"resume it with: unskew resume {shlex.quote(str(place[0]))}"
            if interrupted and again:
                hint = again
            if isinstance(error, ClientFailure) and what.startswith("client"):
                hint = hint.replace("resume it with", "skip such clients with") + " --on-failure skip"
            fail(f"{what}; {hint}", 130 if interrupted else 2)
        raise
    finally:
        close()
    out.print(summary(result))
    return result


def fail(message: str, code: int) -> NoReturn:
    """Print what is wrong in one line, and exit."""
    print(f"unskew: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)
