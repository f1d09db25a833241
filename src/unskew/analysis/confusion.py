"""What is taken for what, and each class's accuracy: with the run's own classifier and after each calibration."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unskew.analysis.measure import (
    CellValue,
    Choice,
    Column,
    Comparison,
    Element,
    Measure,
    Table,
    pick_calibrations,
    tabulate_calibrations,
)
from unskew.calibration import is_bound
from unskew.charts import Axis, Cells, Chart, grouped, shares_in_bins
from unskew.runs.finished import FinishedRun

MAX_TABLE_CLASSES = 100  # a larger table of confusions cannot be read
MAX_COMPARED_CLASSES, MAX_COMPARED_RUNS = 30, 10  # in one chart
BINS = 20  # of the accuracy of classes, where there are too many for a bar each
MAX_PAIRS = 10  # of confused classes, where there are too many for a table
MATTERS = 0.005  # smaller changes of accuracy are called none


@dataclass(frozen=True)
class Confusion:
    """Tables of true class × predicted class, by classifier: "before" is the run's own."""

    classes: list[str]
    total: list[int]  # [C], test images of each class
    tables: dict[str, list[list[int]]]  # [C][C]; empty where there are too many classes for a table
    tried: int = 0  # calibrations that the run has, shown or not, without bounds; 0: those that are shown
    right: dict[str, list[int]] = field(default_factory=dict)  # [C], instead of the tables
    pairs: dict[str, list[list[int]]] = field(default_factory=dict)  # true, predicted, images: the most confused


def take_confusion(run: FinishedRun, *, calibrations: int = 6) -> Confusion:
    """How the test images of each class are classified, before and after; at most ``calibrations`` of them."""
    outputs, classes = run.outputs, run.classes
    chosen = pick_calibrations(run, calibrations)
    total = torch.bincount(outputs.labels, minlength=len(classes)).tolist()
    tried = sum(not is_bound(name) for name in run.result.calibrations)
    if len(classes) > MAX_TABLE_CLASSES:
        seen = {name or "before": outputs.predicted[name] for name in chosen}
        right = {name: _right(outputs.labels, each, len(classes)) for name, each in seen.items()}
        pairs = {name: _confused(outputs.labels, each, len(classes)) for name, each in seen.items()}
        return Confusion(classes, total, {}, tried, right, pairs)
    tables = {
        name or "before": _table(outputs.labels, outputs.predicted[name], len(classes)).tolist() for name in chosen
    }
    return Confusion(classes, total, tables, tried)


def _right(labels: Tensor, predicted: Tensor, classes: int) -> list[int]:
    right: list[int] = torch.bincount(labels[labels == predicted], minlength=classes).tolist()
    return right


