"""Which classes are confused, and each class's accuracy, before and after each calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unskew.analysis.measure import CellValue, Choice, Comparison, Element, Measure, pick_calibrations, tabulate
from unskew.calibration import is_bound
from unskew.charts import Axis, Chart
from unskew.charts.builders import axis_of, grouped, heat_map, sorted_chart
from unskew.runs.finished import FinishedRun

MAX_TABLE_CLASSES = 100  # a larger confusion table cannot be read
MAX_COMPARED_CLASSES, MAX_COMPARED_RUNS = 30, 10  # in one chart
MAX_PAIRS = 10  # of confused classes, if there are too many for a table
MATTERS = 0.005  # smaller changes of accuracy are ignored


@dataclass(frozen=True)
class Confusion:
    """Tables of true class × predicted class, by classifier: "before" is the run's own."""

    classes: list[str]
    total: list[int]  # [C], test images of each class
    tables: dict[str, list[list[int]]]  # [C][C]; empty if there are too many classes for a table
    tried: int = 0  # calibrations of the run without upper bounds, shown or not; 0: as many as are shown
    right: dict[str, list[int]] = field(default_factory=dict)  # [C], instead of the tables
    pairs: dict[str, list[list[int]]] = field(default_factory=dict)  # the most confused: true, predicted, images

    @property
    def right_by_class(self) -> dict[str, list[int]]:
        """[C] by classifier, how many images of each class are classified correctly."""
        return self.right or {name: [row[c] for c, row in enumerate(table)] for name, table in self.tables.items()}

    def accuracy(self, name: str) -> list[float | None]:
        """[C], the share of each class's images that are classified correctly; None without images."""
        return [right / n if n else None for right, n in zip(self.right_by_class[name], self.total, strict=True)]

    def overall(self, name: str) -> float:
        """The share of all test images that are classified correctly."""
        return sum(self.right_by_class[name]) / max(sum(self.total), 1)


