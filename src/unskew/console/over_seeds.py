"""Runs that differ in the seed alone as one row of the comparison: mean ± sample deviation, and over how many runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unskew.analysis.seeds import settings_of_result
from unskew.console.comparison import Compared, Figure, Sheet, arranged, figures, settings_shown, values_of
from unskew.runs.spread import spread

Group = list[int]  # places of the runs of one setting


def grouped(compared: Sequence[Compared]) -> list[Group]:
    """The runs of each setting by their places; a seed that comes twice begins a group of its own."""
    groups: dict[tuple[Any, ...], Group] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for place, one in enumerate(compared):
        setting = (*sorted(settings_of_result(one.result).items()), one.result.data_sha256)
        copy = seen[(*setting, one.result.seed)] = seen.get((*setting, one.result.seed), -1) + 1
        groups.setdefault((*setting, copy), []).append(place)
    return list(groups.values())


def several_seeds(compared: Sequence[Compared]) -> bool:
    """Whether any setting was run with more than one seed."""
    return any(len(group) > 1 for group in grouped(compared))


def seed_sheet(compared: Sequence[Compared], form: str = "table") -> Sheet:
    """The table with one row for each setting; in CSV the deviation has its own column, behind the mean."""
    groups, every = grouped(compared), figures(compared)
    settings, outcomes = [], []
    for group in groups:
        settings.append(_settings([compared[place] for place in group]))
        emd = [Figure(compared[place].result.emd, 2) for place in group]
        columns = {key: [every[place][key] for place in group] for key in every[0]}
        outcome = {"n": str(len(group))}
        for key, several in (columns | {"emd": emd}).items():
            outcome |= _cells(key, several, form)
        outcomes.append(outcome)
    return arranged([_place([compared[place] for place in group]) for group in groups], settings, outcomes)


def seeds_json(compared: Sequence[Compared]) -> str:
    """Every run as JSON has it alone, and with it what the runs of its setting come to: ``over_seeds``."""
    values = [values_of(one) for one in compared]
    for group in grouped(compared):
        results = [compared[place].result for place in group]
        names = dict.fromkeys(name for each in results for name in each.calibrations)
        after = {
            name: _record(each.calibrations[name].accuracy for each in results if name in each.calibrations)
            for name in names
        }
        told = {
            "seeds": [each.seed for each in results],
            "accuracy": _record(each.accuracy for each in results),
            "loss": _record(each.loss for each in results),
            "calibrations": after,
        }
        for place in group:
            values[place]["over_seeds"] = told
    return json.dumps(values, indent=2)


def _record(values: Any) -> dict[str, Any] | None:
    found = spread(values)
    return None if found is None else {"mean": found.mean, "deviation": found.deviation, "n": found.count}


def _settings(several: Sequence[Compared]) -> dict[str, str]:
    """The settings of a group, its seeds in one cell."""
    every = [settings_shown(one.result) for one in several]
    keys = dict.fromkeys(key for each in every for key in each if key not in ("seed", "emd"))
    joined = {key: " / ".join(dict.fromkeys(each.get(key, "") for each in every)) for key in keys}
    return joined | {"seeds": " ".join(str(one.result.seed) for one in several)}


def _place(several: Sequence[Compared]) -> str:
    """The folder of the runs where it is theirs alone, or the first of them and how many more."""
    paths: list[Path] = [one.result.path for one in several]
    if len(paths) == 1:
        return str(paths[0])
    if len({path.parent for path in paths}) == 1 and all(path.name.startswith("seed") for path in paths):
        return str(paths[0].parent)
    return f"{paths[0]} +{len(paths) - 1}"


def _cells(key: str, several: Sequence[Figure], form: str) -> dict[str, str]:
    """The mean of a figure and its deviation; where some runs lack it, of how many it is."""
    found, decimals = spread(each.value for each in several), several[0].decimals
    decimals = decimals or (1 if len(several) > 1 else 0)  # the mean of whole numbers is none
    apart = form == "csv"
    if found is None:
        words = "-" if any(each.never for each in several) and not apart else ""
        return {key: words} | ({f"{key} ±": ""} if apart else {})
    if apart:
        deviation = "" if found.deviation is None else f"{found.deviation:.{decimals}f}"
        return {key: f"{found.mean:.{decimals}f}", f"{key} ±": deviation}
    if key.startswith("MB") and found.deviation == 0:  # what is sent does not depend on the seed
        return {key: f"{found.mean:.{decimals}f}"}
    fewer = f" ({found.count} of {len(several)})" if found.count < len(several) else ""
    return {key: found.words(decimals=decimals) + fewer}
