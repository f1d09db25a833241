"""What to choose when: one page on all results, with a figure for each data set and network."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from unskew.analysis.measure import CellValue, Column, Linked, Table, slug, tabulate
from unskew.analysis.ranking import LEVEL, MIN_SEEDS, Difference, compare_pairs, t_quantile
from unskew.calibration import is_bound
from unskew.charts import Axis, Chart, Dots, Mark, Words
from unskew.core.errors import UserError
from unskew.core.units import counted, format_bytes, format_duration
from unskew.report.page import Page, Section
from unskew.reproduce.cells import Variant, make_cells
from unskew.reproduce.recipe import PaperValue, load_recipe, recipe_names
from unskew.reproduce.records import RECORDS, RUNS, RunRecord, link_run, read_record
from unskew.reproduce.tables import write_page
from unskew.runs.config import OPTIONS
from unskew.runs.result import Result
from unskew.runs.seeds import SeedSpread, spread_over_seeds

# options in which the runs of one scenario may differ
OWN = {"method", "lr", "seed", "partition_seed", "evaluate_every"} | {
    name for name, option in OPTIONS.items() if not option.decides
}
OF_TRAINING = {"epochs", "batch", "momentum", "weight_decay", "augment", "per_round"}  # irrelevant without training
PUBLISHED = {"fedavg", "fedprox", "fedavgm", "moon", "clsnorm", "clsprox", "prototypes", "fedir", "fedvc"}
CHEAP = 1.0  # points that a cheaper family of combinations may lose
NONE, RANDOM, OTHER = "no calibration", "lda on random features", "other calibrations"
KINDS = (NONE, "ccvr", "uscc", "lda", RANDOM, "ridge", OTHER)  # of calibration, one color each
LONG = 100  # passes over the data; from here on, training is long
STEP, LEFT = 190, 140  # width of a scenario in the figure, and of the axis
WIDE = 0.4  # distance of the cheapest and the most expensive combination from the middle of a column
LINES = 17  # height of the figure in lines of text


@dataclass(frozen=True)
class Combination:
    """A method with a calibration in one scenario: its accuracy by seed in percent, and its cost."""

    method: str
    calibration: str  # "": none
    scores: dict[int, float]
    bytes_up: float  # of all rounds and the calibration, mean over seeds
    seconds: float  # of training and calibration, for the fastest seed, which other work disturbed least
    record: RunRecord  # of its first run
    rate: str = ""  # set if the scenario was trained with several

    @property
    def trained(self) -> str:
        """The method and its learning rate, without the calibration."""
        return f"{self.method}, rate {self.rate}" if self.rate else self.method

    @property
    def name(self) -> str:
        """The combination as text."""
        return f"{self.trained} + {self.calibration}" if self.calibration else self.trained

    @property
    def accuracy(self) -> SeedSpread:
        """Mean and deviation over the seeds."""
        return spread_over_seeds(self.scores.values())  # type: ignore[return-value]  # there is a seed

    @property
    def methods(self) -> list[str]:
        """The methods without their knobs."""
        return [part.partition("(")[0].strip() for part in self.method.split(" + ")]

    @property
    def published(self) -> bool:
        """Whether it is in the papers: their methods, with CCVR or USCC as published."""
        as_published = self.kind in (NONE, "ccvr", "uscc") and not re.search("layers|components", self.calibration)
        return as_published and set(self.methods) <= PUBLISHED

    @property
    def kind(self) -> str:
        """The kind of calibration, one of KINDS."""
        name, _, knobs = self.calibration.partition("(")
        kind = RANDOM if "expand" in knobs else name or NONE
        return kind if kind in KINDS else OTHER

    @property
    def family(self) -> str:
        """The methods and the kind of calibration, without knobs."""
        return " + ".join([*self.methods, *([self.kind] if self.calibration else [])])

    @property
    def cost(self) -> str:
        """Bytes and time."""
        return f"{format_bytes(self.bytes_up)} up, {format_duration(self.seconds)}"


@dataclass(frozen=True)
class Scenario:
    """Runs that differ only in method, calibration and seed."""

    combinations: tuple[Combination, ...]
    printed: tuple[str, PaperValue] | None  # where the papers' best value for these settings is, and the value

    @property
    def result(self) -> Result:
        """The result of one of its runs, which share the network and the number of rounds."""
        return self.combinations[0].record.result

    @property
    def data(self) -> str:
        """The data set's name without its folder, module or knobs."""
        return re.sub(r"^.*[:/]", "", self.result.data.partition("(")[0]) or self.result.data

    @property
    def alpha(self) -> float:
        """The parameter of a Dirichlet partition; infinity for other partitions."""
        found = re.search(r"alpha=([\d.]+)", self.result.partition)
        return float(found[1]) if found else math.inf

    @property
    def label(self) -> str:
        """Data, clients, skew, length of training and network."""
        result, settings = self.result, self.result.settings
        scheme = "per-client Dirichlet" if result.partition.startswith("dirichlet-client") else "Dirichlet"
        parts = [self.data, f"{result.clients:,} clients"]
        parts += [f"{result.per_round:,} per round"] if result.per_round < result.clients else []
        parts.append(f"{scheme} α = {self.alpha:g}" if self.alpha < math.inf else result.partition)
        epochs = counted(int(settings.get("epochs", 1)), "epoch")
        parts.append(f"{result.rounds} rounds of {epochs}" if result.rounds else "no training")
        trained = settings.get("train", "all")
        parts.append(result.model if trained == "all" else f"only the {trained} of {result.model} trained")
        return ", ".join(parts)

    @cached_property
    def best(self) -> Combination:
        """The combination with the highest mean among those with enough seeds."""
        return _pick_highest(self.combinations)  # type: ignore[return-value]  # there are combinations

    @property
    def plain(self) -> Combination | None:
        """FedAvg without calibration, at its best rate."""
        return _pick_highest([one for one in self.combinations if one.method == "fedavg" and not one.calibration])

    def best_where(self, published: bool) -> Combination | None:
        """The best published or unpublished combination, as run here."""
        return _pick_highest([one for one in self.combinations if one.published is published])

    def gap(self, one: Combination, other: Combination) -> Difference | None:
        """The gain of one over the other in points, paired over common seeds; None with fewer than three.

        The interval is the wider of two: the pair's own, and one from the pooled noise of all combinations, corrected
        for the number of comparisons with the best (Bonferroni). With that correction the pair's own interval would
        separate nothing with three seeds and dozens of combinations; without it, it still covers pairs that are
        noisier than the others. Calibrations of one training vary together, so the pooled noise has the degrees of
        freedom of the trainings, not of the combinations: (trainings − 1) · (seeds − 1).
        """
        own = compare_pairs(one.scores, other.scores)
        if own is None:
            return None
        seeds = sorted(one.scores.keys() & other.scores.keys())
        complete = [item for item in self.combinations if item.scores.keys() >= set(seeds)]
        scores = np.array([[item.scores[seed] for seed in seeds] for item in complete])  # [combination, seed]
        noise = scores - scores.mean(1, keepdims=True) - scores.mean(0) + scores.mean()
        spreads: dict[str, list[float]] = {}  # sums of squares that neither combination nor seed explains, by training
        for item, spread in zip(complete, (noise**2).sum(1), strict=True):
            spreads.setdefault(item.trained, []).append(spread)
        freedom = (len(spreads) - 1) * (len(seeds) - 1)
        half = own.high - own.mean
        if freedom:
            variance = sum(map(fmean, spreads.values())) / freedom
            level = 1 - (1 - LEVEL) / max(1, len(self.combinations) - 1)
            half = max(half, t_quantile(level, freedom) * math.sqrt(2 * variance / len(seeds)))
        return Difference(own.seeds, own.mean, own.mean - half, own.mean + half)

    def describe_gap(self, one: Combination, other: Combination) -> str:
        """The gap in points, with its interval if there are enough seeds."""
        gap = self.gap(one, other)
        if gap is None:
            return f"{one.accuracy.mean - other.accuracy.mean:+.2f} points"
        return f"{gap.mean:+.2f} points ({gap.low:+.2f} to {gap.high:+.2f})"


