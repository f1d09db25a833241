"""One round, from sampling to the server's update, and the loop over rounds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import IN_PLUGIN, ClientFailure, UserError, describe_error
from unskew.core.key import Key, no_global_draws
from unskew.core.types import CLASSIFIER, Engine, Failure, Outcome, RoundInfo, ServerState, Tensors, Visit
from unskew.data.batches import steps_for
from unskew.round import statistics
from unskew.round.client import Survey, Train
from unskew.round.client_memory import with_tickets
from unskew.round.jobs import collect
from unskew.round.local_optimizers import encode_rate, rate_of_round
from unskew.round.sampling import draw
from unskew.round.server import apply_step

if TYPE_CHECKING:
    from unskew.round.algorithm import Algorithm

NO_MEMORY = "has no memory, which the method needs for what clients keep between visits; use --engine loop"

Recordings = Mapping[int, Mapping[str, Tensor]]  # by client, in visit order
Record = Callable[[Tensors, Recordings], None]  # the tensors sent to the clients in a round, and what was recorded


@dataclass(frozen=True)
class Metrics:
    """A round's line in metrics.jsonl."""

    round: int
    clients: int | None  # None, like everything about participation, if a release omits it
    examples: int | None
    train_loss: float | None  # None if no client took part
    batches_max: int | None
    bytes_up: int | None
    bytes_down: int | None
    seconds: float | None
    failures: tuple[Failure, ...] = ()
    accuracy: float | None = None
    loss: float | None = None
    lr: float | None = None  # the clients' rate, if a schedule changes it
    epsilon: float | None = None  # of all rounds so far, for every client, if updates are private
    delta: float | None = None
    unit: str | None = None  # what ε protects: a client, or an example
    void: str | None = None  # why the round does not count: the state is unchanged
    available: int | None = None  # clients that could be sampled, if a method decides it
    absent: int | None = None  # sampled visits that did not happen, if a method decides it
    notes: tuple[str, ...] = ()  # such as a client that joined, or lost its memory
    released: bool | None = None  # True: everything that (ε, δ) does not cover was left out


def start(algorithm: "Algorithm", model: Tensors, classifier: Sequence[str] = CLASSIFIER) -> ServerState:
    """The state before the first round, on the CPU; ``classifier`` names the tensors of the model's last layer."""
    model = tensors.on_device(model, "cpu")
    parts = zip(("classifier/weight", "classifier/bias"), classifier, strict=False)
    known = model | {alias: model[name] for alias, name in parts if name in model}
    sent = {f"{s.name}/{name}": value.double() for s in algorithm.statistics for name, value in s.init(known).items()}
    return ServerState(0, tensors.copy(model), algorithm.server.init(tensors.parameters(model)), sent)


def run_round(
    algorithm: "Algorithm",
    engine: Engine,
    state: ServerState,
    key: Key,
    *,
    per_round: int,
    rounds: int = 0,
    skip_failures: bool = False,
    watch: Sequence[str] = (),
    record: Record | None = None,
) -> tuple[ServerState, Metrics]:
    """Sample, train, aggregate, update.

    ``per_round`` clients are sampled (0: all); ``rounds`` is the planned total, for schedules; ``watch`` names what is
    recorded of each visit, and ``record`` is called with it.
    """
    began = perf_counter()
    number = state.round + 1
    round_key = key.fold("round", number)
    state, asked = survey(algorithm, engine, state, key) if number == 1 else (state, 0)

    per_round = per_round or engine.roster.clients
    drawn = draw(algorithm, key, number, engine.roster, per_round)
    visits = drawn.visits
    if len({(visit.client, visit.repeat) for visit in visits}) < len(visits):
        raise UserError("the sampler returned two visits to a client with the same repeat; number them 0, 1, …")
    memory = engine.memory if algorithm.remember else None
    if memory is not None:
        visits = list(memory.assign(with_tickets(visits, state.clients)))
    elif algorithm.remember:
        raise UserError(f"the engine {NO_MEMORY}")
    empty = Metrics(number, 0, 0, None, 0, asked, 0, None, available=drawn.available, absent=drawn.absent)
    if not visits and algorithm.mechanism is None:
        return replace(state, round=number), replace(empty, seconds=perf_counter() - began)
    rate = rate_of_round(algorithm.local, number, max(rounds, number))
    shared = statistics.build_shared(state) | encode_rate(rate)
    outcome = collect(algorithm.exchange, engine, Train(number, tuple(watch)), shared, visits, round_key)
    if memory is not None:
        memory.release(visits, {} if outcome.void else outcome.tickets)
    _check_failures(outcome, number, "train", key, skip_failures)
    if outcome.void:
        void = replace(empty, bytes_up=asked + (outcome.bytes_up or 0), seconds=perf_counter() - began)
        void = replace(void, failures=outcome.failures, void=outcome.void, notes=outcome.notes)
        return replace(state, round=number), void
    sums, privacy = outcome.sums, dict[str, Any]()
    if (mechanism := algorithm.mechanism) is not None:
        clients = len(engine.roster.inhabited)
        expected = min(per_round, clients)
        sums = mechanism.add_noise(sums, tensors.parameters(state.tensors), expected, round_key)
        if (epsilon := mechanism.epsilon(number, expected, clients)) is not None:
            privacy = {"epsilon": epsilon, "delta": mechanism.delta, "unit": mechanism.unit(expected, clients)}
    info = RoundInfo(number, max(rounds, number), engine.roster, float(sums["weight"]) / engine.roster.examples)
    gradient = algorithm.aggregate(sums)
    old, steps = tensors.parameters(state.tensors), tensors.parameters(gradient)
    params, server_memory = algorithm.server.update(old, steps, state.memory, info)
    buffers = {name: value for name, value in state.tensors.items() if name.startswith("buffers/")}
    buffers = apply_step(buffers, gradient, 1.0)
    sent = statistics.fold(algorithm.statistics, state.sent, sums, info)
    if not tensors.finite(params | server_memory | sent):
        raise ClientFailure(f"server, round {number}: NaN or infinity in its step; try a smaller server learning rate")

    sizes = [engine.roster.size(visit.client) if visit.take is None else visit.take for visit in visits]
    examples, reported = int(sums["metric/examples"]), int(sums["metric/visits"])
    metrics = replace(
        empty,
        clients=reported,
        examples=examples,
        train_loss=float(sums["metric/loss"]) / max(examples, 1) if "metric/loss" in sums else None,
        batches_max=max((steps_for(size, algorithm.local) for size in sizes), default=0),
        bytes_up=statistics.bytes_up(outcome, state.tensors, visits, reported, asked),
        bytes_down=statistics.bytes_down(state, visits) + outcome.bytes_down,
        seconds=perf_counter() - began,
        failures=outcome.failures,
        lr=rate,
        notes=outcome.notes,
        **privacy,
    )
    if record is not None:
        record(shared, {visits[index].client: values for index, values in outcome.extra.items()})
    if memory is not None:
        memory.supersede(state.clients[client] for client in outcome.tickets if client in state.clients)
    return ServerState(number, params | buffers, server_memory, sent, {**state.clients, **outcome.tickets}), metrics


