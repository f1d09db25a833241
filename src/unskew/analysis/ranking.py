"""Which of several settings is best, and whether the seeds support it.

Runs that differ in the seed alone are one setting. A setting has a score for each of its classifiers: its own and every
calibration that is not a bound. The one with the highest mean leads. It is called a winner only where, for every
classifier of every other setting, the t-interval of the difference over the seeds that both have is above 0; those that
share fewer than three seeds with it are named as not ranked. The intervals hold together with 95 %: each has the level
1 − 0.05/(N − 1), N the number of all classifiers (Bonferroni). A wrong winner would have to beat the truly best one,
which is in N − 1 of the pairs at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import atan, cos, isfinite, pi, sin, sqrt
from statistics import fmean, stdev

from unskew.calibration import is_bound
from unskew.core.units import counted
from unskew.runs import config as configs
from unskew.runs.config import OPTIONS
from unskew.runs.finished import FinishedRun
from unskew.runs.result import Result

# the seed, and what does not change the result
LEFT_OUT = {"seed", "evaluate_every"} | {option.name for option in OPTIONS.values() if not option.decides}

_OF_RESULT = ("method", "data", "partition", "clients", "per_round", "rounds", "model")  # where nothing else is known


def list_settings(run: FinishedRun) -> dict[str, str]:
    """What decides a run's result except the seed: the same for runs that differ in the seed alone."""
    return {key: str(value) for key, value in configs.deciding(run.config).items() if key not in LEFT_OUT}


def list_result_settings(result: Result) -> dict[str, str]:
    """The same of a result: its settings, or what else it knows where they are missing."""
    known = {key: getattr(result, key) for key in _OF_RESULT} | result.settings
    return {key: str(value) for key, value in known.items() if key not in LEFT_OUT}


def name_settings(settings: Sequence[dict[str, str]]) -> list[str]:
    """A name for each of these settings: the method, and every other option in which they differ."""
    if not settings:
        return []
    every = dict.fromkeys(key for each in settings for key in each)
    differing = [key for key in every if len({_value(each, key) for each in settings}) > 1 and key != "method"]
    words = [[each["method"], *(_option(key, _value(each, key)) for key in differing)] for each in settings]
    return [" · ".join(each) for each in words]


def _value(settings: dict[str, str], key: str) -> str:
    """The option's value; its default where the settings, which may be of before it was there, do not have it.

    Empty where the option was not given and has no default that is a value.
    """
    known = key in OPTIONS and OPTIONS[key].default is not None
    return settings.get(key, OPTIONS[key].default_text if known else "")


def _option(key: str, value: str) -> str:
    if not value:
        return f"without {key.replace('_', ' ')}"
    return value if key in ("data", "partition", "model") else f"{key.replace('_', ' ')} {value}"


LEVEL = 0.95
MIN_SEEDS = 3  # that two settings must share before one can be called better
MAX_NAMED = 6  # settings in a sentence


@dataclass(frozen=True)
class Contender:
    """A classifier of a setting: its accuracy by seed."""

    setting: str
    classifier: str  # "" is the run's own, the others are calibrations
    scores: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Over its seeds."""
        return fmean(self.scores.values())

    def __str__(self) -> str:
        return f"{self.setting}, after {self.classifier}" if self.classifier else self.setting


@dataclass(frozen=True)
class Difference:
    """How far one candidate is above another, over the seeds that both have; ``low`` and ``high`` are its interval."""

    seeds: int
    mean: float
    low: float
    high: float


def group_by_settings(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each setting, by its name; those of one setting differ in the seed alone."""
    groups: dict[str, list[Result]] = {}
    for name, result in zip(name_settings([list_result_settings(each) for each in results]), results, strict=True):
        groups.setdefault(name, []).append(result)
    return groups


def list_contenders(groups: Mapping[str, Sequence[Result]]) -> list[Contender]:
    """Every classifier of every setting, without those that are bounds for study."""
    found = []
    for name, group in groups.items():
        found.append(Contender(name, "", {each.seed: each.accuracy for each in group}))
        made = dict.fromkeys(one for each in group for one in each.calibrations if not is_bound(one))
        for one in made:
            scores = {each.seed: each.calibrations[one].accuracy for each in group if one in each.calibrations}
            found.append(Contender(name, one, scores))
    return [each for each in found if all(map(isfinite, each.scores.values()))]


def pick_best(several: Sequence[Contender]) -> Contender:
    """The one with the highest mean; of classifiers of one setting those with most seeds are asked first."""
    most = max(len(each.scores) for each in several)
    return max((each for each in several if len(each.scores) == most), key=lambda each: each.mean)


