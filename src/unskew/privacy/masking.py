"""Secure aggregation of class statistics in a federation of one's own: each side's calls, and all in one process.

A client lays its statistics out for all classes, rounds them to fixed point and adds masks (``agreement``). The server
learns the sum of the clients' statistics and nothing of a single client's. Where clients drop out, t of n that stay
give the shares that take the masks off (``recovery``). Keys and seeds come from the operating system, never from a Key:
the seed of a run must not give the masks away.

Shapes: C classes, d features, W = C + the form's sums: the words of a vector.
"""

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.privacy.agreement import (
    MIN_CLIENTS,
    Agreement,
    Member,
    member_number,
    require_enough,
    shares_needed,
    unmask,
)

if TYPE_CHECKING:  # calibration imports privacy, not the other way round
    from unskew.calibration.protection import Layout
    from unskew.calibration.statistics import ClassStatistics

THRESHOLD = 0.66  # of the clients that begin must stay to the end


class Masking:
    """A client's part in one sum: its keys, its shares for the others, one answer, one opening."""

    def __init__(self, client: int, session: bytes, seed: bytes) -> None:
        self.client = client
        self._member = Member(member_number(client), session, seed)
        self._agreement: Agreement | None = None
        self._sharing: frozenset[int] = frozenset()
        self._answered = False
        self._opened: frozenset[int] | None = None

    @staticmethod
    def new(client: int, session: bytes) -> "Masking":
        """With fresh secrets from the operating system, for the session that the server named."""
        return Masking(client, session, os.urandom(32))

    @property
    def public(self) -> bytes:
        """Its public keys, 64 bytes for the server to hand around."""
        return self._member.public

    def boxes(self, agreement: Agreement, *, least: int = MIN_CLIENTS) -> dict[int, bytes]:
        """For each other client, sealed: its shares of this client's secrets. The server passes them on."""
        require_enough(len(agreement.publics), least)
        if self._agreement not in (None, agreement):
            raise UserError(f"client {self.client} refuses to answer: it takes part in another agreement")
        boxes = self._member.boxes(agreement)
        self._agreement = agreement
        return boxes

    def masked(self, statistics: "ClassStatistics", layout: "Layout", sharing: Collection[int]) -> Tensor:
        """[W] int64, to be sent, once. ``sharing`` are the clients that have handed out their shares."""
        agreement = self._agreed("answer")
        if self._answered:
            raise UserError(f"client {self.client} refuses to answer: a session is answered once")
        if layout.about() != agreement.about:
            raise UserError(f"client {self.client} refuses to answer: agreed was {agreement.about}")
        vector = layout.quantise(statistics, len(agreement.publics), f"client {self.client}").numpy().view(np.uint64)
        self._member.mask(vector, agreement, sharing)
        self._answered, self._sharing = True, frozenset(sharing)
        return torch.from_numpy(vector.view(np.int64))

    def opened(self, boxes: Mapping[int, bytes], answered: Collection[int]) -> dict[int, bytes]:
        """Shares for the server: of the own seed of each client that answered, of the key of each that dropped out.

        ``boxes`` are what the others sealed for this client. Another set of answers is refused afterwards: with both a
        client's vector would be clear.
        """
        agreement = self._agreed("open")
        if not self._answered:
            raise UserError(f"client {self.client} refuses to open: it has not answered")
        if self._opened not in (None, frozenset(answered)):
            raise UserError(f"client {self.client} refuses to open: it has opened for other clients")
        shares = self._member.opened(agreement, boxes, self._sharing, answered)
        self._opened = frozenset(answered)
        return shares

    def _agreed(self, verb: str) -> Agreement:
        if self._agreement is None:
            raise UserError(f"client {self.client} refuses to {verb}: it has handed out no shares (boxes)")
        return self._agreement


def unmasked_sum(
    masked: Mapping[int, Tensor], agreement: Agreement, sharing: Collection[int],
    opened: Mapping[int, Mapping[int, bytes]], layout: "Layout", *, least: int = MIN_CLIENTS,
) -> "ClassStatistics":  # fmt: skip
    """The server's part: the sum over all clients that answered, from their vectors and the shares that were opened."""
    require_enough(len(masked), least)
    words = layout.bytes // 8
    total = np.zeros(words, dtype=np.uint64)
    for client, vector in masked.items():
        if vector.dtype != torch.int64 or tuple(vector.shape) != (words,):
            raise UserError(
                f"the vector of client {client} is refused: {vector.dtype} of the shape {tuple(vector.shape)}, "
                f"expected int64 of ({words},), {layout.about()}"
            )
        total += vector.numpy().view(np.uint64)
    unmask(total, agreement, sharing, masked.keys(), opened)
    return layout.statistics(torch.from_numpy(total.view(np.int64)), f"the sum over {len(masked)} clients")


def secure_sum(
    clients: Mapping[int, "Callable[[], ClassStatistics]"], layout: "Layout", *, dropped: Collection[int] = (),
    threshold: float = THRESHOLD, least: int = MIN_CLIENTS,
) -> "ClassStatistics":  # fmt: skip
    """The whole exchange in one process, for simulation: all clients hand out shares, those in ``dropped`` then leave.

    The part that plays the server handles public keys, sealed shares, masked vectors and opened shares, nothing else.
    ``threshold`` is the share of the clients that must stay.
    """
    if strangers := sorted(set(dropped) - clients.keys()):
        raise UserError(f"dropped names client {strangers[0]}, which does not take part; name only clients of the sum")
    require_enough(len(clients) - len(set(dropped)), least)
    session = os.urandom(32)
    maskings = {client: Masking.new(client, session) for client in clients}
    publics = {client: masking.public for client, masking in maskings.items()}
    agreement = Agreement(session, shares_needed(threshold, len(clients)), publics, layout.about())
    boxes = {client: masking.boxes(agreement, least=least) for client, masking in maskings.items()}
    staying = [client for client in clients if client not in dropped]
    answers = {client: maskings[client].masked(clients[client](), layout, clients.keys()) for client in staying}
    opened = {
        client: maskings[client].opened({other: boxes[other][client] for other in clients if other != client}, answers)
        for client in answers
    }
    return unmasked_sum(answers, agreement, clients.keys(), opened, layout, least=least)
