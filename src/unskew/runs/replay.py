"""A run's states and local models, made again from its keys: nothing of them is stored unless ``--during`` kept it.

Local models are those that clients make in the round after the one whose state is looked at, as the run itself would
have made them.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from unskew import models
from unskew.core import tensors
from unskew.core.errors import Missing, UserError
from unskew.core.types import Engine, ServerState, Tensors, Visit
from unskew.round import driver, statistics
from unskew.runs import recording
from unskew.runs.checkpoint import kept_state, load_checkpoint, load_state

if TYPE_CHECKING:
    from unskew.runs.study import FinishedRun

MOST_BYTES = 2**30  # of local models laid out side by side
Made = TypeVar("Made")


def state_after(subject: "FinishedRun", number: int) -> ServerState:
    """The server's state after that round, 0 being before the first; what clients remember is not part of it."""
    last = subject.config.rounds
    if not 0 <= number <= last:
        raise UserError(f"round {number}: the run has rounds 1 to {last}; 0 is before the first, -1 the last")
    if number == last and (found := _finished(subject)) is not None:
        return found
    if (found := _kept(subject, number)) is not None:
        return found
    if number == last and not subject.algorithm.statistics and subject.algorithm.head is None:
        return ServerState(last, subject.model, {})
    return replayed(subject, number, lambda engine, state: replace(state, clients={}))


def local_models(subject: "FinishedRun", number: int, most: int) -> dict[int, Tensors]:
    """By client, what it makes of the server's model in the round after that one."""
    if subject.algorithm.remember and 0 < number < subject.config.rounds:  # what they remembered then comes with it
        return replayed(subject, number, lambda engine, state: _made(subject, engine, state, most))
    state = subject.state(number)
    if subject.algorithm.remember and number and not (subject.remembered and state.clients):
        subject.notes.append("local models were made as at a first visit: what clients remembered then is not kept")
        state = replace(state, clients={})
    return _made(subject, subject.engine, state, most)


def replayed(subject: "FinishedRun", number: int, then: Callable[[Engine, ServerState], Made]) -> Made:
    """Train again up to that round, and use the state before the engine is gone, with what clients remember there."""
    # a run's own memories must not be written over
    engine = subject.opened(None) if subject.algorithm.remember else subject.engine
    state, config = _earlier(subject, number), subject.prepared.config
    begun = state.round
    rounds = driver.run(
        subject.algorithm, engine, state, subject.key, rounds=config.rounds, per_round=config.per_round or 0,
        skip_failures=config.on_failure == "skip",
    )  # fmt: skip
    try:
        while state.round < number:
            state, _ = next(rounds)
            subject.say("training again up to that round", state.round - begun, number - begun)
        return then(engine, state)
    finally:
        if subject.algorithm.remember:
            engine.close()


def _finished(subject: "FinishedRun") -> ServerState | None:
    """The checkpoint's state, if it is that of the finished run; other versions' and damaged ones are of no use."""
    with suppress(UserError):
        found = load_checkpoint(subject.path)
        used = None if found is None else driver.as_used(subject.algorithm, found[0].tensors, subject.side.classifier)
        if found is not None and used is not None and tensors.sha256(used) == subject.result.weights_sha256:
            return found[0]
    return None


def _kept(subject: "FinishedRun", number: int) -> ServerState | None:
    """What ``--during model`` kept of that round; a damaged file is as good as none."""
    file = kept_state(subject.path, number)
    with suppress(UserError):
        if file.exists() and (found := load_state(file)[0]).round == number:
            return replace(found, clients={})
    return None


def _earlier(subject: "FinishedRun", number: int) -> ServerState:
    """A state from which training up to that round can go on: the latest kept before it, or the very first."""
    if not subject.algorithm.remember:  # what clients remembered at a kept state is gone
        for earlier in range(number, 0, -1):
            if (found := _kept(subject, earlier)) is not None:
                return found
    models.initialise(subject.side.network, subject.key.fold("model"))
    return driver.start(subject.algorithm, tensors.of_module(subject.side.network), subject.side.classifier)


def _made(subject: "FinishedRun", engine: Engine, state: ServerState, most: int) -> dict[int, Tensors]:
    key = subject.key.fold("round", state.round + 1)
    if state.round == 0:  # what methods ask everybody beforehand belongs to the first round
        state, _ = driver.survey(subject.algorithm, engine, state, subject.key)
    coming = subject.algorithm.sampler(key.fold("sample"), engine.roster, subject.prepared.config.per_round or 0)
    visits = _spread({visit.client: visit for visit in reversed(coming)}, most)  # of two to one client, the first
    size = tensors.count_bytes({name: value.double() for name, value in state.tensors.items()})
    if size * len(visits) > MOST_BYTES:
        raise Missing(
            f"{len(visits)} local models of {size / 1e6:.0f} MB take more than {MOST_BYTES / 1e9:.1f} GB side by side; "
            f"give clients={max(1, MOST_BYTES // size)}"
        )
    visits = [replace(visit, ticket=state.clients.get(visit.client)) for visit in visits]
    watching = recording.RecordingEngine(engine, lambda _: ["model"], most=len(visits))
    watching.progress = lambda done, total: subject.say("making local models again", done, total)
    try:
        outcome = watching.map_sum("train", statistics.shared(state), visits, key, round=state.round + 1)
    finally:
        watching.progress = None
    if outcome.failures:
        failure = outcome.failures[0]
        raise Missing(f"client {failure.client} fails when its local model is made again: {failure.reason}")
    found: dict[int, Tensors] = {}
    for name, like in subject.side.weights.items():  # in the network's own order, which no file keeps
        clients, values = watching.rows(f"model/{name}")
        for client, value in zip(clients, values, strict=True):
            found.setdefault(client, {})[name] = value.to(like.dtype)
    return found


def _spread(coming: Mapping[int, Visit], most: int) -> list[Visit]:
    """At most so many of the visits, evenly by client."""
    clients = sorted(coming)
    if len(clients) > most:
        clients = [clients[place] for place in np.linspace(0, len(clients) - 1, most).round().astype(int)]
    return [coming[client] for client in clients]
