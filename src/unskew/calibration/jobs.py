"""Calibration's jobs: class statistics of a client's features, and evaluation of a calibrated classifier.

Several Gaussians per class are found by k-means over the federation: clients send sums, the server moves the centers.
In the statistics each component of a class counts as a class: component k of class c has the label c·K + k.

Reference: Lloyd, "Least Squares Quantization in PCM", IEEE Transactions on Information Theory, 1982.

Shapes: C classes, P of them with examples, K components each, d features.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from unskew.calibration.classifier import load_calibrated
from unskew.calibration.covariances import Gaussians
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.protection import Guarantee, Layout
from unskew.calibration.statistics import ClassStatistics
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Reply, Tensors, TestPart, Visit
from unskew.models.cut import cut
from unskew.models.networks import InParts
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.evaluation import score_images
from unskew.round.jobs import register

Relabel = Callable[[Tensor, Tensor], Tensor]  # features, labels -> the component's label
PASSES = 8  # of Lloyd's algorithm
WORDS = "statistics"  # the name of the fixed-point words, in a ``Layout``


@register
class Moments(msgspec.Struct, frozen=True, tag="moments"):
    """The client's class statistics for all classes; those that it lacks are zero."""

    request: dict[str, Any]

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Measure the client's features under the server's model."""
        statistics = client_statistics(side, shared, visit, StatisticsRequest.from_plain(self.request))
        return Reply(tensors.prefixed(statistics.to_sums(), "stat/moments/"))


@register
class FixedPointMoments(msgspec.Struct, frozen=True, tag="fixed-point-moments"):
    """The client's class statistics in fixed point, for a secure sum over ``members`` clients.

    With a ``budget`` of (ε, δ, clip), every client adds its share of the noise before it masks its words.
    """

    request: dict[str, Any]
    classes: int
    width: int
    bits: int
    members: int
    budget: tuple[float, float, float] | None = None

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Measure, and round to the layout's steps."""
        statistics = client_statistics(side, shared, visit, StatisticsRequest.from_plain(self.request))
        return Reply({WORDS: self._layout.quantise(statistics, self.members, f"client {visit.client}")})

    def with_share(self, side: ClientSide, words: Tensors, needed: int, members: int) -> Tensors:
        """Add this client's share of the noise to the words; refused if it is less than was agreed."""
        agreed, clip = side.algorithm.private, StatisticsRequest.from_plain(self.request).clip
        if agreed is not None and agreed.release and self.budget != (agreed.epsilon, agreed.delta, agreed.clip):
            raise UserError(f"the server asks for statistics without the agreed noise: {agreed}")
        if self.budget is None:
            return words
        epsilon, delta, radius = self.budget
        guarantee = Guarantee.of(radius, epsilon, delta, in_masks=True)
        if not 0 < clip <= self._layout.shorter(radius, guarantee.sigma):
            raise UserError(f"the server asks for features of length {clip:g}, but the agreed noise covers {radius:g}")
        return {WORDS: self._layout.with_share(words[WORDS], guarantee, needed, members)}

    @property
    def _layout(self) -> Layout:
        form = StatisticsRequest.from_plain(self.request).form
        return Layout.of(self.classes, self.width, form, bits=self.bits)


def client_statistics(side: ClientSide, shared: Tensors, visit: Visit, request: StatisticsRequest) -> ClassStatistics:
    """The class statistics of the client's features under the server's model.

    Classes, or components of classes, with too few examples are left out.
    """
    side.load(shared, training=False)
    encoder, width = request.encoder(side.network, side.train.shape)
    examples = side.population.examples(visit.client).astype(np.int64)
    enough = side.counts(visit.client).numpy()[side.labels[examples]] >= request.min_count
    index = torch.from_numpy(examples[enough])
    classes = side.network.classifier.out_features * request.components
    relabel = by_part(shared["centres"]) if "centres" in shared else None
    if relabel is not None and request.min_count > 1 and len(index):
        index = _in_large_parts(side, encoder, index, relabel, request.min_count)
    if len(index):
        batches = (side.train.batch(some) for some in torch.split(index, IMAGES_AT_ONCE))
        return ClassStatistics.measure(encoder, batches, classes, form=request.form, relabel=relabel)
    return ClassStatistics.empty(classes, width, request.form)


def _in_large_parts(side: ClientSide, encoder: nn.Module, index: Tensor, relabel: Relabel, least: int) -> Tensor:
    """The examples whose component has at least ``least`` of them."""
    batches = map(side.train.batch, torch.split(index, IMAGES_AT_ONCE))
    with torch.no_grad():
        part = torch.cat([relabel(encoder(images), labels.cpu()) for images, labels in batches])
    return index[torch.bincount(part)[part] >= least]


@register
class EvaluateCalibrated(msgspec.Struct, frozen=True, tag="evaluate-calibrated"):
    """Like ``Evaluate``, with a calibrated classifier, which is sent along, instead of the model's."""

    by_image: bool = False
    confidence: bool = False

    def __call__(self, side: ClientSide, shared: Tensors, visit: TestPart | Visit, key: Key) -> Reply:
        """Correct predictions and examples by class, and the loss."""
        side.load(shared, training=False)
        values = tensors.under(shared, "calibrated/")
        encoder, classifier = load_calibrated(values, lambda layers: cut(side.network, layers))
        encoder, classifier = InParts(encoder), classifier.cpu()  # it clips features in float64
        return score_images(
            side, visit, lambda images: classifier(encoder(images).cpu()), self.by_image, self.confidence
        )


# Several Gaussians per class


def find_centres(
    statistics: ClassStatistics, components: int, gather: Callable[[Tensor], ClassStatistics], key: Key
) -> Tensor:
    """[C, K, d], the centers after PASSES passes; ``gather`` returns the components' statistics for given centers.

    The first centers are virtual features, so that no client reveals a feature.
    """
    centres = torch.zeros(statistics.classes, components, statistics.width, dtype=torch.float64)
    gaussians = Gaussians(statistics)
    for row, label in enumerate(statistics.held.tolist()):
        centres[label] = gaussians.draw(row, components, key.fold("centres"))[0]
    for _ in range(PASSES):
        centres = move_centres(centres, gather(centres))
    return centres


def move_centres(centres: Tensor, parts: ClassStatistics) -> Tensor:
    """[C, K, d], each center at the mean of the features nearest to it; a center without any stays."""
    flat = centres.flatten(0, 1).clone()
    flat[parts.held] = parts.means()
    return flat.view(centres.shape)


def by_part(centres: Tensor) -> Relabel:
    """(features [n, d], labels [n] on the CPU) -> [n]: label·K + the index of the class's nearest center."""
    on_cpu = centres.cpu()

    def relabel(features: Tensor, labels: Tensor) -> Tensor:
        features, parts = features.cpu(), torch.empty_like(labels)
        for label in torch.bincount(labels).nonzero()[:, 0].tolist():
            rows = (labels == label).nonzero()[:, 0]
            # not by matrix products: far from zero they lose precision, and their rounding depends on the batch
            distance = torch.cdist(features[rows].double(), on_cpu[label], compute_mode="donot_use_mm_for_euclid_dist")
            parts[rows] = label * centres.shape[1] + distance.argmin(1)
        return parts

    return relabel
