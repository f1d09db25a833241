"""The start of a worker process, run as a script: the parent is watched before the long imports begin.

``python start.py LINE LIFE DATA WEIGHTS RESULTS … [MEMORIES]`` with inherited descriptors. As ``python -m`` its
packages would be imported first, PyTorch with them, and a worker whose parent dies then would stay for seconds.

Every worker is a session of its own. Where other programs are busy too, Linux divides the cores among sessions
(autogroup): all workers in their parent's session would have one program's share together, however many they are.
"""

import contextlib
import os
import signal
import sys
import threading


def start(*descriptors: int) -> None:
    """Watch the parent, then import what a worker needs, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    _keep_priority()
    threading.Thread(target=_end_with_parent, args=(descriptors[1],), daemon=True).start()
    from unskew.engines.pool.worker import main

    line, _, *others = descriptors
    main(line, *others)


def _keep_priority() -> None:
    """A session has a priority too, and a new one has the usual: give it the one that this process was started with."""
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(os.nice(0)))


def _end_with_parent(life: int) -> None:
    """The parent holds the other end of this pipe: it closes when the parent dies, however it dies."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    start(*map(int, sys.argv[1:]))
