"""Interrupts while an engine is open: the first one counts, a second one would break the checkpoint that it leads to.

When a rank dies, torchrun ends the others of its machine with SIGTERM, a moment after rank 0 has noticed it itself.
"""

import _thread
import signal
import threading
from types import FrameType
from typing import Any

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Handlers of this process's interrupts; in another thread than its main one there are none."""

    def __init__(self) -> None:
        self.ending = False  # from then on interrupts have nothing to add
        self._came = threading.Event()
        self._ours = False  # whether the next interrupt is one that ``interrupt`` made
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in INTERRUPTS}

    def interrupt(self) -> None:
        """From another thread: end what the main thread is in."""
        self._ours = True
        _thread.interrupt_main()

    def restore(self, wait: float = 0.0) -> None:
        """The handlers from before; ``wait`` is for an interrupt that is sure to come, in seconds."""
        if not self._before:
            return
        if wait:
            self._came.wait(wait)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._ours:
            self._came.set()
        self._ours = False
        before = self._before.get(number)
        if self.ending or before is signal.SIG_IGN:
            return
        self.ending = True
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt
