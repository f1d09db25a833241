"""What to choose when: one page on all results, with a figure for each data set and network."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean

from unskew.analysis.measure import CellValue, Column, Linked, Table, slug
from unskew.analysis.ranking import LEVEL, MIN_SEEDS, Difference, compare_pairs, t_quantile
from unskew.calibration import is_bound
from unskew.charts import Axis, Chart, Dots, Line, Mark, Words
from unskew.charts.files import svg
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.units import counted, format_bytes, format_duration
from unskew.report.page import Page, Section, to_html
from unskew.reproduce.cells import Variant, make_cells
from unskew.reproduce.recipe import PaperValue, load_recipe, recipe_names
from unskew.reproduce.records import RECORDS, RunRecord, link_run, read_record_file, run_folder
from unskew.runs.config import OPTIONS
from unskew.runs.result import Result
from unskew.runs.seeds import SeedSpread, spread_over_seeds

# options in which the runs of one scenario may differ
OWN = {"method", "lr", "seed", "partition_seed", "evaluate_every"} | {
    name for name, option in OPTIONS.items() if not option.decides
}
OF_TRAINING = {"epochs", "batch", "momentum", "weight_decay", "augment", "per_round"}  # irrelevant without training
PUBLISHED = {"fedavg", "fedprox", "fedavgm", "moon", "clsnorm", "clsprox", "prototypes", "fedir", "fedvc"}
CHEAP, SAVING = 1.0, 0.9  # a cheaper combination may lose this many points, and send this share of the bytes
KINDS = ("none", "ccvr", "uscc", "lda", "random", "ridge", "other")  # of calibration, one color each
NAMES = {"none": "no calibration", "random": "lda on random features", "other": "other calibrations"}
LONG = 100  # passes over the data; from here on, training is long
MOST_RIVALS = 3  # named in a sentence
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
    records: tuple[RunRecord, ...]
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
    def published(self) -> bool:
        """Whether it is in the papers: their methods, with CCVR or USCC as published."""
        methods = {part.partition("(")[0].strip() for part in self.method.split(" + ")}
        name, _, knobs = self.calibration.partition("(")
        return methods <= PUBLISHED and name in ("", "ccvr", "uscc") and not re.search("layers|components", knobs)

    @property
    def kind(self) -> str:
        """The kind of calibration, one of KINDS."""
        name, _, knobs = self.calibration.partition("(")
        name = "random" if "expand" in knobs else name or "none"
        return name if name in KINDS else "other"

    @property
    def family(self) -> str:
        """The methods and the kind of calibration, without knobs."""
        methods = " + ".join(part.partition("(")[0].strip() for part in self.method.split(" + "))
        return f"{methods} + {NAMES.get(self.kind, self.kind)}" if self.calibration else methods

    @property
    def cost(self) -> str:
        """Bytes and time."""
        return f"{format_bytes(self.bytes_up)} up, {format_duration(self.seconds)}"


@dataclass(frozen=True)
class Scenario:
    """Runs that differ only in method, calibration and seed."""

    label: str
    alpha: float | None
    combinations: tuple[Combination, ...]
    printed: tuple[str, PaperValue] | None  # where the papers' best value for these settings is, and the value
    data: str  # short name of the data set

    @property
    def result(self) -> Result:
        """The result of one of its runs, which share the network and the number of rounds."""
        return self.combinations[0].records[0].result

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
        trainings: dict[str, list[list[float]]] = {}
        for item in self.combinations:
            if item.scores.keys() >= set(seeds):
                trainings.setdefault(item.trained, []).append([item.scores[seed] for seed in seeds])
        rows = [row for group in trainings.values() for row in group]
        mean, seed_means = fmean(map(fmean, rows)), [fmean(column) for column in zip(*rows, strict=True)]

        def spread(row: list[float]) -> float:
            """The sum of squares that neither the combination nor the seed explains."""
            pairs = zip(row, seed_means, strict=True)
            return sum((score - fmean(row) - seed_mean + mean) ** 2 for score, seed_mean in pairs)

        freedom = (len(trainings) - 1) * (len(seeds) - 1)
        half = own.high - own.mean
        if freedom:
            variance = sum(fmean(map(spread, group)) for group in trainings.values()) / freedom
            level = 1 - (1 - LEVEL) / max(1, len(self.combinations) - 1)
            half = max(half, t_quantile(level, freedom) * math.sqrt(2 * variance / len(seeds)))
        return Difference(own.seeds, own.mean, own.mean - half, own.mean + half)

    def describe_gap(self, one: Combination, other: Combination) -> str:
        """The gap in points, with its interval if there are enough seeds."""
        gap = self.gap(one, other)
        if gap is None:
            return f"{one.accuracy.mean - other.accuracy.mean:+.2f} points"
        return f"{gap.mean:+.2f} points ({gap.low:+.2f} to {gap.high:+.2f})"

    @property
    def rivals(self) -> list[Combination]:
        """The combinations that are statistically tied with the best, highest first."""
        gaps = [(one, self.gap(self.best, one)) for one in self.combinations if one is not self.best]
        return sorted((one for one, gap in gaps if gap is None or gap.low <= 0), key=lambda one: -one.accuracy.mean)

    @property
    def never_calibrated(self) -> list[str]:
        """Methods that were never calibrated although others were."""
        tried = {one.method for one in self.combinations if one.calibration}
        return list(dict.fromkeys(one.method for one in self.combinations if one.method not in tried)) if tried else []

    @property
    def cheapest(self) -> Combination:
        """The combination with the fewest bytes within a point of the best; the best if none saves a tenth."""
        least_accurate = self.best.accuracy.mean - CHEAP
        near = [one for one in _keep_seeded(self.combinations) if one.accuracy.mean >= least_accurate]
        least = min(near, key=lambda one: (one.bytes_up, -one.accuracy.mean))
        return least if least.bytes_up <= SAVING * self.best.bytes_up else self.best


@dataclass(frozen=True)
class Decision:
    """A row of the decision table: a situation, what to use, its gain and cost, and the evidence."""

    situation: tuple[str, str, str, str]  # clients, skew, start, training
    use: str
    gain: str
    cost: str
    evidence: str


def describe_situation(scenario: Scenario) -> tuple[str, str, str, str]:
    """What is known in advance: the number of clients, the skew, pretrained or not, the amount of training."""
    result, alpha = scenario.result, scenario.alpha
    clients = "about 10" if result.clients <= 20 else "50 to 100" if result.clients <= 100 else "hundreds"
    if alpha is None:
        skew = {"users": "by user", "geo": "by place"}.get(result.partition.partition("(")[0], result.partition)
    else:
        skew = "strong (α ≤ 0.2)" if alpha <= 0.2 else "moderate (α ≈ 0.5)" if alpha <= 1 else "mild (α ≥ 5)"
    frozen = str(result.settings.get("train", "all")) != "all"
    start = "pretrained, frozen" if frozen else "pretrained" if result.settings.get("pretrained") else "from scratch"
    passes = result.rounds * int(str(result.settings.get("epochs", 1))) * result.per_round / result.clients
    training = "none" if not result.rounds else "long" if passes >= LONG else "short"
    return clients, skew, start, training


def decide(scenarios: Sequence[Scenario]) -> list[Decision]:
    """One row per situation: among the families tied with the best and within a point, the one that sends least.

    Only scenarios with three seeds count, or all if there are none. Without FedAvg there is no gain to report.
    """
    groups: dict[tuple[str, str, str, str], list[Scenario]] = {}
    for scenario in scenarios:
        if scenario.plain is not None and scenario.result.rounds:
            groups.setdefault(describe_situation(scenario), []).append(scenario)
    decisions = []
    for situation, group in groups.items():
        enough = [scenario for scenario in group if len(scenario.best.scores) >= MIN_SEEDS]
        decisions.append(_decide(situation, enough or group))
    return decisions


def _decide(situation: tuple[str, str, str, str], scenarios: Sequence[Scenario]) -> Decision:
    families: list[dict[str, Combination]] = []  # the best of every family, by scenario
    for scenario in scenarios:
        ranked = sorted(_keep_seeded(scenario.combinations), key=lambda one: one.accuracy.mean)
        families.append({one.family: one for one in ranked})
    shared = set.intersection(*map(set, families))
    means = {name: fmean(family[name].accuracy.mean for family in families) for name in shared}
    best = max(means, key=lambda name: means[name])
    pairs_by_name = {name: [(family[best], family[name]) for family in families] for name in shared}
    tied = [best]
    for name in shared - {best}:
        gaps = [scenario.gap(*pair) for scenario, pair in zip(scenarios, pairs_by_name[name], strict=True)]
        if means[name] >= means[best] - CHEAP and all(gap is not None and gap.low <= 0 for gap in gaps):
            tied.append(name)
    use = min(tied, key=lambda name: (fmean(family[name].bytes_up for family in families), -means[name]))
    pairs = [(scenario, family[use], scenario.plain) for scenario, family in zip(scenarios, families, strict=True)]
    gains, clear, times = [], 0, []
    for scenario, one, plain in pairs:
        assert plain is not None  # ensured by decide()
        gap = scenario.gap(one, plain)
        gains.append(one.accuracy.mean - plain.accuracy.mean if gap is None else gap.mean)
        clear += gap is not None and gap.low > 0
        times.append(one.bytes_up / max(plain.bytes_up, 1))
    seeds = min(len(one.scores) for _, one, _ in pairs)
    names = ", ".join(dict.fromkeys(scenario.data for scenario in scenarios))
    evidence = f"{names}: {counted(len(scenarios), 'setting')}, {counted(seeds, 'seed')} each"
    if seeds < MIN_SEEDS:
        evidence += "; an indication only"
    elif use != "fedavg":
        evidence += f"; the interval excludes 0 in {clear} of {len(pairs)}"
    if use != best:
        evidence += f"; tied with {best}, which has the highest mean"
    if "+" in use and any("fedavg" in scenario.never_calibrated for scenario in scenarios):
        evidence += "; FedAvg was not calibrated there"
    if use == "fedavg":
        return Decision(situation, use, "", "", evidence)
    gain = f"{min(gains):+.1f}" + (f" to {max(gains):+.1f}" if len(gains) > 1 else "")
    cost = f"{fmean(times):.1f}x the upload" if fmean(times) >= 1.05 else "the same upload"
    return Decision(situation, use, gain, cost, evidence)


def _keep_seeded(combinations: Sequence[Combination]) -> list[Combination]:
    """The combinations with three seeds, or as many as any has, so that no mean rests on one lucky partition."""
    enough = min(MIN_SEEDS, max((len(one.scores) for one in combinations), default=0))
    return [one for one in combinations if len(one.scores) >= enough]


def _pick_highest(combinations: Sequence[Combination]) -> Combination | None:
    return max(_keep_seeded(combinations), key=lambda one: one.accuracy.mean, default=None)


def read_all_records(out: Path) -> list[RunRecord]:
    """Every record in a folder of results."""
    records = []
    for file in sorted((out / RECORDS).glob("*/seed*.json")):
        record = read_record_file(file, run_folder(out, file.parent.name, int(file.stem.removeprefix("seed"))))
        if isinstance(record, RunRecord):
            records.append(record)
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
    separate = [group for own in groups.values() for group in _join_fixed(own)]
    combined = [(group, combinations) for group in separate if len(combinations := tuple(_combine(group))) > 1]
    labels, printed, scenarios = _label_scenarios([group[0] for group, _ in combined]), _list_printed(), []
    for label, (group, combinations) in zip(labels, combined, strict=True):
        values = [printed[record.training] for record in group if record.training in printed]
        best = max(values, key=lambda pair: pair[1].mean) if values else None
        data = _shorten(group[0].result.data)
        scenarios.append(Scenario(label, _find_alpha(group[0]), combinations, best, data))

    def order(one: Scenario) -> tuple[str, int, float, int, str]:
        alpha = one.alpha if one.alpha is not None else 1e9
        return one.data, one.result.clients, alpha, one.result.per_round, one.label

    return sorted(scenarios, key=order)


def _join_fixed(own: dict[str, list[RunRecord]]) -> list[list[RunRecord]]:
    """Group repetitions on one partition with the run whose own seed drew it; the others have their own partitions."""
    free = own.pop("", [])
    joined = [[*group, *(one for one in free if str(one.result.seed) == seed)] for seed, group in own.items()]
    return [*joined, *([free] if any(str(one.result.seed) not in own for one in free) else [])]


def _find_alpha(record: RunRecord) -> float | None:
    alpha = re.search(r"alpha=([\d.]+)", record.result.partition)
    return float(alpha[1]) if alpha else None


def _shorten(data: str) -> str:
    """A data set's name without its folder, module or knobs."""
    return re.sub(r"^.*[:/]", "", data.partition("(")[0]) or data


