"""The protections of a run's training: refused before the first round where they cannot hold, told at its end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unskew.calibration.finisher import RealFeatures
from unskew.core.errors import UserError
from unskew.core.plugins import require_extra
from unskew.privacy.agreement import MIN_CLIENTS
from unskew.privacy.ledger import PrivateRounds, Spent, spent_on
from unskew.privacy.private_updates import PrivateUpdates
from unskew.privacy.questions import MOST_MEMBERS
from unskew.privacy.secure_updates import SecureUpdates
from unskew.round.algorithm import Algorithm
from unskew.runs.recording import Recorded

if TYPE_CHECKING:
    from unskew.runs.prepared import Prepared

OF_SINGLE_CLIENTS = ("norms", "drift")  # recordings that look at one client's model


def check_protections(prepared: "Prepared") -> None:
    """Refuse what the run's protections cannot cover, or cannot do with so few clients."""
    algorithm, config = prepared.algorithm, prepared.config
    clients = len(prepared.population.roster.inhabited)
    drawn = min(config.per_round or clients, clients)
    if isinstance(algorithm.exchange, SecureUpdates):
        require_extra("cryptography")
        _refuse_recordings("secure(updates=true)", prepared.recordings)
        if drawn < MIN_CLIENTS:
            given = f"{drawn} of {clients} clients come to a round"
            raise UserError(f"secure(updates=true): {given}, and a secure sum needs {MIN_CLIENTS}; give --per-round")
        if drawn > MOST_MEMBERS:
            raise UserError(f"secure(updates=true): {drawn:,} clients come to a round; give --per-round {MOST_MEMBERS}")
    if algorithm.mechanism is not None:
        require_extra("dp_accounting")
        _refuse_recordings("private-updates", prepared.recordings)
        if prepared.start is not None:
            raise UserError(
                f"private-updates with --start {config.start}: the model would begin with statistics of the clients "
                "that the updates' noise does not cover; leave one of them out"
            )
        network = prepared.blueprint.network()
        if buffers := [name for name, _ in network.named_buffers()]:
            raise UserError(
                f"private-updates: the network {config.model} has running statistics ({buffers[0]}), which clients "
                "would send without noise; take one with GroupNorm"
            )
        poisson = isinstance(algorithm.mechanism, PrivateUpdates) and algorithm.mechanism.poisson
        if poisson and drawn < clients and isinstance(algorithm.exchange, SecureUpdates):
            raise UserError(
                "secure(updates=true) and private-updates(sampling=poisson): a round with fewer clients than a secure "
                "sum needs would show who was drawn; give sampling=fixed, or let every client come to every round"
            )


def spent_in_rounds(prepared: "Prepared", rounds: int) -> Spent | None:
    """What so many rounds of private updates promise; None where they are not private or have no noise."""
    mechanism = prepared.algorithm.mechanism
    if not isinstance(mechanism, PrivateUpdates) or not mechanism.noise or not rounds:
        return None
    clients = len(prepared.population.roster.inhabited)
    return spent_on((), _private_rounds(mechanism, rounds, min(prepared.config.per_round or clients, clients), clients))


def notes_on_protections(algorithm: Algorithm, validation: bool) -> list[str]:
    """What the noise of private updates does not cover."""
    if algorithm.mechanism is None:
        return []
    notes = []
    if algorithm.private is None:
        open_ones = [each.text for each in algorithm.finish if not isinstance(each.needs, RealFeatures)]
        notes += [f"{text}: its statistics have no noise, (ε, δ) does not cover it" for text in open_ones]
    if validation:
        notes.append("accuracy is measured on clients' own examples, which (ε, δ) does not cover")
    return notes


def _private_rounds(mechanism: PrivateUpdates, rounds: int, drawn: int, clients: int) -> PrivateRounds:
    drawing = mechanism.drawing(drawn, clients)
    sampling = "everyone" if drawing.everyone else "poisson" if drawing.poisson else "fixed"
    return PrivateRounds(
        epsilon=mechanism.epsilon(rounds, drawn, clients) or 0.0, delta=mechanism.delta, rounds=rounds,
        clip=mechanism.clip, noise=mechanism.noise, sampling=sampling, replaced=drawing.replaces,
        example_epsilon=mechanism.epsilon(rounds, drawn, clients, replaced=True) or 0.0,
    )  # fmt: skip


def _refuse_recordings(method: str, recordings: Sequence[Recorded]) -> None:
    for each in recordings:
        if each.name in OF_SINGLE_CLIENTS:
            raise UserError(
                f"{method} and --during {each.name}: it would record single clients, which the method keeps from the "
                "server; leave it out (silhouette and model look at the server's model alone)"
            )
