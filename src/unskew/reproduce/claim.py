"""What to choose when: one page over everything measured, a figure for each data set and network."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean

from unskew.analysis.measure import CellValue, Column, Linked, Table, slug
from unskew.analysis.ranking import LEVEL, MIN_SEEDS, Difference, compare_pairs, t_quantile
from unskew.calibration import is_bound
from unskew.charts import Axis, Chart, Dots, Mark, Words
from unskew.charts.files import svg
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.units import counted, format_bytes, format_duration
from unskew.report.page import Page, Section, to_html
from unskew.reproduce.cells import Variant, make_cells
from unskew.reproduce.recipe import PaperValue, load_recipe, recipe_names
from unskew.reproduce.records import RECORDS, RunRecord, link_run, read_record_file, run_folder
from unskew.runs.config import OPTIONS
from unskew.runs.seeds import SeedSpread, spread_over_seeds

# what does not tell federations apart: how they are trained, and who is lucky
OWN = {"method", "lr", "seed", "evaluate_every"} | {name for name, option in OPTIONS.items() if not option.decides}
OF_TRAINING = {"epochs", "batch", "momentum", "weight_decay", "augment", "per_round"}  # nothing, where none is done
PUBLISHED = {"fedavg", "fedprox", "fedavgm", "moon", "clsnorm", "clsprox", "prototypes", "fedir", "fedvc"}
IN_PAPERS = {"", "ccvr", "uscc"}
CHEAP, SAVING = 1.0, 0.9  # points that a cheaper choice may be below the best, and how much of its bytes it may send


@dataclass(frozen=True)
class Combination:
    """A method with a calibration in one federation: its accuracy by seed, in per cent, and what it costs."""

    method: str
    calibration: str  # "": none
    scores: dict[int, float]
    bytes_up: float  # all rounds and the calibration, mean over seeds
    seconds: float  # training and calibration, the quickest seed's: other work on the machine only adds
    records: tuple[RunRecord, ...]
    rate: str = ""  # where the federation was trained with several

    @property
    def trained(self) -> str:
        """What is trained, without the calibration."""
        return f"{self.method}, rate {self.rate}" if self.rate else self.method

    @property
    def name(self) -> str:
        """The choice in words."""
        return f"{self.trained} + {self.calibration}" if self.calibration else self.trained

    @property
    def accuracy(self) -> SeedSpread:
        """Mean and deviation over the seeds."""
        found = spread_over_seeds(self.scores.values())
        assert found is not None
        return found

    @property
    def published(self) -> bool:
        """Whether the papers have it: their methods, and CCVR or USCC as they write it."""
        plain = {part.partition("(")[0].strip() for part in self.method.split(" + ")} <= PUBLISHED
        name, _, knobs = self.calibration.partition("(")
        return plain and name in IN_PAPERS and "layers" not in knobs and "components" not in knobs


@dataclass(frozen=True)
class Scenario:
    """Runs that differ in method, calibration and seed alone."""

    label: str
    alpha: float | None
    clients: int
    choices: tuple[Combination, ...]
    printed: tuple[str, PaperValue] | None  # the papers' best printed value for these settings, and where
    data: str  # the data set in a word

    @property
    def network(self) -> str:
        """What is trained."""
        return self.choices[0].records[0].result.model

    @property
    def trained(self) -> bool:
        """Whether anything was: without it a calibration is all there is."""
        return self.choices[0].records[0].result.rounds > 0

    @property
    def best(self) -> Combination:
        """The highest mean of those with three seeds, or as many as any has."""
        found = _highest(self.choices)
        assert found is not None
        return found

    @property
    def plain(self) -> Combination | None:
        """FedAvg without calibration, at its best rate."""
        return _highest([each for each in self.choices if each.method == "fedavg" and not each.calibration])

    @property
    def best_published(self) -> Combination | None:
        """The best of what the papers have, as run by us."""
        return _highest([each for each in self.choices if each.published])

    @property
    def best_unpublished(self) -> Combination | None:
        """The best of what the papers do not have."""
        return _highest([each for each in self.choices if not each.published])

    @property
    def level(self) -> float:
        """Of an interval for one of all comparisons with the best: Bonferroni's."""
        return 1 - (1 - LEVEL) / max(1, len(self.choices) - 1)

    def gap(self, one: Combination, other: Combination) -> Difference | None:
        """How far one is above the other, in points, paired over common seeds; None with fewer than three.

        The interval is the wider of two: the pair's own, and one from the noise of all choices together, widened for
        the number of comparisons with the best. Widened alike, the pair's own would tell nothing apart with three
        seeds and dozens of choices; where a pair is noisier than the others, it holds for that pair alone.
        """
        own = compare_pairs(one.scores, other.scores)
        if own is None:
            return None
        error, freedom = self._error(sorted(set(one.scores) & set(other.scores)))
        half = max(own.high - own.mean, t_quantile(self.level, freedom) * error)
        return Difference(own.seeds, own.mean, own.mean - half, own.mean + half)

    def _error(self, seeds: Sequence[int]) -> tuple[float, int]:
        """The standard error of a difference of two choices' means, from what choices and seeds leave unexplained."""
        scores = [[each.scores[seed] for seed in seeds] for each in self.choices if set(seeds) <= set(each.scores)]
        whole, by_seed = fmean(map(fmean, scores)), [fmean(column) for column in zip(*scores, strict=True)]
        left = sum((value - fmean(row) - luck + whole) ** 2
                   for row in scores for value, luck in zip(row, by_seed, strict=True))  # fmt: skip
        freedom = (len(scores) - 1) * (len(seeds) - 1)
        return sqrt(2 * left / freedom / len(seeds)), freedom

    @property
    def rivals(self) -> list[Combination]:
        """Those that the seeds do not tell from the best, highest first."""
        others = [each for each in self.choices if each is not self.best]
        gaps = [(each, self.gap(self.best, each)) for each in others]
        unsure = [each for each, gap in gaps if gap is None or gap.low <= 0]
        return sorted(unsure, key=lambda each: -each.accuracy.mean)

    @property
    def never_calibrated(self) -> list[str]:
        """The methods that no calibration was tried on, where one was on others."""
        tried = {each.method for each in self.choices if each.calibration}
        return list(dict.fromkeys(each.method for each in self.choices if each.method not in tried)) if tried else []

    @property
    def cheapest(self) -> Combination:
        """The one with the fewest bytes of those within a point of the best; the best where none saves a tenth."""
        near = [each for each in _seen_enough(self.choices) if each.accuracy.mean >= self.best.accuracy.mean - CHEAP]
        least = min(near, key=lambda each: (each.bytes_up, -each.accuracy.mean))
        return least if least.bytes_up <= SAVING * self.best.bytes_up else self.best


