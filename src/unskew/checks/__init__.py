"""The battery that every method passes, ours and yours: ``check_method("package.module:method(knob=1)")``."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from unskew import methods
from unskew.checks.small import federation, largest_difference, same
from unskew.core import tensors, text
from unskew.core.errors import UserError
from unskew.core.types import Local
from unskew.round.client_memory import ClientMemory
from unskew.runs.checkpoint import MEMORIES, Progress, load_checkpoint, save_checkpoint

QUICK = {"fedvc": "fedvc(16)"}  # methods whose defaults are too much work for a federation this small


class LawBroken(Exception):
    """A method that does not do what every method must; the message names the law and what was seen."""


def check_method(source: str, *, neutral: str | None = None) -> list[str]:
    """Try every law on the method of this text: the names of the laws, or LawBroken at the first that does not hold.

    ``neutral`` is the method's text with its knob at zero, where it has one: it must be FedAvg to the last bit.
    """
    laws: list[tuple[str, Callable[[str], str | None]]] = [
        ("the result is finite, with a client of one example among them", _finite),
        ("the same seed gives the same weights, another seed others", _deterministic),
        ("loop and pool agree bit for bit", _engines_agree),
        ("a run stopped and resumed equals one that never stopped", _resumes),
        ("what clients remember does not grow with the rounds", _bounded),
        ("a round leaves its arguments alone", _leaves_arguments),
        ("it composes with every other method in either order, or is refused by name", _composes),
    ]
    if neutral is not None:
        laws.append(("with its knob at zero it is FedAvg", lambda _: _is_fedavg(neutral)))
    for name, law in laws:
        if (complaint := law(source)) is not None:
            raise LawBroken(f"{source}: {name}: no: {complaint}")
    return [name for name, _ in laws]


def _finite(source: str) -> str | None:
    state = federation(source).run(2)
    return None if tensors.finite(state.tensors | state.memory) else "NaN or infinity after two rounds"


def _deterministic(source: str) -> str | None:
    first, again, other = (federation(source, seed=seed).run(1) for seed in (0, 0, 1))
    if not same(first, again):
        return "two runs with one seed differ"
    return "two seeds give one result" if same(first, other) else None


def _engines_agree(source: str) -> str | None:
    small = federation(source, dtype="float32")
    here, there = small.run(3), small.run(3, "pool", 2)
    if same(here, there):
        return None
    distance = largest_difference(here.tensors, there.tensors)
    return f"they differ by {distance:g}" if distance else "they keep or send other things"


def _resumes(source: str) -> str | None:
    small = federation(source, dtype="float32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        half = small.run(2, rounds_planned=4, folder=folder)
        save_checkpoint(folder, half, Progress(0, 0.0, "", "", ""))
        kept = load_checkpoint(folder)
        if kept is None or not same(half, kept[0]):
            return "a checkpoint does not give back the state"
        whole = small.run(4)
        return (
            None if same(whole, small.run(4, state=kept[0], folder=folder)) else "four rounds differ from two and two"
        )


def _bounded(source: str) -> str | None:
    small = federation(source, sizes=(8, 7, 6, 5, 1), local=Local(epochs=1, batch=8, lr=0.001))
    if not small.algorithm.remember:
        return None
    with tempfile.TemporaryDirectory() as name:
        folder, state = Path(name), None
        for rounds in (2, 4, 6, 8):  # each engine starts from a checkpoint of the one before
            state = small.run(rounds, folder=folder, per_round=3, state=state, rounds_planned=8)
        size = (folder / MEMORIES).stat().st_size
    slot = ClientMemory(small.algorithm.remember, small.state().tensors, -1).slot_bytes
    most = (2 * 5 + 3) * slot  # a checkpoint's and the latest of each client, and the visits under way
    return None if size <= most else f"eight rounds of 3 visits to 5 clients left {size:,} bytes, {most:,} were due"


def _leaves_arguments(source: str) -> str | None:
    small = federation(source)
    state = small.state()
    before, data = copy.deepcopy(state), tensors.copy(small.data)
    small.run(1, state=state)
    if not same(state, before):
        return "the server's state was changed in place"
    return None if largest_difference(small.data, data) == 0 else "the clients' data were changed in place"


def _composes(source: str) -> str | None:
    mine = {call.name for call in text.parse_calls(source, "method")}
    small = federation(local=Local(epochs=1, batch=16, lr=0.05))
    for other in methods.METHODS:
        if other in mine:
            continue
        beside = QUICK.get(other, other)
        refusals = [_refusal(f"{source} + {beside}"), _refusal(f"{beside} + {source}")]
        if any(refusals):
            if not all(other in said and any(name in said for name in mine) for said in refusals):
                return f"beside {other} it is refused in one order only, or not by both names: {' / '.join(refusals)}"
            continue
        there = small.with_method(f"{source} + {beside}").run(1)
        back = small.with_method(f"{beside} + {source}").run(1)
        if largest_difference(there.tensors, back.tensors) > 1e-12:
            return f"the order of it and {other} matters"
    return None


def _refusal(source: str) -> str:
    try:
        methods.parse_method(source)
    except UserError as error:
        return str(error)
    return ""


def _is_fedavg(neutral: str) -> str | None:
    plain = federation(dtype="float32")
    other = replace(plain, blueprint=replace(plain.blueprint, method=neutral))
    return None if largest_difference(plain.run(2).tensors, other.run(2).tensors) == 0 else f"{neutral} is not FedAvg"
