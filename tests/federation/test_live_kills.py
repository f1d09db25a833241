"""Twenty rounds in which nodes and server are killed at random: real processes, and the log explains the result."""

from contextlib import closing

import numpy as np
import pytest

from faults.live import LOCAL, Live, Run, recipe
from faults.processes import one_process
from replay import failed_by_round, replayed
from unskew.core.types import Local
from unskew.runs.result import read_result

ROUNDS, SEED = 20, 0
NODES = ("a", "b", "c")
KILLS = ("server", *NODES, "server", "a")  # each at least once; when, and in which order, is drawn


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["scaffold"])
def test_the_log_of_who_answered_explains_the_result_between_processes(tmp_path, method):
    """A few minutes: a round takes seconds, and a server that was killed half a minute until its nodes are back."""
    chance = np.random.default_rng(SEED)
    out = tmp_path / "run"
    text = recipe(3, ROUNDS, method, data="digits", checkpoint_seconds=0, seed=SEED)  # the server tests by itself
    rules = {"deadline": 60.0, "min_replies": 1}
    with closing(Live(tmp_path / "f", list(NODES))) as live:
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
    failed = failed_by_round(out)
    print(failed)
    assert len(failed) == ROUNDS
    assert any(failed.values())
    result = read_result(out)
    again = replayed(one_process(live.partition, method, SEED), method, Local(**LOCAL), SEED, failed)
    assert again == result.weights_sha256