def _confused(labels: Tensor, predicted: Tensor, classes: int) -> list[list[int]]:
    """The pairs of true and predicted class with the most images, at most MAX_PAIRS; equal ones by number."""
    wrong = labels != predicted
    codes, counts = torch.unique(labels[wrong] * classes + predicted[wrong], return_counts=True)
    order = torch.argsort(counts, descending=True, stable=True)[:MAX_PAIRS]
    return [[code // classes, code % classes, count] for code, count in torch.stack([codes, counts], 1)[order].tolist()]


def _table(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels * classes + predicted, minlength=classes * classes).view(classes, classes)


def accuracy(values: Confusion, name: str) -> list[float | None]:
    """[C], the share of each class's images that are classified correctly; None where there are none."""
    right = right_by_class(values, name)
    return [right[c] / n if n else None for c, n in enumerate(values.total)]


def right_by_class(values: Confusion, name: str) -> list[int]:
    """[C], how many images of each class are classified correctly."""
    return values.right[name] if name in values.right else [row[c] for c, row in enumerate(values.tables[name])]


def classifiers(values: Confusion) -> list[str]:
    """ "before", and the calibrations."""
    return list(values.right or values.tables)


def draw_confusion(values: Confusion) -> list[Chart]:
    """Each class's accuracy by classifier, and the tables."""
    return [by_class(values), *tables(values).values()]


def by_class(values: Confusion) -> Chart:
    """Accuracy of each class, a group of bars; of many classes, how many have which accuracy."""
    groups = {name: accuracy(values, name) for name in classifiers(values)}
    if len(values.classes) > MAX_TABLE_CLASSES:
        bins = {
            name: [sum(share is not None and min(int(share * BINS), BINS - 1) == place for share in each)
                   for place in range(BINS)]
            for name, each in groups.items()
        }  # fmt: skip
        alt = f"{len(values.classes):,} classes by accuracy, before calibration and after."
        title = f"How many of {len(values.classes):,} classes have which accuracy"
        return shares_in_bins("confusion-classes", title, alt, bins, "class", "classes")

    def tip(name: str, label: int) -> str:
        share = groups[name][label]
        return f"{values.classes[label]}, {name}: {'none' if share is None else f'{share:.1%}'}"

    low = min((r for r in accuracy(values, "before") if r is not None), default=0.0)
    return Chart(
        "confusion-classes", "Accuracy of each class",
        f"Accuracy by class; the lowest before calibration is {low:.0%}.", grouped(groups, tip),
        x=Axis("class", ticks=_ticks(values), kind="count"), y=Axis("", low=0, high=1, kind="percent"),
        width=_width(values), height=320,
    )  # fmt: skip


def tables(values: Confusion) -> dict[str, Chart]:
    """By classifier, the table of true × predicted classes; none where there are too many classes to read."""
    if len(values.classes) > MAX_TABLE_CLASSES:
        return {}
    charts = {}
    ticks = _ticks(values)
    for name, table in values.tables.items():
        shares = [[n / max(total, 1) or None for n in row] for row, total in zip(table, values.total, strict=True)]
        tips = [
            [f"{true} taken for {label}: {n:,} of {total:,}" for label, n in zip(values.classes, row, strict=True)]
            for true, row, total in zip(values.classes, table, values.total, strict=True)
        ]
        right = sum(table[c][c] for c in range(len(table))) / max(sum(values.total), 1)
        charts[name] = Chart(
            f"confusion-{name}", f"True and predicted classes, {name}: {right:.2%} right",
            f"Confusion table {name}; {right:.2%} of the images are on its diagonal.",
            [Cells(shares, 0, 1, numbers=".0%" if len(table) <= 12 else "", tips=tips)],
            x=Axis("predicted", ticks=ticks), y=Axis("true", ticks=ticks), width=480, height=460, square=True,
        )  # fmt: skip
    return charts


def draw_classes(values: Confusion) -> dict[str, Chart]:
    """By true class, what its images are taken for by each classifier."""
    charts = {}
    for label, true in enumerate(values.classes[:MAX_TABLE_CLASSES]):
        total = max(values.total[label], 1)
        groups = {name: [n / total for n in table[label]] for name, table in values.tables.items()}
        tips = {
            name: [f"{true} taken for {c}, {name}: {s:.1%}" for c, s in zip(values.classes, share, strict=True)]
            for name, share in groups.items()
        }
        charts[true] = Chart(
            f"confusion-class-{label}", f"What images of {true} are taken for",
            f"Predictions for the {values.total[label]:,} test images of {true}.",
            grouped(groups, lambda name, at, tips=tips: tips[name][at]),  # type: ignore[misc]
            x=Axis("predicted", ticks=_ticks(values), kind="count"), y=Axis("", low=0, high=1, kind="percent"),
            width=_width(values), height=320,
        )  # fmt: skip
    return charts


def _ticks(values: Confusion) -> tuple[tuple[float, str], ...] | None:
    return tuple(enumerate(values.classes)) if len(values.classes) <= 30 else None


def _width(values: Confusion) -> int:
    return 880 if len(values.classes) * len(values.tables) > 20 else 440


def overall(values: Confusion, name: str) -> float:
    """The share of all test images that are classified correctly."""
    return sum(right_by_class(values, name)) / max(sum(values.total), 1)


def confusion_findings(values: Confusion) -> list[str]:
    """What the best calibration changed, and the worst class before and after it."""
    before = accuracy(values, "before")
    known = [c for c, share in enumerate(before) if share is not None]
    worst, finest = min(known, key=lambda c: before[c] or 0.0), max(known, key=lambda c: before[c] or 0.0)
    sentences = []
    names = [name for name in classifiers(values) if name != "before" and not is_bound(name)]
    if names:
        name = max(names, key=lambda each: overall(values, each))
        after = accuracy(values, name)
        gain = overall(values, name) - overall(values, "before")
        moved = "raises" if gain > MATTERS else "lowers" if gain < -MATTERS else "hardly changes"
        risen = [c for c in known if (after[c] or 0.0) > (before[c] or 0.0)]
        low = min(known, key=lambda c: after[c] or 0.0)
        limits = [overall(values, each) for each in classifiers(values) if is_bound(each)]
        limit = f"; re-training on real features, which must not be pooled, gives {max(limits):.2%}" if limits else ""
        tried = max(values.tried, len(names))
        among = f", the best of {tried} on the test images," if tried > 1 else ""
        sentences.append(
            f"Calibration by {name}{among} {moved} accuracy, {overall(values, 'before'):.2%} to "
            f"{overall(values, name):.2%}: {len(risen):,} of {len(known):,} classes gain; the worst class has "
            f"{before[worst]:.0%} before ({values.classes[worst]}) and {after[low]:.0%} after "
            f"({values.classes[low]}){limit}."
        )
    bottom, top = (f"{before[label]:.0%} ({values.classes[label]})" for label in (worst, finest))
    return [*sentences, f"With the run's own classifier the accuracy of a class is between {bottom} and {top}."]


def show_confusion(run: FinishedRun, values: Confusion) -> list[Element]:
    """The calibrations of the run, each class's accuracy, the tables, and one class at a time."""
    charts = tables(values)
    before = [charts.pop("before")] if charts else []
    choices = [Choice("classifier", charts)] if charts else []
    if values.tables and len(values.classes) <= MAX_TABLE_CLASSES:
        choices.append(Choice("class", draw_classes(values)))
    return [*tabulate_calibrations(run), by_class(values), *before, *choices, *_pairs_table(values)]


def _pairs_table(values: Confusion) -> list[Table]:
    """The most confused pairs of each classifier, where there are too many classes for the whole table."""
    if not any(values.pairs.values()):
        return []
    rows: list[list[CellValue]] = [
        [name, values.classes[true], values.classes[taken], count, count / max(values.total[true], 1)]
        for name, pairs in values.pairs.items() for true, taken, count in pairs
    ]  # fmt: skip
    columns = [Column("classifier"), Column("true class"), Column("taken for"), Column("images", "count"),
               Column("of its class", "percent")]  # fmt: skip
    note = (
        f"At most {MAX_PAIRS} pairs of each classifier; a table of {len(values.classes):,} classes could not be read."
    )
    return [Table("Most confused pairs", columns, rows, note)]


def _comparable(runs: Mapping[str, Confusion]) -> dict[str, Confusion]:
    """The runs that fit in one chart: those with the classes of the first, if they are few enough."""
    few = {name: values for name, values in runs.items() if len(values.classes) <= MAX_COMPARED_CLASSES}
    classes = next((values.classes for values in few.values()), [])
    alike = [(name, values) for name, values in few.items() if values.classes == classes]
    return dict(alike[:MAX_COMPARED_RUNS])


def compare_confusion(runs: Mapping[str, Confusion]) -> list[Chart]:
    """Accuracy of each class before calibration, a bar for each run."""
    shown = _comparable(runs)
    if not shown:
        return []
    classes = next(iter(shown.values())).classes
    groups = {name: accuracy(values, "before") for name, values in shown.items()}

    def tip(name: str, label: int) -> str:
        share = groups[name][label]
        return f"{classes[label]}, {name}: {'none' if share is None else f'{share:.1%}'}"

    return [Chart("compare-classes", "Accuracy of each class, before calibration", "Accuracy by class and run.",
                  grouped(groups, tip), x=Axis("class", ticks=tuple(enumerate(classes))),
                  y=Axis("", low=0, high=1, kind="percent"), width=880, height=340)]  # fmt: skip


def runs_left_out(runs: Mapping[str, Confusion]) -> list[str]:
    """The runs that are not in the chart, and why."""
    shown = _comparable(runs)
    names = [name for name in runs if name not in shown]
    why = f"other classes, or more than {MAX_COMPARED_RUNS} runs or {MAX_COMPARED_CLASSES} classes"
    return [f"{', '.join(names)}: {why}"] if names else []


CONFUSION = Measure(
    name="confusion",
    values=Confusion,
    take=take_confusion,
    draw=draw_confusion,
    findings=confusion_findings,
    show=show_confusion,
    title="What calibration changed",
    text="How the test images of each class are classified, with the run's own classifier and after calibration.",
    compare=Comparison(
        title="Accuracy of each class",
        text="Accuracy of each class with the run's own classifier.",
        draw=compare_confusion,
        left_out=runs_left_out,
    ),
    calibrations=True,
    headline=2,
)
