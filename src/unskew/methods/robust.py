"""Robust means, which limit the influence of a few clients that send wrong updates, by accident or on purpose."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import physical_memory
from unskew.core.tensors import DOUBLE, PackedSums
from unskew.core.types import Engine, Failure, Job, Note, Outcome, Reply, Tensors, Visit
from unskew.core.units import format_bytes
from unskew.round.algorithm import Method
from unskew.round.client import Train
from unskew.round.jobs import add

FEWEST = 3  # clients per round: with two, nobody can tell which one is wrong
CHUNK = 2**18  # coordinates sorted at once

Rule = Callable[[Tensor, Tensor], Tensor]  # updates [clients, coordinates], weights [clients] -> their robust mean


def trimmed(share: float = 0.2) -> Method:
    """Averages each coordinate without its largest and smallest values.

    Of n updates, the ⌊share·n⌋ largest and as many of the smallest are left out, coordinate by coordinate; all clients
    have the same weight, whatever their size. It withstands that many wrong clients. On skewed data it also leaves out
    what few clients know: rare classes suffer first.

    Parameters
    ----------
    share
        The share that is left out at each end, below 0.5.

    Reference: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, Algorithm 1.
    """
    if not 0 < share < 0.5:
        raise ValueError(f"trimmed(share={share:g}): the share left out at each end must be above 0 and below 0.5")

    def rule(updates: Tensor, weights: Tensor) -> Tensor:
        drop = int(share * len(updates))
        return updates.sort(0).values[drop : len(updates) - drop].mean(0)

    return _method(_by_coordinate(rule))


def median() -> Method:
    """Takes the median of each coordinate.

    All clients have the same weight, whatever their size. It withstands wrong clients up to half of a round. On skewed
    data it follows the majority: rare classes suffer first.

    Reference: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, Algorithm 1.
    """
    return _method(_by_coordinate(lambda updates, weights: updates.quantile(0.5, 0)))


def bounded(times: float = 3.0) -> Method:
    """Shortens updates that are much longer than the others of their round.

    An update longer than times · the median length is scaled down to that length; then the weighted mean is taken as
    usual. One wrong client moves the model no further than a few honest ones. Of the robust means it costs honest runs
    the least.

    Parameters
    ----------
    times
        The longest update, in multiples of the median length; at least 1.

    Reference: Sun et al., "Can You Really Backdoor Federated Learning?", 2019, with the bound from the round itself.
    """
    if not 1 <= times < float("inf"):
        raise ValueError(f"bounded(times={times:g}): give a multiple of the median length, at least 1")

    def rule(updates: Tensor, weights: Tensor) -> Tensor:
        lengths = torch.stack([update.norm() for update in updates])
        factors = (times * lengths.quantile(0.5) / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)).clamp(max=1.0)
        return (weights * factors / weights.sum()) @ updates

    return _method(rule)


def _by_coordinate(rule: Rule) -> Rule:
    """Apply the rule to a part of the coordinates at a time, since sorting takes several times the memory."""

    def by_parts(updates: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([rule(part, weights) for part in torch.split(updates, CHUNK, dim=1)])

    return by_parts


def _method(rule: Rule) -> Method:
    return lambda algorithm: replace(algorithm, exchange=RobustMean(rule), claims=("aggregate",))


@dataclass(frozen=True)
class RobustMean:
    """Collects the updates of a round and replaces their weighted mean with a robust one.

    The server sees every update, so it cannot be combined with ``secure``. All updates of a round are in memory.
    """

    rule: Rule
    uncovered = "the robust mean does not cover it"

    def __call__(self, engine: Engine, job: Job, shared: Tensors, visits: Sequence[Visit], key: Key) -> Outcome:
        """The job's sums; in training, the update is the robust mean times the sum of the weights."""
        if not isinstance(job, Train):
            return add(engine.visit(job, shared, visits, key), visits)
        replies: list[PackedSums] = []

        def collect() -> Iterator[Reply | Failure | Note]:
            for item in engine.visit(job, shared, visits, key):
                if isinstance(item, Reply):
                    sums = PackedSums.of(item.sums)
                    if not replies:
                        needed, most = 3 * len(visits) * sums.vector.numel() * DOUBLE, physical_memory() / 2
                        if needed > most:
                            raise UserError(
                                f"a robust mean of {len(visits):,} updates needs {format_bytes(needed)} of memory, "
                                f"above the limit of {format_bytes(most)}; sample fewer clients per round"
                            )
                    replies.append(PackedSums(sums.layout, sums.vector.clone()))
                yield item

        outcome = add(collect(), visits)
        if not replies:
            return outcome
        if len(replies) < FEWEST:
            reason = f"{len(replies)} clients answered, but a robust mean needs {FEWEST}"
            return replace(outcome, sums={}, tickets={}, void=reason)
        names = [name for name in outcome.sums if name.startswith("delta/")]
        weights = torch.stack([sums["weight"] for sums in replies])
        updates = torch.stack([torch.cat([sums[name].flatten() for name in names]) for sums in replies])
        mean = self.rule(updates.div_(weights[:, None]), weights) * outcome.sums["weight"]
        parts = torch.split(mean, [outcome.sums[name].numel() for name in names])
        robust = {name: part.view_as(outcome.sums[name]) for name, part in zip(names, parts, strict=True)}
        return replace(outcome, sums={**outcome.sums, **robust})