Situation = tuple[str, str, str, str]  # clients, skew, start, training
Decision = dict[str, str]  # a row of the decision table: the situation, what to use, its gain, cost and evidence


def describe_situation(scenario: Scenario) -> Situation:
    """What is known in advance: the number of clients, the skew, pretrained or not, the amount of training."""
    result, alpha = scenario.result, scenario.alpha
    clients = "about 10" if result.clients <= 20 else "50 to 100" if result.clients <= 100 else "hundreds"
    skew = "strong (α ≤ 0.2)" if alpha <= 0.2 else "moderate (α ≈ 0.5)" if alpha <= 1 else "mild (α ≥ 5)"
    if alpha == math.inf:
        skew = {"users": "by user", "geo": "by place"}.get(result.partition.partition("(")[0], result.partition)
    frozen = str(result.settings.get("train", "all")) != "all"
    start = "pretrained, frozen" if frozen else "pretrained" if result.settings.get("pretrained") else "from scratch"
    passes = result.rounds * int(str(result.settings.get("epochs", 1))) * result.per_round / result.clients
    training = "none" if not result.rounds else "long" if passes >= LONG else "short"
    return clients, skew, start, training


def decide(scenarios: Sequence[Scenario]) -> list[Decision]:
    """One row per situation: among the families tied with the best and within a point, the one that sends least.

    Only scenarios with three seeds count, or all if there are none. Without FedAvg there is no gain to report.
    """
    groups = defaultdict[Situation, list[Scenario]](list)
    for scenario in scenarios:
        if scenario.plain is not None and scenario.result.rounds:
            groups[describe_situation(scenario)].append(scenario)
    enough = {key: [one for one in group if len(one.best.scores) >= MIN_SEEDS] for key, group in groups.items()}
    decisions = [_decide(situation, enough[situation] or group) for situation, group in groups.items()]
    return [decision for decision in decisions if decision]


