"""The clients' part of a calibration: the job ``moments``, class statistics of a client's own features."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from unskew.calibration.mixture import by_part
from unskew.calibration.request import StatisticsRequest
from unskew.calibration.statistics import ClassStatistics
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import Sums, Tensors, Visit

if TYPE_CHECKING:
    from unskew.round.client import ClientSide

IMAGES_PER_PASS = 500  # in one forward pass without gradient


def moments(side: "ClientSide", shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """The class statistics of the client's features under the server's model; a class that it lacks is zero.

    ``options`` is a StatisticsRequest as text.
    """
    side.load(shared, training=False)
    request, centres = StatisticsRequest.from_text(options), shared.get("centres")
    encoder, width = request.encoder(side.network, tuple(side.train.images.shape[1:]))
    index = torch.from_numpy(side.population.examples(visit.client).astype(np.int64))
    index = index[side.counts(visit.client)[side.train.labels[index]] >= request.min_count]
    classes = side.network.classifier.out_features * request.components
    if len(index):
        batches = (side.train.batch(some) for some in torch.split(index, IMAGES_PER_PASS))
        relabel = None if centres is None else by_part(centres)
        statistics = ClassStatistics.measure(encoder, batches, classes, form=request.form, relabel=relabel)
    else:
        statistics = ClassStatistics.empty(classes, width, request.form)
    return tensors.prefixed(statistics.spread_out(), "stat/moments/")
