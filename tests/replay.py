"""What the log of who answered explains: the same rounds in one process, with the visits that did not fail."""

from unskew import models
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import Failure
from unskew.engines.flower.policy import Purpose
from unskew.methods import parse_method
from unskew.round import driver
from unskew.runs.journal import read_metrics


class Answered:
    """One process in which only those come whose visits have not failed, by round."""

    def __init__(self, engine, failed):
        self._engine, self._failed = engine, failed
        self.memory, self.roster = engine.memory, engine.roster

    def visit(self, job, shared, visits, key):
        number = Purpose.of(job).round
        missing = self._failed[number] if number else set()
        replies = self._engine.visit(job, shared, [visit for visit in visits if visit.client not in missing], key)
        for visit in visits:
            if visit.client in missing:
                yield Failure(visit.client, "the log says that it did not answer", visit.repeat)
            else:
                yield next(replies)


def failed_by_round(run):
    """By round, the clients whose visits failed, as the run's metrics have it."""
    return {row["round"]: {each["client"] for each in row.get("failures", ())} for row in read_metrics(run)}


def replayed(engine, method, local, seed, failed):
    """The hash of the weights that training on digits with all of the engine's clients comes to."""
    network = models.build("tiny-cnn", (1, 8, 8), 10)
    models.initialise(network, Key(seed).fold("model"))
    algorithm = parse_method(method, local)
    state = driver.start(algorithm, tensors.of_module(network))
    rounds = driver.run(
        algorithm, Answered(engine, failed), state, Key(seed), rounds=len(failed), per_round=3, skip_failures=True
    )
    *_, (final, _) = rounds
    return tensors.sha256(final.tensors)
