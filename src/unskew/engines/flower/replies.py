"""A node's reply, checked before it counts: it must answer what was asked, with the names, shapes and sizes of the job.

A result that does not fit is left out, with the reason; the others of the same reply count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unskew.core import tensors
from unskew.core.tensors import PackedSums
from unskew.core.types import Reply, Sums, Tensors, Visit
from unskew.engines.codec import BadMessage, by_name
from unskew.engines.flower.compact import FORMS, WireContext, restore
from unskew.engines.flower.messages import field
from unskew.engines.flower.node_memory import TICKET
from unskew.engines.flower.template import Expected, Shapes

MAX_REASON = 2000  # characters that are shown of why a visit failed


@dataclass(frozen=True)
class Facts:
    """What the server knows of a visit's client beforehand."""

    epochs: int
    examples: int
    test: int


@dataclass(frozen=True)
class LeftOut:
    """A result that does not count, and why. ``again``: whether asking once more may help."""

    reason: str
    again: bool = False


def read_results(
    header: Mapping[str, Any], sent: Sequence[tuple[str, Tensor]], visits: Sequence[Visit], facts: Sequence[Facts],
    shared: Tensors, expected: Sequence[Expected],
) -> list[Reply | LeftOut]:  # fmt: skip
    """One for each visit, in their order. Raises BadMessage where the message as a whole does not answer the visits."""
    results = field(header, "results", list)
    if len(results) != len(visits):
        raise BadMessage(f"it has {len(results)} results for {len(visits)} visits")
    read, start = list[Reply | LeftOut](), 0
    for values, visit, known, shapes in zip(results, visits, facts, expected, strict=True):
        if not isinstance(values, dict):
            raise BadMessage("a result is not an object")
        if (field(values, "client", int), field(values, "repeat", int)) != (visit.client, visit.repeat):
            raise BadMessage(f"it answers for client {values['client']}, where client {visit.client} was asked")
        if "failure" in values:
            read.append(LeftOut(shown(field(values, "failure", str))))
            continue
        forms, count = field(values, "forms", list), field(values, "extra", int)
        end = start + len(forms) + count
        mine, start = sent[start:end], end
        if count < 0 or len(mine) < len(forms) + count or not all(form in FORMS for form in forms):
            raise BadMessage("its tensors do not fit its description of them")
        try:
            read.append(_read_one(values, mine, forms, visit, known, shared, shapes))
        except (BadMessage, ValueError) as error:
            read.append(LeftOut(f"its result is refused: {error}"))
    if start != len(sent):
        raise BadMessage("it has more tensors than results")
    return read


def _read_one(
    values: Mapping[str, Any], sent: Sequence[tuple[str, Tensor]], forms: Sequence[str], visit: Visit, facts: Facts,
    shared: Tensors, expected: Expected,
) -> Reply:  # fmt: skip
    factor = float(field(values, "factor", (int, float)))
    if not (math.isfinite(factor) and factor > 0):
        raise BadMessage("its factor is not a number above 0")
    context = WireContext(shared, visit.weight, factor)
    pairs = zip(sent[: len(forms)], forms, strict=True)
    sums = by_name((name, restore(name, form, value, context)) for (name, value), form in pairs)
    extra = by_name(sent[len(forms) :])
    _check_shapes(sums, expected.sums, shared)
    _check_shapes(extra, None if expected.sums is None else expected.extra, shared)
    if not tensors.finite({name: value for name, value in (sums | extra).items() if value.is_floating_point()}):
        raise BadMessage("it contains NaN or infinity")
    check_numbers(sums, visit, facts)
    ticket = field(values, "ticket", (str, type(None)))
    if ticket is not None:
        found = TICKET.fullmatch(ticket)
        if not visit.keep or found is None or int(found[1]) != visit.client:
            raise BadMessage("its ticket is not one for this visit")
    return Reply(PackedSums.of(sums), extra, ticket)


def _check_shapes(values: Tensors, expected: Shapes | None, shared: Tensors) -> None:
    """Refuse tensors of other names, types or shapes than the job has; where they are unknown, another model's."""
    if expected is not None:
        if list(values) != list(expected):
            names = sorted(set(values) ^ set(expected))
            raise BadMessage(f"its tensors are not those of the job: {', '.join(names)[:200] or 'their order differs'}")
        for name, (dtype, shape) in expected.items():
            found = str(values[name].dtype).removeprefix("torch."), tuple(values[name].shape)
            if found != (dtype, shape):
                raise BadMessage(f"{name[:60]} is {found[0]} {list(found[1])}; {dtype} {list(shape)} is expected")
        return
    for name, value in values.items():
        model = shared.get(name.removeprefix("delta/")) if name.startswith("delta/") else None
        if model is not None and model.shape != value.shape:
            raise BadMessage(f"{name[:60]} has shape {list(value.shape)}; {list(model.shape)} is expected")


def check_numbers(sums: Sums, visit: Visit, facts: Facts) -> None:
    """Refuse impossible numbers: another weight than was asked for, more examples than the client has."""
    if any(not value.is_floating_point() for value in sums.values()):
        return  # words of a secure sum, or rounded
    if "weight" in sums and float(sums["weight"]) != visit.weight:
        raise BadMessage(f"it weighs {float(sums['weight']):g}, {visit.weight:g} was asked for")
    if "metric/visits" in sums and float(sums["metric/visits"]) != 1:
        raise BadMessage("it counts as more than one visit")
    most = facts.epochs * (facts.examples if visit.take is None else visit.take)
    if "metric/examples" in sums and not 0 <= float(sums["metric/examples"]) <= most:
        raise BadMessage(f"it saw {float(sums['metric/examples']):,.0f} examples, {most:,} are the most")
    if "metric/total" in sums and "metric/right" in sums:
        total, right = sums["metric/total"], sums["metric/right"]
        if float(total.sum()) > facts.test or bool((right > total).any()) or bool((right < 0).any()):
            raise BadMessage(f"it has other numbers of test images than its {facts.test:,}")


def shown(reason: object) -> str:
    """What a node says, as a log may have it: not long, and without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(reason)[:MAX_REASON])
