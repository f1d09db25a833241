"""Where the classifier is biased: the length of each class's row against how many examples of it there are.

Shapes: C classes, k clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from unskew.analysis.measure import Comparison, Measure, describe_when, find_requested_round, note_sample
from unskew.calibration import is_bound
from unskew.charts import Axis, Cells, Chart, Dots, Line, Mark, grouped
from unskew.core.errors import Missing, UserError
from unskew.core.units import counted
from unskew.runs.finished import FinishedRun


def calibrated_lengths(classifier: dict[str, torch.Tensor]) -> list[float]:
    """[C], of the layer whose rows belong to the classes."""
    return row_lengths(classifier["head.weight" if "head.weight" in classifier else "head.classifier.weight"])


def row_lengths(weight: torch.Tensor) -> list[float]:
    """[C], the lengths of rows without what all rows share: adding one vector to every row changes no prediction.

    Departs from the paper, whose rows are taken as they are: those of a discriminant share a part thousands of times
    as long as the differences between classes.
    """
    rows = weight.cpu().double()
    lengths: list[float] = (rows - rows.mean(0)).norm(dim=1).tolist()
    return lengths


def correlation(counts: Any, norms: Sequence[float]) -> float | None:
    """Pearson's correlation; None where one of them does not vary."""
    counts, lengths = np.asarray(counts, float), np.asarray(norms, float)
    if len(counts) < 3 or counts.std() == 0 or lengths.std() == 0:
        return None
    return float(np.corrcoef(counts, lengths)[0, 1])


