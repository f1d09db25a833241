"""The clients' learning rate from round to round: ``--schedule "cosine(warmup=5)"``.

A schedule gives the share of ``--lr`` that a round uses. Rounds count from 1 to R.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from unskew.core import text
from unskew.core.errors import UserError, nearest
from unskew.core.types import Local, Tensors

RATE = "rate"  # the name under which the server sends a round's rate


@dataclass(frozen=True)
class Schedule:
    """How a rate changes: ``warmup`` rounds in which it rises, then what ``after`` makes of the rest.

    ``after(done, left, lr)`` is the rate when ``done`` of the ``left`` rounds without warm-up are over.
    """

    warmup: int
    after: Callable[[int, int, float], float]

    def rate(self, lr: float, number: int, rounds: int) -> float:
        """The rate of round ``number`` of ``rounds``; a round after the last has the last one's."""
        number = min(number, rounds)
        if number <= self.warmup:
            return lr * number / (self.warmup + 1)
        return self.after(number - self.warmup - 1, rounds - self.warmup, lr)


def constant(warmup: int = 0) -> Schedule:
    """The same rate in every round."""
    return Schedule(_warmup("constant", warmup), lambda done, left, lr: lr)


def step(every: int = 30, factor: float = 0.1, warmup: int = 0) -> Schedule:
    """The rate times ``factor`` after each ``every`` rounds, as torch's StepLR: η·factor^⌊(r − 1)/every⌋."""
    if every < 1:
        raise ValueError(f"step(every={every}): every counts rounds, give at least 1")
    if not 0 < factor < float("inf"):
        raise ValueError(f"step(factor={factor}): factor multiplies the rate, give a number above 0")
    return Schedule(_warmup("step", warmup), lambda done, left, lr: lr * factor ** (done // every))


def cosine(least: float = 0.0, warmup: int = 0) -> Schedule:
    """Half a cosine down to ``least``, as torch's CosineAnnealingLR: least + (η − least)·(1 + cos(π·(r − 1)/R))/2.

    The round after the last would have the rate ``least``, so that no round is trained with a rate of 0.
    """
    if not 0 <= least < float("inf"):
        raise ValueError(f"cosine(least={least}): least is a learning rate, give 0 or more")

    def after(done: int, left: int, lr: float) -> float:
        if least > lr:
            raise UserError(f"--schedule cosine(least={least:g}): it is above --lr {lr:g}; give a smaller one")
        return least + (lr - least) * (1 + math.cos(math.pi * done / left)) / 2

    return Schedule(_warmup("cosine", warmup), after)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {"constant": constant, "step": step, "cosine": cosine}


def parse_schedule(source: str) -> Schedule:
    """The schedule that a text such as ``"step(every=30, factor=0.1)"`` describes."""
    calls = text.parse_calls(source, "schedule")
    if len(calls) > 1:
        raise text.complain(source, calls[1].start, "give one schedule")
    call = calls[0]
    if call.name not in SCHEDULES:
        raise text.complain(source, call.start, f"no schedule is called {call.name!r}; {nearest(call.name, SCHEDULES)}")
    schedule: Schedule = text.apply(call, SCHEDULES[call.name], "schedule")
    return schedule


def check_schedule(source: str) -> None:
    """Refuse a text that describes no schedule."""
    parse_schedule(source)


def check_rounds(local: Local, rounds: int) -> None:
    """Refuse a schedule that does not fit the number of rounds or the rate; where there are none, any does."""
    if local.schedule == "constant" or not rounds:
        return
    schedule = parse_schedule(local.schedule)
    if schedule.warmup >= rounds:
        raise UserError(
            f"--schedule {local.schedule}: a warm-up of {schedule.warmup} rounds leaves none of --rounds {rounds}; "
            "give fewer"
        )
    schedule.rate(local.lr, rounds, rounds)


def rate_of_round(local: Local, number: int, rounds: int) -> float | None:
    """The clients' rate in a round; None where it is the same in all."""
    if local.schedule == "constant":
        return None
    return parse_schedule(local.schedule).rate(local.lr, number, rounds)


def sent_rate(rate: float | None) -> Tensors:
    """What the server sends beside the model, so that clients know the round's rate; nothing where it is constant."""
    return {} if rate is None else {RATE: torch.tensor(rate, dtype=torch.float64)}


def in_round(local: Local, shared: Tensors) -> Local:
    """The settings of the round that the server sent this for: ``lr`` is the round's own."""
    return replace(local, lr=float(shared[RATE])) if RATE in shared else local


def _warmup(name: str, rounds: int) -> int:
    if rounds < 0:
        raise ValueError(f"{name}(warmup={rounds}): warmup counts rounds, give 0 or more")
    return rounds