def take_confusion(run: FinishedRun, *, calibrations: int = 6) -> Confusion:
    """How the test images of each class are classified, before and after at most ``calibrations`` calibrations."""
    labels, classes, count = run.outputs.labels, run.classes, len(run.classes)
    total = torch.bincount(labels, minlength=count).tolist()
    tried = sum(not is_bound(name) for name in run.result.calibrations)
    predictions = {name or "before": run.outputs.predicted[name] for name in pick_calibrations(run, calibrations)}
    if count <= MAX_TABLE_CLASSES:
        codes = {name: labels * count + predicted for name, predicted in predictions.items()}
        tables = {name: torch.bincount(c, minlength=count**2).view(count, count).tolist() for name, c in codes.items()}
        return Confusion(classes, total, tables, tried)
    right, pairs = {}, {}
    for name, predicted in predictions.items():
        wrong = labels != predicted
        right[name] = torch.bincount(labels[~wrong], minlength=count).tolist()
        codes, images = torch.unique(labels[wrong] * count + predicted[wrong], return_counts=True)
        most = torch.argsort(images, descending=True, stable=True)[:MAX_PAIRS]
        pairs[name] = torch.stack([codes // count, codes % count, images], 1)[most].tolist()
    return Confusion(classes, total, {}, tried, right, pairs)


def _draw_by_class(values: Confusion) -> Chart:
    groups = {name: values.accuracy(name) for name in values.right_by_class}
    if (count := len(values.classes)) > MAX_TABLE_CLASSES:
        known = {name: sorted(share for share in shares if share is not None) for name, shares in groups.items()}
        alt = f"{count:,} classes sorted by accuracy, before calibration and after."
        y = Axis("at most this accuracy", low=0, high=1, kind="percent")
        return sorted_chart("confusion-classes", "Classes sorted by accuracy", alt, known, f"{count:,} classes", y)
    low = min((share for share in groups["before"] if share is not None), default=0.0)
    alt = f"Accuracy by class; the lowest before calibration is {low:.0%}."
    return _draw_shares("confusion-classes", "Accuracy of each class", alt, groups, values.classes)


def _draw_shares(
    name: str, title: str, alt: str, groups: Mapping[str, Sequence[float | None]], classes: Sequence[str],
    label: str = "class",
) -> Chart:  # fmt: skip
    """A bar for each class and name."""

    def tip(name: str, at: int) -> str:
        share = groups[name][at]
        return f"{classes[at]}, {name}: {'none' if share is None else f'{share:.1%}'}"

    x, y = axis_of(label, classes, most=30), Axis("", low=0, high=1, kind="percent")
    return Chart(name, title, alt, grouped(groups, tip), x, y, 880 if len(classes) * len(groups) > 20 else 440, 320)


def _draw_tables(values: Confusion) -> dict[str, Chart]:
    charts, classes = {}, values.classes
    x, y = axis_of("predicted", classes, most=30), axis_of("true", classes, most=30)
    look: dict[str, Any] = {"numbers": ".0%", "width": 480, "height": 460, "square": True}
    for name, table in values.tables.items():
        shares = [[n / max(total, 1) or None for n in row] for row, total in zip(table, values.total, strict=True)]

        def tip(true: int, predicted: int, table: list[list[int]] = table) -> str:
            count = table[true][predicted]
            return f"{classes[true]} predicted as {classes[predicted]}: {count:,} of {values.total[true]:,}"

        right = values.overall(name)
        title = f"True and predicted classes, {name}: {right:.2%} correct"
        alt = f"Confusion table {name}; {right:.2%} of the images are on its diagonal."
        charts[name] = heat_map(f"confusion-{name}", title, alt, shares, tip, x, y, **look)
    return charts


def _draw_classes(values: Confusion) -> dict[str, Chart]:
    charts = {}
    for label, (true, total) in enumerate(zip(values.classes, values.total, strict=True)):
        groups = {name: [n / max(total, 1) for n in table[label]] for name, table in values.tables.items()}
        title, alt = f"Predictions for {true}", f"Predictions for the {total:,} test images of {true}."
        charts[true] = _draw_shares(f"confusion-class-{label}", title, alt, groups, values.classes, "predicted")
    return charts


def _findings(values: Confusion) -> list[str]:
    before = {c: share for c, share in enumerate(values.accuracy("before")) if share is not None}
    worst, best = (pick(before, key=before.__getitem__) for pick in (min, max))
    bottom, top = (f"{before[label]:.0%} ({values.classes[label]})" for label in (worst, best))
    sentences = [f"With the run's own classifier, accuracy ranges from {bottom} to {top} over the classes."]
    overall = {name: values.overall(name) for name in values.right_by_class}
    if usable := [name for name in overall if name != "before" and not is_bound(name)]:
        name = max(usable, key=overall.__getitem__)
        after, old, new = [share or 0.0 for share in values.accuracy(name)], overall["before"], overall[name]
        changes = "raises" if new - old > MATTERS else "lowers" if new - old < -MATTERS else "hardly changes"
        risen, fallen = (sum(sign * (after[c] - share) > 0 for c, share in before.items()) for sign in (1, -1))
        low = min(before, key=after.__getitem__)
        bounds = [accuracy for name, accuracy in overall.items() if is_bound(name)]
        bound = f"; retraining on pooled real features, the upper bound, reaches {max(bounds):.2%}" if bounds else ""
        tried = max(values.tried, len(usable))
        among = f", the best of {tried} on the test images," if tried > 1 else ""
        sentence = (
            f"Calibration by {name}{among} {changes} accuracy from {old:.2%} to {new:.2%}: "
            f"{risen:,} of {len(before):,} classes gain and {fallen:,} lose; the worst class has "
            f"{before[worst]:.0%} before ({values.classes[worst]}) and {after[low]:.0%} after "
            f"({values.classes[low]}){bound}."
        )
        sentences.insert(0, sentence)
    return sentences


def _show(run: FinishedRun, values: Confusion) -> list[Element]:
    result, charts = run.result, _draw_tables(values)
    rows: list[list[CellValue]] = [["before", result.accuracy, None, result.loss, None, None]]
    for new in result.calibrations.values():
        rows.append([new.name, new.accuracy, new.accuracy - result.accuracy, new.loss, new.bytes_up, new.seconds])
    columns = {"classifier": "text", "accuracy": "percent", "gain, points": "points", "loss": "number"}
    columns |= {"sent for it": "bytes", "time": "seconds"}
    elements: list[Element] = [tabulate("Classifiers of this run", columns, rows)] if result.calibrations else []
    elements.append(_draw_by_class(values))
    if charts:
        elements.append(charts.pop("before"))
        elements += [Choice("classifier", charts)] if charts else []
        elements.append(Choice("class", _draw_classes(values)))
    confused: list[list[CellValue]] = [
        [name, values.classes[true], values.classes[predicted], count, count / max(values.total[true], 1)]
        for name, pairs in values.pairs.items()
        for true, predicted, count in pairs
    ]
    columns = {"classifier": "text", "true class": "text", "predicted as": "text"}
    columns |= {"images": "count", "of its class": "percent"}
    note = f"At most {MAX_PAIRS} pairs per classifier; a table of {len(values.classes):,} classes would be unreadable."
    return [*elements, *([tabulate("Most confused pairs", columns, confused, note)] if confused else [])]


def _pick_comparable(runs: Mapping[str, Confusion]) -> dict[str, Confusion]:
    """The runs that fit in one chart: those with the same classes as the first, up to a limit."""
    few = [(name, values) for name, values in runs.items() if len(values.classes) <= MAX_COMPARED_CLASSES]
    return dict([pair for pair in few if pair[1].classes == few[0][1].classes][:MAX_COMPARED_RUNS])


def _compare(runs: Mapping[str, Confusion]) -> list[Chart]:
    shown = _pick_comparable(runs)
    groups = {name: values.accuracy("before") for name, values in shown.items()}
    title, alt = "Accuracy of each class, before calibration", "Accuracy by class and run."
    classes = [values.classes for values in shown.values()][:1]
    return [_draw_shares("compare-classes", title, alt, groups, names) for names in classes]


def _left_out(runs: Mapping[str, Confusion]) -> list[str]:
    names = [name for name in runs if name not in _pick_comparable(runs)]
    reason = f"other classes, or more than {MAX_COMPARED_RUNS} runs or {MAX_COMPARED_CLASSES} classes"
    return [f"{', '.join(names)}: {reason}"] if names else []


CONFUSION = Measure(
    name="confusion",
    values=Confusion,
    take=take_confusion,
    draw=lambda values: [_draw_by_class(values), *_draw_tables(values).values()],
    findings=_findings,
    show=_show,
    title="What calibration changed",
    text="How the test images of each class are classified, with the run's own classifier and after calibration.",
    compare=Comparison(
        title="Accuracy of each class",
        text="Accuracy of each class with the run's own classifier.",
        draw=_compare,
        left_out=_left_out,
    ),
    calibrations=True,
    headline=2,
)