def mean_known(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def unevenness(norms: Sequence[float]) -> float:
    """The rows' standard deviation as a share of their mean: 0 where all are alike."""
    mean = fmean(norms)
    return float(np.std(norms)) / mean if mean else 0.0


def sample_rows(counts: Sequence[float], most: int) -> list[int]:
    """At most about ``most`` of the rows, by number: half of them of classes that a client has, evenly chosen."""
    has, lacks = ([at for at, count in enumerate(counts) if bool(count) is held] for held in (True, False))
    first = min(len(has), max(most // 2, most - len(lacks)))
    return sorted([*_evenly(has, first), *_evenly(lacks, most - first)])


def _evenly(places: Sequence[int], most: int) -> Sequence[int]:
    return places[:: max(1, -(-len(places) // max(most, 1)))]


FOLLOWS, HARDLY = 0.5, 0.2  # correlations above which rows follow counts, and hardly follow them
MAX_NAMED_CLASSES = 30  # classes with names on an axis
MAX_CALIBRATIONS = 4  # drawn side by side
MAX_BARS = 100  # classes with a bar each; of more, the rows are sorted by length
MAX_DOTS = 2000  # of a chart of local rows; of more, some clients and classes are shown


@dataclass(frozen=True)
class Norms:
    """Row norms of classifiers: the run's own, calibrated ones, and those of clients in the rounds that are known."""

    classes: list[str]
    total: list[int]  # [C], training examples
    server: list[float]  # [C], the run's own at its end, without what all rows share
    calibrated: dict[str, list[float]]  # [C] each, likewise
    # of each round: "round", "when", "server" [C] or None, "clients" [k], "local" [k][C], means over clients
    rounds: list[dict[str, Any]]
    counts: list[list[int]]  # [K][C] of the clients that occur above, by their number in ``clients``
    clients: list[int]


def take_norms(run: FinishedRun, *, clients: int = 10, round: int = -1, local: bool = True) -> Norms:
    """Row norms before and after calibration, and of local classifiers: as recorded, and in the visit after ``round``.

    −1 is the last round, 0 gives the local models of the first. ``local=false`` needs no data set.

    Reference: Luo et al. 2021, Figure 3.
    """
    held, classes = run.holdings, run.classes
    rows = [_recorded_row(row) for row in run.during if "norms" in row]
    try:
        rows += [_trained_again(run, clients, round)] if local else []
    except Missing as error:
        run.notes.append(f"norms of local classifiers are not shown, except recorded ones: {error}")
    rows = list({row["round"]: row for row in rows}.values())  # recorded and also trained again: counts once
    known = sorted({client for row in rows for client in row["clients"] if client >= 0})
    if reason := _mismatch(known, rows, len(held.sizes), len(classes)):
        raise UserError(f"{run.path / 'during.jsonl'} is damaged: {reason}")
    there = held.cells[np.isin(held.cells[:, 0], known)]
    counts = np.zeros((len(known), len(classes)), np.int64)
    counts[np.searchsorted(known, there[:, 0]), there[:, 1]] = there[:, 2]
    place = {client: row for row, client in enumerate(known)}
    for row in rows:
        row["unevenness"] = mean_known([unevenness(norms) for norms in row["local"]])
        row["correlation"] = mean_known(
            [
                correlation(counts[place[c]], norms)
                for c, norms in zip(row["clients"], row["local"], strict=True)
                if c >= 0
            ]
        )
    if len(run.calibrated) > MAX_CALIBRATIONS:
        run.notes.append(f"the rows of the first {MAX_CALIBRATIONS} of {len(run.calibrated)} calibrations are drawn")
    return Norms(
        classes=classes,
        total=np.bincount(held.cells[:, 1], held.cells[:, 2], len(classes)).astype(int).tolist(),
        server=row_lengths(run.classifier_weight),
        calibrated={name: calibrated_lengths(each) for name, each in run.calibrated.items()},
        rounds=sorted(rows, key=lambda row: int(row["round"])),
        counts=counts.tolist(),
        clients=known,
    )


def _mismatch(clients: list[int], rows: list[dict[str, Any]], population: int, classes: int) -> str:
    """Why the recorded rows cannot belong to this run; "" where they can."""
    if clients and clients[-1] >= population:
        return f"it names client {clients[-1]} of {population}"
    if any(len(norms) != classes for row in rows for norms in row["local"]):
        return f"its norms are not those of {classes} classes"
    return ""


def _trained_again(run: FinishedRun, clients: int, round: int) -> dict[str, Any]:
    number = run.number(round)
    models = run.local_models(number, clients)
    run.notes += note_sample(len(models), len(run.engine.roster.inhabited))
    lengths = [_rows(run, model) for model in models.values()]
    when = describe_when(number, run.result.final_round)
    return {"round": number + 1, "when": when, "asked": True, "server": None, "clients": list(models), "local": lengths}


def _recorded_row(row: dict[str, Any]) -> dict[str, Any]:
    seen = row["norms"]
    when = f"in round {row['round']}"
    return {
        "round": row["round"],
        "when": when,
        "server": seen["server"],
        "clients": seen["clients"],
        "local": seen["local"],
    }


def _rows(run: FinishedRun, model: dict[str, torch.Tensor]) -> list[float]:
    names, head = run.side.classifier, run.algorithm.head
    weight = model[names[0]]
    if head is not None:
        weight, _ = head(weight, model[names[1]] if len(names) > 1 else None)
    lengths: list[float] = weight.cpu().double().norm(dim=1).tolist()
    return lengths


def draw_norms(values: Norms) -> list[Chart]:
    """Rows before and after calibration, local rows against label counts, and how that went by round."""
    charts = [_before_and_after(values)]
    if values.rounds:
        charts += [_scatter(values, row) for row in _ends(values)]
        charts += [_shades(values, find_requested_round(values.rounds))]
    if len(values.rounds) > 1:
        charts.append(_by_round(values))
    return charts


def _ends(values: Norms) -> list[dict[str, Any]]:
    """The first round that is known, and the one that the measure was asked for."""
    if not values.rounds:
        return []
    first, last = values.rounds[0], find_requested_round(values.rounds)
    return [first] if first is last else [first, last]


def _before_and_after(values: Norms) -> Chart:
    groups = {"before": values.server, **dict(list(values.calibrated.items())[:MAX_CALIBRATIONS])}
    relative = {name: [norm / (fmean(norms) or 1.0) for norm in norms] for name, norms in groups.items()}

    def tip(name: str, label: int) -> str:
        return f"{values.classes[label]}, {name}: {groups[name][label]:.3f}, {relative[name][label]:.2f} of the mean"

    words = ", ".join(f"{name} {unevenness(norms):.3f}" for name, norms in groups.items())
    if len(values.classes) > MAX_BARS:
        lines = [Line(list(range(1, len(rows) + 1)), sorted(rows, reverse=True), name, colour % 10)
                 for colour, (name, rows) in enumerate(relative.items())]  # fmt: skip
        return Chart(
            "norms-classes", f"Lengths of the rows of {len(values.classes):,} classes, less what all rows share",
            f"Row norms of the classifier, the longest first; their unevenness is {words}.", lines,
            x=Axis("rank", kind="count"), y=Axis("norm / mean norm", low=0),
        )  # fmt: skip
    ticks = tuple(enumerate(values.classes)) if len(values.classes) <= MAX_NAMED_CLASSES else None
    return Chart(
        "norms-classes", "Length of each class's row, less what all rows share",
        f"Row norms of the classifier by class; their unevenness is {words}.", grouped(relative, tip),
        x=Axis("class", ticks=ticks, kind="count"), y=Axis("norm / mean norm", low=0),
        width=880 if len(values.classes) * len(groups) > 20 else 440,
    )  # fmt: skip


def _scatter(values: Norms, row: dict[str, Any]) -> Chart:
    x, y, colour, tips = list[float](), list[float](), list[int | str](), list[str]()
    for client, norms in zip(row["clients"], row["local"], strict=True):
        if client not in values.clients:
            continue
        counts = values.counts[values.clients.index(client)]
        for label, (count, norm) in enumerate(zip(counts, norms, strict=True)):
            x.append(count)
            y.append(norm)
            colour.append(label % 10)
            tips.append(f"client {client}, {values.classes[label]}: {counted(count, 'example')}, norm {norm:.3f}")
    known = row["correlation"]
    words = "" if known is None else f", correlation {known:.2f}"
    every = len(x)
    if every > MAX_DOTS:
        kept = sample_rows(x, MAX_DOTS)
        x, y, colour, tips = ([each[at] for at in kept] for each in (x, y, colour, tips))  # type: ignore[assignment]
        words += f" ({len(kept):,} of {every:,} rows shown)"
    return Chart(
        f"norms-round-{row['round']}", f"Local rows {row['when']}{words}",
        f"Norms of local classifier rows against the client's examples of that class{words}.",
        [Dots(x, y, colour, radius=3.5, tips=tips)], x=Axis("examples of the class on the client", low=0, kind="count"),
        y=Axis("norm of its row"),
    )  # fmt: skip


def _shades(values: Norms, row: dict[str, Any]) -> Chart:
    table = row["local"]
    low, high = min(map(min, table)), max(map(max, table))
    shown = range(len(values.classes))
    part = ""
    if len(values.classes) > MAX_BARS:
        shown = range(0, len(values.classes), -(-len(values.classes) // MAX_BARS))
        table = [[norms[c] for c in shown] for norms in table]
        part = f", {len(shown)} of {len(values.classes):,} classes"
    tips = [
        [f"client {k}, {values.classes[c]}: {n:.3f}" for c, n in zip(shown, norms, strict=True)]
        for k, norms in zip(row["clients"], table, strict=True)
    ]
    names = tuple((place, str(client)) for place, client in enumerate(row["clients"]))
    ticks = tuple(enumerate(values.classes)) if len(values.classes) <= MAX_NAMED_CLASSES else None
    if part:
        ticks = tuple((place, str(c)) for place, c in enumerate(shown) if not place % 20)
    return Chart(
        "norms-clients", f"Row norms of local classifiers {row['when']}{part}",
        f"Row norms of {len(table)} local classifiers, {low:.2f} to {high:.2f}.",
        [Cells(table, low, high if high > low else low + 1, tips=tips)], x=Axis("class", ticks=ticks),
        y=Axis("client", ticks=names), height=340,
    )  # fmt: skip


def _by_round(values: Norms) -> Chart:
    rounds = [int(row["round"]) for row in values.rounds]
    even = [None if row["server"] is None else unevenness(row["server"]) for row in values.rounds]
    marks: list[Mark] = [
        Line(rounds, [row["correlation"] for row in values.rounds], "correlation", 0, points=True),
        Line(rounds, [row["unevenness"] for row in values.rounds], "local unevenness", 2, points=True),
        Line(rounds, even, "server's unevenness", 1, points=True),
    ]
    return Chart(
        "norms-rounds", "Row norms by round",
        "How far row norms follow label counts, and how uneven they are, by round.", marks,
        x=Axis("round", kind="count"), y=Axis(""),
    )  # fmt: skip


def norms_findings(values: Norms) -> list[str]:
    """Whether norms follow counts, and whether calibration evens them."""
    sentences = []
    ends = [row for row in _ends(values) if row["correlation"] is not None]
    if ends:
        first, last = ends[0], ends[-1]
        known = round(first["correlation"], 2) + 0.0  # no −0.00
        how = "follow" if known > FOLLOWS else "hardly follow" if known > HARDLY else "do not follow"
        then = f", and {round(last['correlation'], 2) + 0.0:.2f} {last['when']}" if last is not first else ""
        sentences.append(
            f"{first['when'].capitalize()} the rows of local classifiers {how} the clients' label counts: mean "
            f"correlation {known:.2f}{then}."
        )
    before = unevenness(values.server)
    if after := {name: unevenness(rows) for name, rows in values.calibrated.items() if not is_bound(name)}:
        evener = sum(each < before for each in after.values())
        shown = ", ".join(f"{each:.1%} after {name}" for name, each in list(after.items())[:MAX_CALIBRATIONS])
        rest = f" and {len(after) - MAX_CALIBRATIONS} more" if len(after) > MAX_CALIBRATIONS else ""
        verb = "evens" if evener == len(after) else "does not even" if not evener else f"{evener} of {len(after)} even"
        which = f"Calibration {verb}" if evener in (0, len(after)) else f"Of the calibrations {verb}"
        sentences.append(
            f"{which} the classifier's rows: their deviation is {before:.1%} of their mean before, {shown}{rest}."
        )
    return sentences


def compare_norms(runs: Mapping[str, Norms]) -> list[Chart]:
    """How uneven the rows of each run are: local, before and after calibration."""
    if not runs:
        return []
    before = [unevenness(values.server) for values in runs.values()]
    usable = [[rows for name, rows in values.calibrated.items() if not is_bound(name)] for values in runs.values()]
    after = [min(map(unevenness, rows), default=None) for rows in usable]
    local = [values.rounds[-1]["unevenness"] if values.rounds else None for values in runs.values()]
    marks = grouped({"local classifiers": local, "before calibration": before, "after calibration": after})
    alt = "Deviation of the classifier's row norms, before and after calibration."
    return [Chart("compare-norms", "Deviation of row norms / their mean", alt, marks,
                  x=Axis("", ticks=tuple(enumerate(runs))), y=Axis("", low=0, kind="percent"), width=640,
                  height=340)]  # fmt: skip


NORMS = Measure(
    name="norms",
    values=Norms,
    take=take_norms,
    draw=draw_norms,
    findings=norms_findings,
    title="Where the bias is: the classifier's rows",
    text=(
        "Each class has a row in the classifier; the longer it is, the more readily the class is predicted. Local rows "
        "that grow with a client's label counts are a sign of bias. What all rows share changes no prediction and is "
        "left out before and after calibration. The last point by round is one more visit, after the last round."
    ),
    compare=Comparison(
        title="Evenness of the classifier's rows",
        text="How unequal the lengths of the classes' rows in the classifier are, before calibration and after.",
        draw=compare_norms,
    ),
    calibrations=True,
    folder_only="norms(local=false)",
    headline=5,
)
