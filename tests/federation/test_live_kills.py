"""Twenty rounds in which nodes and server are killed at random: real processes, and the log explains the result."""

import numpy as np
import pytest
from live import LOCAL, Live, Run, recipe

from replay import failed_by_round, replayed
from unskew import engines
from unskew.core.types import Local
from unskew.data.population import Population
from unskew.data.sources import load
from unskew.engines.blueprint import Blueprint, dataset
from unskew.runs import config as configs
from unskew.runs.config import Config
from unskew.runs.prepare import make_partition
from unskew.runs.result import read_result

ROUNDS, SEED = 20, 0
NODES = ("a", "b", "c")
KILLS = ("server", *NODES, "server", "a")  # each at least once; when, and in which order, is drawn


def one_process(live, method):
    """All clients of the federation in this process."""
    images, local = load("digits", None), Local(**LOCAL)
    config = configs.checked(Config(data="digits", partition=f"file:{live.partition}", clients=len(NODES), seed=SEED))
    data = dataset(images, Population.from_partition(make_partition(config, images.examples)))
    return engines.open_engine("loop", engines.EngineSetup(Blueprint(method, "tiny-cnn", (1, 8, 8), 10, local), data))


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["scaffold"])
def test_the_log_of_who_answered_explains_the_result_between_processes(tmp_path, method):
    """A few minutes: a round takes seconds, and a server that was killed half a minute until its nodes are back."""
    chance = np.random.default_rng(SEED)
    live, out = Live(tmp_path / "f", list(NODES)), tmp_path / "run"
    text = recipe(3, ROUNDS, method, data="digits", checkpoint_seconds=0, seed=SEED)  # the server tests by itself
    rules = {"deadline": 60.0, "min_replies": 1}
    try:
        live.start("server", *NODES)
        run = Run(live, out, text, **rules)
        for victim in chance.permutation(KILLS):
            done = len(run.reaches(1))
            run.reaches(min(ROUNDS - 2, done + int(chance.integers(1, 4))))
            run.join(float(chance.uniform(0, 3)))  # somewhere in the middle of a round
            live.kill(victim)
            if victim != "server":
                live.start(victim)
                continue
            assert run.wait().trouble is not None
            live.start("server")
            run = Run(live, out, text, resume=True, **rules)
        assert run.wait(900).trouble is None, (run.trouble, run.said)
    finally:
        live.close()
    failed = failed_by_round(out)
    print(failed)
    assert len(failed) == ROUNDS
    assert any(failed.values())
    result = read_result(out)
    assert replayed(one_process(live, method), method, Local(**LOCAL), SEED, failed) == result.weights_sha256
