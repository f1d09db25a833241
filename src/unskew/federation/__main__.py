"""``python -m unskew.federation server|node DIR``: the long-lived commands, in a process without PyTorch."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from unskew.core.errors import UserError, nearest
from unskew.federation.folder import read_federation, read_node
from unskew.federation.node import PARTS, attend, node_mark
from unskew.federation.processes import ENDS, MARK, WATCHER
from unskew.federation.server import serve, server_mark

USAGE = "usage: python -m unskew.federation server DIR | node DIR [both|service|supernode]"


class Stopped(BaseException):
    """A signal asks us to end: not an error."""


def main() -> int:
    """Run a server or a node until a signal comes; the exit code."""
    os.umask(0o077)  # for all that the programs write: databases, logs, memories, run directories
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, _stop)
    try:
        watch(sys.argv[1:])
    except UserError as error:
        print(f"unskew: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except Stopped as stopped:
        say("stopped")
        return 130 if stopped.args[0] == signal.SIGINT else 0
    return 0


def say(line: str) -> None:
    """One line for the person at the terminal, or for the journal; where nobody reads any more, the programs go on."""
    with suppress(OSError):
        print(line, flush=True)  # noqa: T201


def watch(words: list[str]) -> None:
    """Watch over the programs of a server or a node."""
    match words:
        case ["server", folder]:
            federation = read_federation(Path(folder))
            become(server_mark(federation), ["server", str(federation.path)])
            serve(federation, say)
        case ["node", folder, *part] if len(part) <= 1:
            node, which = read_node(Path(folder)), part[0] if part else PARTS[0]
            if which not in PARTS:
                raise UserError(f"{which!r}: {nearest(which, PARTS)}")
            become(node_mark(node, which), ["node", str(node.path), which])
            attend(node, say, which)
        case _:
            raise UserError(USAGE)


def become(mark: str, words: list[str]) -> None:
    """Be this program, with the mark by which ``status`` and ``stop`` know it: start anew in the same process."""
    if os.environ.get(MARK) != mark:
        sys.stdout.flush()
        command = [sys.executable, "-P", "-m", WATCHER.decode(), *words]
        os.execve(sys.executable, command, {**os.environ, MARK: mark})


def _stop(number: int, frame: FrameType | None) -> None:
    for stop in ENDS:
        signal.signal(stop, signal.SIG_IGN)  # a second one has nothing to add: the programs are being ended
    raise Stopped(number)


if __name__ == "__main__":
    sys.exit(main())
