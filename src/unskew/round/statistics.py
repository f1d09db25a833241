"""6. Statistics that are exchanged in addition to the model, and the bytes of everything sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from unskew.core import tensors
from unskew.core.errors import ClientFailure, describe_error
from unskew.core.types import CLASSIFIER, EVERYONE, Outcome, RoundInfo, ServerState, Statistic, Sums, Tensors, Visit


def init_sent(statistics: Sequence[Statistic], model: Tensors, classifier: Sequence[str] = CLASSIFIER) -> Tensors:
    """The statistics sent in the first round; ``classifier`` names the classifier's weight and bias."""
    parts = zip(("classifier/weight", "classifier/bias"), classifier, strict=False)
    model = model | {alias: model[name] for alias, name in parts if name in model}
    return {f"{s.name}/{name}": value.double() for s in statistics for name, value in s.init(model).items()}


def fold_survey(statistics: Sequence[Statistic], sent: Tensors, sums: Sums) -> Tensors:
    """Update what is sent with the answers of all clients to the survey."""
    for s in statistics:
        if s.surveyed is not None:
            with _named(s.name):
                sent = sent | tensors.prefixed(s.surveyed(tensors.under(sums, f"stat/{s.name}/")), f"{s.name}/")
    return sent


def fold_statistics(statistics: Sequence[Statistic], sent: Tensors, sums: Sums, info: RoundInfo) -> Tensors:
    """The statistics sent in the next round, from those sent in this round and the clients' sums."""
    for s in statistics:
        if s.fold is not None:
            last, total = tensors.under(sent, f"{s.name}/"), tensors.under(sums, f"stat/{s.name}/")
            with _named(s.name):
                sent = sent | tensors.prefixed(s.fold(last, total, info), f"{s.name}/")
    return sent


def build_shared(state: ServerState) -> Tensors:
    """Everything a client receives: the model and the statistics, in the model's dtype."""
    dtype = _dtype(state.tensors)
    return state.tensors | {f"sent/{name}": value.to(dtype) for name, value in state.sent.items()}


def bytes_down(state: ServerState, visits: Sequence[Visit]) -> int:
    """The bytes sent to these visits; pooled data need no communication."""
    return tensors.count_bytes(build_shared(state)) * sum(visit.client != EVERYONE for visit in visits)


def bytes_up(outcome: Outcome, model: Tensors, visits: Sequence[Visit], reported: int, asked: int = 0) -> int:
    """The bytes of the updates and statistics of the visits that reported, in the model's dtypes, plus ``asked``.

    Sums are float64, but a client's values have the precision of its model and are counted that way for every engine.
    To give the same bits as one process, a federation sends statistics that do not fit in 32 bits (scaffold's) with 8
    bytes. The few other numbers (weight, loss, counts) are not counted.
    """
    if outcome.bytes_up is not None:
        return asked + outcome.bytes_up
    if any(visit.client == EVERYONE for visit in visits):
        return 0
    updates = sum(v.numel() * model[name].element_size() for name, v in tensors.under(outcome.sums, "delta/").items())
    others = _dtype(model).itemsize * sum(value.numel() for value in tensors.under(outcome.sums, "stat/").values())
    return asked + (updates + others) * reported


@contextmanager
def _named(statistic: str) -> Iterator[None]:
    """Add the statistic's name to an error in a method's fold."""
    try:
        yield
    except Exception as error:
        raise ClientFailure(f"server, statistic {statistic}: {describe_error(error)}") from error


def _dtype(model: Tensors) -> torch.dtype:
    return next((value.dtype for value in model.values() if value.is_floating_point()), torch.float32)
