"""From a partition's text to the client of each training example: schemes, users, places, files, a user's function.

Shapes: N examples, K clients.
"""

from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, nearest
from unskew.core.key import Key
from unskew.core.plugins import load_function
from unskew.core.text import Call, apply, complain, parse_calls
from unskew.core.units import counted
from unskew.data.partition_files import read_partition
from unskew.data.population import Ints, Partition, check_clients, number_users
from unskew.data.schemes import SCHEMES, Geo, Places, Scheme
from unskew.data.schemes import deal as deal_places


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


def partition(
    text: str,
    labels: Ints,
    *,
    clients: int | None,
    key: Key,
    users: npt.NDArray[np.str_] | None = None,
    places: Places | None = None,
    classes: int,
) -> Partition:
    """Deal the training examples out as ``text`` says: ``"dirichlet(alpha=0.1)"``, ``"file:split.csv"``, ``"mine:f"``.

    ``users``, ``geo`` and ``file:`` bring their own number of clients; ``clients`` must then be that number or None. A
    file's text stays the scheme, since another seed would not give the same; its notes say how it was made.
    """
    if len(labels) == 0:
        raise UserError("there are no training examples to deal out")
    if clients is not None and clients < 1:
        raise UserError(f"{clients} clients: give at least 1")
    if text.strip().startswith("file:"):
        kept = read_partition(text.strip().removeprefix("file:"), labels, classes, seed=key.seed)
        return _agree(replace(kept, scheme=text.strip()), clients)
    call = _single(text)
    if call.name == "users":
        apply(call, lambda: None, "partition")
        if users is None:
            raise UserError("partition users: this data set names no users; take dirichlet, iid or file:FILE")
        if len(users) != len(labels):
            raise UserError(f"partition users: {len(users)} user ids for {len(labels)} training examples")
        return _agree(_by_user(users, key.seed), clients)
    if call.name == "geo":
        geo = apply(call, Geo, "partition")
        if places is None:
            raise UserError("partition geo: this data set names no places; take users, dirichlet-client or file:FILE")
        if len(places) != len(labels):
            raise UserError(f"partition geo: {len(places)} places for {len(labels)} training examples")
        return _agree(deal_places(geo, places, scheme=_canonical(call.name, geo), seed=key.seed), clients)
    if ":" in call.name:
        return from_function(call, labels, _enough(call.name, clients, labels), key)
    if call.name not in SCHEMES:
        hint = nearest(call.name, [*SCHEMES, "users", "geo", "file:FILE", "package.module:function"])
        raise complain(text, call.start, f"there is no partition {call.name!r}; {hint}")
    scheme = apply(call, SCHEMES[call.name], "partition")
    clients = _enough(call.name, clients, labels)
    client, redraws = scheme.deal(labels, clients, key.fold("partition", call.name))
    client = client.astype(np.int32)
    client.flags.writeable = False
    return Partition(client, clients, _canonical(call.name, scheme), key.seed, redraws=redraws)


def _by_user(users: npt.NDArray[np.str_], seed: int) -> Partition:
    """A client for each user; an empty id is no user, and its examples belong to no client."""
    named = users != ""
    if not named.any():
        raise UserError("partition users: all user ids are empty; take dirichlet, iid or file:FILE")
    if named.all():
        client, names = number_users(users)
        return Partition(client, len(names), "users", seed, names)
    client = np.full(len(users), -1, np.int32)
    client[named], names = number_users(users[named])
    client.flags.writeable = False
    note = f"left to no client: {counted(int(np.count_nonzero(~named)), 'training example')} without a user"
    return Partition(client, len(names), "users", seed, names, notes=(note,))


def _enough(name: str, clients: int | None, labels: Ints) -> int:
    """How many clients there are, if there are examples for all of them."""
    if clients is None:
        raise UserError(f"partition {name}: say how many clients there are (--clients 10)")
    if clients > len(labels):
        raise UserError(f"{clients} clients share {len(labels)} training examples: give at most {len(labels)}")
    return clients


def _single(text: str) -> Call:
    """The one call of the text."""
    calls = parse_calls(text, "partition")
    if len(calls) > 1:
        raise complain(text, calls[1].start, "partition takes one scheme; schemes cannot be added")
    return calls[0]


def _canonical(name: str, scheme: Scheme | Geo) -> str:
    """The scheme's text: its first knob always, the others where they are not the default."""
    knobs = {
        field.name: getattr(scheme, field.name)
        for at, field in enumerate(fields(scheme))  # type: ignore[arg-type]
        if at == 0 or field.default is MISSING or getattr(scheme, field.name) != field.default
    }
    return str(Call(name, (), knobs, 0, ""))


def _agree(made: Partition, clients: int | None) -> Partition:
    """The partition, if it has as many clients as were asked for."""
    if clients is not None and clients != made.clients:
        given = f"{clients} were asked for; leave --clients out"
        raise UserError(f"partition {made.scheme} has {made.clients} clients, {given}")
    return made
