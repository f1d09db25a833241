"""From a partition's text to the client of each training example: schemes, users, places, files, a user's function.

Shapes: N examples, K clients.
"""

from dataclasses import MISSING, fields, replace

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, nearest
from unskew.core.key import Key
from unskew.core.text import Call, apply, complain, parse_calls
from unskew.core.units import counted
from unskew.data.geo import Geo, Places
from unskew.data.geo import deal as deal_places
from unskew.data.partition_files import read_partition
from unskew.data.partition_values import from_function
from unskew.data.population import Ints, Partition, number_users
from unskew.data.schemes import SCHEMES, Scheme


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
