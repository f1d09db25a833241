"""What engines share: their clients' memories, and how those that spread visits begin and end a job."""

from collections.abc import Iterable, Sequence

from unskew.core.types import Outcome, Roster, TestPart, Visit
from unskew.engines.work import Work, work_of
from unskew.round.client_memory import SavedStates, Slots


class Remembering:
    """An engine whose clients may keep something between visits, in one file."""

    def __init__(self, memory: SavedStates | None) -> None:
        self._memory, self._slots = memory, Slots()

    def accept(self, superseded: Iterable[str]) -> None:
        """The server has the last receipts; older memories may be overwritten, unless a checkpoint refers to them."""
        self._slots.accept(superseded)

    def sync(self) -> None:
        """Make every memory durable."""
        if self._memory is not None:
            self._memory.sync()

    def pin(self, tickets: Iterable[str]) -> None:
        """A checkpoint refers to these memories and to no others."""
        tickets = list(tickets)
        if self._memory is not None:
            self._memory.require(tickets)
        self._slots.pin(tickets)


class Spreading(Remembering):
    """An engine that spreads the visits of a job over processes."""

    def __init__(self, roster: Roster, epochs: int, memory: SavedStates | None) -> None:
        super().__init__(memory)
        self.roster, self._epochs = roster, epochs
        self._numbers = dict[str, int]()  # by job: how many numbers a result of it has

    def _work_of(self, job: str, visits: Sequence[Visit | TestPart]) -> Work:
        """The visits as work, each with room for what its client keeps."""
        return work_of(self.roster, job, self._slots.assign(visits), self._epochs, self._numbers)

    def _outcome_of(self, job: str, work: Work) -> Outcome:
        """What the work came to, when all of it is done."""
        outcome = work.outcome()
        if work.numbers is not None:
            self._numbers[job.partition(" ")[0]] = work.numbers
        self._slots.give_back(work.visits, outcome.receipts)
        return outcome
