"""Over all records: for each skew and number of clients every method with every calibration, its gain and its cost."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean

from unskew.analysis.phrases import bound
from unskew.analysis.ranking import LEVEL, MIN_SEEDS, Candidate, Difference, difference, t_quantile
from unskew.core.errors import UserError
from unskew.reproduce.cells import Asked, cells_of
from unskew.reproduce.recipe import PaperValue
from unskew.reproduce.recipe_files import names, recipe
from unskew.reproduce.records import RECORDS, Record, read_record_file, run_folder
from unskew.runs.options import OPTIONS
from unskew.runs.spread import Spread, spread

# what does not tell federations apart: how they are trained, and who is lucky
OWN = {"method", "lr", "seed", "evaluate_every"} | {name for name, option in OPTIONS.items() if not option.decides}
OF_TRAINING = {"epochs", "batch", "momentum", "weight_decay", "augment", "per_round"}  # nothing, where none is done
PUBLISHED = {"fedavg", "fedprox", "fedavgm", "moon", "clsnorm", "clsprox", "prototypes", "fedir", "fedvc"}
IN_PAPERS = {"", "ccvr", "uscc"}
CHEAP, SAVING = 1.0, 0.9  # points that a cheaper choice may be below the best, and how much of its bytes it may send


@dataclass(frozen=True)
class Choice:
    """A method with a calibration in one federation: its accuracy by seed, in per cent, and what it costs."""

    method: str
    calibration: str  # "": none
    scores: dict[int, float]
    bytes_up: float  # all rounds and the calibration, mean over seeds
    seconds: float  # training and calibration, the quickest seed's: other work on the machine only adds
    records: tuple[Record, ...]
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
    def accuracy(self) -> Spread:
        """Mean and deviation over the seeds."""
        found = spread(self.scores.values())
        assert found is not None
        return found

    @property
    def published(self) -> bool:
        """Whether the papers have it: their methods, and CCVR or USCC as they write it."""
        plain = {part.partition("(")[0].strip() for part in self.method.split(" + ")} <= PUBLISHED
        name, _, knobs = self.calibration.partition("(")
        return plain and name in IN_PAPERS and "layers" not in knobs and "components" not in knobs


@dataclass(frozen=True)
class Federation:
    """Runs that differ in method, calibration and seed alone."""

    label: str
    alpha: float | None
    clients: int
    choices: tuple[Choice, ...]
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
    def best(self) -> Choice:
        """The highest mean of those with three seeds, or as many as any has."""
        found = _highest(self.choices)
        assert found is not None
        return found

    @property
    def plain(self) -> Choice | None:
        """FedAvg without calibration, at its best rate."""
        return _highest([each for each in self.choices if each.method == "fedavg" and not each.calibration])

    @property
    def best_published(self) -> Choice | None:
        """The best of what the papers have, as run by us."""
        return _highest([each for each in self.choices if each.published])

    @property
    def best_unpublished(self) -> Choice | None:
        """The best of what the papers do not have."""
        return _highest([each for each in self.choices if not each.published])

    @property
    def level(self) -> float:
        """Of an interval for one of all comparisons with the best: Bonferroni's."""
        return 1 - (1 - LEVEL) / max(1, len(self.choices) - 1)

    def gap(self, one: Choice, other: Choice) -> Difference | None:
        """How far one is above the other, in points, paired over common seeds; None with fewer than three.

        The interval is the wider of two: the pair's own, and one from the noise of all choices together, widened for
        the number of comparisons with the best. Widened alike, the pair's own would tell nothing apart with three
        seeds and dozens of choices; where a pair is noisier than the others, it holds for that pair alone.
        """
        own = difference(Candidate("", "", one.scores), Candidate("", "", other.scores))
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
    def rivals(self) -> list[Choice]:
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
    def cheapest(self) -> Choice:
        """The one with the fewest bytes of those within a point of the best; the best where none saves a tenth."""
        near = [each for each in _seen_enough(self.choices) if each.accuracy.mean >= self.best.accuracy.mean - CHEAP]
        least = min(near, key=lambda each: (each.bytes_up, -each.accuracy.mean))
        return least if least.bytes_up <= SAVING * self.best.bytes_up else self.best


def _seen_enough(choices: Sequence[Choice]) -> list[Choice]:
    """Those with three seeds, or as many as any has: with fewer a mean may be the luck of a partition."""
    enough = min(MIN_SEEDS, max((len(each.scores) for each in choices), default=0))
    return [each for each in choices if len(each.scores) >= enough]


def _highest(choices: Sequence[Choice]) -> Choice | None:
    """The highest mean of those that were seen often enough."""
    return max(_seen_enough(choices), key=lambda each: each.accuracy.mean, default=None)


def all_records(out: Path) -> list[Record]:
    """Every record in a folder of results."""
    found = []
    for file in sorted((out / RECORDS).glob("*/seed*.json")):
        record = read_record_file(file, run_folder(out, file.parent.name, int(file.stem.removeprefix("seed"))))
        if isinstance(record, Record):
            found.append(record)
    if not found:
        again = "unskew reproduce ours/calibrations --scale small"
        raise UserError(f"{out} has no results to choose from; make some, such as: {again} --out {out}")
    return found


def federations(records: Sequence[Record]) -> list[Federation]:
    """The federations of which at least two choices were tried, by data set, number of clients and skew."""
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}
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
        made.append(Federation(label, skew, group[0].result.clients, choices, best, data))
    return sorted(made, key=_order)


def _order(one: Federation) -> tuple[str, int, float, int, str]:
    visits = one.choices[0].records[0].result.per_round
    return one.data, one.clients, one.alpha if one.alpha is not None else 1e9, visits, one.label


def _word(data: str) -> str:
    """A data set's name without its folder, module or knobs."""
    return re.sub(r"^.*[:/]", "", data.partition("(")[0]) or data


def _choices(group: Sequence[Record]) -> Iterator[Choice]:
    trained: dict[tuple[str, str], list[Record]] = {}
    for record in group:
        trained.setdefault((record.result.method, str(record.result.settings.get("lr", ""))), []).append(record)
    several = len({rate for _, rate in trained}) > 1
    for (method, rate), records in trained.items():
        every = dict.fromkeys(name for each in records for name in each.result.calibrations if not bound(name))
        for name in ("", *every):
            some = [each for each in records if not name or name in each.result.calibrations]
            made = [each.result.calibrations[name] if name else None for each in some]
            scores = {each.result.seed: 100 * (one.accuracy if one else each.result.accuracy)
                      for each, one in zip(some, made, strict=True)}  # fmt: skip
            sent = fmean(
                each.result.bytes_up + (one.bytes_up if one else 0) for each, one in zip(some, made, strict=True)
            )
            took = min(each.result.seconds for each in some) + min((one.seconds for one in made if one), default=0)
            yield Choice(method, name, scores, sent, took, tuple(some), rate if several else "")


def _labels(records: Sequence[Record]) -> list[str]:
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
    for name in names():
        for cell in cells_of(recipe(name), Asked("paper")):
            value = cell.paper
            if value is None or cell.reads != "accuracy" or (cell.after and bound(cell.after)):
                continue
            if cell.training not in found or value.mean > found[cell.training][1].mean:
                found[cell.training] = (f"{cell.row.name}, {cell.column.name} in {name}", value)
    return found
