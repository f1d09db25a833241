"""Before the first round: the state that training starts from, with the classifier that ``--start`` asks for.

The calibration is made of the initial model's features, as one after the last round is made of the trained model's. Its
classifier becomes the initial one before any method looks at the model.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from unskew.calibration.classifier import CalibratedClassifier
from unskew.calibration.feasible import check, named, protections
from unskew.calibration.federated import Federation, Forecasted, Gathering
from unskew.calibration.finisher import RealFeatures
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Engine, ServerState, Tensors
from unskew.methods import parse_calibrations
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.round.evaluation import evaluate
from unskew.runs.result import Calibration


@dataclass(frozen=True)
class Begun:
    """The model before the first round: how well it does, and the calibration that made its classifier, if one did."""

    accuracy: float
    loss: float
    start: Calibration | None = None
    notes: tuple[str, ...] = ()


def parse_start(source: str, algorithm: Algorithm) -> Algorithm:
    """The one calibration of ``--start``, with what protects it; refused where its classifier cannot be trained on.

    ``algorithm`` is what the run trains with.
    """
    start = parse_calibrations(source)
    if len(start.finish) > 1:
        names = " and ".join(each.text for each in start.finish)
        raise UserError(f"--start {source}: training starts from one classifier, these are {names}; name one")
    finisher, needs = start.finish[0], start.finish[0].needs
    because, instead = "", "give lda, ridge or ccvr"
    if isinstance(needs, RealFeatures):
        because = "it pools real features, which no federation could do"
    elif needs.layers > 1:
        because = f"it replaces {needs.layers} layers by others (layers)"
    elif needs.expand:
        because = "it sees random features beside the network's own (expand)"
    elif finisher.bends:
        because = "features pass a transformation first (relu, tukey)"
    elif start.private is not None:
        because, instead = "features are clipped first (private)", "leave private out of it"
    elif algorithm.head is not None:
        because = "the method uses the classifier's rows scaled to length 1 (clsnorm)"
        instead = "leave --start out, or clsnorm"
    if because:
        raise UserError(f"--start {source} cannot become the network's classifier: {because}; {instead}")
    if lacking := [each for each in protections(algorithm) if each not in protections(start)]:
        added = " + ".join([source, *lacking])
        raise UserError(
            f"--start {source} would send statistics without {' + '.join(lacking)}, which the method has; give --start "
            f'"{added}"'
        )
    return start


def check_start(start: Algorithm, side: ClientSide) -> None:
    """Refuse a start that this network or its clients cannot have."""
    finisher = start.finish[0]
    if side.network.classifier.bias is None:
        raise UserError(f"--start {finisher.text}: its classifier has a bias, the network's has none; give it one")
    check(finisher, start, side)


def with_start(
    model: Tensors, start: Algorithm, side: ClientSide, engine: Engine, key: Key,
    observe: Callable[[Gathering | Forecasted], None],
) -> tuple[Tensors, CalibratedClassifier, int, float]:  # fmt: skip
    """The model with the calibration's classifier; the calibration itself, the bytes and seconds that it took."""
    federation = Federation(engine, side, model, start, key, observe, {})
    classifier, sent, seconds = federation.calibrated(start.finish[0])
    linear = classifier.linear()
    new = dict(zip(side.classifier, (linear.weight.detach(), linear.bias.detach()), strict=True))
    changed = {name: new[name].to(value) if name in new else value for name, value in model.items()}
    return changed, classifier, sent, seconds + classifier.report.seconds


def begin(
    model: Tensors, start: Algorithm, side: ClientSide, engine: Engine, key: Key, observe: Callable[[Any], Any]
) -> tuple[ServerState, Begun]:
    """The state before the first round, and how well its model does.

    What the methods send and what the server keeps is made of the model that has the new classifier.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, classifier, sent, seconds = with_start(model, start, side, engine, key, observe)
    state = driver.start(side.algorithm, model, side.classifier)
    score = evaluated(state, side, engine, key)
    made = Calibration(named(start.finish[0], start), score.accuracy, score.loss, sent, seconds)
    notes = dict.fromkeys([*(str(warning.message) for warning in warned), *classifier.report.notes()])
    return state, replace(score, start=made, notes=tuple(notes))


def evaluated(state: ServerState, side: ClientSide, engine: Engine, key: Key) -> Begun:
    """How well the model before the first round does."""
    score = evaluate(engine, state.tensors, len(side.test.labels), key, exchange=side.algorithm.exchange)
    return Begun(score.accuracy, score.loss)
