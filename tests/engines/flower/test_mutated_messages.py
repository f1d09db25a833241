"""Thousands of mutated messages on both sides: each is answered or left out, nothing crashes and nothing grows.

``make test`` sends 2,000 to each side, ``make test-all`` 100,000.
"""

import gc
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nodes import VISIT, Asking, InProcess, engine_over, first_state, make_node, outcome_of, plain_visit
from unskew.calibration.covariances import Diagonal
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.jobs import Moments
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.engines.flower.engine import Rules
from unskew.engines.flower.messages import (
    MAX_BODY,
    BadMessage,
    Envelope,
    RunAgreement,
    decode_tensors,
    read_header,
    seal,
    unseal,
)
from unskew.engines.flower.policy import Policy
from unskew.round import statistics
from unskew.round.client import Train
from unskew.round.evaluation import Evaluate
from unskew.round.jobs import encode_job

MARKER = "MARKER-0815"
ODD = [
    *(None, True, 0, -1, 1, 2**31 - 1, 2**40, 2**63, -(2**63), 1e300, -1e-300, [], {}, [[[]]], [0] * 1000, [65535] * 3),
    *("", "x", MARKER, MARKER * 50, [MARKER], {MARKER: MARKER}, "\x1b[2J\n"),
    *("os:system", "this:-", "../../etc", "fedavg + lda", "resnet-50"),
]
GROWTH = 64 * 2**20  # bytes of memory that all messages together may leave behind
COUNTS = [500, pytest.param(100_000, marks=pytest.mark.heavy)]


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def places(value, path=()):
    """The path of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in places(each, (*path, key)))]


def mutated(envelope, rng):
    """The message with one to three things changed: bytes, or values of its header. Its hash is mostly right again."""
    header, body = bytearray(envelope.header.rpartition(b',"sha256"')[0] + b"}"), bytearray(envelope.body)
    for _ in range(rng.integers(1, 4)):
        match rng.integers(0, 8):
            case 0:
                header[rng.integers(0, len(header))] = rng.integers(0, 256)
            case 1:
                del header[rng.integers(0, len(header)) :]
            case 2:
                start = rng.integers(0, len(header))
                header[start:start] = rng.bytes(rng.integers(1, 40))
            case 3 if body:
                del body[rng.integers(0, len(body)) :]
            case 4 if body:
                start = rng.integers(0, len(body))
                body[start : start + 8] = rng.bytes(8)
            case _:
                try:
                    values = json.loads(bytes(header))
                except ValueError:
                    continue
                path = (found := places(values))[rng.integers(0, len(found))]
                odd = ODD[rng.integers(0, len(ODD))]
                if not path:
                    values = odd
                else:
                    inside = values
                    for key in path[:-1]:
                        inside = inside[key]
                    inside[path[-1]] = odd
                header = bytearray(json.dumps(values).encode())
        if not header:
            break
    start, content = bytes(header).removesuffix(b"}"), hashlib.sha256(bytes(body)).digest()
    digest = hashlib.sha256(start + content).hexdigest().encode() if rng.integers(0, 20) else b"0" * 64
    return Envelope(start + b',"sha256":"%s"}' % digest, bytes(body))


@pytest.mark.parametrize("count", COUNTS)
def test_a_node_answers_every_mutated_message(tmp_path, count):
    said, rng = [], np.random.default_rng(7)
    node = make_node(tmp_path, 1, say=said.append, policy=Policy(max_disk=50, min_class=1))
    asking = Asking(node, "fedavg + lda")
    shared = list(statistics.build_shared(first_state()).items())
    visit = plain_visit(VISIT)
    about = {"agreement": asking.agreement.digest, "seed": 0, "key": ["round", 1], "visits": [visit], "keep": []}
    request = StatisticsRequest(form=Diagonal()).to_plain()
    originals = [
        ({"kind": "describe"}, []),
        ({"kind": "agree", "agreement": asking.agreement.to_json()}, []),
        ({"kind": "job", "job": encode_job(Evaluate())}, shared),
        ({"kind": "job", "job": encode_job(Moments(request))}, shared),
        ({"kind": "job", "job": encode_job(Train(1))}, shared),
        ({"kind": "refuse", "reason": "it does not fit"}, []),
        ({"kind": "finish"}, []),
    ]
    kinds, before = {}, 0
    for number in range(count):
        if number % 100 == 0:  # a message number that is too large makes every later one a replay: begin another run
            run = f"{number:032x}"
            asking.agreement = replace(asking.agreement, run=run)
            about["agreement"] = asking.agreement.digest
            originals[1] = ({"kind": "agree", "agreement": asking.agreement.to_json()}, [])
            header, _ = unseal(node.answer(seal({"run": run, "number": 1, **originals[1][0]})))
            assert header["kind"] == "agreed"
        fields, sent = originals[rng.integers(0, len(originals))]
        fields = {**fields, **(about if fields["kind"] == "job" else {})}
        message = mutated(seal({"run": run, "number": 10 + number, **fields}, sent), rng)
        header, _ = unseal(node.answer(message))
        kinds[header["kind"]] = kinds.get(header["kind"], 0) + 1
        if number == count // 4:
            before = resident()
        if number % 100 == 99:
            node.answer(seal({"kind": "finish", "run": run, "number": 2**62}))
    grown = resident() - before
    print(f"\n{count:,} messages to a node: {kinds}, {grown / 2**20:+.1f} MB")
    assert grown < GROWTH
    assert kinds["refused"] > count / 2
    assert kinds["refused"] <= node.refusals.total() <= kinds["refused"] + count // 100
    assert kinds["done"] > count / 100  # some mutations change nothing that matters
    assert len(node.refusals) < 300
    logged = [line for line in said if line.startswith("refused")]
    assert 20 <= len(logged) < 300  # the others are only counted
    assert not any(MARKER in line or "\x1b" in line for line in logged)
    assert not any(MARKER in reason for reason in node.refusals)
    anew = Asking(node)
    anew.number = 10**7
    anew.agreement = RunAgreement("cd" * 16, *list(vars(anew.agreement).values())[1:])
    header, _ = anew.ask("agree", run="cd" * 16, agreement=anew.agreement.to_json())
    assert header["kind"] == "agreed"
    assert anew.job(run="cd" * 16)[0]["kind"] == "done"


@pytest.mark.parametrize("count", COUNTS)
def test_a_server_leaves_out_every_mutated_reply(tmp_path, count):
    """One node mutates its replies, the other is honest and always in the sum."""
    rng, said = np.random.default_rng(8), []
    nodes = {number: make_node(tmp_path, number) for number in (0, 1)}
    model, visits, spoilt, known = first_state().tensors, [Visit(0, 1.0), Visit(1, 1.0)], [True], {}

    def answer(node):
        def answered(question):
            """What the node said the first time, under the number of this question."""
            header = read_header(question)
            if (node, header["kind"]) not in known or header["kind"] == "agree":
                known[node, header["kind"]] = unseal(nodes[node].answer(question))
            fields, sent = known[node, header["kind"]]
            reply = seal(fields | {"run": header["run"], "number": header["number"]}, sent)
            return mutated(reply, rng) if node == 1 and spoilt[0] and header["kind"] != "agree" else reply

        return answered

    exchange = InProcess({number: answer(number) for number in nodes})

    def begin(spoil):
        spoilt[0] = spoil
        return engine_over(exchange, rules=Rules(wait=0), said=said.append)

    expected = tensors.sha256(outcome_of(begin(False), Evaluate(), model, visits[:1], Key(0)).sums)
    left, before, done = 0, 0, 0
    while done < count:
        engine = begin(bool(rng.integers(0, 2)))  # in half of all sessions it cannot even describe itself
        spoilt[0] = True
        for _ in range(50):
            outcome = outcome_of(engine, Evaluate(), model, visits, Key(0))
            failed = [failure.client for failure in outcome.failures]
            assert failed in ([], [1])
            if failed:
                assert tensors.sha256(outcome.sums) == expected
            left += bool(failed)
            done += 1
            if 1 not in engine._session.members.by_number:
                break
        assert not any(MARKER * 2 in line or "\x1b" in line for line in said)
        said.clear()
        for node in nodes.values():
            node._runs.clear()
            unseal(node.answer(seal({"kind": "finish", "run": engine._session.run, "number": 10**6})))
        if not before and done > count / 4:
            before = resident()
    grown = resident() - before
    print(f"\n{done:,} replies to a server: {left:,} left out, {grown / 2**20:+.1f} MB")
    assert grown < GROWTH
    assert left > count / 2


def test_tensors_that_are_announced_are_not_allocated():
    """A header that describes 16 GB of tensors and brings none is refused without any of it."""
    before = resident()
    for shape in ([2**31], [2**33], [2**16, 2**16], [0, 2**33]):
        described = [["x", "float64", shape]]
        if 0 in shape:
            assert decode_tensors(described, b"", MAX_BODY)[0][1].numel() == 0
            continue
        with pytest.raises(BadMessage, match=r"should take .* bytes, but 0 arrived"):
            decode_tensors(described, b"", MAX_BODY)
    assert resident() - before < 2**24
