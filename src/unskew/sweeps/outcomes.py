"""What a sweep came to: every setting with its score over the seeds, the best, the effective learning rate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from unskew.core import text
from unskew.core.errors import UserError
from unskew.methods.fedavgm import fedavg, fedavgm
from unskew.round.local_optimizers import uses_sgd
from unskew.runs.config import Config
from unskew.runs.options import Value
from unskew.runs.result import Result
from unskew.runs.spread import Spread, spread
from unskew.sweeps.space import Dimension
from unskew.sweeps.work import Failure

OTHER_SERVERS = {"fedadam", "fedyogi", "fedadagrad", "feddyn"}  # whose rate is not one number
SCORES = ("accuracy", "loss")  # besides these a score is a calibration's name


@dataclass(frozen=True)
class Outcome:
    """A setting that was tried: a result or a failure for each seed."""

    name: str  # of its folder
    values: Mapping[str, Value]
    config: Config
    runs: tuple[Result | Failure, ...]
    by: str  # what it is judged by

    @property
    def score(self) -> Spread | None:
        """Its score over the seeds; None where a run failed, has no such calibration, or a score beyond all bounds."""
        scores = [score_of(each, self.by) for each in self.runs]
        return spread(scores) if all(each is not None and isfinite(each) for each in scores) else None

    @property
    def failure(self) -> str:
        """What went wrong, in a word or a sentence; empty where nothing did."""
        failed = [each for each in self.runs if isinstance(each, Failure)]
        if not failed:
            return "" if self.score else "no finite loss" if self.by == "loss" else f"no {self.by}"
        return "diverged" if all(each.diverged for each in failed) else failed[0].reason


@dataclass(frozen=True, repr=False)
class Sweep:
    """What ``unskew.sweep`` gives: the settings in the order in which they were tried, and the folder that has them."""

    path: Path
    over: tuple[Dimension, ...]
    seeds: tuple[int, ...]
    by: str
    outcomes: tuple[Outcome, ...]

    @property
    def ranked(self) -> list[Outcome]:
        """The best first, those that failed last; equal ones in the order in which they were tried."""
        sign = 1 if self.by == "loss" else -1
        return sorted(self.outcomes, key=lambda each: (each.score is None, sign * each.score.mean if each.score else 0))

    @property
    def best(self) -> Outcome | None:
        """The setting with the best mean; None where all failed."""
        first = self.ranked[0]
        return first if first.score else None

    def __repr__(self) -> str:
        best = f"best {dict(self.best.values)}" if self.best else "all failed"
        return f"<Sweep of {len(self.outcomes)} settings: {best}; {self.path}>"


def score_of(run: Result | Failure, by: str) -> float | None:
    """A run's score: its accuracy, its loss, or the accuracy after a calibration."""
    if isinstance(run, Failure):
        return None
    if by in SCORES:
        return float(getattr(run, by))
    return run.calibrations[by].accuracy if by in run.calibrations else None


def effective_rate(config: Config) -> float | None:
    """γ·η / ((1 − μ)·(1 − β)): η and μ are the clients' rate and momentum, γ and β the server's (fedavg, fedavgm).

    Of clients that step with Adam μ = 0. None for methods whose server moves otherwise.

    Reference: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, with μ = 0 and γ = 1.
    """
    server = server_step(config.method)
    return None if server is None else server[0] * config.lr / ((1 - _momentum(config)) * (1 - server[1]))


def _momentum(config: Config) -> float:
    """The clients' own."""
    return config.momentum if uses_sgd(config.local()) else 0.0


def server_step(method: str) -> tuple[float, float] | None:
    """The server's rate γ and momentum β; None where it moves in another way."""
    try:
        calls = {call.name: call for call in text.parse_calls(method, "method")}
        if OTHER_SERVERS & set(calls):
            return None
        name = "fedavgm" if "fedavgm" in calls else "fedavg"
        read: Callable[..., tuple[float, float]] = _with_momentum if name == "fedavgm" else _plain
        step: tuple[float, float] = text.apply(calls[name], read, "method") if name in calls else (1.0, 0.0)
    except UserError:
        return None
    return step


def _plain(lr: float = 1.0) -> tuple[float, float]:
    fedavg(lr)
    return lr, 0.0


def _with_momentum(beta: float = 0.9, lr: float = 1.0, damped: bool = False) -> tuple[float, float]:
    fedavgm(beta, lr, damped)
    return (lr * (1 - beta) if damped else lr), beta


def effective_rates(outcomes: Sequence[Outcome]) -> list[float] | None:
    """The effective rate of each setting, where they differ in the rate and in momentum; None otherwise."""
    rates = [effective_rate(each.config) for each in outcomes]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or len({each.config.lr for each in outcomes}) < 2:
        return None
    return known if len({momentum_words(each.config) for each in outcomes}) > 1 else None


def momentum_words(config: Config) -> str:
    """The clients' momentum, and the server's where it has any."""
    beta = (server_step(config.method) or (1.0, 0.0))[1]
    return f"momentum {_momentum(config):g}" + (f", server's {beta:g}" if beta else "")
