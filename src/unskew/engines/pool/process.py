"""One worker process as its parent sees it: started, sent messages, seen to die, ended."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from unskew.core.tensors import Layout
from unskew.engines.pool.shared import SLOTS, Line, ResultFile, SharedFile
from unskew.privacy.sessions import Sessions
from unskew.round.client_memory import ClientMemory

START = str(Path(__file__).with_name("start.py"))  # run as a script: nothing is imported before its first line


class Worker:
    """A process, the line to it, and the memory it writes its results to."""

    def __init__(
        self, shared: Sequence[SharedFile], sessions: Sessions, memory: ClientMemory | None, hello: dict[str, Any],
        number: int = 0,
    ) -> None:  # fmt: skip
        self.number = number  # which decides its device where there are several
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        self._results = [ResultFile() for _ in range(SLOTS)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        files = [*(each.descriptor for each in shared), *(each.descriptor for each in self._results)]
        kept = [sessions.descriptor, *([memory.descriptor] if memory else [])]
        inherited = [theirs.fileno(), life, *files, *kept]
        self.process = subprocess.Popen(
            [sys.executable, "-P", START, *map(str, inherited)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Linux divides busy cores among sessions: see start.py
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
                "OMP_NUM_THREADS": "1",
            },
        )
        theirs.close()
        os.close(life)
        self.line = Line(ours)
        self.ready = False
        self.tasks: dict[int, list[int]] = {}  # slot -> places of the visits in the round that it was given for it
        self.held: dict[int, list[int]] = {}  # slot -> places whose results are in it and may not be added yet
        self._layout: Layout = []  # of its last result
        self.send(hello)

    def send(self, message: dict[str, Any]) -> None:
        """Send if it lives: that a worker died is noticed when its line closes."""
        try:
            self.line.send(message)
        except OSError:
            return

    def free_slot(self) -> int | None:
        """A slot without visits or results, if any."""
        return next((slot for slot in range(SLOTS) if slot not in self.tasks and slot not in self.held), None)

    def result(self, slot: int, where: tuple[int, int], layout: Layout | None) -> tuple[Layout, Tensor]:
        """A result in a slot: its layout, and all of it as one vector, since every sum is float64."""
        if layout is not None:
            self._layout = layout
        return self._layout, self._results[slot].read(*where)

    def running(self) -> int | None:
        """The place of the visit that it was doing, once it is dead; None where it had none."""
        places = (self._results[slot].running for slot in self.tasks)
        return next((place for place in places if any(place in group for group in self.tasks.values())), None)

    def exit_reason(self) -> str:
        """How it died, with the last line it wrote to its standard error."""
        code = self.process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}{': ' + last if last else ''}"

    def close(self) -> None:
        """End the process and give everything back."""
        self.line.connection.close()
        os.close(self._life)
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()
        for each in self._results:
            each.close()
