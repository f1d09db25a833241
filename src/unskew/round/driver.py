"""A whole round on one screen, and rounds one after another."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from unskew import tensors
from unskew.data.batches import steps_for
from unskew.errors import ClientFailure
from unskew.key import Key
from unskew.round.client import EVALUATION_CHUNK
from unskew.round.server import moved
from unskew.types import Engine, Failure, Outcome, ServerState, Tensors, Visit

if TYPE_CHECKING:
    from unskew.algorithm import Algorithm


@dataclass(frozen=True)
class Metrics:
    """What a round's line in metrics.jsonl says."""

    round: int
    clients: int
    examples: int
    train_loss: float
    batches_max: int
    bytes_up: int
    bytes_down: int
    seconds: float
    failures: tuple[Failure, ...] = ()
    accuracy: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """How well a model does on the test images."""

    accuracy: float
    loss: float


def start(algorithm: "Algorithm", model: Tensors) -> ServerState:
    """The state before the first round."""
    return ServerState(0, tensors.copy(model), algorithm.server.init(_params(model)))


def run_round(
    algorithm: "Algorithm", engine: Engine, state: ServerState, key: Key, *, per_round: int, skip_failures: bool = False
) -> tuple[ServerState, Metrics]:
    """Sample, train, aggregate, move."""
    began = perf_counter()
    number = state.round + 1
    here = key.fold("round", number)

    visits = algorithm.sampler(here.fold("sample"), engine.population, per_round)
    outcome = engine.map_sum("train", state.tensors, visits, here)
    _judge(outcome, number, "train", key, skip_failures)
    gradient = algorithm.aggregate(outcome.sums)
    params, memory = algorithm.server.update(_params(state.tensors), _params(gradient), state.memory)
    buffers = moved(_buffers(state.tensors), gradient, 1.0)
    if not tensors.finite(params | memory):
        raise ClientFailure(f"server, round {number}: its step gives NaN or infinity; a smaller server rate may help")

    size, sums = tensors.count_bytes(state.tensors), outcome.sums
    examples = int(sums["metric/examples"])
    metrics = Metrics(
        round=number,
        clients=int(sums["metric/visits"]),
        examples=examples,
        train_loss=float(sums["metric/loss"]) / max(examples, 1),
        batches_max=max(_steps(algorithm, engine, visit) for visit in visits),
        bytes_up=size * int(sums["metric/visits"]),
        bytes_down=size * len(visits),
        seconds=perf_counter() - began,
        failures=outcome.failures,
    )
    return ServerState(number, params | buffers, memory), metrics


def run(
    algorithm: "Algorithm", engine: Engine, state: ServerState, key: Key, *, rounds: int, per_round: int,
    skip_failures: bool = False,
) -> Iterator[tuple[ServerState, Metrics]]:  # fmt: skip
    """Rounds from where the state stands up to ``rounds``; each is given as it ends."""
    while state.round < rounds:
        state, metrics = run_round(algorithm, engine, state, key, per_round=per_round, skip_failures=skip_failures)
        yield state, metrics


def evaluate(engine: Engine, model: Tensors, examples: int, key: Key) -> Evaluation:
    """Accuracy and mean loss on the ``examples`` test images, in chunks spread over the engine."""
    chunks = [Visit(chunk, 1.0) for chunk in range(-(-examples // EVALUATION_CHUNK))]
    outcome = engine.map_sum("evaluate", model, chunks, key)
    _judge(outcome, None, "evaluate", key, skip=False)
    total = float(outcome.sums["metric/total"].sum())
    right = float(outcome.sums["metric/right"].sum())
    return Evaluation(right / total, float(outcome.sums["metric/loss"]) / total)


def _judge(outcome: Outcome, number: int | None, job: str, key: Key, skip: bool) -> None:
    """Stop at a failed client, unless the user would rather go on without it and somebody is left."""
    for failure in outcome.failures:
        where = f"client {failure.client}" if job == "train" else f"test chunk {failure.client}"
        when = "" if number is None else f", round {number}"
        if not skip or not outcome.sums:
            raise ClientFailure(f"{where}{when}, job {job}: {failure.reason} (seed {key.seed} replays it)")


def _steps(algorithm: "Algorithm", engine: Engine, visit: Visit) -> int:
    held = engine.population.size(visit.client) if visit.take is None else visit.take
    return steps_for(held, algorithm.local)


def _params(model: Tensors) -> Tensors:
    return {name: value for name, value in model.items() if name.startswith("params/")}


def _buffers(model: Tensors) -> Tensors:
    return {name: value for name, value in model.items() if name.startswith("buffers/")}
