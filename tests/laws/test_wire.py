"""Law 10 between machines: the messages of a federation have what the architecture's table names, and no image."""

import re

import numpy as np
import pytest

from nodes import exchange_of, federated, make_nodes
from unskew.data.sources import load
from unskew.engines.flower.messages import opened

DOWN = re.compile(r"(params|buffers|sent/\w+|calibrated|secure)/|centres$|rate$")
UP = re.compile(r"weight$|scaled$|delta/(params|buffers)/|metric/(loss|examples|visits|right|total)$|stat/\w+/|"
                r"(came|keys|shares|opened)$|(low|high)/(statistics|check)$")  # fmt: skip
JOB = {"kind", "run", "number", "agreement", "job", "round", "seed", "key", "visits", "keep"}
VISIT = {"client", "weight", "take", "repeat", "ticket", "keep"}
RESULT = {"client", "repeat", "forms", "factor", "receipt", "anew"}


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
        asked, sent = opened(question)
        answered, came = opened(reply)
        assert not {name for name, _ in sent if not DOWN.match(name)}
        assert not {name for name, _ in came if not UP.match(name)}
        if asked["kind"] == "job":
            jobs += 1
            assert set(asked) == JOB
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
