"""What secure updates cost: one client of 100, a million parameters, all four of its jobs, and the server's part.

Processor time, not time on a clock: on a client's own machine they are the same, and here other work may run beside it.
"""

import json
import os
import statistics
import time
from types import SimpleNamespace

import numpy as np
import torch

from measure import Row, at_most
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.types import Visit
from unskew.privacy import rows
from unskew.privacy.agreement import BOX_BYTES, Agreement, Member, shares_needed, unmask
from unskew.privacy.ciphers import derived_key
from unskew.privacy.fixed_point import as_steps
from unskew.privacy.secure_jobs import MaskedJob, Rounded, mask_keys, mask_openings, mask_shares
from unskew.privacy.sessions import Sessions, new_session

CLIENTS, WORDS, DROPPED = 100, 1_000_000, 33
NAME = "masked-benchmark"


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


def _session(sides):
    """Seconds of the first client's jobs by name, and of the server's recovery."""
    session, visits = new_session(), [Visit(client, 1.0) for client in range(CLIENTS)]
    question = {"session": session.hex(), "threshold": shares_needed(0.66, CLIENTS), "about": NAME, "options": ""}
    text, seconds, key = json.dumps(question), {}, Key(0)
    everyone = torch.ones(CLIENTS, dtype=torch.uint8)
    shared = {"secure/members": torch.tensor([[client, 0] for client in range(CLIENTS)])}
    members = [
        Member(client, session, derived_key(side.secret, b"unskew member seed 1 " + client.to_bytes(8, "big"), session))
        for client, side in enumerate(sides)
    ]
    publics = {member.number: member.public for member in members}
    agreement = Agreement(session, question["threshold"], publics, NAME)
    sums = {"delta": torch.randn(WORDS, generator=Key(1).torch(), dtype=torch.float64)}
    masked = MaskedJob(NAME, lambda *given: Rounded(as_steps(sums, given[-1], "client 0")))
    stages = [
        ("keys", mask_keys, {}),
        ("shares", mask_shares, {"secure/keys": torch.from_numpy(rows.as_bytes(publics, CLIENTS, 64)),
                                 "secure/present": everyone}),
        ("masks", masked, {"secure/sharing": everyone}),
        ("opening", mask_openings, {"secure/answered": everyone, "secure/shares": _boxes(members, agreement)}),
    ]  # fmt: skip
    for name, job, sent in stages:
        shared |= sent
        began = time.process_time()
        job(sides[0], shared, visits[0], key, text)
        seconds[name] = time.process_time() - began
    return seconds, _recovered(members, agreement)


def _boxes(members, agreement):
    """[n, n, BOX_BYTES], those for the first client; the others' are not looked at here."""
    boxes = np.zeros((CLIENTS, CLIENTS, BOX_BYTES), np.uint8)
    for member in members[1:]:
        boxes[member.number, 0] = np.frombuffer(member.boxes(agreement)[0], np.uint8)
    return torch.from_numpy(boxes)


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
