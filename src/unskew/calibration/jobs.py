"""The jobs of calibration: class statistics of a client's features, and evaluation with a calibrated classifier."""

from collections.abc import Mapping

import numpy as np
import torch

from unskew.calibration.classifier import load_calibrated
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.mixture import by_part
from unskew.calibration.statistics import ClassStatistics
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import Sums, Tensors, TestPart, Visit
from unskew.models.cut import cut
from unskew.privacy.secure_statistics import MASKED_STATISTICS, masked_statistics_job
from unskew.privacy.secure_updates import protected
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.evaluation import IMAGES, scored
from unskew.round.jobs import Job


def moments(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """The job: the client's class statistics, laid out for all classes; those that it lacks are zero."""
    statistics = client_statistics(side, shared, visit, StatisticsRequest.from_text(options))
    return tensors.prefixed(statistics.spread_out(), "stat/moments/")


def client_statistics(side: ClientSide, shared: Tensors, visit: Visit, request: StatisticsRequest) -> ClassStatistics:
    """The class statistics of the client's features under the server's model."""
    side.load(shared, training=False)
    centres = shared.get("centres")
    encoder, width = request.encoder(side.network, side.train.shape)
    examples = side.population.examples(visit.client).astype(np.int64)
    enough = side.counts(visit.client).numpy()[side.labels[examples]] >= request.min_count
    index = torch.from_numpy(examples[enough])
    classes = side.network.classifier.out_features * request.components
    if len(index):
        batches = (side.train.batch(some) for some in torch.split(index, IMAGES_AT_ONCE))
        relabel = None if centres is None else by_part(centres)
        return ClassStatistics.measure(encoder, batches, classes, form=request.form, relabel=relabel)
    return ClassStatistics.empty(classes, width, request.form)


def evaluate_calibrated(side: ClientSide, shared: Tensors, part: TestPart | Visit, key: Key, options: str) -> Sums:
    """As ``evaluate``, with the calibrated classifier that is sent along in the place of the model's own."""
    side.load(shared, training=False)
    encoder, classifier = load_calibrated(
        tensors.under(shared, "calibrated/"), lambda layers: cut(side.network, layers)
    )
    classifier = classifier.cpu()  # it clips features in float64
    return scored(side, part, lambda images: classifier(encoder(images).cpu()), by_image=options == IMAGES)


JOBS: Mapping[str, Job] = {
    "moments": moments,
    MASKED_STATISTICS: masked_statistics_job(client_statistics),
    "evaluate-calibrated": evaluate_calibrated,
    **protected({"evaluate-calibrated": evaluate_calibrated}),
}
