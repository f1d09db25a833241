"""Words that several measures use in their sentences."""

from collections.abc import Mapping
from typing import Any

from unskew.calibration import is_bound

COUNTED_AT_A_GLANCE = 20  # clients
MAX_RUNS_NAMED = 8  # in a sentence


def after(number: int, rounds: int) -> str:
    """When local models were made from the model after that round."""
    return "after the last round" if number == rounds > 0 else f"in round {number + 1}"


def layer_words(layer: str) -> str:
    """A layer in a sentence."""
    return "the classifier" if layer == "classifier" else layer


def bound(calibration: str) -> bool:
    """Whether it is an upper bound for study, which uses what must not be pooled."""
    return is_bound(calibration)


def requested_round(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The round that the measure was asked for; the last one where all were recorded while training."""
    return next((row for row in rows if row.get("asked")), rows[-1])


def shown_of(models: int, clients: int) -> list[str]:
    """A note where local models of a small part of the clients are shown."""
    few = models < clients and clients > COUNTED_AT_A_GLANCE
    return [f"the local models of {models:,} of {clients:,} clients are shown"] if few else []


def in_figures(what: str, runs: Mapping[str, float], digits: str) -> list[str]:
    """A figure of each run, the highest first; none where there is only one run, or too many for a sentence."""
    if not 2 <= len(runs) <= MAX_RUNS_NAMED:
        return []
    ranked = sorted(runs.items(), key=lambda pair: -pair[1])
    return [f"{what}, each of one run: {', '.join(f'{name} {value:{digits}}' for name, value in ranked)}."]
