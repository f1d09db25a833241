"""6. What else is sent: statistics in addition to the model, in both directions, and the bytes of all of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from unskew.core import tensors
from unskew.core.errors import ClientFailure, describe_error
from unskew.core.types import CLASSIFIER, EVERYONE, RoundInfo, ServerState, Statistic, Sums, Tensors, Visit


def init_sent(statistics: Sequence[Statistic], model: Tensors, classifier: Sequence[str] = CLASSIFIER) -> Tensors:
    """What clients receive in addition to the model in the first round; ``classifier`` names its weight and bias."""
    parts = zip(("classifier/weight", "classifier/bias"), classifier, strict=False)
    model = model | {alias: model[name] for alias, name in parts if name in model}
    return {f"{s.name}/{name}": value.double() for s in statistics for name, value in s.init(model).items()}


def fold_survey(statistics: Sequence[Statistic], sent: Tensors, sums: Sums) -> Tensors:
    """What is sent once every client has been asked."""
    for s in statistics:
        if s.surveyed is not None:
            with _named(s.name):
                sent = sent | tensors.prefixed(s.surveyed(tensors.under(sums, f"stat/{s.name}/")), f"{s.name}/")
    return sent


def fold_statistics(statistics: Sequence[Statistic], sent: Tensors, sums: Sums, info: RoundInfo) -> Tensors:
    """What is sent in the next round, from what was sent in this one and what came back."""
    for s in statistics:
        if s.fold is not None:
            last, total = tensors.under(sent, f"{s.name}/"), tensors.under(sums, f"stat/{s.name}/")
            with _named(s.name):
                sent = sent | tensors.prefixed(s.fold(last, total, info), f"{s.name}/")
    return sent


def build_shared(state: ServerState) -> Tensors:
    """All that goes to a client: the model, and what else is sent, in the model's own type."""
    dtype = _dtype(state.tensors)
    return state.tensors | {f"sent/{name}": value.to(dtype) for name, value in state.sent.items()}


def bytes_down(state: ServerState, visits: Sequence[Visit]) -> int:
    """What these visits are sent; data in one place need no sending."""
    return tensors.count_bytes(build_shared(state)) * sum(visit.client != EVERYONE for visit in visits)


def bytes_up(sums: Sums, model: Tensors, visits: Sequence[Visit], reported: int, asked: int = 0) -> int:
    """What the visits that reported sent back, and ``asked`` before: updates and statistics, in the model's own types.

    Sums are float64 since they are sums; what a client sends has the precision of its model, and is counted that way
    for every engine. A federation gives the same bits as one process, and therefore sends statistics that 32 bits do
    not hold with 8 bytes (scaffold's). The few other numbers (weight, loss, counts) are not counted.
    """
    if any(visit.client == EVERYONE for visit in visits):
        return 0
    updates = sum(v.numel() * model[name].element_size() for name, v in tensors.under(sums, "delta/").items())
    others = _dtype(model).itemsize * sum(value.numel() for value in tensors.under(sums, "stat/").values())
    return asked + (updates + others) * reported


@contextmanager
def _named(statistic: str) -> Iterator[None]:
    """What a method's own fold raises, with the statistic's name."""
    try:
        yield
    except Exception as error:
        raise ClientFailure(f"server, statistic {statistic}: {describe_error(error)}") from error


def _dtype(model: Tensors) -> torch.dtype:
    return next((value.dtype for value in model.values() if value.is_floating_point()), torch.float32)