def _combine(group: Sequence[RunRecord]) -> Iterator[Combination]:
    """Every method and rate of a scenario with each of its calibrations."""
    trained: dict[tuple[str, str], list[RunRecord]] = {}
    for record in group:
        trained.setdefault((record.result.method, str(record.result.settings.get("lr", ""))), []).append(record)
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
            yield Combination(method, name, scores, sent, seconds, tuple(own), rate if several else "")


def _label_scenarios(records: Sequence[RunRecord]) -> list[str]:
    """A name for each scenario: clients and skew, and what else distinguishes it from the others."""
    lengths = {(one.result.rounds, one.result.settings.get("epochs")) for one in records}
    sets = {_shorten(one.result.data) for one in records}
    networks = {(_shorten(one.result.data), one.result.model) for one in records}
    labels = []
    for record in records:
        result, alpha = record.result, _find_alpha(record)
        scheme = "per-client Dirichlet" if result.partition.startswith("dirichlet-client") else "Dirichlet"
        parts = [_shorten(result.data)] if len(sets) > 1 else []
        parts += [f"{result.clients:,} clients"]
        parts += [f"{result.per_round:,} per round"] if result.per_round < result.clients else []
        parts += [result.partition if alpha is None else f"{scheme} α = {alpha:g}"]
        if len(lengths) > 1:
            epochs = counted(int(result.settings.get("epochs", 1)), "epoch")
            parts.append(f"{result.rounds} rounds of {epochs}" if result.rounds else "no training")
        part_trained = result.settings.get("train", "all")
        if part_trained != "all":
            parts.append(f"only the {part_trained} of {result.model} trained")
        elif len(networks) > len(sets):
            parts.append(result.model)
        labels.append(", ".join(parts))
    return [
        f"{label}, {one.result.data}, {one.result.partition}, {one.result.model}" if labels.count(label) > 1 else label
        for label, one in zip(labels, records, strict=True)
    ]


