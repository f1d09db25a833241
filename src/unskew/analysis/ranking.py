"""Which of several settings is best, and whether the seeds support it.

Runs that differ only in the seed form one setting. A setting has a score for each of its classifiers: its own and every
calibration that is not an upper bound. The highest mean leads. It wins only if, against every classifier of every other
setting, the t-interval of the difference, paired over common seeds, is above 0; classifiers that share fewer than three
seeds with it are not ranked. The intervals hold jointly with 95 %: each has level 1 − 0.05/(N − 1) for N classifiers
(Bonferroni), because a wrong winner would have to beat the truly best one, which is in at most N − 1 pairs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Any, TypeVar

from unskew.calibration import is_bound
from unskew.core.units import counted
from unskew.runs import config as configs
from unskew.runs.config import OPTIONS
from unskew.runs.finished import FinishedRun
from unskew.runs.result import Result
from unskew.runs.seeds import SeedSpread, spread_over_seeds

# the seed, and options that do not change the result
LEFT_OUT = {"seed", "evaluate_every"} | {option.name for option in OPTIONS.values() if not option.decides}
LEVEL = 0.95
MIN_SEEDS = 3  # that two settings must share to be ranked
MAX_SEEDS = 100  # the largest number of seeds to recommend
MAX_NAMED = 6  # settings in a sentence
T = TypeVar("T")


def list_settings(run: FinishedRun) -> dict[str, str]:
    """Everything that decides a run's result, except the seed."""
    return {key: str(value) for key, value in configs.deciding(run.config).items() if key not in LEFT_OUT}


def list_result_settings(result: Result) -> dict[str, str]:
    """The same for a result: its settings, and the fields that a result without settings still has."""
    fields = ("method", "data", "partition", "clients", "per_round", "rounds", "model")
    settings = {key: getattr(result, key) for key in fields} | result.settings
    return {key: str(value) for key, value in settings.items() if key not in LEFT_OUT}


def name_settings(settings: Sequence[dict[str, str]]) -> list[str]:
    """A name for each of these settings: the method, and every other option in which they differ."""
    defaults = {name: option.default_text for name, option in OPTIONS.items() if option.default is not None}
    keys = dict.fromkeys(key for options in settings for key in options if key != "method")
    full = [{key: defaults.get(key, "") for key in keys} | options for options in settings]  # older results have fewer
    differing = [key for key in keys if len({options[key] for options in full}) > 1]

    def describe(key: str, text: str) -> str:
        if not text:
            return f"without {key.replace('_', ' ')}"
        return text if key in ("data", "partition", "model") else f"{key.replace('_', ' ')} {text}"

    return [" · ".join([row["method"], *(describe(key, row[key]) for key in differing)]) for row in full]


@dataclass(frozen=True)
class Contender:
    """A classifier of a setting: its accuracy by seed."""

    setting: str
    classifier: str  # "": the run's own; otherwise a calibration
    scores: Mapping[int, float]

    @property
    def accuracy(self) -> SeedSpread:
        """Mean and deviation over the seeds."""
        return spread_over_seeds(self.scores.values())  # type: ignore[return-value]  # there is a seed

    def __str__(self) -> str:
        return f"{self.setting}, after {self.classifier}" if self.classifier else self.setting


@dataclass(frozen=True)
class Difference:
    """How far one contender is above another over common seeds; ``low`` and ``high`` are its interval."""

    seeds: int
    mean: float
    low: float
    high: float


def group_by_settings(
    runs: Iterable[T], settings: Callable[[Any], dict[str, str]] = list_result_settings
) -> dict[str, list[T]]:
    """The runs of each setting by its name, by default from results; those of one setting differ only in the seed."""
    runs, groups = list(runs), dict[str, list[T]]()
    for name, run in zip(name_settings([settings(run) for run in runs]), runs, strict=True):
        groups.setdefault(name, []).append(run)
    return groups


def list_contenders(groups: Mapping[str, Sequence[Result]]) -> list[Contender]:
    """Every classifier of every setting, except upper bounds."""
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for name, group in groups.items():
        scores[name, ""] = {run.seed: run.accuracy for run in group}
        for run in group:
            for added in filterfalse(is_bound, run.calibrations):
                scores.setdefault((name, added), {})[run.seed] = run.calibrations[added].accuracy
    contenders = [Contender(*names, by_seed) for names, by_seed in scores.items()]
    return [contender for contender in contenders if all(map(isfinite, contender.scores.values()))]


def pick_best(contenders: Sequence[Contender]) -> Contender:
    """The highest mean among those with the most seeds."""
    most = max(len(contender.scores) for contender in contenders)
    return max((one for one in contenders if len(one.scores) == most), key=lambda one: one.accuracy.mean)


