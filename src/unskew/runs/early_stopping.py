"""Early stopping: which round is the best so far, when patience has run out, and the best round's state on disk.

A round is better if its measure is better than that of every round before: of two equal ones the earlier stays. Which
round is the best follows from metrics.jsonl, so that a resumed run stops in the same round.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.types import ServerState
from unskew.runs.checkpoint import CHECKPOINT, Progress, kept_state, load_state, save_state


@dataclass(frozen=True)
class Best:
    """The best round so far: its number, its measure, the server's state after it."""

    round: int
    value: float
    state: ServerState


def best_row(rows: Iterable[Mapping[str, Any]], monitor: str) -> Mapping[str, Any] | None:
    """The evaluated round with the best measure, the first of equal ones; None where no round was evaluated."""
    best: Mapping[str, Any] | None = None
    for row in rows:
        value = row.get(monitor)
        if value is not None and (best is None or is_better(value, best[monitor], monitor)):
            best = row
    return best


def is_better(value: float, other: float, monitor: str) -> bool:
    """Whether a measure is better than another: more accuracy, less loss. NaN is never better."""
    return value > other if monitor == "accuracy" else value < other


class BestRound:
    """Follows a run's rounds. Between two checkpoints the best state is in memory, at a checkpoint also on disk."""

    def __init__(
        self, path: Path, monitor: str, patience: int, rows: Sequence[Mapping[str, Any]], now: ServerState
    ) -> None:
        """Continue after the rounds of ``rows``; ``now`` is the state after the last of them."""
        self._path, self._monitor, self._patience = path, monitor, patience
        self._written: set[int] = set()
        self.best: Best | None = None
        self.over = False  # patience has run out: the last evaluation was this many rounds after the best, or more
        if (row := best_row(rows, monitor)) is not None:
            number = row["round"]
            self.best = Best(number, row[monitor], now if number == now.round else self._read(number))
            self.over = rows[-1].get(monitor) is not None and now.round - number >= patience

    def see(self, state: ServerState, measured: float | None) -> None:
        """A round has ended; ``measured`` is None where it was not evaluated."""
        if measured is None:
            return
        if self.best is None or is_better(measured, self.best.value, self._monitor):
            self.best = Best(state.round, measured, state)
        self.over = state.round - self.best.round >= self._patience

    def save(self, now: ServerState, progress: Progress) -> None:
        """Before a checkpoint of ``now`` is written: what it does not have itself."""
        if self.best is not None and self.best.round not in {now.round, *self._written}:
            save_state(kept_state(self._path, self.best.round), self.best.state, progress)
            self._written.add(self.best.round)

    def clear(self, kept: Callable[[int], bool]) -> None:
        """After the checkpoint was written: remove states that are no longer the best and not kept for another use."""
        for number in self._written - ({self.best.round} if self.best else set()):
            if not kept(number):
                kept_state(self._path, number).unlink(missing_ok=True)
            self._written.discard(number)

    def _read(self, number: int) -> ServerState:
        file = kept_state(self._path, number)
        if not file.exists():
            raise UserError(
                f"{file} is missing, the state after the best round so far; restore it from a copy, or delete "
                f"{self._path / CHECKPOINT} to start the run from the beginning"
            )
        state, _ = load_state(file)
        if state.round != number:
            raise UserError(f"{file} is the state of round {state.round}, not {number}; restore it from a copy")
        self._written.add(number)
        return state