@cache
def _list_printed() -> dict[str, tuple[str, PaperValue]]:
    """The best accuracy that a paper prints, and where, by training; upper bounds do not count."""
    printed: dict[str, tuple[str, PaperValue]] = {}
    for name in recipe_names():
        for cell in make_cells(load_recipe(name), Variant("paper")):
            value = cell.paper
            if value is None or cell.reads != "accuracy" or (cell.after and is_bound(cell.after)):
                continue
            if cell.training() not in printed or value.mean > printed[cell.training()][1].mean:
                printed[cell.training()] = (f"{cell.row.name}, {cell.column.name} in {name}", value)
    return printed


def write_claim(out: Path) -> tuple[list[Path], list[str]]:
    """Write claim.html, claim.md and their figures from the records in a folder; returns the files and decisions."""
    records = read_all_records(out)
    scenarios = group_scenarios(records)
    decisions, charts, sentences = decide(scenarios), draw_claim(scenarios, out), describe_scenarios(scenarios)
    names = ["clients", "skew", "start", "training", "use this", "points over FedAvg", "cost", "evidence"]
    rows = [[*one.situation, one.use, one.gain, one.cost, one.evidence] for one in decisions]
    tables = {
        "What to use": (_CHOICES, Table("", [Column(name) for name in names], rows)),
        "Beyond the papers": (_BEYOND, _tabulate_beyond(scenarios)),
        "Forecast and gain": (_FORECAST, _tabulate_forecasts(records)),
    }
    if forecast := _draw_forecasts(records):
        charts.append(forecast)
    shown = [Section(slug(title), title, text, [table]) for title, (text, table) in tables.items() if table.rows]
    page = Page(
        title="What to choose when",
        subtitle="Over all runs in this folder: which method, which calibration, at what cost",
        findings=[],
        facts=[("settings", str(len(scenarios))), ("combinations", str(sum(len(s.combinations) for s in scenarios)))],
        sections=[
            *shown,
            Section("figure", "Accuracy of every combination", _FIGURE, charts),
            Section("choices", "Every combination", _TABLE, [_tabulate_all(scenarios, out)]),
            Section("settings", "Every setting in a sentence", "", findings=sentences),
        ],
        footer="Made by unskew reproduce --claim from the records in this folder.",
        heading="What to choose",
    )
    lines = ["# What to choose when", ""]
    for title, (text, table) in tables.items():
        if table.rows:
            cells = [[column.name for column in table.columns], ["---"] * len(table.columns), *table.rows]
            lines += [f"## {title}", "", text, ""]
            lines += ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in cells]
            lines.append("")
    lines += ["## Appendix: every setting", "", *(f"- {sentence}" for sentence in sentences), ""]
    lines += [line for chart in charts for line in (f"![{chart.title}]({chart.name}.svg)", "")]
    contents = {"claim.html": to_html(page), "claim.md": "\n".join(lines).rstrip() + "\n"}
    contents |= {f"{chart.name}.svg": svg(chart) for chart in charts}
    if (out / "claim.md").is_file():  # delete figures of data sets that are no longer there
        earlier = re.findall(r"\]\((claim[a-z0-9-]*\.svg)\)", (out / "claim.md").read_text(encoding="utf-8"))
        for name in set(earlier) - set(contents):
            (out / name).unlink(missing_ok=True)
    for name, content in contents.items():
        write_whole(out / name, content.encode())
    return [out / name for name in contents], [f"{', '.join(one.situation)}: {one.use}" for one in decisions]


