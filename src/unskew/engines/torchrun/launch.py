"""Which of the processes that torchrun started this one is: read from the variables that torchrun sets."""

import os
from dataclasses import dataclass

from unskew.core.errors import UserError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LINE = "torchrun --nproc-per-node 2 -m -- unskew run --engine torchrun"


@dataclass(frozen=True)
class Launched:
    """This process among those that were started together."""

    rank: int
    ranks: int
    host: str  # where the ranks find each other: on rank 0's machine
    port: int
    local_rank: int = 0  # among those on this machine
    local_ranks: int = 1
    by_torchrun: bool = False  # which ends the ranks of a machine when one of them dies

    @property
    def several_machines(self) -> bool:
        """Whether some of the ranks are elsewhere."""
        return self.local_ranks < self.ranks


def launched() -> Launched:
    """This process's place; refused where nothing started it as one of several."""
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"--engine torchrun: {missing[0]} is not set, so torchrun did not start this process; start it so: "
            f"{LINE} …, or give --engine auto"
        )
    place = Launched(
        _number("RANK"), _number("WORLD_SIZE"), os.environ["MASTER_ADDR"], _number("MASTER_PORT"),
        _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1),
        by_torchrun="TORCHELASTIC_RUN_ID" in os.environ,
    )  # fmt: skip
    if not place.rank < place.ranks:
        raise UserError(f"RANK={place.rank}, WORLD_SIZE={place.ranks}: ranks count from 0; start it so: {LINE} …")
    return place


def check_command(engine: str | None) -> None:
    """Refuse a command that torchrun has started several times, if its engine would make a run of each."""
    if "TORCHELASTIC_RUN_ID" in os.environ and engine != "torchrun" and (ranks := launched().ranks) > 1:
        raise UserError(
            f"torchrun has started this command {ranks} times; give --engine torchrun, so that it is one run, or start "
            "it without torchrun"
        )


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text}: torchrun sets it to a whole number; start it so: {LINE} …")
    return int(text)
