"""The laws, one function each: None where a method keeps it, otherwise what was seen and in which round."""

import copy
import random  # noqa: TID251  only its state is compared
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from unskew.checks.candidate import Candidate
from unskew.checks.instruments import Report, watching_arguments, watching_loss
from unskew.checks.small import Federation, federation, largest_difference, same
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.roster import Roster
from unskew.core.types import Local, ServerState, Visit
from unskew.round.algorithm import Algorithm
from unskew.round.client_memory import ClientMemory
from unskew.runs.checkpoint import MEMORIES, Progress, load_checkpoint, save_checkpoint

ROUNDS = 3  # in the first, momentum, memories, prototypes and control variates are still empty
PLANNED = 4  # of a schedule, so that no round is its last
SIZES = (10, 7, 1, 5)  # examples of each client
PER_ROUND = 3  # some clients come for the first time in a later round
SETTINGS = Local(epochs=1, batch=8, lr=0.05)
TOLERANCE = 1e-12  # how far rounding may put two orders of methods apart, in float64


def small(method: Candidate, *, dtype: str = "float64", seed: int = 0) -> Federation:
    """The federation that the laws are tried on."""
    return federation("fedavg", SIZES, dtype=dtype, seed=seed, local=SETTINGS).with_candidate(method)


def finite(method: Candidate) -> str | None:
    """Clients of one example and of one class do not break it."""
    for state in small(method).states(ROUNDS, per_round=PER_ROUND, rounds_planned=PLANNED):
        if not tensors.finite(state.tensors | state.memory | state.sent):
            return f"round {state.round} gives NaN or infinity"
    return None


def seeded(method: Candidate) -> str | None:
    """Everything random follows from the seed."""
    first, again, other = (list(small(method, seed=seed).states(ROUNDS, rounds_planned=PLANNED)) for seed in (0, 0, 1))
    for left, right in zip(first, again, strict=True):
        if not same(left, right):
            return f"two runs with one seed differ from round {left.round} on"
    return "two seeds give the same result" if same(first[-1], other[-1]) else None


def engines_agree(method: Candidate) -> str | None:
    """One process and two workers give the same bits; only for what another process can import."""
    fed = small(method, dtype="float32")
    pairs = zip(
        fed.states(ROUNDS, rounds_planned=PLANNED), fed.states(ROUNDS, "pool", rounds_planned=PLANNED), strict=True
    )
    for here, there in pairs:
        if not same(here, there):
            apart = largest_difference(here.tensors, there.tensors)
            what = f"the models differ by {apart:g}" if apart else "what is sent or remembered differs"
            return f"{what} after round {here.round}"
    return None


