"""What is taken for what, and each class's accuracy: with the run's own classifier and after each calibration."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.analysis.phrases import bound
from unskew.charts import Axis, Cells, Chart
from unskew.charts.groups import grouped
from unskew.core.errors import UserError
from unskew.runs.study import FinishedRun

MOST = 100  # classes whose table of confusions can be read
MATTERS = 0.005  # a change of accuracy that is spoken of


@dataclass(frozen=True)
class Confusion:
    """Tables of true class × predicted class, by classifier: "before" is the run's own."""

    classes: list[str]
    total: list[int]  # [C], test images of each class
    tables: dict[str, list[list[int]]]  # [C][C]


def measure(subject: FinishedRun, *, calibrations: int = 6) -> Confusion:
    """How the test images of each class are classified, before and after; at most so many calibrations, the best."""
    outputs, classes = subject.outputs, subject.classes
    chosen = best(subject, calibrations)
    tables = {
        name or "before": _table(outputs.labels, outputs.predicted[name], len(classes)).tolist() for name in chosen
    }
    total = torch.bincount(outputs.labels, minlength=len(classes))
    return Confusion(classes, total.tolist(), tables)


def best(subject: FinishedRun, most: int) -> list[str]:
    """The run's own classifier, "", and the best of its calibrations, in the order in which they were made."""
    if most < 0:
        raise UserError("give 0 or more calibrations")
    found = {name: each for name, each in subject.result.calibrations.items() if name in subject.calibrated}
    ranked = sorted(found, key=lambda name: -found[name].accuracy)
    if len(ranked) > most > 0:
        subject.notes.append(f"{most} of {len(ranked)} calibrations are shown, those with the best accuracy")
    return ["", *(name for name in found if name in ranked[:most])]


def _table(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels * classes + predicted, minlength=classes * classes).view(classes, classes)


def accuracy(found: Confusion, name: str) -> list[float | None]:
    """[C], the share of each class's images that are got right; None where there are none."""
    table = found.tables[name]
    return [table[c][c] / n if n else None for c, n in enumerate(found.total)]


def draw(found: Confusion) -> list[Chart]:
    """Each class's accuracy by classifier, and the tables."""
    return [by_class(found), *tables(found).values()]


def by_class(found: Confusion) -> Chart:
    """Accuracy of each class, a group of bars."""
    groups = {name: accuracy(found, name) for name in found.tables}

    def tip(name: str, label: int) -> str:
        share = groups[name][label]
        return f"{found.classes[label]}, {name}: {'none' if share is None else f'{share:.1%}'}"

    low = min((r for r in accuracy(found, "before") if r is not None), default=0.0)
    return Chart(
        "confusion-classes", "Accuracy of each class",
        f"Accuracy by class; the lowest before calibration is {low:.0%}.", grouped(groups, tip),
        x=Axis("class", ticks=_ticks(found), kind="count"), y=Axis("", low=0, high=1, kind="percent"),
        width=_width(found), height=320,
    )  # fmt: skip


def tables(found: Confusion) -> dict[str, Chart]:
    """By classifier, the table of true × predicted classes; none where there are too many classes to read."""
    if len(found.classes) > MOST:
        return {}
    charts = {}
    ticks = _ticks(found)
    for name, table in found.tables.items():
        shares = [[n / max(total, 1) or None for n in row] for row, total in zip(table, found.total, strict=True)]
        tips = [
            [f"{true} taken for {said}: {n:,} of {total:,}" for said, n in zip(found.classes, row, strict=True)]
            for true, row, total in zip(found.classes, table, found.total, strict=True)
        ]
        right = sum(table[c][c] for c in range(len(table))) / max(sum(found.total), 1)
        charts[name] = Chart(
            f"confusion-{name}", f"True and predicted classes, {name}: {right:.2%} right",
            f"Confusion table {name}; {right:.2%} of the images lie on its diagonal.",
            [Cells(shares, 0, 1, numbers=".0%" if len(table) <= 12 else "", tips=tips)],
            x=Axis("predicted", ticks=ticks), y=Axis("true", ticks=ticks), width=480, height=460, square=True,
        )  # fmt: skip
    return charts


def each_class(found: Confusion) -> dict[str, Chart]:
    """By true class, what its images are taken for by each classifier."""
    charts = {}
    for label, true in enumerate(found.classes[:MOST]):
        total = max(found.total[label], 1)
        groups = {name: [n / total for n in table[label]] for name, table in found.tables.items()}
        tips = {
            name: [f"{true} taken for {c}, {name}: {s:.1%}" for c, s in zip(found.classes, share, strict=True)]
            for name, share in groups.items()
        }
        charts[true] = Chart(
            f"confusion-class-{label}", f"What images of {true} are taken for",
            f"Predictions for the {found.total[label]:,} test images of {true}.",
            grouped(groups, lambda name, at, tips=tips: tips[name][at]),  # type: ignore[misc]
            x=Axis("predicted", ticks=_ticks(found), kind="count"), y=Axis("", low=0, high=1, kind="percent"),
            width=_width(found), height=320,
        )  # fmt: skip
    return charts


def _ticks(found: Confusion) -> tuple[tuple[float, str], ...] | None:
    return tuple(enumerate(found.classes)) if len(found.classes) <= 30 else None


def _width(found: Confusion) -> int:
    return 880 if len(found.classes) * len(found.tables) > 20 else 440


def overall(found: Confusion, name: str) -> float:
    """The share of all test images that are got right."""
    return sum(found.tables[name][c][c] for c in range(len(found.classes))) / max(sum(found.total), 1)


def findings(found: Confusion) -> list[str]:
    """The class that fared worst, and what the best calibration made of it."""
    before = accuracy(found, "before")
    known = [c for c, share in enumerate(before) if share is not None]
    worst, finest = min(known, key=lambda c: before[c] or 0.0), max(known, key=lambda c: before[c] or 0.0)
    said = []
    names = [name for name in found.tables if name != "before" and not bound(name)]
    if names:
        name = max(names, key=lambda each: overall(found, each))
        after = accuracy(found, name)
        gain = overall(found, name) - overall(found, "before")
        moved = "raises" if gain > MATTERS else "lowers" if gain < -MATTERS else "hardly changes"
        risen = [c for c in known if (after[c] or 0.0) > (before[c] or 0.0)]
        low = min(known, key=lambda c: after[c] or 0.0)
        limits = [overall(found, each) for each in found.tables if bound(each)]
        limit = f"; re-training on real features, which nobody may pool, gives {max(limits):.2%}" if limits else ""
        among = f", the best of {len(names)} on the test images," if len(names) > 1 else ""
        said.append(
            f"Calibration by {name}{among} {moved} accuracy, {overall(found, 'before'):.2%} to "
            f"{overall(found, name):.2%}: {len(risen)} of {len(known)} classes gain; the worst class has "
            f"{before[worst]:.0%} before ({found.classes[worst]}) and {after[low]:.0%} after "
            f"({found.classes[low]}){limit}."
        )
    words = f"With the run's own classifier classes fare from {before[worst]:.0%} ({found.classes[worst]}) to "
    return [*said, f"{words}{before[finest]:.0%} ({found.classes[finest]})."]
