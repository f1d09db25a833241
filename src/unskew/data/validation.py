"""A validation part: some of each client's training examples, held out to choose settings without the test images.

Shapes: N training examples, V of them held out.
"""

from dataclasses import replace

import numpy as np

from unskew.core.errors import UserError
from unskew.core.images import ImageSet, Split
from unskew.core.key import Key
from unskew.data.population import Clients, Ints, Partition


def held_out(client: Clients, labels: Ints, share: float, key: Key) -> Ints:
    """[V], the rows that are held out, ascending: that share of every client's examples and of each of its classes.

    The examples are put in order by client, then by class, then at random, and every (1/share)-th is taken, from a
    random start. So a client and each of its classes give their share up to one example, and the whole gives it too.
    A client keeps at least one example. What no client has is not held out.
    """
    generator = key.numpy()
    start, chance = generator.random(), generator.random(len(client))
    order = np.lexsort((chance, labels, client))
    order = order[client[order] >= 0]
    steps = np.floor(share * np.arange(len(order) + 1) + start)
    taken = np.diff(steps) > 0
    owner = client[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))  # where each client's examples begin
    emptied = np.logical_and.reduceat(taken, first) if len(first) else np.zeros(0, np.bool_)
    taken[first[emptied]] = False
    rows: Ints = np.sort(order[taken]).astype(np.int64)
    return rows


def with_validation(images: ImageSet, partition: Partition, share: float, key: Key) -> tuple[ImageSet, Partition]:
    """The images with the validation part in the place of the test part, and the partition without it."""
    labels = images.train.labels
    rows = held_out(partition.client, labels, share, key)
    if not len(rows):
        held = int(np.count_nonzero(partition.client >= 0))
        raise UserError(f"--validation {share:g}: of {held:,} examples none would be held out; give a larger share")
    part = Split(images.train.images, labels[rows], rows)
    users = None if images.users is None else images.users[rows]
    rest = partition.client.copy()
    rest[rows] = -1
    return replace(images, test=part, test_users=users), replace(partition, client=rest)
