"""Methods that live outside the package, for tests of what a client may do wrong."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import torch

from unskew.core.types import Loss, Step


def _term(term):
    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, term))


def raises(on: int = 1):
    """The client whose batch holds ``on`` examples raises."""

    def term(loss: Loss, step: Step) -> Loss:
        if len(step.labels) == on:
            raise RuntimeError("the camera fell into the sea")
        return loss

    return _term(term)


def nan(on: int = 1):
    """The client whose batch holds ``on`` examples has a loss that is not a number."""

    def term(loss: Loss, step: Step) -> Loss:
        return loss.plus(torch.tensor(float("nan"))) if len(step.labels) == on else loss

    return _term(term)


def stays_away(client: int):
    """The client is drawn and never comes."""

    def arrive(key, visits):
        return [visit for visit in visits if visit.client != client]

    return lambda algorithm: replace(algorithm, arrive=arrive)


def dies(on: int = 1, once: str = ""):
    """The process that trains the client with ``on`` examples is killed; with ``once``, only the first time."""

    def term(loss: Loss, step: Step) -> Loss:
        if len(step.labels) == on and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    return _term(term)


def sleeps(seconds: float = 60.0):
    """Every step takes long."""
    import time

    def term(loss: Loss, step: Step) -> Loss:
        time.sleep(seconds)
        return loss

    return _term(term)


def empty():
    """No method: what it gives makes no Algorithm."""
    return lambda algorithm: None


def nothing(shape=None, classes=0):
    """No model: it gives nothing."""


def as_it_is(algorithm):
    """A method itself: it takes an Algorithm, and has no knobs."""
    return algorithm
