"""A run trained again from its keys: earlier states of the server, and local models of clients.

States are stored only where ``--during model`` kept them, local models never. The local models of a state are those
that clients train in the next round, exactly as the run itself would have trained them.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from unskew.core import tensors
from unskew.core.errors import Missing, UserError
from unskew.core.types import Engine, ServerState, Tensors, Visit
from unskew.round import driver, statistics
from unskew.round.sampling import draw
from unskew.round.schedules import rate_of_round, sent_rate
from unskew.runs import config as configs
from unskew.runs import recording
from unskew.runs.checkpoint import CHECKPOINT, Progress, kept_state, load_checkpoint, load_state
from unskew.runs.start import with_start

if TYPE_CHECKING:
    from unskew.runs.study import FinishedRun

MAX_BYTES = 2**30  # of local models in memory at one time
T = TypeVar("T")


def state_after(run: "FinishedRun", number: int) -> ServerState:
    """The server's state after that round, 0 being before the first; clients' saved states are not part of it."""
    rounds, last = run.result.rounds, run.result.final_round
    if not 0 <= number <= rounds:
        raise UserError(f"round {number}: the run has rounds 1 to {rounds}; 0 is before the first, -1 the last")
    if number == last and (state := _checkpoint_state(run)) is not None:
        return state
    if (state := _kept_state(run, number)) is not None:
        return state
    if number == last and not run.algorithm.statistics and run.algorithm.head is None:
        return ServerState(last, run.model, {})
    return replayed(run, number, lambda engine, state: replace(state, clients={}))


def local_models(run: "FinishedRun", number: int, most: int) -> dict[int, Tensors]:
    """By client, its local model of the round after that one."""
    if run.algorithm.remember and 0 < number != run.result.final_round:  # what they remembered then comes with it
        return replayed(run, number, lambda engine, state: _trained(run, engine, state, most))
    state = run.state(number)
    if run.algorithm.remember and number and not (run.remembered and state.clients):
        run.notes.append(
            "local models were trained as at a first visit: the clients' saved states of that round were not kept"
        )
        state = replace(state, clients={})
    return _trained(run, run.engine, state, most)


def replayed(run: "FinishedRun", number: int, then: Callable[[Engine, ServerState], T]) -> T:
    """Train again up to that round, then call ``then`` while the engine still has the clients' saved states."""
    state, config = _earlier_state(run, number), run.prepared.config
    begun = state.round
    if begun < number and run.algorithm.mechanism is not None and not run.algorithm.mechanism.repeatable:
        raise Missing(
            f"round {number} cannot be trained again: its noise came from the operating system (private-updates with "
            "release=true); --during model keeps the server's state of chosen rounds"
        )
    # a run's own memories must not be written over
    engine = run.opened(None) if run.algorithm.remember else run.engine
    rounds = driver.run(
        run.algorithm, engine, state, run.key, rounds=config.rounds, per_round=config.per_round or 0,
        skip_failures=config.on_failure == "skip",
    )  # fmt: skip
    try:
        while state.round < number:
            state, _ = next(rounds)
            run.say("training again up to that round", state.round - begun, number - begun)
        return then(engine, state)
    finally:
        if run.algorithm.remember:
            engine.close()


def _checkpoint_state(run: "FinishedRun") -> ServerState | None:
    """The checkpoint's state, if it is that of the finished run; only saved states need it undamaged."""
    try:
        checkpoint = load_checkpoint(run.path)
    except UserError as error:
        if run.remembered:
            file = run.path / CHECKPOINT
            raise UserError(
                f"{file} is damaged, and the clients' saved states cannot be read without it; restore it from a copy, "
                "or delete it to train local models as at a first visit"
            ) from error
        return None
    if checkpoint is None:
        return None
    used = driver.as_used(run.algorithm, checkpoint[0].tensors, run.side.classifier)
    return checkpoint[0] if tensors.sha256(run.prepared.whole(used)) == run.result.weights_sha256 else None