_CHOICES = (
    "One row for each situation: the number of clients, the skew of their labels, where the weights come from, and how "
    "much is trained (long: 100 passes over the data or more). The gain is in points of accuracy over FedAvg without "
    "calibration, from the smallest to the largest over the settings; the cost is relative to FedAvg. Of the "
    "combinations that are statistically tied with the most accurate one and within a point of it, the table has the "
    "one that sends least."
)
_FORECAST = (
    "What unskew forecasts from the class statistics before a calibration, against what the calibration gained: for "
    "every run whose separability was measured, the forecast of a linear discriminant on features drawn from the "
    "Gaussians, and the best gain of CCVR, USCC, LDA or ridge on the test images, in points."
)
_FIGURE = (
    "One column per scenario, one dot per method and calibration. Within a column, dots further right send more bytes. "
    "The text above each column names the best combination. A dot links to its first run."
)
_TABLE = (
    "Bytes are what all clients send, over all rounds and for the calibration. The time is that of the fastest seed, "
    "since other work on the machine only adds to it. The gap is how far the best is above a combination, paired over "
    "the seeds. Its interval is the wider of the pair's own and one from the noise of all combinations together, "
    "widened for the number of comparisons. A paper's table shows only the pair's own interval, which may exclude zero "
    "where this one does not."
)
_BEYOND = (
    "The best combination that is not in the papers against the best that is, both run here on the "
    "same partitions and seeds, with the bytes that each sends, and the best value that a paper reports "
    "for the same settings. CCVR counts as the paper's method with or without ReLU and Tukey's transformation."
)


