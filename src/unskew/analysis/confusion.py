"""Which classes are confused, and each class's accuracy, before and after each calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from unskew.analysis.measure import (
    CellValue,
    Choice,
    Comparison,
    Element,
    Measure,
    pick_calibrations,
    tabulate,
    tabulate_calibrations,
)
from unskew.calibration import is_bound
from unskew.charts import Axis, Chart, axis_of, grouped, heat_map, sorted_chart
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


def accuracy(values: Confusion, name: str) -> list[float | None]:
    """[C], the share of each class's images that are classified correctly; None without images."""
    return [right / n if n else None for right, n in zip(right_by_class(values, name), values.total, strict=True)]


def right_by_class(values: Confusion, name: str) -> list[int]:
    """[C], how many images of each class are classified correctly."""
    return values.right[name] if name in values.right else [row[c] for c, row in enumerate(values.tables[name])]


def overall(values: Confusion, name: str) -> float:
    """The share of all test images that are classified correctly."""
    return sum(right_by_class(values, name)) / max(sum(values.total), 1)


def classifiers(values: Confusion) -> list[str]:
    """ "before", and the calibrations."""
    return list(values.right or values.tables)


def _draw_by_class(values: Confusion) -> Chart:
    groups = {name: accuracy(values, name) for name in classifiers(values)}
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
    for name, table in values.tables.items():
        shares = [[n / max(total, 1) or None for n in row] for row, total in zip(table, values.total, strict=True)]

        def tip(true: int, predicted: int, table: list[list[int]] = table) -> str:
            count = table[true][predicted]
            return f"{classes[true]} predicted as {classes[predicted]}: {count:,} of {values.total[true]:,}"

        right = overall(values, name)
        title = f"True and predicted classes, {name}: {right:.2%} correct"
        alt = f"Confusion table {name}; {right:.2%} of the images are on its diagonal."
        x, y = axis_of("predicted", classes, most=30), axis_of("true", classes, most=30)
        charts[name] = heat_map(
            f"confusion-{name}", title, alt, shares, tip, x, y, numbers=".0%", width=480, height=460, square=True
        )
    return charts


def _draw_classes(values: Confusion) -> dict[str, Chart]:
    charts = {}
    for label, (true, total) in enumerate(zip(values.classes, values.total, strict=True)):
        groups = {name: [n / max(total, 1) for n in table[label]] for name, table in values.tables.items()}
        title, alt = f"Predictions for {true}", f"Predictions for the {total:,} test images of {true}."
        charts[true] = _draw_shares(f"confusion-class-{label}", title, alt, groups, values.classes, "predicted")
    return charts


def _findings(values: Confusion) -> list[str]:
    before = accuracy(values, "before")
    known = [c for c, share in enumerate(before) if share is not None]
    worst, best = (pick(known, key=lambda c: before[c] or 0.0) for pick in (min, max))
    sentences = []
    names = [name for name in classifiers(values) if name != "before" and not is_bound(name)]
    if names:
        name = max(names, key=lambda name: overall(values, name))
        after, old, new = accuracy(values, name), overall(values, "before"), overall(values, name)
        changes = "raises" if new - old > MATTERS else "lowers" if new - old < -MATTERS else "hardly changes"
        risen, fallen = (sum(sign * ((after[c] or 0.0) - (before[c] or 0.0)) > 0 for c in known) for sign in (1, -1))
        low = min(known, key=lambda c: after[c] or 0.0)
        bounds = [overall(values, name) for name in classifiers(values) if is_bound(name)]
        bound = f"; retraining on pooled real features, the upper bound, reaches {max(bounds):.2%}" if bounds else ""
        tried = max(values.tried, len(names))
        among = f", the best of {tried} on the test images," if tried > 1 else ""
        sentences.append(
            f"Calibration by {name}{among} {changes} accuracy from {old:.2%} to {new:.2%}: {risen:,} of {len(known):,} "
            f"classes gain and {fallen:,} lose; the worst class has {before[worst]:.0%} before "
            f"({values.classes[worst]}) and {after[low]:.0%} after ({values.classes[low]}){bound}."
        )
    bottom, top = (f"{before[label]:.0%} ({values.classes[label]})" for label in (worst, best))
    return [*sentences, f"With the run's own classifier, accuracy ranges from {bottom} to {top} over the classes."]


def _show(run: FinishedRun, values: Confusion) -> list[Element]:
    charts = _draw_tables(values)
    elements: list[Element] = [*tabulate_calibrations(run), _draw_by_class(values)]
    if charts:
        elements.append(charts.pop("before"))
        elements += [Choice("classifier", charts)] if charts else []
        elements.append(Choice("class", _draw_classes(values)))
    rows: list[list[CellValue]] = [
        [name, values.classes[true], values.classes[predicted], count, count / max(values.total[true], 1)]
        for name, pairs in values.pairs.items()
        for true, predicted, count in pairs
    ]
    columns = {"classifier": "text", "true class": "text", "predicted as": "text"}
    columns |= {"images": "count", "of its class": "percent"}
    note = f"At most {MAX_PAIRS} pairs per classifier; a table of {len(values.classes):,} classes would be unreadable."
    return [*elements, tabulate("Most confused pairs", columns, rows, note)] if rows else elements


def _pick_comparable(runs: Mapping[str, Confusion]) -> dict[str, Confusion]:
    """The runs that fit in one chart: those with the same classes as the first, up to a limit."""
    few = [(name, values) for name, values in runs.items() if len(values.classes) <= MAX_COMPARED_CLASSES]
    return dict([pair for pair in few if pair[1].classes == few[0][1].classes][:MAX_COMPARED_RUNS])


def _compare(runs: Mapping[str, Confusion]) -> list[Chart]:
    shown = _pick_comparable(runs)
    groups = {name: accuracy(values, "before") for name, values in shown.items()}
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
