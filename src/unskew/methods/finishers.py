"""Calibrations as methods: what is trained stays as it is, and after the last round the classifier is made anew."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unskew.calibration.methods import CALIBRATIONS, Calibration, uscc
from unskew.core import text
from unskew.methods.prototypes import prototypes
from unskew.round.algorithm import Algorithm, Method


def finisher(name: str, build: Callable[..., Calibration]) -> Callable[..., Method]:
    """The calibration as a method with the same knobs."""

    @functools.wraps(build)
    def method(**knobs: Any) -> Method:
        build(**knobs)  # a wrong value shows now
        defaults = {knob: parameter.default for knob, parameter in inspect.signature(build).parameters.items()}
        given = {knob: knobs[knob] for knob, default in defaults.items() if knobs.get(knob, default) != default}
        spelled = str(text.Call(name, (), given, 0, ""))
        return lambda algorithm: replace(algorithm, finish=(*algorithm.finish, spelled))

    return method


def fedeccr(tau: float = 0.5, scale: float = 1.0, per_class: int = 400, epochs: int = 20) -> Method:
    """Prototype contrast in training, then a classifier from equally many virtual features of each class.

    prototypes(tau, scale) + uscc(per_class, epochs).

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023.
    """
    first, second = prototypes(tau, scale), finisher("uscc", uscc)(per_class=per_class, epochs=epochs)

    def both(algorithm: Algorithm) -> Algorithm:
        return second(first(algorithm))

    return both


FINISHERS: dict[str, Callable[..., Method]] = {
    **{name: finisher(name, build) for name, build in CALIBRATIONS.items()},
    "fedeccr": fedeccr,
}