def run(
    algorithm: "Algorithm",
    engine: Engine,
    state: ServerState,
    key: Key,
    *,
    rounds: int,
    per_round: int,
    skip_failures: bool = False,
    watch: Callable[[int], Sequence[str]] = lambda number: (),
    record: Record | None = None,
) -> Iterator[tuple[ServerState, Metrics]]:
    """Run the rounds after the state's, up to ``rounds``, and yield each as it ends."""
    one_round = partial(run_round, algorithm, engine, per_round=per_round, rounds=rounds, skip_failures=skip_failures)
    while state.round < rounds:
        number = state.round + 1
        try:
            with no_global_draws() if number == 1 else nullcontext():
                state, metrics = one_round(state, key, watch=watch(number), record=record)
        except (UserError, ClientFailure):
            raise
        except Exception as error:  # a plug-in's code on the server, such as a sampler
            if IN_PLUGIN not in (described := describe_error(error)):
                raise
            raise ClientFailure(f"server, round {number}: {described}") from error
        yield state, metrics


def survey(algorithm: "Algorithm", engine: Engine, state: ServerState, key: Key) -> tuple[ServerState, int]:
    """Ask all clients for what the methods need before the first round; return the new state and the bytes up."""
    if all(statistic.survey is None for statistic in algorithm.statistics):
        return state, 0
    visits = [Visit(client, 1.0) for client in engine.roster.inhabited.tolist()]
    outcome = collect(algorithm.exchange, engine, Survey(), {}, visits, key.fold("survey"))
    _check_failures(outcome, None, "survey", key, skip=False)
    if outcome.void:
        raise UserError(f"the survey before the first round: {outcome.void}")
    sent = statistics.fold(algorithm.statistics, state.sent, outcome.sums)
    return replace(state, sent=sent), statistics.bytes_up(outcome, state.tensors, visits, len(visits))


def _check_failures(outcome: Outcome, number: int | None, job: str, key: Key, skip: bool) -> None:
    for failure in outcome.failures:
        if not skip or not (outcome.sums or outcome.void):
            where = f"client {failure.client}{'' if number is None else f', round {number}'}, job {job}"
            reason, in_plugin, location = failure.reason.partition(IN_PLUGIN)
            message = f"{where}: {reason} (seed {key.seed} replays it){in_plugin}{location}"
            raise ClientFailure(message, skippable=bool(outcome.replied) and not in_plugin)


def as_used(algorithm: "Algorithm", model: Tensors, classifier: Sequence[str] = CLASSIFIER) -> Tensors:
    """The model for use without the algorithm: its classifier is transformed by the algorithm's ``head``."""
    if algorithm.head is None:
        return model
    bias = next((model[name] for name in classifier[1:] if name in model), None)
    used = algorithm.head(model[classifier[0]], bias)
    return model | {name: value for name, value in zip(classifier, used, strict=False) if value is not None}
