"""The start of a worker process, run as a script: the parent is watched before the long imports begin.

``python start.py LINE LIFE DATA WEIGHTS RESULTS … SESSIONS [MEMORIES]`` with inherited descriptors. As ``python -m``
its packages would be imported first, PyTorch with them, and a worker whose parent dies then would stay for seconds.

Every worker is a session of its own. Where other programs are busy too, Linux divides the cores among sessions
(autogroup): all workers in their parent's session would have one program's share together, however many they are.
"""

import os
import signal
import sys
import threading


def start(*descriptors: int) -> None:
    """Watch the parent, then import what a worker needs, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_end_with_parent, args=(descriptors[1],), daemon=True).start()
    from unskew.core.child import keep_priority
    from unskew.engines.pool.worker import main

    keep_priority()
    line, _, *others = descriptors
    main(line, *others)


def _end_with_parent(life: int) -> None:
    """The parent holds the other end of this pipe: it closes when the parent dies, however it dies."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    start(*map(int, sys.argv[1:]))
