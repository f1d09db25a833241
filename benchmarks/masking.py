"""What secure updates cost: one client of 100, a million parameters, all of its jobs, and the server's part.

With and without the signatures that a federation's nodes make and check.

Processor time, not time on a clock: on a client's own machine they are the same, and here other work may run beside it.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from measure import Row, at_most
from unskew.core.files import write_whole
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.types import Reply, Visit
from unskew.federation.folder import ROSTER, write_roster
from unskew.federation.network import make_node_key
from unskew.privacy.ciphers import derived_key
from unskew.privacy.masking import BOX_BYTES, Agreement, Member, shares_needed, survivors, unmask
from unskew.privacy.secure_sum import (
    Masked,
    MaskKeys,
    MaskOpenings,
    MaskShares,
    MaskSurvivors,
    SignedTerms,
    as_steps,
    describe,
    digest_of,
    digest_of_key,
)
from unskew.privacy.sessions import Sessions, new_session
from unskew.privacy.signing import (
    CONSENT,
    SIGNATURE_BYTES,
    STATED_BYTES,
    STATEMENT_BYTES,
    SURVIVORS,
    Registered,
    Signer,
    sign,
)

CLIENTS, WORDS, DROPPED = 100, 1_000_000, 33


def suite(repeats):
    population = SimpleNamespace(examples=lambda client: range(600))
    plain = [
        SimpleNamespace(secret=os.urandom(32), sessions=Sessions.temporary(), signer=None, population=population)
        for _ in range(CLIENTS)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for sides, what in ((plain, ""), (_with_signers(plain, Path(folder)), ", signed")):
            one, server = [], []
            for _ in range(max(2, repeats // 2)):
                with neutral():  # one thread, as in an engine
                    client, recovering = _session(sides)
                one.append(client)
                server.append(recovering)
            seconds = {step: statistics.median(each[step] for each in one) for step in one[0]}
            remark = ", ".join(f"{step} {value * 1000:.0f} ms" for step, value in seconds.items())
            name = f"masking: a client of {CLIENTS}, {WORDS:,} parameters, a round{what}"
            rows.append(at_most(name, sum(seconds.values()), "s of processor time", 2, remark))
    return [
        *rows,
        *_bytes_rows(),
        Row(f"masking: the server, {DROPPED} of {CLIENTS} dropped out", statistics.median(server), "s",
            remark=f"{CLIENTS - DROPPED} own masks, {DROPPED * (CLIENTS - DROPPED):,} of pairs"),
    ]  # fmt: skip


def _with_signers(sides, folder):
    """The same clients, each on a node with a registered key."""
    keys = {f"node-{number}": make_node_key() for number in range(CLIENTS)}
    write_roster(folder / ROSTER, {name: key.public for name, key in keys.items()})
    signed = []
    for side, (name, key) in zip(sides, keys.items(), strict=True):
        write_whole(folder / name, key.private)
        registered = Registered.read(folder / name, folder / ROSTER)
        signer = Signer(registered, bytes(32), lambda *about: "benchmark", lambda subject, members: None)
        signed.append(SimpleNamespace(**{**vars(side), "signer": signer}))
    return signed


def _bytes_rows():
    """Bytes of one client beside the model and its masked words."""
    up = 64 + 50 * (CLIENTS - 1) + 17 * CLIENTS
    down = 64 * CLIENTS + 50 * (CLIENTS - 1)
    more_up = STATEMENT_BYTES + 2 * SIGNATURE_BYTES
    more_down = CLIENTS * (STATEMENT_BYTES + 3 * STATED_BYTES + 2 * SIGNATURE_BYTES)
    return [
        Row(f"masking: bytes up of a client of {CLIENTS}, signed", up + more_up, "bytes", remark=f"{up:,} without"),
        Row(
            f"masking: bytes down of a client of {CLIENTS}, signed",
            down + more_down,
            "bytes",
            remark=f"{down:,} without",
        ),
    ]


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
    keys, terms, consents, signatures = tuple(publics.values()), None, (), ()
    if sides[0].signer is not None:
        statements = tuple(side.signer.state(member, 600) for side, member in zip(sides, members, strict=True))
        terms = SignedTerms(digest_of({}), digest_of_key(Key(0)), (1.0,) * CLIENTS, (None,) * CLIENTS, statements)
    agreement = Agreement(session, about[1], publics, describe(Work(), terms, about[3]))
    late = None if terms is None else terms.unsigned()
    if terms is not None:
        consents = tuple(sign(member, CONSENT, agreement) for member in members)
        question = survivors(range(CLIENTS), range(CLIENTS))
        signatures = tuple(sign(member, SURVIVORS, agreement, question) for member in members)
    stages = [
        ("keys", MaskKeys(*about), b""),
        ("shares", MaskShares(*about, keys, terms=terms), b""),
        ("masks", Masked(*about, keys, everyone, terms=late, signatures=consents), b""),
        *([] if terms is None else [("survivors", MaskSurvivors(*about, keys, everyone, everyone, late), b"")]),
        ("opening", MaskOpenings(*about, keys, everyone, everyone, late, signatures), _parcel(members, agreement)),
    ]
    for name, job, parcel in stages:
        began = time.process_time()
        job(sides[0], {}, Visit(0, 1.0, parcel=parcel), Key(0).fold("client", 0, 0))
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
