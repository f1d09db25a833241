"""Checks on the knobs that several calibrations have."""

from unskew.calibration.retraining import Descent
from unskew.core.text import MAX_COUNT


def check_positive(name: str, **values: float) -> None:
    """Refuse a value that is not above zero and finite, and a count beyond all that can be counted."""
    for knob, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}({knob}={value}): give a number above 0")
        if isinstance(value, int) and value > MAX_COUNT:
            raise ValueError(f"{name}({knob}=…): give at most {MAX_COUNT:,}")


def descent_of(name: str, epochs: int, batch: int, lr: float, momentum: float, weight_decay: float) -> Descent:
    """How the classifier is trained, if the knobs allow it."""
    check_positive(name, epochs=epochs, batch=batch, lr=lr)
    if not 0 <= momentum < 1:
        raise ValueError(f"{name}(momentum={momentum}): give 0 or more and less than 1")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"{name}(weight_decay={weight_decay}): give 0 or more")
    return Descent(epochs, batch, lr, momentum, weight_decay)
