"""Runs that differ in the seed alone: what decides a run's result, and a name for each such setting."""

from collections.abc import Sequence

from unskew.runs import config as configs
from unskew.runs.options import OPTIONS
from unskew.runs.result import Result
from unskew.runs.study import FinishedRun

# the seed, and what does not change the result
LEFT_OUT = {"seed", "evaluate_every"} | {option.name for option in OPTIONS.values() if not option.decides}

_OF_RESULT = ("method", "data", "partition", "clients", "per_round", "rounds", "model")  # where nothing else is known


def settings_of(run: FinishedRun) -> dict[str, str]:
    """What decides a run's result except the seed: the same for runs that differ in the seed alone."""
    return {key: str(value) for key, value in configs.deciding(run.config).items() if key not in LEFT_OUT}


def settings_of_result(result: Result) -> dict[str, str]:
    """The same of a result: its settings, or what else it knows where they are missing."""
    known = {key: getattr(result, key) for key in _OF_RESULT} | result.settings
    return {key: str(value) for key, value in known.items() if key not in LEFT_OUT}


def setting_names(settings: Sequence[dict[str, str]]) -> list[str]:
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
