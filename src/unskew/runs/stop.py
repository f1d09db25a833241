"""How an observer ends a run before its last round, so that it can be resumed."""

from collections.abc import Sequence
from typing import Final


class Stop:
    """The type of STOP."""

    def __repr__(self) -> str:
        return "unskew.STOP"


STOP: Final = Stop()  # what an observer answers to end the run after the current round


class StopRun(Exception):
    """A run that an observer ended: its checkpoint is written. An observer may also raise it.

    ``path`` is the run folder and ``round`` the last round that is done, None where none was done yet.
    """

    def __init__(self, path: str = "", round: int | None = None, values: Sequence[str] = ()) -> None:
        self.path, self.round = path, round
        when = "" if round is None else f" after round {round}"
        call = f"unskew.resume({', '.join([repr(path), *(f'{name}=…' for name in values)])})"
        super().__init__(f"the run was stopped{when}; resume it with: {call}" if path else "stop the run")
