"""After the last round: class statistics gathered from the clients, classifiers made from them, how well they do."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from unskew import models, tensors
from unskew.calibration.forms import Form
from unskew.calibration.head import CalibratedClassifier
from unskew.calibration.methods import calibrate, parse
from unskew.calibration.statistics import ClassStatistics
from unskew.data.population import cells
from unskew.errors import UserError
from unskew.key import Key
from unskew.preparation import Prepared
from unskew.results import Calibration
from unskew.round import driver
from unskew.types import Engine, Tensors, Visit

MOST_BYTES = 2 * 2**30  # of a dense sum over clients in this process


@dataclass(frozen=True)
class Gathering:
    """What is about to be sent for a calibration, said before it is."""

    method: str
    form: str
    clients: int
    bytes_up: int


@dataclass(frozen=True)
class Calibrated:
    """A calibrated classifier, how it did, and what there is to say of it."""

    result: Calibration
    classifier: CalibratedClassifier
    notes: tuple[str, ...]


def finish(
    prepared: Prepared, engine: Engine, model: Tensors, sources: Sequence[str], observe: Callable[[Gathering], None]
) -> list[Calibrated]:
    """Each calibration in turn; statistics of one form are gathered once."""
    key, gathered, made = Key(prepared.config.seed), dict[Form, tuple[ClassStatistics, int, float]](), []
    for source in sources:
        form = parse(source).form
        _fits(form, model)
        if form not in gathered:
            cost = sent_bytes(prepared, form, model)
            observe(Gathering(source, str(form), len(engine.population.inhabited), cost))
            began = time.perf_counter()
            gathered[form] = (gather(engine, model, form, key), cost, time.perf_counter() - began)
        statistics, cost, seconds = gathered[form]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            classifier = calibrate(_classifier(prepared, model), statistics, source, prepared.config.seed)
        found = driver.evaluate(engine, model | classifier.tensors(), len(prepared.images.test), key)
        result = Calibration(source, found.accuracy, found.loss, cost, seconds + classifier.report.seconds)
        made.append(Calibrated(result, classifier, tuple(str(warning.message) for warning in said)))
    return made


def gather(engine: Engine, model: Tensors, form: Form, key: Key) -> ClassStatistics:
    """The statistics of all clients' features under the model, added up."""
    visits = [Visit(client, 1.0) for client in engine.population.inhabited.tolist()]
    outcome = engine.map_sum(f"moments:{form}", model, visits, key.fold("moments"))
    if outcome.failures:
        failure = outcome.failures[0]
        raise UserError(f"client {failure.client}, class statistics: {failure.reason}")
    return ClassStatistics.gathered(tensors.under(outcome.sums, "stat/moments/"), form)


def sent_bytes(prepared: Prepared, form: Form, model: Tensors) -> int:
    """What all clients together send: each only of the classes it holds."""
    owner, _, _ = cells(prepared.partition.client, prepared.images.train.labels, len(prepared.images.classes))
    width = model["params/classifier.weight"].shape[1]
    return sum(form.bytes(int(held), width) for held in np.unique(owner, return_counts=True)[1])


def _fits(form: Form, model: Tensors) -> None:
    classes, width = model["params/classifier.weight"].shape
    needed = form.bytes(classes, width)
    if needed > MOST_BYTES:
        raise UserError(
            f"{form} covariances of {classes:,} classes and {width:,} features take {needed / 1e9:.1f} GB a client; "
            f"take covariance=shared ({Form('shared').bytes(classes, width) / 1e6:.0f} MB) or diagonal"
        )


def _classifier(prepared: Prepared, model: Tensors) -> nn.Linear:
    blueprint = prepared.blueprint
    network = models.build(blueprint.model, blueprint.shape, blueprint.classes)
    classifier = network.classifier
    classifier.load_state_dict(tensors.under(model, "params/classifier."))
    return classifier
