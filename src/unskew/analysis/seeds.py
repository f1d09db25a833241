"""Runs that differ in the seed alone: what decides a run's result, and a name for each such setting."""

from collections.abc import Sequence
from dataclasses import asdict

from unskew.runs.options import OPTIONS
from unskew.runs.study import FinishedRun

# the seed, and what does not change the result
LEFT_OUT = {"seed", "evaluate_every"} | {option.name for option in OPTIONS.values() if not option.decides}


def settings_of(run: FinishedRun) -> dict[str, str]:
    """What decides a run's result except the seed: the same for runs that differ in the seed alone."""
    return {key: str(value) for key, value in asdict(run.config).items() if key not in LEFT_OUT}


def setting_names(settings: Sequence[dict[str, str]]) -> list[str]:
    """A name for each of these settings: the method, and every other option in which they differ."""
    if not settings:
        return []
    differing = [key for key in settings[0] if len({each.get(key, "") for each in settings}) > 1 and key != "method"]
    words = [[each["method"], *(_option(key, each.get(key, "")) for key in differing)] for each in settings]
    return [" · ".join(each) for each in words]


def _option(key: str, value: str) -> str:
    return value if key in ("data", "partition", "model") else f"{key.replace('_', ' ')} {value}"
