"""The roster: which clients there are and how many examples each holds. The server knows nothing else of them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from unskew.core.types import EVERYONE

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Roster:
    """Clients are numbered 0 … K − 1; ``sizes`` [K] says how many examples each holds."""

    sizes: Ints

    @property
    def clients(self) -> int:
        """K."""
        return len(self.sizes)

    @cached_property
    def ends(self) -> Ints:
        """[K], running totals of the sizes: example number e belongs to the first client whose end is above e."""
        return np.cumsum(self.sizes)

    @cached_property
    def examples(self) -> int:
        """How many examples all clients hold together."""
        return int(self.sizes.sum())

    @cached_property
    def inhabited(self) -> Ints:
        """The clients that hold at least one example, ascending."""
        return np.flatnonzero(self.sizes)

    def size(self, client: int) -> int:
        """How many examples the client holds; EVERYONE holds them all."""
        if client == EVERYONE:
            return self.examples
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client}: there are {self.clients}, counted from 0")
        return int(self.sizes[client])