def _decide(situation: Situation, scenarios: Sequence[Scenario]) -> Decision:
    """The row of a situation; empty if no family has enough seeds in all its scenarios."""
    families: list[dict[str, Combination]] = []  # the best of every family, by scenario
    for scenario in scenarios:
        ranked = sorted(_keep_seeded(scenario.combinations), key=lambda one: one.accuracy.mean)
        families.append({one.family: one for one in ranked})
    shared = sorted(set.intersection(*map(set, families)))
    if not shared:
        return {}
    means = {name: fmean(family[name].accuracy.mean for family in families) for name in shared}
    best = max(means, key=lambda name: means[name])
    tied = [best]
    for name in (name for name in shared if name != best and means[name] >= means[best] - CHEAP):
        gaps = [one.gap(family[best], family[name]) for one, family in zip(scenarios, families, strict=True)]
        if all(gap is not None and gap.low <= 0 for gap in gaps):
            tied.append(name)
    use = min(tied, key=lambda name: (fmean(family[name].bytes_up for family in families), -means[name]))
    chosen = [family[use] for family in families]
    gains, clear, times = [], 0, []
    for scenario, one in zip(scenarios, chosen, strict=True):
        if plain := scenario.plain:  # there is one in all these scenarios
            gap = scenario.gap(one, plain)
            gains.append(gap.mean if gap else one.accuracy.mean - plain.accuracy.mean)
            clear += gap is not None and gap.low > 0
            times.append(one.bytes_up / max(plain.bytes_up, 1))
    seeds = min(len(one.scores) for one in chosen)
    names = ", ".join(dict.fromkeys(scenario.data for scenario in scenarios))
    evidence = f"{names}: {counted(len(scenarios), 'setting')}, {counted(seeds, 'seed')} each"
    if seeds < MIN_SEEDS:
        evidence += "; an indication only"
    elif use != "fedavg":
        evidence += f"; the interval excludes 0 in {clear} of {len(chosen)}"
    evidence += f"; tied with {best}, which has the highest mean" if use != best else ""
    calibrated = [{one.method for one in scenario.combinations if one.calibration} for scenario in scenarios]
    if "+" in use and any(methods and "fedavg" not in methods for methods in calibrated):
        evidence += "; FedAvg was not calibrated there"
    gain, cost = "", ""
    if use != "fedavg":
        gain = f"{min(gains):+.1f}" + (f" to {max(gains):+.1f}" if len(gains) > 1 else "")
        cost = f"{fmean(times):.1f}x the upload" if fmean(times) >= 1.05 else "the same upload"
    about = dict(zip(("clients", "skew", "start", "training"), situation, strict=True))
    return {**about, "use this": use, "points over FedAvg": gain, "cost": cost, "evidence": evidence}


