"""Twenty rounds with random kills of nodes and server: what comes out is what the log of who answered explains."""

import numpy as np
import pytest

from nodes import OPTIONS, exchange_of, federated, loop_over, make_node, make_nodes
from unskew import models
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import Local
from unskew.engines.flower.exchange import Presence
from unskew.engines.flower.messages import read_header
from unskew.engines.flower.session import Rules
from unskew.methods import parse_method
from unskew.round import driver
from unskew.runs.metrics import read_metrics

ROUNDS = 20


class Killed(Exception):
    pass


class Answered:
    """One process in which only those come whose visits have not failed, by round."""

    def __init__(self, engine, failed):
        self._engine, self._failed, self.progress = engine, failed, None
        self.accept, self.roster = engine.accept, engine.roster

    def map_sum(self, job, shared, visits, key, *, round=0):
        came = [visit for visit in visits if visit.client not in self._failed[round]]
        return self._engine.map_sum(job, shared, came, key, round=round)


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
    failed = {
        row["round"]: {each["client"] for each in row.get("failures", ())} for row in read_metrics(tmp_path / "run")
    }
    assert len(failed) == ROUNDS
    assert any(failed.values())
    assert resume

    network = models.build("tiny-cnn", (1, 8, 8), 10)
    models.initialise(network, Key(OPTIONS["seed"]).fold("model"))
    algorithm = parse_method(method, Local(epochs=1, batch=64, lr=0.05))
    state = driver.start(algorithm, tensors.of_module(network))
    engine = Answered(loop_over(method=method), failed)
    rounds = driver.run(algorithm, engine, state, Key(OPTIONS["seed"]), rounds=ROUNDS, per_round=3, skip_failures=True)
    *_, (final, _) = rounds
    assert tensors.sha256(final.tensors) == result.weights_sha256
