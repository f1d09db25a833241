"""Calibrations as methods: training stays as it is, and after the last round the classifier is made new.

A Finisher is a method by itself, so the table of calibrations is a table of methods.
"""

from collections.abc import Callable

from unskew.calibration import CALIBRATIONS
from unskew.calibration.ccvr import uscc
from unskew.methods.prototypes import prototypes
from unskew.round.algorithm import Algorithm, Method


def fedeccr(tau: float = 0.5, scale: float = 1.0, per_class: int = 400, epochs: int = 20) -> Method:
    """Trains with prototypes, then re-trains with uscc: FedECCR as a whole.

    prototypes(tau, scale) + uscc(per_class, epochs).

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023.
    """
    first, second = prototypes(tau, scale), uscc(per_class=per_class, epochs=epochs)

    def both(algorithm: Algorithm) -> Algorithm:
        changed: Algorithm = second(first(algorithm))
        return changed

    return both


FINISHERS: dict[str, Callable[..., Method]] = {**CALIBRATIONS, "fedeccr": fedeccr}
