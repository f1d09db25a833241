"""What to choose when: one page over everything measured, a figure for each data set and network."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from unskew.analysis.elements import Cell, Column, Linked, Table
from unskew.analysis.measure import slug
from unskew.analysis.ranking import MIN_SEEDS, Difference
from unskew.charts import Axis, Chart, Dots, Mark, Words
from unskew.charts.svg import svg
from unskew.core.files import write_whole
from unskew.core.units import counted, format_bytes, format_duration
from unskew.report.html import to_html
from unskew.report.page import Page, Section
from unskew.reproduce.choices import CHEAP, Choice, Federation, all_records, federations
from unskew.reproduce.links import run_link

KINDS = ("none", "ccvr", "uscc", "lda", "random", "ridge", "other")  # of calibration, each with a colour
NAMES = {"none": "no calibration", "random": "lda on random features", "other": "other calibrations"}
MOST_RIVALS = 3  # named in a sentence
STEP, LEFT = 190, 140  # width of a federation in the figure, and beside them
WIDE = 0.4  # how far from the middle of its column the cheapest and the dearest choice are
LINES = 17  # of text that the figure is high


def write_claim(out: Path) -> tuple[list[Path], list[str]]:
    """Write claim.html, claim.md and their figures from the records in a folder; the files, and what they say."""
    every = federations(all_records(out))
    charts, said = claim_charts(every, out), sentences(every)
    page = Page(
        title="What to choose when",
        subtitle="Over all runs in this folder: which method, which calibration, at what cost",
        findings=said,
        facts=[("federations", str(len(every))), ("choices", str(sum(len(each.choices) for each in every)))],
        sections=[
            Section("figure", "Accuracy of every choice", _FIGURE, charts),
            Section("choices", "Every choice", _TABLE, [_table(every, out)]),
            Section("beyond", "Beyond the papers", _BEYOND, [_beyond(every)]),
        ],
        footer="Made by unskew reproduce --claim from the records in this folder.",
        heading="What to choose",
    )
    contents = {"claim.html": to_html(page), "claim.md": _markdown(every, charts, said)}
    contents |= {f"{chart.name}.svg": svg(chart) for chart in charts}
    for name in _figures_of(out / "claim.md") - set(contents):  # of data sets that are no longer here
        (out / name).unlink(missing_ok=True)
    for file, content in contents.items():
        write_whole(out / file, content.encode())
    return [out / file for file in contents], said


def _figures_of(file: Path) -> set[str]:
    """The figures that an earlier claim has written."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return set(re.findall(r"\]\((claim[a-z0-9-]*\.svg)\)", text))


_FIGURE = (
    "A column for each federation, a dot for each method with each calibration: in its column from left to right the "
    "bytes that it sends, from the fewest to the most. Above them the best. A dot leads to its first run."
)
_TABLE = (
    "Bytes are those that all clients send, in all rounds and for the calibration; the time is the "
    "quickest seed's, since other work on the machine only adds to it. The gap is how far the best is above it, "
    "paired over the seeds; its interval is the wider of the pair's own and one from the noise of all choices "
    "together, widened for the number of comparisons. A paper's table has the pair's own interval alone, which may "
    "leave out zero where this one does not."
)
_BEYOND = (
    "The best of what the papers do not have against the best of what they have, both run here on the same partitions "
    "and seeds, with the bytes that each sends; and beside the best value that a paper prints for the same settings. "
    "CCVR counts as the paper's with ReLU and Tukey's transformation and without them."
)


def sentences(every: Sequence[Federation]) -> list[str]:
    """For each federation what is best, what is as good, and what is cheaper."""
    said = []
    for each in every:
        best = each.best
        few = len(best.scores) < MIN_SEEDS
        highest = f"highest with {counted(len(best.scores), 'seed')}, too few to call it best: " if few else ""
        words = f"{each.label}: {highest}{best.name}, {best.accuracy.words()} %{_seeds(best)}, {_cost(best)}"
        if each.trained and each.plain is not None and each.plain is not best:
            words += f"; {_gap(each.gap(best, each.plain), best, each.plain)} above FedAvg without calibration"
        rivals = each.rivals
        if rivals and not few:
            more = f" and {len(rivals) - MOST_RIVALS} more" if len(rivals) > MOST_RIVALS else ""
            words += f". Not told apart from it: {', '.join(one.name for one in rivals[:MOST_RIVALS])}{more}"
        if each.never_calibrated:
            words += f". Tried only without calibration: {', '.join(each.never_calibrated)}"
        cheap = each.cheapest
        if cheap is not best:
            words += (
                f". Within {CHEAP:g} point at {format_bytes(cheap.bytes_up)} instead of {format_bytes(best.bytes_up)}: "
                f"{cheap.name}"
            )
        said.append(f"{words}.")
    return said


def _gap(gap: Difference | None, one: Choice, other: Choice) -> str:
    if gap is None:
        return f"{one.accuracy.mean - other.accuracy.mean:+.2f} points"
    return f"{gap.mean:+.2f} points ({gap.low:+.2f} to {gap.high:+.2f})"


def _seeds(choice: Choice) -> str:
    return f" over {counted(len(choice.scores), 'seed')}"


def claim_charts(every: Sequence[Federation], folder: Path) -> list[Chart]:
    """A figure for each data set and network: a column for each federation, in it bytes from left to right, accuracy
    upwards."""
    groups: dict[tuple[str, str], list[Federation]] = {}
    for each in every:
        groups.setdefault((each.data, each.network), []).append(each)
    sets = [data for data, _ in groups]
    charts = []
    for (data, network), some in groups.items():
        name = f"{data} {network}" if sets.count(data) > 1 else data if len(groups) > 1 else ""
        charts.append(_chart(some, folder, name))
    return charts