def _seen_enough(choices: Sequence[Combination]) -> list[Combination]:
    """Those with three seeds, or as many as any has: with fewer a mean may be the luck of a partition."""
    enough = min(MIN_SEEDS, max((len(each.scores) for each in choices), default=0))
    return [each for each in choices if len(each.scores) >= enough]


def _highest(choices: Sequence[Combination]) -> Combination | None:
    """The highest mean of those that were seen often enough."""
    return max(_seen_enough(choices), key=lambda each: each.accuracy.mean, default=None)


def read_all_records(out: Path) -> list[RunRecord]:
    """Every record in a folder of results."""
    found = []
    for file in sorted((out / RECORDS).glob("*/seed*.json")):
        record = read_record_file(file, run_folder(out, file.parent.name, int(file.stem.removeprefix("seed"))))
        if isinstance(record, RunRecord):
            found.append(record)
    if not found:
        again = "unskew reproduce ours/calibrations --scale small"
        raise UserError(f"{out} has no results to choose from; make some, such as: {again} --out {out}")
    return found


def group_scenarios(records: Sequence[RunRecord]) -> list[Scenario]:
    """The federations of which at least two choices were tried, by data set, number of clients and skew."""
    groups: dict[tuple[tuple[str, str], ...], list[RunRecord]] = {}
    for record in records:
        if "centralised" not in record.result.method:
            idle = set() if record.result.rounds else OF_TRAINING
            key = tuple(sorted((k, str(v)) for k, v in record.result.settings.items() if k not in OWN | idle))
            groups.setdefault(key, []).append(record)
    chosen = [(group, choices) for group in groups.values() if len(choices := tuple(_choices(group))) > 1]
    labels = _labels([group[0] for group, _ in chosen])
    printed = _printed()
    made = []
    for label, (group, choices) in zip(labels, chosen, strict=True):
        values = [printed[each.training] for each in group if each.training in printed]
        best = max(values, key=lambda pair: pair[1].mean) if values else None
        alpha = re.search(r"alpha=([\d.]+)", group[0].result.partition)
        skew, data = float(alpha[1]) if alpha else None, _word(group[0].result.data)
        made.append(Scenario(label, skew, group[0].result.clients, choices, best, data))
    return sorted(made, key=_order)