def describe_scenarios(scenarios: Sequence[Scenario]) -> list[str]:
    """For each scenario: the best combination, those statistically tied with it, and a cheaper one."""
    sentences = []
    for scenario in scenarios:
        best, seeds = scenario.best, counted(len(scenario.best.scores), "seed")
        few = len(best.scores) < MIN_SEEDS
        what = f"highest mean, but too few seeds ({seeds}) to name a winner: " if few else ""
        text = f"{scenario.label}: {what}{best.name}, {best.accuracy.format()} % over {seeds}, {best.cost}"
        if scenario.result.rounds and scenario.plain is not None and scenario.plain is not best:
            text += f"; {scenario.describe_gap(best, scenario.plain)} over FedAvg without calibration"
        rivals = [one.name for one in scenario.rivals]
        if rivals and not few:
            more = f" and {len(rivals) - MOST_RIVALS} more" if len(rivals) > MOST_RIVALS else ""
            text += f". Statistically tied with: {', '.join(rivals[:MOST_RIVALS])}{more}"
        if scenario.never_calibrated:
            text += f". Tried only without calibration: {', '.join(scenario.never_calibrated)}"
        cheap = scenario.cheapest
        if cheap is not best:
            instead = f"{format_bytes(cheap.bytes_up)} instead of {format_bytes(best.bytes_up)}"
            text += f". Within {CHEAP:g} point for {instead}: {cheap.name}"
        sentences.append(f"{text}.")
    return sentences


