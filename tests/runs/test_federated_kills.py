"""Twenty rounds with random kills of nodes and server: what comes out is what the log of who answered explains."""

import numpy as np
import pytest

from nodes import OPTIONS, exchange_of, federated, loop_over, make_node, make_nodes
from replay import failed_by_round, replayed
from unskew.core.types import Local
from unskew.engines.flower.engine import Rules
from unskew.engines.flower.messages import Presence, read_header

ROUNDS = 20


class Killed(Exception):
    pass


@pytest.mark.heavy
@pytest.mark.parametrize(("method", "seed"), [("scaffold", 0), ("fedavgm(0.9)", 1)])
def test_the_log_of_who_answered_explains_the_result(tmp_path, method, seed):
    chance = np.random.default_rng(seed)
    nodes, lives = make_nodes(tmp_path), iter(range(10**6))
    exchange = exchange_of(nodes)

    def between(node, question, reply):
        if read_header(question)["kind"] == "job" and chance.random() < 0.1:  # killed while it answered
            exchange.answers[node] = make_node(tmp_path, node - 100).answer
            exchange.presence[node] = Presence(since=str(next(lives)))
            return None
        return reply

    def observe(event):
        exchange.pause(5)
        if getattr(event, "round", ROUNDS) < ROUNDS and chance.random() < 0.15:
            raise Killed

    exchange.between, options = between, {"method": method, "rounds": ROUNDS, "checkpoint_seconds": 0}
    result, resume = None, False
    for _ in range(40):
        try:
            rules = Rules(deadline=60, min_replies=1, wait=120)
            result = federated(tmp_path, exchange, resume=resume, rules=rules, observe=observe, **options)
            break
        except Killed:
            resume = True
    failed = failed_by_round(tmp_path / "run")
    assert len(failed) == ROUNDS
    assert any(failed.values())
    assert resume
    local = Local(epochs=1, batch=64, lr=0.05)
    again = replayed(loop_over(method=method), method, local, OPTIONS["seed"], failed)
    assert again == result.weights_sha256
