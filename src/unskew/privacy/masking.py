"""Secure aggregation of class statistics for your own federation: the calls of each side, and all in one process.

Keys and seeds come from the operating system, never from a Key: the seed of a run must not reveal the masks.
Shapes: C classes, d features, W = C + the form's sums: the words of a vector.
"""

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.types import THRESHOLD
from unskew.privacy.agreement import (
    MIN_CLIENTS,
    Agreement,
    Member,
    member_number,
    require_enough,
    shares_needed,
    unmask,
)
from unskew.privacy.sessions import Record
from unskew.privacy.signing import survivors

if TYPE_CHECKING:  # calibration imports privacy, not the other way round
    from unskew.calibration.protection import Layout
    from unskew.calibration.statistics import ClassStatistics


class Masking:
    """A client's part in one sum: its keys, its shares for the others, one answer, and opening shares once."""

    def __init__(self, client: int, session: bytes, seed: bytes) -> None:
        self.client = client
        self._member = Member(member_number(client), session, seed)
        self._record = Record()  # what it has done, so that it answers and opens once
        self._agreement: Agreement | None = None
        self._sharing: frozenset[int] = frozenset()

    @staticmethod
    def new(client: int, session: bytes) -> "Masking":
        """A part with fresh secrets from the operating system, for the server's session."""
        return Masking(client, session, os.urandom(32))

    @property
    def public(self) -> bytes:
        """Its public keys, 64 bytes, which the server distributes."""
        return self._member.public

    def boxes(self, agreement: Agreement, *, least: int = MIN_CLIENTS) -> dict[int, bytes]:
        """For each other client, its sealed shares of this client's secrets, which the server forwards."""
        require_enough(len(agreement.publics), least)
        self._member.check(agreement)
        self._record = self._record.agreed(agreement.session, agreement.digest)
        self._agreement = agreement
        return self._member.boxes(agreement)

    def masked(self, statistics: "ClassStatistics", layout: "Layout", sharing: Collection[int]) -> Tensor:
        """[W] int64, to be sent once. ``sharing`` are the clients that have distributed their shares."""
        agreement = self._agreed()
        if layout.about() != agreement.about:
            raise UserError(f"client {self.client} refuses to answer: the agreed layout was {agreement.about}")
        vector = layout.quantise(statistics, len(agreement.publics), f"client {self.client}").numpy().view(np.uint64)
        record = self._record.with_answer(agreement.session, agreement.digest, survivors(sharing, ()), 0)
        self._member.mask(vector, agreement, sharing)
        self._record, self._sharing = record, frozenset(sharing)
        return torch.from_numpy(vector.view(np.int64))

    def opened(self, boxes: Mapping[int, bytes], answered: Collection[int]) -> dict[int, bytes]:
        """Shares for the server: of the seed of each client that answered, of the key of each that dropped out.

        ``boxes`` are those that the others sealed for this client. Afterwards another set of answers is refused: with
        both, a client's vector could be unmasked.
        """
        agreement, sharing = self._agreed(), self._sharing
        digests = agreement.digest, survivors(sharing, ()), survivors(sharing, answered)
        record = self._record.with_opening(agreement.session, *digests, visit=0)
        shares = self._member.opened(agreement, boxes, sharing, answered)
        self._record = record
        return shares

    def _agreed(self) -> Agreement:
        if self._agreement is None:
            raise UserError(f"client {self.client} refuses: it has not distributed its shares (boxes)")
        return self._agreement


def unmasked_sum(
    masked: Mapping[int, Tensor], agreement: Agreement, sharing: Collection[int],
    opened: Mapping[int, Mapping[int, bytes]], layout: "Layout", *, least: int = MIN_CLIENTS,
) -> "ClassStatistics":  # fmt: skip
    """The server's part: the sum over all clients that answered, from their vectors and opened shares."""
    require_enough(len(masked), least)
    words = layout.bytes // 8
    total = np.zeros(words, dtype=np.uint64)
    for client, vector in masked.items():
        if vector.dtype != torch.int64 or tuple(vector.shape) != (words,):
            raise UserError(f"the vector of client {client} is not int64 of shape ({words},), {layout.about()}")
        total += vector.numpy().view(np.uint64)
    unmask(total, agreement, sharing, masked.keys(), opened)
    return layout.statistics(torch.from_numpy(total.view(np.int64)), f"the sum over {len(masked)} clients")


def secure_sum(
    clients: Mapping[int, "Callable[[], ClassStatistics]"], layout: "Layout", *, dropped: Collection[int] = (),
    threshold: float = THRESHOLD, least: int = MIN_CLIENTS,
) -> "ClassStatistics":  # fmt: skip
    """The complete exchange in one process, for simulation: all clients distribute shares, then ``dropped`` leave.

    The simulated server handles only public keys, sealed shares, masked vectors and opened shares. ``threshold`` is the
    share of the clients that must stay.
    """
    staying = [client for client in clients if client not in dropped]
    require_enough(len(staying), least)
    session = os.urandom(32)
    maskings = {client: Masking.new(client, session) for client in clients}
    publics = {client: masking.public for client, masking in maskings.items()}
    agreement = Agreement(session, shares_needed(threshold, len(clients)), publics, layout.about())
    boxes = {client: masking.boxes(agreement, least=least) for client, masking in maskings.items()}
    answers = {client: maskings[client].masked(clients[client](), layout, clients.keys()) for client in staying}
    opened = {
        client: maskings[client].opened({other: boxes[other][client] for other in clients if other != client}, answers)
        for client in answers
    }
    return unmasked_sum(answers, agreement, clients.keys(), opened, layout, least=least)
