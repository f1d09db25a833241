"""The last stage of a run: its calibrations in turn, each evaluated on the test images."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from unskew.calibration.classifier import CalibratedClassifier
from unskew.calibration.feasible import named
from unskew.calibration.federated import Federation, Forecasted, Gathering, Known
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import Engine, Tensors
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.round.evaluation import Evaluation, evaluate
from unskew.runs.result import Calibration
from unskew.runs.start import Begun


@dataclass(frozen=True)
class Calibrated:
    """A calibrated classifier, its result, and notes on it."""

    result: Calibration
    classifier: CalibratedClassifier
    notes: tuple[str, ...]
    score: Evaluation


@dataclass(frozen=True)
class Stage:
    """How far work is that is neither a round nor a calibration."""

    words: str
    done: int
    total: int


Event = Gathering | Forecasted | Calibrated | Stage | Begun


def finish(
    engine: Engine, side: ClientSide, model: Tensors, algorithm: Algorithm, key: Key,
    observe: Callable[[Event], None], known: Known | None = None, *, by_image: bool = False,
) -> list[Calibrated]:  # fmt: skip
    """Each of the algorithm's calibrations in turn; statistics that are ``known`` already are not gathered twice.

    With ``by_image`` the scores say which test images are right.
    """
    federation = Federation(engine, side, model, algorithm, key, observe, {} if known is None else known)
    done = []
    for finisher in algorithm.finish:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            classifier, sent, seconds = federation.calibrated(finisher)
        values = tensors.prefixed(classifier.tensors(), "calibrated/")
        score = evaluate(
            engine, model | values, len(side.test.labels), key, job="evaluate-calibrated", by_image=by_image,
            exchange=algorithm.exchange,
        )  # fmt: skip
        seconds += classifier.report.seconds
        result = Calibration(named(finisher, algorithm), score.accuracy, score.loss, sent, seconds)
        notes = dict.fromkeys([*(str(warning.message) for warning in warned), *classifier.report.notes()])
        done.append(Calibrated(result, classifier, tuple(notes), score))
        observe(done[-1])
    return done