def _keep_seeded(combinations: Sequence[Combination]) -> list[Combination]:
    """The combinations with three seeds, or as many as any has, so that no mean rests on one lucky partition."""
    enough = min(MIN_SEEDS, max((len(one.scores) for one in combinations), default=0))
    return [one for one in combinations if len(one.scores) >= enough]


def _pick_highest(combinations: Sequence[Combination]) -> Combination | None:
    return max(_keep_seeded(combinations), key=lambda one: one.accuracy.mean, default=None)


def read_all_records(out: Path) -> list[RunRecord]:
    """Every record in a folder of results."""
    runs = [out / RUNS / file.parent.name / file.stem for file in sorted((out / RECORDS).glob("*/seed*.json"))]
    records = [record for run in runs if isinstance(record := read_record(run), RunRecord)]
    if not records:
        command = f"unskew reproduce ours/calibrations --scale small --out {out}"
        raise UserError(f"{out} has no results to compare; run some first, for example: {command}")
    return records


def group_scenarios(records: Sequence[RunRecord]) -> list[Scenario]:
    """The scenarios with at least two combinations, by data set, number of clients and skew."""
    groups: dict[tuple[tuple[str, str], ...], dict[str, list[RunRecord]]] = {}  # by settings, then by partition seed
    for record in records:
        settings = record.result.settings
        if "centralised" not in record.result.method:
            ignored = OWN if record.result.rounds else OWN | OF_TRAINING
            key = tuple(sorted((k, str(v)) for k, v in settings.items() if k not in ignored))
            fixed = settings.get("partition_seed")
            groups.setdefault(key, {}).setdefault("" if fixed is None else str(fixed), []).append(record)
    scenarios, printed = [], _list_printed()
    for group in (group for own in groups.values() for group in _join_fixed(own)):
        combinations = tuple(_combine(group))
        if len(combinations) > 1:
            values = [printed[record.training] for record in group if record.training in printed]
            scenarios.append(Scenario(combinations, max(values, key=lambda pair: pair[1].mean, default=None)))
    return sorted(scenarios, key=lambda one: (one.data, one.result.clients, one.alpha, one.result.per_round, one.label))


def _join_fixed(own: dict[str, list[RunRecord]]) -> list[list[RunRecord]]:
    """Group repetitions on one partition with the run whose own seed drew it; the others have their own partitions."""
    free = own.pop("", [])
    joined = [[*group, *(one for one in free if str(one.result.seed) == seed)] for seed, group in own.items()]
    return [*joined, *([free] if any(str(one.result.seed) not in own for one in free) else [])]


def _combine(group: Sequence[RunRecord]) -> Iterator[Combination]:
    """Every method and rate of a scenario with each of its calibrations."""
    trained = defaultdict[tuple[str, str], list[RunRecord]](list)
    for record in group:
        trained[record.result.method, str(record.result.settings.get("lr", ""))].append(record)
    several = len({rate for _, rate in trained}) > 1
    for (method, rate), records in trained.items():
        names = dict.fromkeys(name for one in records for name in one.result.calibrations if not is_bound(name))
        for name in ("", *names):
            own = [record for record in records if not name or name in record.result.calibrations]
            results = [record.result for record in own]
            added = [result.calibrations[name] for result in results] if name else []
            scores = {one.seed: 100 * (one.calibrations[name] if name else one).accuracy for one in results}
            sent = fmean(one.bytes_up or 0 for one in results) + (fmean(one.bytes_up for one in added) if added else 0)
            seconds = min(one.seconds for one in results) + min((one.seconds for one in added), default=0)
            yield Combination(method, name, scores, sent, seconds, own[0], rate if several else "")


