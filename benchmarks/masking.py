"""What secure updates cost: one client of 100, a million parameters, all four of its jobs, and the server's part.

Processor time, not time on a clock: on a client's own machine they are the same, and here other work may run beside it.
"""

import os
import statistics
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from measure import Row, at_most
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.types import Reply, Visit
from unskew.privacy.agreement import BOX_BYTES, Agreement, Member, shares_needed, unmask
from unskew.privacy.ciphers import derived_key
from unskew.privacy.fixed_point import as_steps
from unskew.privacy.secure_sum import Masked, MaskKeys, MaskOpenings, MaskShares, describe
from unskew.privacy.sessions import Sessions, new_session

CLIENTS, WORDS, DROPPED = 100, 1_000_000, 33


def suite(repeats):
    sides = [SimpleNamespace(secret=os.urandom(32), sessions=Sessions.temporary()) for _ in range(CLIENTS)]
    one, server = [], []
    for _ in range(max(2, repeats // 2)):
        with neutral():  # one thread, as in an engine
            client, recovering = _session(sides)
        one.append(client)
        server.append(recovering)
    seconds = {step: statistics.median(each[step] for each in one) for step in one[0]}
    remark = ", ".join(f"{step} {value * 1000:.0f} ms" for step, value in seconds.items())
    name = f"masking: a client of {CLIENTS}, {WORDS:,} parameters, a round"
    return [
        at_most(name, sum(seconds.values()), "s of processor time", 2, remark),
        Row(f"masking: the server, {DROPPED} of {CLIENTS} dropped out", statistics.median(server), "s",
            remark=f"{CLIENTS - DROPPED} own masks, {DROPPED * (CLIENTS - DROPPED):,} of pairs"),
    ]  # fmt: skip


class Work(msgspec.Struct, frozen=True, tag="benchmark"):
    """What is masked: an update that costs nothing but its rounding."""

    def __call__(self, side, shared, visit, key):
        """The rounded update."""
        return Reply(as_steps({"delta": UPDATE}, CLIENTS, "client 0"))


UPDATE = torch.randn(WORDS, generator=Key(1).torch(), dtype=torch.float64)


def _session(sides):
    """Seconds of the first client's jobs by name, and of the server's recovery."""
    session, seconds, everyone = new_session(), {}, (True,) * CLIENTS
    about = (session, shares_needed(0.66, CLIENTS), Work(), tuple((client, 0) for client in range(CLIENTS)))
    members = [
        Member(client, session, derived_key(side.secret, b"unskew member seed 1 " + client.to_bytes(8, "big"), session))
        for client, side in enumerate(sides)
    ]
    publics = {member.number: member.public for member in members}
    keys = tuple(publics.values())
    agreement = Agreement(session, about[1], publics, describe(Work()))
    stages = [
        ("keys", MaskKeys(*about), b""),
        ("shares", MaskShares(*about, keys), b""),
        ("masks", Masked(*about, keys, everyone), b""),
        ("opening", MaskOpenings(*about, keys, everyone, everyone), _parcel(members, agreement)),
    ]
    for name, job, parcel in stages:
        began = time.process_time()
        job(sides[0], {}, Visit(0, 1.0, parcel=parcel), Key(0))
        seconds[name] = time.process_time() - began
    return seconds, _recovered(members, agreement)


def _parcel(members, agreement):
    """What all others have sealed for the first client."""
    return b"".join([bytes(BOX_BYTES), *(member.boxes(agreement)[0] for member in members[1:])])


def _recovered(members, agreement):
    answered = range(CLIENTS - DROPPED)
    opened = {}
    own, keys = ([getattr(member, name)(agreement) for member in members] for name in ("_own_shares", "_key_shares"))
    for place in answered:
        opened[place] = {
            number: (own if number in answered else keys)[number][place] for number in range(CLIENTS)
        }  # fmt: skip
    total = np.zeros(WORDS, np.uint64)
    began = time.process_time()
    unmask(total, agreement, range(CLIENTS), answered, opened)
    return time.process_time() - began
