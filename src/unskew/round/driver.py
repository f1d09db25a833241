"""A whole round on one screen, and rounds one after another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from unskew.core import tensors
from unskew.core.errors import ClientFailure, UserError
from unskew.core.key import Key
from unskew.core.types import Engine, Failure, Outcome, RoundInfo, ServerState, Tensors, Visit
from unskew.data.batches import steps_for
from unskew.round import statistics
from unskew.round.client import CHUNK
from unskew.round.server import moved

if TYPE_CHECKING:
    from unskew.round.algorithm import Algorithm


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
    """The state before the first round. The server's side is on the CPU, whatever the clients compute with."""
    model = tensors.on_device(model, "cpu")
    sent = statistics.first_sent(algorithm.statistics, model)
    return ServerState(0, tensors.copy(model), algorithm.server.init(tensors.parameters(model)), sent)


def run_round(
    algorithm: "Algorithm", engine: Engine, state: ServerState, key: Key, *, per_round: int, rounds: int = 0,
    skip_failures: bool = False,
) -> tuple[ServerState, Metrics]:  # fmt: skip
    """Sample, train, aggregate, move. ``rounds`` is how many there will be, for methods that follow a schedule."""
    began = perf_counter()
    number = state.round + 1
    here = key.fold("round", number)
    state, asked = survey(algorithm, engine, state, key) if number == 1 else (state, 0)

    visits = algorithm.sampler(here.fold("sample"), engine.population, per_round)
    if len({(visit.client, visit.repeat) for visit in visits}) < len(visits):
        raise UserError("the sampler gives a client two visits with the same repeat: they would see the same batches")
    if engine.memories is not None:
        visits = engine.memories.assign(visits, state.clients)
    outcome = engine.map_sum("train", statistics.shared(state), visits, here)
    _judge(outcome, number, "train", key, skip_failures)
    sums = outcome.sums
    moment = RoundInfo(number, max(rounds, number), engine.population, _turnout(engine, outcome))
    gradient = algorithm.aggregate(sums)
    params, memory = algorithm.server.update(
        tensors.parameters(state.tensors), tensors.parameters(gradient), state.memory, moment
    )
    buffers = moved(_buffers(state.tensors), gradient, 1.0)
    sent = statistics.folded(algorithm.statistics, state.sent, sums, moment)
    if not tensors.finite(params | memory | sent):
        raise ClientFailure(f"server, round {number}: its step gives NaN or infinity; a smaller server rate may help")

    examples, reported = int(sums["metric/examples"]), int(sums["metric/visits"])
    metrics = Metrics(
        round=number,
        clients=reported,
        examples=examples,
        train_loss=float(sums["metric/loss"]) / max(examples, 1),
        batches_max=max(_steps(algorithm, engine, visit) for visit in visits),
        bytes_up=statistics.bytes_up(sums, state.tensors, visits, reported, asked),
        bytes_down=statistics.bytes_down(state, visits),
        seconds=perf_counter() - began,
        failures=outcome.failures,
    )
    return ServerState(number, params | buffers, memory, sent, _remembered(engine, state, visits, outcome)), metrics


def run(
    algorithm: "Algorithm", engine: Engine, state: ServerState, key: Key, *, rounds: int, per_round: int,
    skip_failures: bool = False,
) -> Iterator[tuple[ServerState, Metrics]]:  # fmt: skip
    """Rounds from where the state stands up to ``rounds``; each is given as it ends."""
    while state.round < rounds:
        state, metrics = run_round(
            algorithm, engine, state, key, per_round=per_round, rounds=rounds, skip_failures=skip_failures
        )
        yield state, metrics


def survey(algorithm: "Algorithm", engine: Engine, state: ServerState, key: Key) -> tuple[ServerState, int]:
    """Ask every client once what the methods want to know beforehand; the state that knows, and the bytes it took."""
    if all(statistic.survey is None for statistic in algorithm.statistics):
        return state, 0
    visits = [Visit(client, 1.0) for client in engine.population.inhabited.tolist()]
    outcome = engine.map_sum("survey", {}, visits, key.fold("survey"))
    _judge(outcome, None, "survey", key, skip=False)
    sent = statistics.after_survey(algorithm.statistics, state.sent, outcome.sums)
    return replace(state, sent=sent), statistics.bytes_up(outcome.sums, state.tensors, visits, len(visits))


def evaluate(engine: Engine, model: Tensors, examples: int, key: Key) -> Evaluation:
    """Accuracy and mean loss on the ``examples`` test images, in chunks spread over the engine."""
    chunks = [Visit(chunk, 1.0) for chunk in range(-(-examples // CHUNK))]
    outcome = engine.map_sum("evaluate", model, chunks, key)
    _judge(outcome, None, "evaluate", key, skip=False)
    total = float(outcome.sums["metric/total"].sum())
    right = float(outcome.sums["metric/right"].sum())
    return Evaluation(right / total, float(outcome.sums["metric/loss"]) / total)


def _judge(outcome: Outcome, number: int | None, job: str, key: Key, skip: bool) -> None:
    """Stop at a failed client, unless the user would rather go on without it and somebody is left."""
    for failure in outcome.failures:
        where = "the model on the test images" if job == "evaluate" else f"client {failure.client}"
        when = "" if number is None else f", round {number}"
        if not skip or not outcome.sums:
            raise ClientFailure(f"{where}{when}, job {job}: {failure.reason} (seed {key.seed} replays it)")


def _turnout(engine: Engine, outcome: Outcome) -> float:
    return float(outcome.sums["weight"]) / len(engine.population.order)


def _remembered(
    engine: Engine, state: ServerState, visits: list[Visit], outcome: Outcome
) -> Mapping[int, tuple[int, int]]:
    """Where the clients' memories lie after the round: a visit that failed leaves its client's as it was."""
    if engine.memories is None:
        return state.clients
    failed = {(failure.client, failure.repeat) for failure in outcome.failures}
    return {**state.clients, **engine.memories.kept([v for v in visits if (v.client, v.repeat) not in failed])}


def _steps(algorithm: "Algorithm", engine: Engine, visit: Visit) -> int:
    held = engine.population.size(visit.client) if visit.take is None else visit.take
    return steps_for(held, algorithm.local)


def _buffers(model: Tensors) -> Tensors:
    return {name: value for name, value in model.items() if name.startswith("buffers/")}


def as_used(algorithm: "Algorithm", model: Tensors) -> Tensors:
    """The model as anybody may use it: a classifier that the algorithm transforms is given transformed."""
    if algorithm.head is None:
        return model
    names = ("params/classifier.weight", "params/classifier.bias")
    used = algorithm.head(model[names[0]], model.get(names[1]))
    return model | {name: value for name, value in zip(names, used, strict=True) if value is not None}