@cache
def _list_printed() -> dict[str, tuple[str, PaperValue]]:
    """The best accuracy that a paper prints, and where, by training; upper bounds do not count."""
    printed: dict[str, tuple[str, PaperValue]] = {}
    for name in recipe_names():
        for cell in make_cells(load_recipe(name), Variant("paper")):
            if cell.paper and cell.reading.text == "accuracy" and not (cell.after and is_bound(cell.after)):
                found = f"{cell.row.name}, {cell.column.name} in {name}", cell.paper
                training = cell.training()
                printed[training] = max(printed.get(training, found), found, key=lambda pair: pair[1].mean)
    return printed


def write_claim(out: Path) -> tuple[list[Path], list[str]]:
    """Write claim.md, claim.html and their figures from the records in a folder; returns the files and decisions."""
    scenarios = group_scenarios(read_all_records(out))
    decisions, beyond = decide(scenarios), _tabulate_beyond(scenarios)
    sections = []
    if decisions:
        choices = tabulate("", dict.fromkeys(decisions[0], "text"), [list(one.values()) for one in decisions])
        sections.append(Section("use", "What to use", _CHOICES, [choices]))
    sections += [Section("beyond", "Beyond the papers", _BEYOND, [beyond])] if beyond.rows else []
    sections.append(Section("figure", "Accuracy of every combination", _FIGURE, draw_claim(scenarios, out)))
    sections.append(Section("choices", "Appendix: every combination", _TABLE, [_tabulate_all(scenarios, out)]))
    page = Page(
        title="What to choose when",
        subtitle="Over all runs in this folder: which method, which calibration, at what cost",
        findings=[],
        facts=[("settings", str(len(scenarios))), ("combinations", str(sum(len(s.combinations) for s in scenarios)))],
        sections=sections,
        footer="Made by unskew reproduce --claim from the records in this folder.",
        heading="What to choose",
    )
    uses = [f"{', '.join(situation)}: {use}" for *situation, use, _, _, _ in map(dict.values, decisions)]
    return write_page(page, out, "claim"), uses


_CHOICES = (
    "One row for each situation. Training is long from 100 passes over the data. The gain is in points of accuracy "
    "over FedAvg without calibration, from the smallest to the largest over the settings; the cost is relative to "
    "FedAvg. Of the combinations statistically tied with the most accurate one and within a point of it, the one that"
    " sends least."
)
_FIGURE = (
    "One column per scenario, one dot per method and calibration. Within a column, dots further right send more "
    "bytes. The text above each column names the best combination. A dot links to its first run."
)
_TABLE = (
    "Bytes are what all clients send, over all rounds and for the calibration. The time is that of the fastest seed. "
    "The gap is how far the best is above a combination, paired over the seeds. Its interval is the wider of the "
    "pair's own and one from the noise of all combinations together, widened for the number of comparisons."
)
_BEYOND = (
    "The best combination that is not in the papers against the best that is, both run here on the same partitions "
    "and seeds, and the best value that a paper prints for the same settings. CCVR counts as the paper's with or "
    "without ReLU and Tukey's transformation."
)


def draw_claim(scenarios: Sequence[Scenario], folder: Path) -> list[Chart]:
    """A figure for each data set and network."""
    groups = defaultdict[str, list[Scenario]](list)
    for scenario in scenarios:
        groups[f"claim {scenario.data} {scenario.result.model}"].append(scenario)
    return [_draw_group(group, folder, slug(name)) for name, group in groups.items()]