def compare_pairs(one: Contender, other: Contender, level: float = LEVEL) -> Difference | None:
    """The mean difference, paired over common seeds, with its t-interval; None with fewer than ``MIN_SEEDS``."""
    common = sorted(set(one.scores) & set(other.scores))
    if len(common) < MIN_SEEDS:
        return None
    gaps = [one.scores[seed] - other.scores[seed] for seed in common]
    mean, half = fmean(gaps), t_quantile(level, len(gaps) - 1) * stdev(gaps) / sqrt(len(gaps))
    return Difference(len(gaps), mean, mean - half, mean + half)


def rank_settings(results: Sequence[Result]) -> list[str]:
    """The sentence on which setting is best: a winner, no clear winner, or with too few seeds the figures alone."""
    groups = group_by_settings(results)
    if len(groups) < 2:
        return []
    if len({each.data_sha256 for each in results}) > 1:
        return ["The runs are on different data: they are not ranked."]
    if len({each.settings.get("validation") for each in results}) > 1:
        return ["The runs were evaluated on different images, test or validation: they are not ranked."]
    every = list_contenders(groups)
    tops = [pick_best([each for each in every if each.setting == name]) for name in groups
            if any(each.setting == name for each in every)]  # fmt: skip
    tops.sort(key=lambda each: -each.mean)
    if len(tops) < 2:
        return []
    if all(len(set(top.scores) & set(tops[0].scores)) < MIN_SEEDS for top in tops[1:]):
        return [_figures(tops), *_uncalibrated(tops[0], every)]
    leader = tops[0]
    level = 1 - (1 - LEVEL) / (len(every) - 1)
    found = [(each, compare_pairs(leader, each, level)) for each in every if each.setting != leader.setting]
    ranked = [(each, gap) for each, gap in found if gap is not None]
    rest = [*_unranked([each for each, gap in found if gap is None]), *_uncalibrated(leader, every)]
    unsure = [(each, gap) for each, gap in ranked if gap.low <= 0]
    if unsure:
        rival, gap = max(unsure, key=lambda pair: pair[0].mean)
        highest = f"{leader} has the highest mean of {counted(len(every), 'classifier')}, {_spread(leader)}"
        return [f"No clear winner: {highest}, but {rival} has {_spread(rival)}: {_points(gap)}.", *rest]
    closest, gap = min(ranked, key=lambda pair: pair[1].mean)
    tried, settings = len(every) - len(found) + len(ranked), {each.setting for each, _ in ranked}
    among = f"the best of {tried} classifiers in {len(settings) + 1} settings"
    next_one = f"The next is {closest}, {_spread(closest)}: {_points(gap)}."
    return [f"{leader} is ahead: {_spread(leader)}, {among}. {next_one}", *rest]


def _unranked(several: Sequence[Contender]) -> list[str]:
    """Those that cannot be held against the leader."""
    if not several:
        return []
    return [f"Not ranked, with fewer than {MIN_SEEDS} seeds in common with it: {_named(list(map(str, several)))}."]


def _named(names: Sequence[str]) -> str:
    return "; ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _uncalibrated(leader: Contender, every: Sequence[Contender]) -> list[str]:
    """A calibrated setting beside others that were not calibrated: what is ahead may be the calibration."""
    made = {each.setting for each in every if each.classifier}
    bare = list(dict.fromkeys(each.setting for each in every if each.setting not in made))
    if not leader.classifier or not bare:
        return []
    return [f"Not calibrated, unlike {leader.setting}: {_named(bare)}."]


def _figures(tops: Sequence[Contender]) -> str:
    """With too few seeds: what came out, highest first, and that it ranks nothing."""
    shown = _named([f"{each} {_spread(each, seeds=False)}" for each in tops])
    most = max(len(each.scores) for each in tops)
    have = "one seed each" if most == 1 else f"fewer than {MIN_SEEDS} seeds in common"
    return f"No winner is named, with {have}: {shown}."


def _spread(one: Contender, seeds: bool = True) -> str:
    values = list(one.scores.values())
    if len(values) == 1:
        return f"{values[0]:.2%}"
    return f"{100 * one.mean:.2f} ± {100 * stdev(values):.2f}%" + (f" over {len(values)} seeds" if seeds else "")


def _points(gap: Difference) -> str:
    return (f"{100 * gap.mean:+.2f} points, 95% interval {100 * gap.low:+.2f} to {100 * gap.high:+.2f}, paired over "
            f"{counted(gap.seeds, 'seed')}")  # fmt: skip


def t_quantile(level: float, freedom: int) -> float:
    """The t that |T| stays below with this probability, for Student's T with that many degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < level:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t). Reference: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4."""
    angle = atan(t / sqrt(freedom))
    odd = freedom % 2
    term, total = (cos(angle), 0.0) if odd else (1.0, 0.0)
    for step in range(freedom // 2):
        total += term
        term *= cos(angle) ** 2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
