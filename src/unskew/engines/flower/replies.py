"""A node's reply, checked before it counts: it must answer what was asked, with the names, shapes and sizes of the job.

A result that does not fit is left out, with the reason; the others of the same reply count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.types import Sums, Tensors, Visit
from unskew.engines.flower.compact import FORMS, Known, restored
from unskew.engines.flower.messages import BadMessage, field
from unskew.engines.flower.node_memory import TICKET
from unskew.engines.flower.template import Layout
from unskew.privacy.questions import MEMBERS, row_of
from unskew.privacy.rows import HIGH, LOW
from unskew.privacy.secure_jobs import CAME

MAX_REASON = 2000  # characters that are shown of why a visit failed


@dataclass(frozen=True)
class Facts:
    """What the server knows of a visit's client beforehand."""

    epochs: int
    examples: int
    test: int


@dataclass(frozen=True)
class Counted:
    """A result that counts: its sums, the next ticket, whether the client began its memory anew."""

    sums: Sums
    receipt: str | None = None
    anew: bool = False


@dataclass(frozen=True)
class LeftOut:
    """A result that does not count, and why. ``again``: whether asking once more may help."""

    reason: str
    again: bool = False


def read_results(
    header: Mapping[str, Any], came: Sequence[tuple[str, Tensor]], visits: Sequence[Visit], facts: Sequence[Facts],
    shared: Tensors, layout: Layout | None,
) -> list[Counted | LeftOut]:  # fmt: skip
    """One for each visit, in their order. Raises BadMessage where the reply as a whole is not one to these visits."""
    results = field(header, "results", list)
    if len(results) != len(visits):
        raise BadMessage(f"it has {len(results)} results for {len(visits)} visits")
    read, start = list[Counted | LeftOut](), 0
    for values, visit, known in zip(results, visits, facts, strict=True):
        if not isinstance(values, dict):
            raise BadMessage("a result is not an object")
        if (field(values, "client", int), field(values, "repeat", int)) != (visit.client, visit.repeat):
            raise BadMessage(f"it answers for client {values['client']}, where client {visit.client} was asked")
        if "failure" in values:
            read.append(LeftOut(shown(field(values, "failure", str))))
            continue
        forms = field(values, "forms", list)
        mine, start = came[start : start + len(forms)], start + len(forms)
        if len(mine) < len(forms) or not all(form in FORMS for form in forms):
            raise BadMessage("its tensors do not fit what it says of them")
        try:
            read.append(_counted(values, mine, forms, visit, known, shared, layout))
        except (BadMessage, ValueError) as error:
            read.append(LeftOut(f"its result is refused: {error}"))
    if start != len(came):
        raise BadMessage("it has more tensors than results")
    return read


def _counted(
    values: Mapping[str, Any], came: Sequence[tuple[str, Tensor]], forms: Sequence[str], visit: Visit, facts: Facts,
    shared: Tensors, layout: Layout | None,
) -> Counted:  # fmt: skip
    factor = float(field(values, "factor", (int, float)))
    if not (math.isfinite(factor) and factor > 0):
        raise BadMessage("its factor is not a number above 0")
    known = Known(shared, visit.weight, factor, row_of(shared, visit), len(shared.get(MEMBERS, ())))
    sums = {name: restored(name, form, sent, known) for (name, sent), form in zip(came, forms, strict=True)}
    if len(sums) < len(came):
        raise BadMessage("a tensor comes twice")
    check_layout(sums, layout, shared)
    if not tensors.finite(sums):
        raise BadMessage("it holds NaN or infinity")
    check_numbers(sums, visit, facts)
    check_secure(sums, known)
    receipt = field(values, "receipt", (str, type(None)))
    if receipt is not None:
        found = TICKET.fullmatch(receipt)
        if not visit.keep or found is None or int(found[1]) != visit.client:
            raise BadMessage("its ticket is not one for this visit")
    return Counted(sums, receipt, bool(values.get("anew", False)))


def check_layout(sums: Sums, layout: Layout | None, shared: Tensors) -> None:
    """Refuse sums of other names or shapes than the job has; without a layout, updates of another model."""
    if layout is not None:
        if list(sums) != list(layout):
            odd = sorted(set(sums) ^ set(layout))
            raise BadMessage(f"its names are not those of the job: {odd[0] if odd else 'their order differs'}")
        wanted = layout
    else:
        wanted = {f"delta/{name}": tuple(value.shape) for name, value in shared.items() if f"delta/{name}" in sums}
    for name, shape in wanted.items():
        if tuple(sums[name].shape) != shape:
            raise BadMessage(f"{name} has the shape {list(sums[name].shape)}, {list(shape)} is wanted")


def check_numbers(sums: Sums, visit: Visit, facts: Facts) -> None:
    """Refuse numbers that cannot be: another weight than was asked for, more examples than the client has."""
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


def check_secure(sums: Sums, known: Known) -> None:
    """Refuse an answer to a secure sum that speaks for another member, or whose words are none."""
    if known.row is None:
        return
    for name, value in sums.items():
        if name.startswith((LOW, HIGH)):
            if not bool(((value >= 0) & (value < 2**32) & (value == value.round())).all()):
                raise BadMessage(f"{name[:60]} is not made of half words")
        elif bool(value[: known.row].any()) or bool(value[known.row + 1 :].any()):
            raise BadMessage(f"{name[:60]} speaks for another member of the secure sum")
    if float(sums[CAME][known.row]) != 1:
        raise BadMessage("it does not say that it came")


def most_bytes(layout: Layout | None, shared: Tensors, visits: int) -> int:
    """What the tensors of a reply may take at most."""
    if layout is None:
        return visits * (16 * sum(value.numel() for value in shared.values()) + 2**26)
    return visits * 8 * sum(int(torch.Size(shape).numel()) for shape in layout.values())


def shown(reason: object) -> str:
    """What a node says, as a log may have it: not long, and without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(reason)[:MAX_REASON])
