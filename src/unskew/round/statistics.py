"""6. Statistics that are exchanged in addition to the model, and the bytes of everything sent."""

from collections.abc import Sequence

import torch

from unskew.core import tensors
from unskew.core.errors import ClientFailure, describe_error
from unskew.core.types import EVERYONE, Outcome, RoundInfo, ServerState, Statistic, Sums, Tensors, Visit


def fold(statistics: Sequence[Statistic], sent: Tensors, sums: Sums, info: RoundInfo | None = None) -> Tensors:
    """The statistics sent in the next round, from those sent in this one and the clients' sums.

    Without ``info`` the sums are the answers of all clients to the survey before the first round.
    """
    for s in statistics:
        last, total = tensors.under(sent, f"{s.name}/"), tensors.under(sums, f"stat/{s.name}/")
        try:
            if info is None:
                new = {} if s.surveyed is None else s.surveyed(total)
            else:
                new = {} if s.fold is None else s.fold(last, total, info)
            sent = sent | tensors.prefixed(new, f"{s.name}/")
        except Exception as error:
            raise ClientFailure(f"server, statistic {s.name}: {describe_error(error)}") from error
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


def _dtype(model: Tensors) -> torch.dtype:
    return next((value.dtype for value in model.values() if value.is_floating_point()), torch.float32)
