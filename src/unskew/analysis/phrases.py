"""Words that several measures use in their sentences, and what these speak of."""

from typing import Any

from unskew.calibration import is_bound


def after(number: int, rounds: int) -> str:
    """When local models were made from the model after that round."""
    return "after the last round" if number == rounds else f"in round {number + 1}"


def said(layer: str) -> str:
    """A layer in a sentence."""
    return "the classifier" if layer == "classifier" else layer


def bound(calibration: str) -> bool:
    """Whether it is an upper bound for study, which sees what nobody may pool."""
    return is_bound(calibration)


def asked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The round that was asked for among those that are known; the last where all were recorded."""
    return next((row for row in rows if row.get("asked")), rows[-1])
