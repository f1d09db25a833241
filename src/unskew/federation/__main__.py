"""``python -m unskew.federation server|node DIR``: the long-lived commands, in a process without PyTorch."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from unskew.core.errors import UserError
from unskew.federation.folder import read_federation, read_node
from unskew.federation.node import PARTS, attend, node_mark
from unskew.federation.processes import ENDS, MARK, WATCHER
from unskew.federation.server import serve, server_mark


class Stopped(BaseException):
    """A signal asked this process to exit; not an error."""


def main() -> int:
    """Run a server or a node until a signal arrives; return the exit code."""
    os.umask(0o077)  # for everything the programs write: databases, logs, client memories, run directories
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
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
    """Print a line for the terminal or the journal; the programs continue if nobody can read it."""
    with suppress(OSError):
        print(line, flush=True)  # noqa: T201


def watch(words: list[str]) -> None:
    """Supervise the programs of a server or a node, with a mark by which ``status`` and ``stop`` recognize them."""
    match words:
        case ["server", folder]:
            federation = read_federation(Path(folder))
            mark, words = server_mark(federation), ["server", str(federation.path)]
        case ["node", folder, *part] if part in ([], *([name] for name in PARTS)):
            node, which = read_node(Path(folder)), part[0] if part else PARTS[0]
            mark, words = node_mark(node, which), ["node", str(node.path), which]
        case _:
            raise UserError(f"usage: python -m unskew.federation server DIR | node DIR [{'|'.join(PARTS)}]")
    if os.environ.get(MARK) != mark:
        sys.stdout.flush()
        command = [sys.executable, "-P", "-m", WATCHER.decode(), *words]
        os.execve(sys.executable, command, {**os.environ, MARK: mark})
    if words[0] == "server":
        serve(federation, say)
    else:
        attend(node, say, which)


def _stop(number: int, frame: FrameType | None) -> None:
    for stop in ENDS:
        signal.signal(stop, signal.SIG_IGN)  # the programs are already being ended
    raise Stopped(number)


if __name__ == "__main__":
    sys.exit(main())
