"""Law 10 between machines: the messages of a federation have what the architecture's table names, and no image.

Under ``secure`` all bytes that go between server and nodes are read, and nothing of a single client is in them.
"""

import re
from base64 import b64decode

import numpy as np
import pytest

from leaks import Leaks
from nodes import exchange_of, federated, make_nodes
from unskew.data.sources import load
from unskew.engines.flower.messages import read_header, unseal
from unskew.round.jobs import JOBS

DOWN = re.compile(r"(params|buffers|sent/\w+|calibrated)/|centres$|rate$")
UP = re.compile(r"weight$|scaled$|delta/(params|buffers)/|metric/(loss|examples|visits|right|total)$|stat/\w+/|"
                r"(statistics|check)$|(keys|statement|shares|consent|survivors|opened)$")  # fmt: skip
JOB = {"kind", "run", "number", "agreement", "job", "seed", "key", "visits", "keep"}
VISIT = {"client", "weight", "take", "repeat", "ticket", "keep", "parcel"}
RESULT = {"client", "repeat", "forms", "extra", "factor", "ticket", "anew"}


@pytest.mark.parametrize("method", ["scaffold", "fedavg + lda + secure"])
def test_messages_have_what_the_table_names_and_no_image(tmp_path, method):
    wire = []

    def between(node, question, reply):
        wire.append((question, reply))
        return reply

    exchange = exchange_of(make_nodes(tmp_path, 4), between=between)
    federated(tmp_path, exchange, clients=4, method=method, data="nodes", rounds=1)
    images = load("digits", None)
    pictures = {np.ascontiguousarray(each).tobytes() for part in (images.train, images.test) for each in part.images}
    labels = images.train.labels[:64].tobytes()
    jobs = 0
    for question, reply in wire:
        asked, sent = unseal(question)
        answered, came = unseal(reply)
        assert not {name for name, _ in sent if not DOWN.match(name)}
        assert not {name for name, _ in came if not UP.match(name)}
        if asked["kind"] == "job":
            jobs += 1
            assert set(asked) == JOB
            assert set(asked["job"]) <= {"type", *JOBS[asked["job"]["type"]].__struct_fields__}
            assert all(set(visit) == VISIT for visit in asked["visits"])
            assert all(set(result) <= RESULT for result in answered["results"])
        for content in (question.body, reply.body):
            assert labels not in content
            assert not any(content[start : start + 64] in pictures for start in range(0, len(content), 4))
    assert jobs >= 4


def test_no_clients_memory_is_in_a_message(tmp_path):
    wire = []
    exchange = exchange_of(make_nodes(tmp_path), between=lambda node, question, reply: wire.append(reply) or reply)
    kept = []

    def observe(event):
        files = tmp_path.glob("node-*/runs/*/memories/*.state")
        kept.extend(file.read_bytes()[:256] for file in files)

    federated(tmp_path, exchange, method="scaffold", rounds=2, observe=observe)
    assert len(set(kept)) >= 6
    assert not any(each in reply.body for each in set(kept) for reply in wire)


METHOD = "scaffold + fedir + prototypes + ccvr(per_class=20)"


def parcels(question):
    """What the server hands to single visits, as bytes."""
    return [b64decode(visit["parcel"]) for visit in read_header(question).get("visits", ())]


def listened(tmp_path, method, **options):
    """All bytes of a run's messages, up and down, and what of the clients could be in them."""
    nodes, content, leaks = make_nodes(tmp_path, 4), [], Leaks()

    def between(node, question, reply):
        content.extend((question.header, question.body, reply.header, reply.body, *parcels(question)))
        leaks.add_work(nodes[node], question)
        if nodes[node]._runs and node not in known:
            known.add(node)
            leaks.add_data(nodes[node], node - 100)
        return reply

    known = set()
    exchange = exchange_of(nodes, between=between)
    result = federated(tmp_path, exchange, clients=4, method=method, data="nodes", **options)
    assert len(known) == 4
    return b"|".join(content), leaks, result


def test_under_secure_no_byte_on_the_wire_is_of_a_single_client(tmp_path):
    """No image, no feature, no label counts, no update, no statistics, no metrics; as floats or in fixed point."""
    content, leaks, result = listened(tmp_path, f"{METHOD} + secure(updates=true)")
    assert list(result.calibrations) == ["ccvr(per_class=20) + secure"]
    assert all(row["clients"] == 4 for row in result.history)
    assert len(leaks.known) > 10_000
    assert leaks.found(content) == set()


def test_the_same_look_finds_everything_where_nothing_is_masked(tmp_path):
    content, leaks, _ = listened(tmp_path, METHOD, rounds=1)
    assert leaks.found(content) == {"an update", "a client's statistics", "a client's metrics", "label counts"}
    for what in ("an image", "a feature"):  # never sent: put into a message they are found, at any place
        needles = [needle for needle, known in leaks.known.items() if what in known]
        assert len(needles) > 100
        assert all(
            leaks.found(content[:1001] + needle + content[:99]) >= {what} for needle in needles[:: len(needles) // 5]
        )


def test_the_same_look_finds_updates_where_only_statistics_are_masked_and_what_is_rounded(tmp_path):
    for each in "ab":
        (tmp_path / each).mkdir()
    content, leaks, _ = listened(tmp_path / "a", "fedavg + ccvr(per_class=20) + secure", rounds=1)
    assert leaks.found(content) == {"an update", "a client's metrics", "label counts"}  # of the nodes' test images
    content, leaks, _ = listened(tmp_path / "b", "fedavg + rounded", rounds=1)
    assert "an update" in leaks.found(content)
