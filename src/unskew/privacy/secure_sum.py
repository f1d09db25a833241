"""A secure sum through an engine: three jobs on the client's side, and the server's part that starts them.

Every client derives its keys and its own mask from a secret of its machine, so that it needs no memory between the
jobs. The server sees public keys, the sum of the masked vectors, and, once every client has answered, the seeds of
their own masks: never the statistics of one client. An engine adds float64 sums, so a 64-bit word travels as two halves
of 32 bits each; sums of up to two million of them are exact.

Shapes: n clients, W words of a vector.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.calibration.request import StatisticsRequest
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.core.types import Engine, Sums, Tensors, Visit
from unskew.privacy.fixed_point import Layout
from unskew.privacy.masking import MIN_CLIENTS, Words, derived_key, masked_vector, roster_hash, unmasked
from unskew.round.client import ClientSide
from unskew.round.jobs import Job, job_text

HALF = 2**32
MAX_CLIENTS = 2**21  # whose halves add up exactly in float64

Measure = Callable[[ClientSide, Tensors, Visit, StatisticsRequest], ClassStatistics]


def secure_statistics(
    engine: Engine, shared: Tensors, request: StatisticsRequest, layout: Layout, visits: Sequence[Visit], key: Key
) -> ClassStatistics:
    """The class statistics of all these clients together; of a single one the server learns nothing."""
    if not MIN_CLIENTS <= len(visits) <= MAX_CLIENTS:
        wanted = f"at least {MIN_CLIENTS}" if len(visits) < MIN_CLIENTS else f"at most {MAX_CLIENTS:,}"
        raise UserError(f"a secure sum over {len(visits):,} clients is refused; {wanted} are needed")
    session = {"session": os.urandom(32).hex()}
    clients = torch.tensor([visit.client for visit in visits])
    taking_part = {"secure/clients": clients}
    keys = _summed(engine, job_text("public-keys", json.dumps(session)), taking_part, visits, key)["keys"]
    taking_part["secure/keys"] = keys.to(torch.uint8)
    question = {**session, "request": request.to_text(), "layout": [layout.classes, layout.width, layout.bits]}
    job = job_text("masked-statistics", json.dumps(question))
    total = _words(_summed(engine, job, shared | taking_part, visits, key))
    seeds = _summed(engine, job_text("mask-seeds", json.dumps(question)), taking_part, visits, key)["seeds"]
    return unmasked(total, [bytes(row) for row in seeds.to(torch.uint8).tolist()], layout)


def public_key(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """The job: the client's public key for this session, in its row of [n, 32]."""
    private = _private_key(side, visit, bytes.fromhex(json.loads(options)["session"]))
    return {"keys": _in_row(private.public_key().public_bytes_raw(), shared, visit)}


def mask_seed(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """The job: the seed of the client's own mask, in its row of [n, 32], once every client has answered."""
    question = _Question(options, shared)
    return {"seeds": _in_row(question.seed(side, visit), shared, visit)}


def masked_statistics_job(measure: Measure) -> Job:
    """The job: the client's statistics as ``measure`` takes them, masked before they leave it."""

    def masked_statistics(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
        question = _Question(options, shared)
        vector = masked_vector(
            measure(side, shared, visit, question.request), question.layout, question.public_keys, question.session,
            client=visit.client, private=_private_key(side, visit, question.session), seed=question.seed(side, visit),
        )  # fmt: skip
        words = vector.numpy().view(np.uint64)
        halves = {"low": words % np.uint64(HALF), "high": words // np.uint64(HALF)}
        return {name: torch.from_numpy(half.astype(np.float64)) for name, half in halves.items()}

    return masked_statistics


class _Question:
    """What a client is asked under a secure sum, read from a job's text and what was sent along."""

    def __init__(self, options: str, shared: Tensors) -> None:
        fields = json.loads(options)
        self.session = bytes.fromhex(fields["session"])
        self.request = StatisticsRequest.from_text(fields["request"])
        classes, width, bits = fields["layout"]
        self.layout = Layout.of(classes, width, self.request.form, bits=bits)
        rows = zip(shared["secure/clients"].tolist(), shared["secure/keys"].tolist(), strict=True)
        self.public_keys = {client: bytes(row) for client, row in rows}

    def seed(self, side: ClientSide, visit: Visit) -> bytes:
        """The seed of the client's own mask: another for every session, layout and set of clients."""
        info = b"unskew own mask 1 " + self.layout.about().encode() + roster_hash(self.public_keys)
        return derived_key(side.secret, info + visit.client.to_bytes(8, "big"), self.session)


def _private_key(side: ClientSide, visit: Visit, session: bytes) -> Any:
    x25519 = require_extra("cryptography.hazmat.primitives.asymmetric.x25519")
    secret = derived_key(side.secret, b"unskew private key 1 " + visit.client.to_bytes(8, "big"), session)
    return x25519.X25519PrivateKey.from_private_bytes(secret)


def _in_row(content: bytes, shared: Tensors, visit: Visit) -> Tensor:
    clients = shared["secure/clients"]
    rows = torch.zeros(len(clients), len(content), dtype=torch.float64)
    rows[clients == visit.client] = torch.tensor(list(content), dtype=torch.float64)
    return rows


def _words(sums: Mapping[str, Tensor]) -> Words:
    """[W], the sum of the vectors modulo 2⁶⁴."""
    low, high = (sums[name].numpy().astype(np.uint64) for name in ("low", "high"))
    return low + (high << np.uint64(32))


def _summed(engine: Engine, job: str, shared: Tensors, visits: Sequence[Visit], key: Key) -> Sums:
    outcome = engine.map_sum(job, shared, visits, key)
    if outcome.failures:
        failure = outcome.failures[0]
        raise UserError(f"client {failure.client}, class statistics: {failure.reason}")
    return outcome.sums