def _draw_group(scenarios: Sequence[Scenario], folder: Path, name: str) -> Chart:
    """A column for each scenario: bytes from left to right, accuracy upwards, the best named above."""
    marks: list[Mark] = []
    every = [(at, one) for at, scenario in enumerate(scenarios) for one in scenario.combinations]
    for colour, kind in enumerate(KINDS):
        points = [(at, one) for at, one in every if one.kind == kind]
        if not points:
            continue
        tips = [f"{scenarios[at].label}\n{one.name}: {one.accuracy.format()} %\n{one.cost}" for at, one in points]
        links = [link_run(one.record, folder) for _, one in points]
        x = [at + WIDE * _place_by_bytes(one, scenarios[at]) for at, one in points]
        y = [one.accuracy.mean for _, one in points]
        marks.append(Dots(x, y, colour, radius=4.5, name=kind, tips=tips, links=links))
    highest = max(one.accuracy.mean for _, one in every)
    line = highest / LINES
    for at, scenario in enumerate(scenarios):
        best = scenario.best
        calibration = [f"+ {best.kind}"] if best.calibration else []
        texts = [f"{best.accuracy.mean:.1f} %: {' + '.join(best.methods)}", *calibration, best.cost]
        top = max(one.accuracy.mean for one in scenario.combinations)  # may have fewer seeds than the best
        marks += [Words(float(at), top + (row + 0.7) * line, text) for row, text in enumerate(reversed(texts))]
    parts = [scenario.label.split(", ") for scenario in scenarios]
    common = [part for part in parts[0] if len(parts) > 1 and all(part in other for other in parts)]
    labels = [[part for part in label if part not in common] for label in parts]
    low = -line * (max(map(len, labels)) + 0.8)
    for at, label in enumerate(labels):  # below the dots, one part per line
        marks += [Words(float(at), -line * (row + 1.2), part) for row, part in enumerate(label)]
    high = highest + 5 * line
    numbers = tuple((float(value), str(value)) for value in range(0, 101, 10 if high > 30 else 2) if value <= high)
    title = "Accuracy of every method with every calibration" + (f": {', '.join(common)}" if common else "")
    alt = "The best of each scenario: " + "; ".join(f"{one.label}: {one.best.name}" for one in scenarios) + "."
    x_axis = Axis(ticks=tuple((float(at), "") for at in range(len(parts))), low=-0.5, high=len(parts) - 0.5)
    y_axis = Axis("accuracy, %", low=low, high=high, ticks=numbers)
    width = max(620, LEFT + STEP * len(parts))
    return Chart(name, title, alt, marks, x=x_axis, y=y_axis, width=width, height=460)


def _place_by_bytes(one: Combination, scenario: Scenario) -> float:
    """The position of its bytes in the scenario on a log scale, from -1 for the fewest to 1 for the most."""
    sent = [math.log(max(other.bytes_up, 1)) for other in scenario.combinations]
    low, high = min(sent), max(sent)
    return 0.0 if high == low else 2 * (math.log(max(one.bytes_up, 1)) - low) / (high - low) - 1


def _tabulate_all(scenarios: Sequence[Scenario], folder: Path) -> Table:
    kinds = {"scenario": "text", "method": "text", "calibration": "text", "accuracy, %": "number", "seeds": "count"}
    kinds |= {"gap to the best": "text", "sent up": "bytes", "time": "seconds"}
    rows: list[list[CellValue]] = []
    for scenario in scenarios:
        for one in sorted(scenario.combinations, key=lambda one: -one.accuracy.mean):
            gap = "best" if one is scenario.best else scenario.describe_gap(scenario.best, one)
            link = Linked(one.accuracy.format(), link_run(one.record, folder), value=one.accuracy.mean)
            names: list[CellValue] = [scenario.label, one.trained, one.calibration]
            rows.append([*names, link, len(one.scores), gap, one.bytes_up, one.seconds])
    return tabulate("", kinds, rows)


def _tabulate_beyond(scenarios: Sequence[Scenario]) -> Table:
    names = ["scenario", "ours", "accuracy, %", "sent up", "the papers' best, run here", "accuracy, %", "sent up"]
    names += ["ours minus theirs, points", "printed in a paper", "where"]
    rows: list[list[CellValue]] = []
    for scenario in scenarios:
        ours, theirs = scenario.best_where(published=False), scenario.best_where(published=True)
        if ours is None or theirs is None or not scenario.result.rounds:
            continue
        where, printed = scenario.printed or ("", None)
        cells = [[one.name, one.accuracy.format(), format_bytes(one.bytes_up)] for one in (ours, theirs)]
        gap = scenario.describe_gap(ours, theirs)
        rows.append([scenario.label, *cells[0], *cells[1], gap, None if printed is None else str(printed), where])
    return Table("", [Column(name) for name in names], rows)