def resumes(method: Candidate) -> str | None:
    """All that later rounds need is in the checkpoint."""
    fed = small(method, dtype="float32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        half = fed.run(2, rounds_planned=4, folder=folder)
        save_checkpoint(folder, half, Progress(0, 0.0, "", "", ""))
        kept = load_checkpoint(folder)
        if kept is None or not same(half, kept[0]):
            return "a checkpoint after round 2 does not give back the state"
        if not same(fed.run(4), fed.run(4, state=kept[0], folder=folder)):
            return "four rounds differ from two and, after a checkpoint, two more"
    return None


def bounded(method: Candidate) -> str | None:
    """Neither the server's state nor the clients' memories grow from round to round."""
    fed = federation(sizes=(8, 7, 6, 5, 1), local=Local(epochs=1, batch=8, lr=0.001)).with_candidate(method)
    with tempfile.TemporaryDirectory() as name:
        folder, sizes = Path(name), {}
        state: ServerState | None = None
        for rounds in (2, 4, 6, 8):  # each engine starts from a checkpoint of the one before
            state = fed.run(rounds, folder=folder, per_round=3, state=state, rounds_planned=8)
            sizes[rounds] = tensors.count_bytes(state.memory), tensors.count_bytes(state.sent)
        for part, what in enumerate(("the server's memory", "what is sent beside the model")):
            if sizes[8][part] > sizes[2][part]:
                return f"{what} grew from {sizes[2][part]:,} bytes in round 2 to {sizes[8][part]:,} in round 8"
        if not fed.algorithm.remember:
            return None
        size = (folder / MEMORIES).stat().st_size
    slot = ClientMemory(fed.algorithm.remember, fed.state().tensors, -1).slot_bytes
    most = (2 * 5 + 3) * slot  # a checkpoint's and the latest of each client, and the visits under way
    return (
        None if size <= most else f"after 8 rounds of 3 visits 5 clients keep {size:,} bytes; at most {most:,} are due"
    )


def leaves_arguments(method: Candidate) -> str | None:
    """Neither the state nor the data nor any argument of its functions is changed in place."""
    fed = small(method)
    data, state = tensors.copy(fed.data), fed.state()
    before = copy.deepcopy(state)

    def changed_data() -> str | None:
        return "the clients' data are changed in place" if largest_difference(fed.data, data) else None

    complaint = _watch(fed, watching_arguments, changed_data, state)
    return complaint or (None if same(state, before) else "the server's first state is changed in place")


def leaves_generators(method: Candidate) -> str | None:
    """It draws through keys, and neither draws from nor seeds the generators that a whole process shares."""
    before: dict[str, bytes] = {}

    def noting(algorithm: Algorithm, report: Report) -> Algorithm:
        def sampler(key: Key, roster: Roster, per_round: int) -> list[Visit]:
            torch.empty(1).uniform_()  # a method that seeds the generator cannot have left it in this state already
            before.update(_generators())
            return algorithm.sampler(key, roster, per_round)

        return replace(algorithm, sampler=sampler)

    def used() -> str | None:
        now = _generators()
        names = [name for name, state in before.items() if state != now[name]]
        return f"the global generator of {' and '.join(names)} was used; draw through a Key" if names else None

    return _watch(small(method), noting, used)


def keeps_to_its_slots(method: Candidate) -> str | None:
    """Margins fit the logits, a blend gives a loss for each example, terms multiply weights and add penalties."""
    return _watch(small(method), watching_loss, lambda: None)


def commutes(one: Candidate, other: Candidate) -> str | None:
    """In either order the same result, round by round; or refused in both orders, by both names."""
    refusals = [refusal(one + other), refusal(other + one)]
    if any(refusals):
        named = all(any(word in said for word in each.words) for said in refusals for each in (one, other))
        return None if named else f"it is refused in one order only, or not by both names: {' / '.join(refusals)}"
    if not (one.trains() and other.trains()):
        return None
    there, back = (
        small(both).states(ROUNDS, per_round=PER_ROUND, rounds_planned=PLANNED) for both in (one + other, other + one)
    )
    for left, right in zip(there, back, strict=True):
        parts = {"model": (left.tensors, right.tensors), "server's memory": (left.memory, right.memory),
                 "statistics": (left.sent, right.sent)}  # fmt: skip
        for part, (a, b) in parts.items():
            if (apart := largest_difference(a, b)) > TOLERANCE:
                return f"their order changes the {part} by {apart:.1g} in round {left.round}"
    return None


def is_fedavg(neutral: Candidate) -> str | None:
    """Bit for bit, in float32."""
    plain = federation("fedavg", SIZES, dtype="float32", local=SETTINGS)
    states = zip(plain.states(ROUNDS), plain.with_candidate(neutral).states(ROUNDS), strict=True)
    for left, right in states:
        if largest_difference(left.tensors, right.tensors):
            return f"{neutral.name} differs from FedAvg in round {left.round}"
    return None


def _watch(
    fed: Federation, instrument: Callable[[Algorithm, Report], Algorithm], after_round: Callable[[], str | None],
    state: ServerState | None = None,
) -> str | None:  # fmt: skip
    """Some rounds of the instrumented algorithm, up to the first that has something reported."""
    reports: list[str] = []
    watched = fed.with_algorithm(instrument(fed.algorithm, reports.append))
    for now in watched.states(ROUNDS, per_round=PER_ROUND, rounds_planned=PLANNED, state=state):
        if complaint := next(iter(reports), None) or after_round():
            return f"{complaint} (round {now.round})"
    return None


def _generators() -> dict[str, bytes]:
    numpy_state = np.random.get_state()  # noqa: NPY002  only its state is compared
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": str([np.asarray(part).tobytes() for part in numpy_state]).encode(),
        "random": str(random.getstate()).encode(),
    }


def refusal(method: Candidate) -> str:
    """Why its methods cannot be composed; empty where they can."""
    try:
        method.algorithm()
    except UserError as error:
        return str(error)
    return ""
