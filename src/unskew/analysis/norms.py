"""Where the classifier is biased: the length of each class's row against how many examples of it there are.

Shapes: C classes, k clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from unskew.analysis.phrases import after, asked, bound
from unskew.charts import Axis, Cells, Chart, Dots, Line, Mark
from unskew.charts.groups import grouped
from unskew.core.errors import UserError
from unskew.runs.study import FinishedRun, Missing

EARLY, FAINT = 0.5, 0.2  # correlations above which rows are said to follow counts, and to hardly follow them
FEW = 30  # classes with names on an axis
SHOWN = 4  # calibrations drawn side by side


@dataclass(frozen=True)
class Norms:
    """Row norms of classifiers: the run's own, calibrated ones, and those of clients in the rounds that are known."""

    classes: list[str]
    total: list[int]  # [C], training examples
    server: list[float]  # [C], the run's own at its end, without what all rows share
    calibrated: dict[str, list[float]]  # [C] each, likewise
    rounds: list[
        dict[str, Any]
    ]  # "round", "when", "server" [C] or None, "clients" [k], "local" [k][C], means over clients
    counts: list[list[int]]  # [K][C] of the clients that occur above, by their number in ``clients``
    clients: list[int]


def measure(subject: FinishedRun, *, clients: int = 10, round: int = -1, local: bool = True) -> Norms:
    """Row norms before and after calibration, and of local classifiers: as recorded, and in the visit after ``round``.

    −1 is the last round, 0 gives the local models of the very first. ``local=false`` needs no data set.

    Reference: Luo et al. 2021, Figure 3.
    """
    held, classes = subject.holdings, subject.classes
    found = [_known(row) for row in subject.during if "norms" in row]
    try:
        found += [_at_the_end(subject, clients, round)] if local else []
    except Missing as error:
        subject.notes.append(f"norms of local classifiers are not shown, except recorded ones: {error}")
    found = list({row["round"]: row for row in found}.values())  # a round that was recorded and made again stands once
    known = sorted({client for row in found for client in row["clients"] if client >= 0})
    if odd := _wrong(known, found, len(held.sizes), len(classes)):
        raise UserError(f"{subject.path / 'during.jsonl'} is damaged: {odd}")
    there = held.cells[np.isin(held.cells[:, 0], known)]
    counts = np.zeros((len(known), len(classes)), np.int64)
    counts[np.searchsorted(known, there[:, 0]), there[:, 1]] = there[:, 2]
    place = {client: row for row, client in enumerate(known)}
    for row in found:
        row["unevenness"] = _mean([unevenness(norms) for norms in row["local"]])
        row["correlation"] = _mean(
            [
                _correlation(counts[place[c]], norms)
                for c, norms in zip(row["clients"], row["local"], strict=True)
                if c >= 0
            ]
        )
    if len(subject.calibrated) > SHOWN:
        subject.notes.append(f"the rows of the first {SHOWN} of {len(subject.calibrated)} calibrations are drawn")
    return Norms(
        classes=classes,
        total=np.bincount(held.cells[:, 1], held.cells[:, 2], len(classes)).astype(int).tolist(),
        server=own_lengths(subject.classifier_weight),
        calibrated={name: _last_rows(values) for name, values in subject.calibrated.items()},
        rounds=sorted(found, key=lambda row: int(row["round"])),
        counts=counts.tolist(),
        clients=known,
    )


def _wrong(clients: list[int], rows: list[dict[str, Any]], population: int, classes: int) -> str:
    """What cannot be of this run in what was recorded."""
    if clients and clients[-1] >= population:
        return f"it speaks of client {clients[-1]}, and there are {population}"
    if any(len(norms) != classes for row in rows for norms in row["local"]):
        return f"it has norms of other than {classes} classes"
    return ""


def _at_the_end(subject: FinishedRun, clients: int, round: int) -> dict[str, Any]:
    number = subject.number(round)
    models = subject.local_models(number, clients)
    rows = [_rows(subject, model) for model in models.values()]
    when = after(number, subject.config.rounds)
    return {"round": number + 1, "when": when, "asked": True, "server": None, "clients": list(models), "local": rows}


def _known(row: dict[str, Any]) -> dict[str, Any]:
    seen = row["norms"]
    when = f"in round {row['round']}"
    return {
        "round": row["round"],
        "when": when,
        "server": seen["server"],
        "clients": seen["clients"],
        "local": seen["local"],
    }


def _rows(subject: FinishedRun, model: dict[str, torch.Tensor]) -> list[float]:
    names, head = subject.side.classifier, subject.algorithm.head
    weight = model[names[0]]
    if head is not None:
        weight, _ = head(weight, model[names[1]] if len(names) > 1 else None)
    lengths: list[float] = weight.double().norm(dim=1).tolist()
    return lengths


def _last_rows(values: dict[str, torch.Tensor]) -> list[float]:
    """[C], of the layer whose rows belong to the classes."""
    return own_lengths(values["head.weight" if "head.weight" in values else "head.classifier.weight"])


def own_lengths(weight: torch.Tensor) -> list[float]:
    """[C], the lengths of rows without what all rows share: adding one vector to every row changes no prediction.

    Departs from the paper, whose rows are taken as they are: those of a discriminant share a part thousands of times
    as long as what tells the classes apart.
    """
    rows = weight.double()
    lengths: list[float] = (rows - rows.mean(0)).norm(dim=1).tolist()
    return lengths


def _correlation(counts: Any, norms: Sequence[float]) -> float | None:
    """Pearson's; None where one of them does not vary."""
    counts, lengths = np.asarray(counts, float), np.asarray(norms, float)
    if len(counts) < 3 or counts.std() == 0 or lengths.std() == 0:
        return None
    return float(np.corrcoef(counts, lengths)[0, 1])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def unevenness(norms: Sequence[float]) -> float:
    """The rows' standard deviation as a share of their mean: 0 where all are alike."""
    mean = fmean(norms)
    return float(np.std(norms)) / mean if mean else 0.0


