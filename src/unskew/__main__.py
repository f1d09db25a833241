"""Where the command starts: an interrupt is understood before the long imports begin."""

import _signal  # type: ignore[import-not-found]  # ``signal`` adds enumerations: longer to import than all here
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INTERRUPTED = 130


def main() -> None:
    """Import the command line and run it."""
    # An exception that crosses a C++ module in its initialisation aborts the process, so nothing is raised there.
    _on_interrupt(_leave)
    try:
        os.getcwd()
    except OSError:  # libraries end the process for it, or print tracebacks
        os.write(2, b"unskew: the working directory was deleted; change to another one\n")
        sys.exit(2)
    from unskew.console.main import main as command

    _on_interrupt(_interrupt)
    try:
        command()
    except KeyboardInterrupt:
        _leave()
    except SystemExit as ending:
        if ending.code == INTERRUPTED:  # reported; an interrupt that passed eval() would let Python end by signal
            _end()
        raise


def _on_interrupt(handler: "Any") -> None:
    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, handler)


def _interrupt(*_: "Any") -> None:
    raise KeyboardInterrupt


def _leave(*_: "Any") -> None:
    _on_interrupt(_signal.SIG_IGN)  # a second interrupt has nothing to add
    os.write(2, b"unskew: interrupted\n")
    _end()


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, RuntimeError):  # closed, or its reader is gone, or this interrupts a write
            continue
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