def _kept_state(run: "FinishedRun", number: int) -> ServerState | None:
    """What ``--during model`` kept of that round; None where the file is damaged or of another round or run."""
    file = kept_state(run.path, number)
    with suppress(UserError):
        if file.exists():
            state, progress = load_state(file)
            return replace(state, clients={}) if state.round == number and _of_this_run(run, progress) else None
    return None


def _of_this_run(run: "FinishedRun", progress: Progress) -> bool:
    """Whether a kept state was made with the run's data, partition and configuration, or with its checkpoint's."""
    if (progress.data_sha256, progress.partition_hash) != (run.result.data_sha256, run.result.partition_hash):
        return False
    if progress.config_sha256 == configs.fingerprint(run.config):
        return True
    checkpoint = load_checkpoint(run.path)  # a path in config.toml may have been changed since
    return checkpoint is not None and checkpoint[1].config_sha256 == progress.config_sha256


def _earlier_state(run: "FinishedRun", number: int) -> ServerState:
    """A state from which that round can be reached by training: the latest kept before it, or the first."""
    if not run.algorithm.remember:  # what clients remembered at a kept state is gone
        for earlier in range(number, 0, -1):
            if (state := _kept_state(run, earlier)) is not None:
                return state
    run.prepared.initialise(run.side.network)
    model = tensors.on_device(tensors.of_module(run.side.network), "cpu")
    if run.prepared.start is not None:
        model = with_start(tensors.copy(model), run.prepared.start, run.side, run.engine, run.key, _unheard)[0]
    return driver.start(run.algorithm, model, run.side.classifier)


def _unheard(event: object) -> None:
    return


def _trained(run: "FinishedRun", engine: Engine, state: ServerState, most: int) -> dict[int, Tensors]:
    key = run.key.fold("round", state.round + 1)
    if state.round == 0:  # the survey of all clients belongs to the first round
        state, _ = driver.survey(run.algorithm, engine, state, run.key)
    config, number = run.prepared.config, state.round + 1
    coming = draw(run.algorithm, run.key, number, engine.roster, config.per_round or 0).visits
    if not coming:
        raise Missing(f"no client comes to round {number}, so that there are no local models; give another round")
    visits = _spread({visit.client: visit for visit in reversed(coming)}, most)  # of two to one client, the first
    size = tensors.count_bytes({name: value.double() for name, value in state.tensors.items()})
    if size * len(visits) > MAX_BYTES:
        raise Missing(
            f"{len(visits)} local models of {size / 1e6:.0f} MB take more than {MAX_BYTES / 1e9:.1f} GB; "
            f"give clients={max(1, MAX_BYTES // size)}"
        )
    visits = [replace(visit, ticket=state.clients.get(visit.client)) for visit in visits]
    watching = recording.RecordingEngine(engine, lambda _: ["model"], most=len(visits))
    watching.progress = lambda done, total: run.say("training local models again", done, total)
    try:
        sent = sent_rate(rate_of_round(run.algorithm.local, number, config.rounds))
        outcome = watching.map_sum("train", statistics.shared(state) | sent, visits, key, round=number)
    finally:
        watching.progress = None
    if outcome.failures:
        failure = outcome.failures[0]
        raise Missing(f"client {failure.client} failed when its local model was trained again: {failure.reason}")
    by_client: dict[int, Tensors] = {}
    for name, like in run.side.weights.items():  # in the network's own order, which files do not keep
        clients, values = watching.rows(f"model/{name}")
        for client, value in zip(clients, values, strict=True):
            by_client.setdefault(client, {})[name] = value.to(like.dtype)
    return by_client


def _spread(coming: Mapping[int, Visit], most: int) -> list[Visit]:
    """At most ``most`` of the visits, evenly by client."""
    clients = sorted(coming)
    if len(clients) > most:
        clients = [clients[place] for place in np.linspace(0, len(clients) - 1, most).round().astype(int)]
    return [coming[client] for client in clients]
