"""The ``.part`` files beside those that are being written: their names, and clearing away what a kill left behind."""

import os
import platform
import re
import time
from contextlib import suppress
from pathlib import Path

FORGOTTEN_SECONDS = 24 * 3600  # no file takes a day to write: such a part is nobody's, on whichever machine
_NAME = re.compile(r"\.(?:([A-Za-z0-9-]+)\.)?([0-9]{1,10})\.part$")  # earlier versions left the machine out


def part_beside(path: Path) -> Path:
    """Where this process writes what will take the path's place: two processes may write the same file."""
    return path.with_name(f"{path.name}.{_machine()}.{os.getpid()}.part")


def is_part(name: str) -> bool:
    """Whether a file's name is that of a part."""
    return _NAME.search(name) is not None


def clear_parts(*folders: Path) -> None:
    """Remove the parts in these folders whose process has ended; those of another machine when they are a day old."""
    for folder in folders:
        with suppress(OSError):
            for file in folder.iterdir():
                if (found := _NAME.search(file.name)) and _left_behind(file, found[1], int(found[2])):
                    file.unlink(missing_ok=True)


def _left_behind(file: Path, machine: str | None, process: int) -> bool:
    written = file.stat().st_mtime
    if time.time() - written > FORGOTTEN_SECONDS:
        return True
    if machine is None or machine != _machine() or process == os.getpid():
        return False
    began = _began(process)
    return began is None or began > written + 1  # another process has got its number since


def _began(process: int) -> float | None:
    """When the process started, in seconds since the epoch; None where there is none, 0 where that cannot be told."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:
        return 0.0  # it belongs to another user
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def _machine() -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", platform.node())[:40] or "here"
