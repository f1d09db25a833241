"""1. Who comes: a sampler turns a key, the population and K into the round's visits."""

import numpy as np

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.data.population import Population


def uniform(key: Key, population: Population, per_round: int) -> list[Visit]:
    """K clients drawn uniformly without replacement, in ascending order, each weighted by its number of examples.

    Clients that hold nothing never come: they could report nothing.
    """
    if population.clients == len(population.inhabited) and per_round == population.clients:
        chosen = population.inhabited
    else:
        drawn = key.numpy().choice(len(population.inhabited), _at_most(per_round, population), replace=False)
        chosen = population.inhabited[np.sort(drawn)]
    return [Visit(client, float(population.size(client))) for client in chosen.tolist()]


def _at_most(per_round: int, population: Population) -> int:
    held = len(population.inhabited)
    if held == 0:
        raise UserError("no client of the partition holds an example; make the partition anew")
    return min(per_round, held)