def compare_pairs(one: Mapping[int, float], other: Mapping[int, float], level: float = LEVEL) -> Difference | None:
    """The mean difference of scores by seed, paired over common seeds; None with fewer than ``MIN_SEEDS`` of them."""
    gaps = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    if len(gaps) < MIN_SEEDS:
        return None
    mean, half = fmean(gaps), t_quantile(level, len(gaps) - 1) * stdev(gaps) / sqrt(len(gaps))
    return Difference(len(gaps), mean, mean - half, mean + half)


def t_quantile(level: float, freedom: int) -> float:
    """The t with P(|T| < t) = ``level`` for Student's t distribution."""
    from scipy.special import stdtrit  # as scipy.stats.t.ppf, but scipy.stats takes a second to import

    return float(stdtrit(freedom, (1 + level) / 2))


def rank_settings(results: Sequence[Result]) -> list[str]:
    """Which setting is best, in sentences: a winner, no clear winner, or too few seeds to name one."""
    groups = group_by_settings(results)
    if len(groups) < 2:
        return []
    if len({result.data_sha256 for result in results}) > 1:
        return ["The runs use different data, so they are not ranked."]
    if len({result.settings.get("validation") for result in results}) > 1:
        return ["Some runs were evaluated on test images, others on validation images, so they are not ranked."]
    contenders = list_contenders(groups)
    by_setting = [[one for one in contenders if one.setting == name] for name in groups]
    tops = sorted((pick_best(some) for some in by_setting if some), key=lambda one: -one.accuracy.mean)
    if len(tops) < 2:
        return []
    leader, calibrated = tops[0], {one.setting for one in contenders if one.classifier}
    bare = list(dict.fromkeys(one.setting for one in contenders if one.setting not in calibrated))
    notes = [f"Not calibrated, unlike {leader.setting}: {_list_some(bare)}."] if leader.classifier and bare else []
    if all(len(top.scores.keys() & leader.scores.keys()) < MIN_SEEDS for top in tops[1:]):
        single = max(len(top.scores) for top in tops) == 1
        reason = "one seed each" if single else f"fewer than {MIN_SEEDS} seeds in common"
        scores = _list_some([f"{top} {top.accuracy.format(100)}%" for top in tops])
        return [f"Too few seeds to name a winner ({reason}): {scores}.", *notes]
    pairs = len(contenders) - 1
    level = 1 - (1 - LEVEL) / pairs
    rivals = [one for one in contenders if one.setting != leader.setting]
    gaps = [(one, compare_pairs(leader.scores, one.scores, level)) for one in rivals]
    ranked = [(one, gap) for one, gap in gaps if gap is not None]
    if unranked := [str(one) for one, gap in gaps if gap is None]:
        notes.insert(0, f"Not ranked (fewer than {MIN_SEEDS} seeds in common with it): {_list_some(unranked)}.")
    tied = [(one, gap) for one, gap in ranked if gap.low <= 0]
    rival, gap = (
        max(tied, key=lambda pair: pair[0].accuracy.mean) if tied else min(ranked, key=lambda pair: pair[1].mean)
    )
    reached = f"{leader.accuracy.format(100)}% over {counted(len(leader.scores), 'seed')}"
    corrected = f", Bonferroni-corrected for {pairs} comparisons" if pairs > 1 else ""
    points = (
        f"{100 * gap.mean:+.2f} points, 95% interval {100 * gap.low:+.2f} to {100 * gap.high:+.2f} "
        f"(t-interval paired over {counted(gap.seeds, 'seed')}{corrected})"
    )
    if tied:
        return [
            f"No clear winner: {leader} has the highest mean of {counted(len(contenders), 'classifier')} "
            f"({reached}), but is statistically tied with {rival} ({rival.accuracy.format(100)}%): {points}. "
            f"{_describe_need(gap, level)}",
            *notes,
        ]
    tried, settings = len(contenders) - len(unranked), len({one.setting for one, _ in ranked}) + 1
    return [
        f"{leader} is the clear winner: {reached}, the best of {tried} classifiers in {settings} "
        f"settings. The runner-up is {rival} with {rival.accuracy.format(100)}%: {points}.",
        *notes,
    ]


def _describe_need(gap: Difference, level: float) -> str:
    """How many more seeds would separate the two if mean and deviation stay the same."""
    spread = (gap.high - gap.mean) * sqrt(gap.seeds) / t_quantile(level, gap.seeds - 1)  # standard deviation
    enough = (n for n in range(gap.seeds + 1, MAX_SEEDS + 1) if t_quantile(level, n - 1) * spread < gap.mean * sqrt(n))
    if gap.mean <= 0 or (needed := next(enough, None)) is None:
        return f"More than {MAX_SEEDS} seeds would be needed to separate them."
    more = counted(needed - gap.seeds, "more seed")
    return f"About {more} would decide it if the difference and its spread stay the same."


def _list_some(names: Sequence[str]) -> str:
    return "; ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