def draw(found: Norms) -> list[Chart]:
    """Rows before and after calibration, local rows against label counts, and how that went by round."""
    charts = [_before_and_after(found)]
    if found.rounds:
        charts += [_scatter(found, row) for row in _ends(found)]
        charts += [_shades(found, asked(found.rounds))]
    if len(found.rounds) > 1:
        charts.append(_by_round(found))
    return charts


def _ends(found: Norms) -> list[dict[str, Any]]:
    """The first round that is known, and the one that was asked for."""
    if not found.rounds:
        return []
    first, last = found.rounds[0], asked(found.rounds)
    return [first] if first is last else [first, last]


def _before_and_after(found: Norms) -> Chart:
    groups = {"before": found.server, **dict(list(found.calibrated.items())[:SHOWN])}
    relative = {name: [norm / (fmean(norms) or 1.0) for norm in norms] for name, norms in groups.items()}

    def tip(name: str, label: int) -> str:
        return f"{found.classes[label]}, {name}: {groups[name][label]:.3f}, {relative[name][label]:.2f} of the mean"

    ticks = tuple(enumerate(found.classes)) if len(found.classes) <= FEW else None
    said = ", ".join(f"{name} {unevenness(norms):.3f}" for name, norms in groups.items())
    return Chart(
        "norms-classes", "Length of each class's row, less what all rows share",
        f"Row norms of the classifier by class; their unevenness is {said}.", grouped(relative, tip),
        x=Axis("class", ticks=ticks, kind="count"), y=Axis("norm / mean norm", low=0),
        width=880 if len(found.classes) * len(groups) > 20 else 440,
    )  # fmt: skip


def _scatter(found: Norms, row: dict[str, Any]) -> Chart:
    x, y, colour, tips = list[float](), list[float](), list[int | str](), list[str]()
    for client, norms in zip(row["clients"], row["local"], strict=True):
        if client not in found.clients:
            continue
        counts = found.counts[found.clients.index(client)]
        for label, (count, norm) in enumerate(zip(counts, norms, strict=True)):
            x.append(count)
            y.append(norm)
            colour.append(label % 10)
            tips.append(f"client {client}, {found.classes[label]}: {count:,} examples, norm {norm:.3f}")
    known = row["correlation"]
    said = "" if known is None else f", correlation {known:.2f}"
    return Chart(
        f"norms-round-{row['round']}", f"Local rows {row['when']}{said}",
        f"Norms of local classifier rows against the client's examples of that class{said}.",
        [Dots(x, y, colour, radius=3.5, tips=tips)], x=Axis("examples of the class on the client", low=0, kind="count"),
        y=Axis("norm of its row"),
    )  # fmt: skip


def _shades(found: Norms, row: dict[str, Any]) -> Chart:
    table = row["local"]
    low, high = min(map(min, table)), max(map(max, table))
    tips = [
        [f"client {k}, {c}: {n:.3f}" for c, n in zip(found.classes, norms, strict=True)]
        for k, norms in zip(row["clients"], table, strict=True)
    ]
    names = tuple((place, str(client)) for place, client in enumerate(row["clients"]))
    ticks = tuple(enumerate(found.classes)) if len(found.classes) <= FEW else None
    return Chart(
        "norms-clients", f"Row norms of local classifiers {row['when']}",
        f"Row norms of {len(table)} local classifiers, {low:.2f} to {high:.2f}.",
        [Cells(table, low, high if high > low else low + 1, tips=tips)], x=Axis("class", ticks=ticks),
        y=Axis("client", ticks=names), height=340,
    )  # fmt: skip


def _by_round(found: Norms) -> Chart:
    rounds = [int(row["round"]) for row in found.rounds]
    even = [None if row["server"] is None else unevenness(row["server"]) for row in found.rounds]
    marks: list[Mark] = [
        Line(
            rounds,
            [row["correlation"] for row in found.rounds],
            "correlation",
            0,
            points=True,
        ),
        Line(rounds, [row["unevenness"] for row in found.rounds], "local unevenness", 2, points=True),
        Line(rounds, even, "server's unevenness", 1, points=True),
    ]
    return Chart(
        "norms-rounds", "Row norms by round",
        "How far row norms follow label counts, and how uneven they are, by round.", marks,
        x=Axis("round", kind="count"), y=Axis(""),
    )  # fmt: skip


def findings(found: Norms) -> list[str]:
    """Whether norms follow counts, and whether calibration evens them."""
    said = []
    ends = [row for row in _ends(found) if row["correlation"] is not None]
    if ends:
        first, last = ends[0], ends[-1]
        known = round(first["correlation"], 2) + 0.0  # no −0.00
        how = "follow" if known > EARLY else "hardly follow" if known > FAINT else "do not follow"
        then = f", and {round(last['correlation'], 2) + 0.0:.2f} {last['when']}" if last is not first else ""
        said.append(
            f"{first['when'].capitalize()} the rows of local classifiers {how} the clients' label counts: mean "
            f"correlation {known:.2f}{then}."
        )
    before = unevenness(found.server)
    if usable := [name for name in found.calibrated if not bound(name)]:
        name = min(usable, key=lambda each: unevenness(found.calibrated[each]))
        after = unevenness(found.calibrated[name])
        verb = "evens" if after < before else "does not even"
        said.append(
            f"Calibration {verb} the classifier's rows: their deviation is {before:.1%} of their mean before, "
            f"{after:.1%} after {name}."
        )
    return said