def _order(one: Scenario) -> tuple[str, int, float, int, str]:
    visits = one.choices[0].records[0].result.per_round
    return one.data, one.clients, one.alpha if one.alpha is not None else 1e9, visits, one.label


def _word(data: str) -> str:
    """A data set's name without its folder, module or knobs."""
    return re.sub(r"^.*[:/]", "", data.partition("(")[0]) or data


def _choices(group: Sequence[RunRecord]) -> Iterator[Combination]:
    trained: dict[tuple[str, str], list[RunRecord]] = {}
    for record in group:
        trained.setdefault((record.result.method, str(record.result.settings.get("lr", ""))), []).append(record)
    several = len({rate for _, rate in trained}) > 1
    for (method, rate), records in trained.items():
        every = dict.fromkeys(name for each in records for name in each.result.calibrations if not is_bound(name))
        for name in ("", *every):
            some = [each for each in records if not name or name in each.result.calibrations]
            made = [each.result.calibrations[name] if name else None for each in some]
            scores = {each.result.seed: 100 * (one.accuracy if one else each.result.accuracy)
                      for each, one in zip(some, made, strict=True)}  # fmt: skip
            sent = fmean(
                each.result.bytes_up + (one.bytes_up if one else 0) for each, one in zip(some, made, strict=True)
            )
            took = min(each.result.seconds for each in some) + min((one.seconds for one in made if one), default=0)
            yield Combination(method, name, scores, sent, took, tuple(some), rate if several else "")


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """A name for each federation: skew and clients, and whatever else tells them apart."""
    lengths = {(each.result.rounds, each.result.settings.get("epochs")) for each in records}
    sets = {_word(each.result.data) for each in records}
    networks = {(_word(each.result.data), each.result.model) for each in records}
    made = []
    for each in records:
        result = each.result
        alpha = re.search(r"alpha=([\d.]+)", result.partition)
        by_client = " by client" if result.partition.startswith("dirichlet-client") else ""  # which is more skewed
        skew = f"α = {float(alpha[1]):g}{by_client}" if alpha else result.partition
        words = [skew, f"{result.clients:,} clients"]
        words += [f"{result.per_round:,} a round"] if result.per_round < result.clients else []
        length = f"{result.rounds}×{result.settings.get('epochs')} epochs" if result.rounds else "no training"
        words += [length] if len(lengths) > 1 else []
        trained = result.settings.get("train", "all")
        if trained != "all":
            words.append(f"{trained} of {result.model} alone")
        elif len(networks) > len(sets):
            words.append(result.model)
        made.append(", ".join([*([_word(result.data)] if len(sets) > 1 else []), *words]))
    twice = {label for label in made if made.count(label) > 1}
    return [f"{label}, {each.result.data}, {each.result.partition}, {each.result.model}" if label in twice else label
            for label, each in zip(made, records, strict=True)]  # fmt: skip


@cache
def _printed() -> dict[str, tuple[str, PaperValue]]:
    """By training, the best value that a paper prints for it, and where; bounds and other readings do not count."""
    found: dict[str, tuple[str, PaperValue]] = {}
    for name in recipe_names():
        for cell in make_cells(load_recipe(name), Variant("paper")):
            value = cell.paper
            if value is None or cell.reads != "accuracy" or (cell.after and is_bound(cell.after)):
                continue
            if cell.training not in found or value.mean > found[cell.training][1].mean:
                found[cell.training] = (f"{cell.row.name}, {cell.column.name} in {name}", value)
    return found


KINDS = ("none", "ccvr", "uscc", "lda", "random", "ridge", "other")  # of calibration, each with a colour
NAMES = {"none": "no calibration", "random": "lda on random features", "other": "other calibrations"}
MOST_RIVALS = 3  # named in a sentence
STEP, LEFT = 190, 140  # width of a federation in the figure, and beside them
WIDE = 0.4  # how far from the middle of its column the cheapest and the dearest choice are
LINES = 17  # of text that the figure is high


