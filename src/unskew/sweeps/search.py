"""Settings chosen by Optuna from what earlier ones came to; the same for the same seed, whatever runs in parallel.

Settings are asked for ``TOGETHER`` at a time, and answered in the order of asking. Nothing of Optuna is stored: a sweep
that goes on asks again from the beginning, and the runs that are finished answer at once.
"""

from collections.abc import Sequence
from typing import Any

from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.runs.options import Value
from unskew.sweeps.space import Dimension

TOGETHER = 4  # settings that are asked for before the next is answered
DIGITS = 4  # of a number that is tried: folders and tables have it in full


class Search:
    """Asks for settings, and takes what they came to. A setting that failed counts as ``worst``."""

    def __init__(self, dimensions: Sequence[Dimension], key: Key, *, maximise: bool, worst: float) -> None:
        optuna = require_extra("optuna", "sweeps")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=key.fold("sweep").number() % 2**32)
        self._study = optuna.create_study(sampler=sampler, direction="maximize" if maximise else "minimize")
        self._dimensions, self._worst = dimensions, worst

    def ask(self) -> tuple[Any, dict[str, Value]]:
        """The next setting, and what ``tell`` knows it by."""
        trial = self._study.ask()
        return trial, {each.option: _suggested(trial, each) for each in self._dimensions}

    def tell(self, trial: Any, score: float | None) -> None:
        """What the setting came to; None where it failed."""
        self._study.tell(trial, self._worst if score is None else score)


def _suggested(trial: Any, dimension: Dimension) -> Value:
    if dimension.values:
        place: int = trial.suggest_categorical(dimension.option, list(range(len(dimension.values))))
        return dimension.values[place]
    if dimension.whole:
        return int(trial.suggest_int(dimension.option, int(dimension.low), int(dimension.high), log=dimension.log))
    value = trial.suggest_float(dimension.option, dimension.low, dimension.high, log=dimension.log)
    return min(max(float(f"{value:.{DIGITS}g}"), dimension.low), dimension.high)
