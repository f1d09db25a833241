"""Partitions that are not in our table: an array of clients, a Partition, a user's function.

Shapes: N examples, K clients.
"""

from functools import partial
from typing import Any

import numpy as np

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import load_function
from unskew.core.text import Call, apply
from unskew.data.population import Ints, Partition, check_clients


def partition_from(
    value: Any, labels: Ints, *, clients: int | None = None, seed: int = 0, scheme: str = "your partition"
) -> Partition:
    """A Partition, or an array with the client of each training example, as a partition of these examples.

    −1 marks an example that no client has. Without ``clients`` there are as many as the largest number says.
    """
    if isinstance(value, Partition):
        client, clients = np.asarray(value.client), value.clients if clients is None else clients
        if clients != value.clients:
            raise UserError(f"{scheme} has {value.clients} clients, {clients} were asked for; leave --clients out")
    else:
        client = _array(value, scheme)
    if client.shape != (len(labels),):
        given = f"{list(client.shape)} numbers for {len(labels):,} training examples"
        raise UserError(f"{scheme} gives {given}; give one client number for each example, in one row")
    if client.dtype.kind not in "iu":
        raise UserError(f"{scheme} gives {client.dtype}; give client numbers as whole numbers")
    low, high = int(client.min()), int(client.max())
    if low < -1:
        raise UserError(f"{scheme} gives the client {low}; clients count from 0, and −1 means that no client has it")
    if high < 0:
        raise UserError(f"{scheme} gives every example to no client (−1); give at least one to a client")
    check_clients(high + 1 if clients is None else clients, len(labels), scheme)
    if clients is not None and high >= clients:
        raise UserError(f"{scheme} gives the client {high}, but there are {clients}, counted from 0; raise --clients")
    if isinstance(value, Partition):
        return value
    numbers = client.astype(np.int32)
    numbers.flags.writeable = False
    left = int(np.count_nonzero(numbers < 0))
    notes = (f"{left} of {len(labels)} training examples belong to no client",) if left else ()
    return Partition(numbers, high + 1 if clients is None else clients, scheme, seed, notes=notes)


def from_function(call: Call, labels: Ints, clients: int, key: Key) -> Partition:
    """What ``package.module:function(knobs)`` gives for (labels, clients, key)."""
    function = load_function(call.name, "partition")
    own = labels.copy()  # so that a function that sorts in place leaves the data alone
    try:
        value = apply(call, partial(function, own, clients, key.fold("partition", call.name)), "partition")
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"partition {call} raises {type(error).__name__}: {error}; it is called with (labels, clients, key)"
        ) from error
    return partition_from(value, labels, clients=clients, seed=key.seed, scheme=str(call))


def _array(value: Any, scheme: str) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    except (ValueError, TypeError) as error:
        raise UserError(f"{scheme} is not an array ({error}); give one client number for each example") from error