def _chart(every: Sequence[Federation], folder: Path, name: str) -> Chart:
    marks: list[Mark] = []
    for colour, kind in enumerate(KINDS):
        points = [(place, one) for place, each in enumerate(every) for one in each.choices if _kind(one) == kind]
        if not points:
            continue
        tips = [f"{every[place].label}\n{one.name}: {one.accuracy.words()} %\n{_cost(one)}" for place, one in points]
        links = [run_link(one.records[0], folder) for _, one in points]
        x = [place + WIDE * _dearness(one, every[place]) for place, one in points]
        y = [one.accuracy.mean for _, one in points]
        marks.append(Dots(x, y, colour, radius=4.5, name=NAMES.get(kind, kind), tips=tips, links=links))
    means = [one.accuracy.mean for each in every for one in each.choices]
    line = (max(means, default=0) - min(means, default=0) or 1) / LINES
    for place, each in enumerate(every):
        top = max(one.accuracy.mean for one in each.choices)  # higher than the best where that one has fewer seeds
        marks += [Words(float(place), top + (count + 0.7) * line, words)
                  for count, words in enumerate(reversed(_best_words(each)))]  # fmt: skip
    common, left = _in_common([each.label for each in every])
    ticks = tuple((float(place), words) for place, words in enumerate(left))
    best = "; ".join(f"{each.label}: {each.best.name}" for each in every)
    title = "Accuracy of every method with every calibration" + (f": {common}" if common else "")
    return Chart(
        slug(f"claim {name}"), title, f"The best of each federation: {best}.", marks,
        x=Axis(ticks=ticks, low=-0.5, high=len(every) - 0.5),
        y=Axis("accuracy, %", high=max(means, default=0) + 5 * line),
        width=max(620, LEFT + STEP * len(every)), height=460, whole_legend=True,
    )  # fmt: skip


def _in_common(labels: Sequence[str]) -> tuple[str, list[str]]:
    """What all labels have, once, and what is left of each: a figure has little room under a column."""
    parts = [label.split(", ") for label in labels]
    common = [part for part in parts[0] if len(parts) > 1 and all(part in each for each in parts)]
    return ", ".join(common), [", ".join(part for part in each if part not in common) for each in parts]


def _dearness(one: Choice, federation: Federation) -> float:
    """Where its bytes are among the federation's, by their logarithm: -1 the fewest, 1 the most."""
    sent = [math.log(max(each.bytes_up, 1)) for each in federation.choices]
    low, high = min(sent), max(sent)
    return 0.0 if high == low else 2 * (math.log(max(one.bytes_up, 1)) - low) / (high - low) - 1


def _best_words(federation: Federation) -> list[str]:
    """The best in three short lines: a figure has no room for every knob."""
    best, kind = federation.best, _kind(federation.best)
    method = " + ".join(part.partition("(")[0].strip() for part in best.method.split(" + "))
    with_it = [f"+ {NAMES.get(kind, kind)}"] if best.calibration else []
    return [f"{best.accuracy.mean:.1f} %: {method}", *with_it, _cost(best)]


def _cost(one: Choice) -> str:
    return f"{format_bytes(one.bytes_up)} up, {format_duration(one.seconds)}"


def _kind(choice: Choice) -> str:
    name, _, knobs = choice.calibration.partition("(")
    name = "random" if "expand" in knobs else name or "none"
    return name if name in KINDS else "other"


def _table(every: Sequence[Federation], folder: Path) -> Table:
    names = ("federation", "method", "calibration", "accuracy, %", "seeds", "gap to the best", "sent up", "time")
    kinds = ("text", "text", "text", "number", "count", "text", "bytes", "seconds")
    rows: list[list[Cell]] = []
    for each in every:
        for one in sorted(each.choices, key=lambda choice: -choice.accuracy.mean):
            gap = "best" if one is each.best else _gap(each.gap(each.best, one), each.best, one)
            link = Linked(one.accuracy.words(), run_link(one.records[0], folder), value=one.accuracy.mean)
            rows.append(
                [each.label, one.trained, one.calibration, link, len(one.scores), gap, one.bytes_up, one.seconds]
            )
    return Table("", [Column(name, kind) for name, kind in zip(names, kinds, strict=True)], rows)


def _beyond(every: Sequence[Federation]) -> Table:
    names = ("federation", "ours", "accuracy, %", "sent up", "the papers' best, run here", "accuracy, %", "sent up",
             "ours above it, points", "printed in a paper", "where")  # fmt: skip
    rows: list[list[Cell]] = []
    for each in every:
        best, theirs = each.best_unpublished, each.best_published
        if best is None or theirs is None or not each.trained:
            continue
        gap = _gap(each.gap(best, theirs), best, theirs)
        where, printed = each.printed or ("", None)
        rows.append([each.label, best.name, best.accuracy.words(), format_bytes(best.bytes_up), theirs.name,
                     theirs.accuracy.words(), format_bytes(theirs.bytes_up), gap,
                     None if printed is None else str(printed), where])  # fmt: skip
    return Table("", [Column(name) for name in names], rows)


def _markdown(every: Sequence[Federation], charts: Sequence[Chart], said: Sequence[str]) -> str:
    lines = ["# What to choose when", "", *(f"- {each}" for each in said), ""]
    lines += [line for chart in charts for line in (f"![{chart.title}]({chart.name}.svg)", "")]
    table = _beyond(every)
    if table.rows:
        head = [column.name for column in table.columns]
        lines += ["## Beyond the papers", "", _BEYOND, "", _line(head), _line(["---"] * len(head))]
        lines += [_line(["" if cell is None else str(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
