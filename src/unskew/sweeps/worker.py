"""A process that does runs of a sweep, one after another: ``python worker.py LIFE``, JSON lines in and out.

A line in is a task; a line out is a round that is done, or how the task ended.
"""

import json
import os
import sys
import threading
from typing import Any


def main(life: int) -> None:
    """Serve until the parent closes the line; end at once where the parent dies."""
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what code from outside prints must not get between the lines
    from pathlib import Path

    from unskew.core.machine import keep_priority
    from unskew.runs.config import Config
    from unskew.sweeps.work import Task, do

    keep_priority()

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(ready=True)
    for line in sys.stdin:
        given = json.loads(line)
        more = tuple(given["calibrations"]), tuple(given["measures"])
        failure = do(Task(Config(**given["config"]), Path(given["path"]), *more), lambda number: answer(round=number))
        if failure is None:
            answer(done=True)
        else:
            answer(failed=failure.reason, diverged=failure.diverged)


def _end_with_parent(life: int) -> None:
    """The parent holds the other end of this pipe: it closes when the parent dies, however it dies."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except KeyboardInterrupt:
        os._exit(130)