def write_claim(out: Path) -> tuple[list[Path], list[str]]:
    """Write claim.html, claim.md and their figures from the records in a folder; the files, and what they say."""
    every = group_scenarios(read_all_records(out))
    charts, said = draw_claim(every, out), describe_scenarios(every)
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


def describe_scenarios(every: Sequence[Scenario]) -> list[str]:
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


def _gap(gap: Difference | None, one: Combination, other: Combination) -> str:
    if gap is None:
        return f"{one.accuracy.mean - other.accuracy.mean:+.2f} points"
    return f"{gap.mean:+.2f} points ({gap.low:+.2f} to {gap.high:+.2f})"


def _seeds(choice: Combination) -> str:
    return f" over {counted(len(choice.scores), 'seed')}"


def draw_claim(every: Sequence[Scenario], folder: Path) -> list[Chart]:
    """A figure for each data set and network: a column for each federation, in it bytes from left to right, accuracy
    upwards."""
    groups: dict[tuple[str, str], list[Scenario]] = {}
    for each in every:
        groups.setdefault((each.data, each.network), []).append(each)
    sets = [data for data, _ in groups]
    charts = []
    for (data, network), some in groups.items():
        name = f"{data} {network}" if sets.count(data) > 1 else data if len(groups) > 1 else ""
        charts.append(_chart(some, folder, name))
    return charts


def _chart(every: Sequence[Scenario], folder: Path, name: str) -> Chart:
    marks: list[Mark] = []
    for colour, kind in enumerate(KINDS):
        points = [(place, one) for place, each in enumerate(every) for one in each.choices if _kind(one) == kind]
        if not points:
            continue
        tips = [f"{every[place].label}\n{one.name}: {one.accuracy.words()} %\n{_cost(one)}" for place, one in points]
        links = [link_run(one.records[0], folder) for _, one in points]
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


def _dearness(one: Combination, federation: Scenario) -> float:
    """Where its bytes are among the federation's, by their logarithm: -1 the fewest, 1 the most."""
    sent = [math.log(max(each.bytes_up, 1)) for each in federation.choices]
    low, high = min(sent), max(sent)
    return 0.0 if high == low else 2 * (math.log(max(one.bytes_up, 1)) - low) / (high - low) - 1


def _best_words(federation: Scenario) -> list[str]:
    """The best in three short lines: a figure has no room for every knob."""
    best, kind = federation.best, _kind(federation.best)
    method = " + ".join(part.partition("(")[0].strip() for part in best.method.split(" + "))
    with_it = [f"+ {NAMES.get(kind, kind)}"] if best.calibration else []
    return [f"{best.accuracy.mean:.1f} %: {method}", *with_it, _cost(best)]


def _cost(one: Combination) -> str:
    return f"{format_bytes(one.bytes_up)} up, {format_duration(one.seconds)}"


def _kind(choice: Combination) -> str:
    name, _, knobs = choice.calibration.partition("(")
    name = "random" if "expand" in knobs else name or "none"
    return name if name in KINDS else "other"


def _table(every: Sequence[Scenario], folder: Path) -> Table:
    names = ("federation", "method", "calibration", "accuracy, %", "seeds", "gap to the best", "sent up", "time")
    kinds = ("text", "text", "text", "number", "count", "text", "bytes", "seconds")
    rows: list[list[CellValue]] = []
    for each in every:
        for one in sorted(each.choices, key=lambda choice: -choice.accuracy.mean):
            gap = "best" if one is each.best else _gap(each.gap(each.best, one), each.best, one)
            link = Linked(one.accuracy.words(), link_run(one.records[0], folder), value=one.accuracy.mean)
            rows.append(
                [each.label, one.trained, one.calibration, link, len(one.scores), gap, one.bytes_up, one.seconds]
            )
    return Table("", [Column(name, kind) for name, kind in zip(names, kinds, strict=True)], rows)


def _beyond(every: Sequence[Scenario]) -> Table:
    names = ("federation", "ours", "accuracy, %", "sent up", "the papers' best, run here", "accuracy, %", "sent up",
             "ours above it, points", "printed in a paper", "where")  # fmt: skip
    rows: list[list[CellValue]] = []
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


def _markdown(every: Sequence[Scenario], charts: Sequence[Chart], said: Sequence[str]) -> str:
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
