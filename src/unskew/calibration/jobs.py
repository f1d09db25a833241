"""The jobs of calibration: class statistics of a client's features, and evaluation with a calibrated classifier."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from unskew.calibration.classifier import load_calibrated
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.mixture import by_part
from unskew.calibration.protection import Guarantee, Layout
from unskew.calibration.statistics import ClassStatistics
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Reply, Tensors, TestPart, Visit
from unskew.models.cut import cut
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.evaluation import score_images
from unskew.round.jobs import register

Relabel = Callable[[Tensor, Tensor], Tensor]  # features, labels -> the number of the part
WORDS = "statistics"  # the name of the words, laid out by a ``Layout``


@register
class Moments(msgspec.Struct, frozen=True, tag="moments"):
    """The client's class statistics, laid out for all classes; those that it lacks are zero."""

    request: dict[str, Any]

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Measure the client's features under the server's model."""
        statistics = client_statistics(side, shared, visit, StatisticsRequest.from_plain(self.request))
        return Reply(tensors.prefixed(statistics.to_sums(), "stat/moments/"))


@register
class FixedPointMoments(msgspec.Struct, frozen=True, tag="fixed-point-moments"):
    """The same in whole numbers, for a secure sum over so many ``members``.

    With a ``budget`` of (ε, δ, clip) every client adds its share of the noise before it masks its words.
    """

    request: dict[str, Any]
    classes: int
    width: int
    bits: int
    members: int
    budget: tuple[float, float, float] | None = None

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Measure, and round to the layout's steps."""
        request = StatisticsRequest.from_plain(self.request)
        statistics = client_statistics(side, shared, visit, request)
        return Reply({WORDS: self._layout.quantise(statistics, self.members, f"client {visit.client}")})

    def with_share(self, side: ClientSide, words: Tensors, needed: int, members: int) -> Tensors:
        """The words with this client's share of the noise; refused where it is less than was agreed on."""
        agreed, clip = side.algorithm.private, StatisticsRequest.from_plain(self.request).clip
        if agreed is not None and agreed.release and self.budget != (agreed.epsilon, agreed.delta, agreed.clip):
            raise UserError(f"the server asks for statistics without the agreed noise: {agreed}")
        if self.budget is None:
            return words
        epsilon, delta, radius = self.budget
        guarantee = Guarantee.of(radius, epsilon, delta, in_masks=True)
        if not 0 < clip <= self._layout.shorter(radius, guarantee.sigma):
            raise UserError(
                f"the server asks for features clipped to {clip:g}, but the agreed noise covers only {radius:g}"
            )
        return {WORDS: self._layout.with_share(words[WORDS], guarantee, needed, members)}

    @property
    def _layout(self) -> Layout:
        form = StatisticsRequest.from_plain(self.request).form
        return Layout.of(self.classes, self.width, form, bits=self.bits)


def client_statistics(side: ClientSide, shared: Tensors, visit: Visit, request: StatisticsRequest) -> ClassStatistics:
    """The class statistics of the client's features under the server's model.

    Classes with too few examples are left out, and where classes have parts, parts with too few.
    """
    side.load(shared, training=False)
    centres = shared.get("centres")
    encoder, width = request.encoder(side.network, side.train.shape)
    examples = side.population.examples(visit.client).astype(np.int64)
    least = request.min_count
    enough = side.counts(visit.client).numpy()[side.labels[examples]] >= least
    index = torch.from_numpy(examples[enough])
    classes = side.network.classifier.out_features * request.components
    relabel = None if centres is None else by_part(centres)
    if relabel is not None and least > 1:
        index = _in_large_parts(side, encoder, index, relabel, least)
    if len(index):
        batches = (side.train.batch(some) for some in torch.split(index, IMAGES_AT_ONCE))
        return ClassStatistics.measure(encoder, batches, classes, form=request.form, relabel=relabel)
    return ClassStatistics.empty(classes, width, request.form)


def _in_large_parts(side: ClientSide, encoder: nn.Module, index: Tensor, relabel: Relabel, least: int) -> Tensor:
    """Of these examples, those whose part of their class has at least so many of them."""
    parts = list[Tensor]()
    with torch.no_grad():
        for some in torch.split(index, IMAGES_AT_ONCE):
            images, labels = side.train.batch(some)
            parts.append(relabel(encoder(images), labels.cpu()))
    part = torch.cat(parts) if parts else index
    return index[torch.bincount(part)[part] >= least] if len(part) else index


@register
class EvaluateCalibrated(msgspec.Struct, frozen=True, tag="evaluate-calibrated"):
    """As ``Evaluate``, with the calibrated classifier that is sent along instead of the model's own."""

    by_image: bool = False
    confidence: bool = False

    def __call__(self, side: ClientSide, shared: Tensors, visit: TestPart | Visit, key: Key) -> Reply:
        """Right answers and loss by class."""
        side.load(shared, training=False)
        encoder, classifier = load_calibrated(
            tensors.under(shared, "calibrated/"), lambda layers: cut(side.network, layers)
        )
        classifier = classifier.cpu()  # it clips features in float64

        def logits(images: Tensor) -> Tensor:
            made: Tensor = classifier(encoder(images).cpu())
            return made

        return score_images(side, visit, logits, self.by_image, self.confidence)