def draw_claim(scenarios: Sequence[Scenario], folder: Path) -> list[Chart]:
    """A figure for each data set and network."""
    groups: dict[tuple[str, str], list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault((scenario.data, scenario.result.model), []).append(scenario)
    sets, charts = [data for data, _ in groups], []
    for (data, network), group in groups.items():
        name = f"{data} {network}" if sets.count(data) > 1 else data if len(groups) > 1 else ""
        charts.append(_draw_group(group, folder, name))
    return charts


def _draw_group(scenarios: Sequence[Scenario], folder: Path, name: str) -> Chart:
    """A column for each scenario: bytes from left to right, accuracy upwards, the best named above."""
    marks: list[Mark] = []
    for colour, kind in enumerate(KINDS):
        every = [(at, one) for at, scenario in enumerate(scenarios) for one in scenario.combinations]
        points = [(at, one) for at, one in every if one.kind == kind]
        if not points:
            continue
        tips = [f"{scenarios[at].label}\n{one.name}: {one.accuracy.format()} %\n{one.cost}" for at, one in points]
        links = [link_run(one.records[0], folder) for _, one in points]
        x = [at + WIDE * _place_by_bytes(one, scenarios[at]) for at, one in points]
        y = [one.accuracy.mean for _, one in points]
        marks.append(Dots(x, y, colour, radius=4.5, name=NAMES.get(kind, kind), tips=tips, links=links))
    means = [one.accuracy.mean for scenario in scenarios for one in scenario.combinations]
    line = (max(means) - min(means) or 1) / LINES
    for at, scenario in enumerate(scenarios):
        best = scenario.best
        methods = " + ".join(part.partition("(")[0].strip() for part in best.method.split(" + "))  # no room for knobs
        calibration = [f"+ {NAMES.get(best.kind, best.kind)}"] if best.calibration else []
        texts = [f"{best.accuracy.mean:.1f} %: {methods}", *calibration, best.cost]
        top = max(one.accuracy.mean for one in scenario.combinations)  # may have fewer seeds than the best
        marks += [Words(float(at), top + (row + 0.7) * line, text) for row, text in enumerate(reversed(texts))]
    parts = [scenario.label.split(", ") for scenario in scenarios]
    common = [part for part in parts[0] if len(parts) > 1 and all(part in other for other in parts)]
    ticks = tuple((float(at), ", ".join(p for p in label if p not in common)) for at, label in enumerate(parts))
    title = "Accuracy of every method with every calibration" + (f": {', '.join(common)}" if common else "")
    alt = "The best of each scenario: " + "; ".join(f"{one.label}: {one.best.name}" for one in scenarios) + "."
    x_axis, y_axis = Axis(ticks=ticks, low=-0.5, high=len(parts) - 0.5), Axis("accuracy, %", high=max(means) + 5 * line)
    name, width = slug(f"claim {name}"), max(620, LEFT + STEP * len(parts))
    return Chart(name, title, alt, marks, x=x_axis, y=y_axis, width=width, height=460)


def _place_by_bytes(one: Combination, scenario: Scenario) -> float:
    """The position of its bytes in the scenario on a log scale, from -1 for the fewest to 1 for the most."""
    sent = [math.log(max(other.bytes_up, 1)) for other in scenario.combinations]
    low, high = min(sent), max(sent)
    return 0.0 if high == low else 2 * (math.log(max(one.bytes_up, 1)) - low) / (high - low) - 1


def _tabulate_all(scenarios: Sequence[Scenario], folder: Path) -> Table:
    columns = [Column("scenario"), Column("method"), Column("calibration"), Column("accuracy, %", "number")]
    columns += [Column("seeds", "count"), Column("gap to the best"), Column("sent up", "bytes")]
    columns += [Column("time", "seconds")]
    rows: list[list[CellValue]] = []
    for scenario in scenarios:
        for one in sorted(scenario.combinations, key=lambda one: -one.accuracy.mean):
            gap = "best" if one is scenario.best else scenario.describe_gap(scenario.best, one)
            link = Linked(one.accuracy.format(), link_run(one.records[0], folder), value=one.accuracy.mean)
            names: list[CellValue] = [scenario.label, one.trained, one.calibration]
            rows.append([*names, link, len(one.scores), gap, one.bytes_up, one.seconds])
    return Table("", columns, rows)


def _tabulate_beyond(scenarios: Sequence[Scenario]) -> Table:
    names = ["scenario", "ours", "accuracy, %", "sent up", "the papers' best, run here", "accuracy, %", "sent up"]
    names += ["ours minus theirs, points", "printed in a paper", "where"]
    rows: list[list[CellValue]] = []
    for scenario in scenarios:
        ours, theirs = scenario.best_where(published=False), scenario.best_where(published=True)
        if ours is None or theirs is None or not scenario.result.rounds:
            continue
        where, printed = scenario.printed or ("", None)
        cells = []
        for one in (ours, theirs):
            cells += [one.name, one.accuracy.format(), format_bytes(one.bytes_up)]
        gap = scenario.describe_gap(ours, theirs)
        rows.append([scenario.label, *cells, gap, None if printed is None else str(printed), where])
    return Table("", [Column(name) for name in names], rows)


def _list_forecasts(records: Sequence[RunRecord]) -> list[tuple[RunRecord, float, float]]:
    """For each run with a forecast and a calibration: the forecast gain and the best gain, in points."""
    forecasts = []
    for record in records:
        values, result = record.measure("separability"), record.result
        names = [name for name in result.calibrations if not is_bound(name) and "expand" not in name]
        if names and values and values["before"] is not None and values["after"] is not None:
            best = max(result.calibrations[name].accuracy for name in names)
            forecasts.append((record, 100 * (values["after"] - values["before"]), 100 * (best - result.accuracy)))
    return forecasts


def _tabulate_forecasts(records: Sequence[RunRecord]) -> Table:
    """The mean forecast, the mean gain and their difference, by setting and method."""
    names = ["setting", "runs", "forecast", "gain", "forecast minus gain"]
    groups: dict[str, list[tuple[float, float]]] = {}
    for record, forecast, gain in _list_forecasts(records):
        result = record.result
        name = f"{_shorten(result.data)}, {result.partition}, {result.method}, {result.rounds} rounds"
        groups.setdefault(name, []).append((forecast, gain))
    rows: list[list[CellValue]] = []
    for name, pairs in sorted(groups.items()):
        forecast, gain = (fmean(values) for values in zip(*pairs, strict=True))
        rows.append([name, len(pairs), f"{forecast:+.1f}", f"{gain:+.1f}", f"{forecast - gain:+.1f}"])
    return Table("", [Column(name) for name in names], rows)


def _draw_forecasts(records: Sequence[RunRecord]) -> Chart | None:
    rows = _list_forecasts(records)
    if len(rows) < MIN_SEEDS:
        return None
    x, y = [forecast for _, forecast, _ in rows], [gain for _, _, gain in rows]
    tips = [f"{one.result.method}, seed {one.result.seed}: {a:+.1f} forecast, {b:+.1f} gained" for one, a, b in rows]
    marks: list[Mark] = [Dots(x, y, 0, radius=4.0, tips=tips)]
    ends = [min(*x, *y, 0.0), max(*x, *y)]
    marks.append(Line(ends, ends, "as forecast", "quiet", dashed=True))
    below = sum(gain < forecast for _, forecast, gain in rows)
    alt = f"{len(rows)} runs: the gain of calibration by its forecast; {below} gained less than forecast."
    x_axis, y_axis = Axis("forecast gain, points"), Axis("gain of the best calibration, points")
    return Chart("claim-forecast", "Forecast and gain", alt, marks, x=x_axis, y=y_axis, width=520, height=340)
