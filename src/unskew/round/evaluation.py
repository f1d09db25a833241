"""Accuracy, loss and calibration error of a model, on the server's test images or on the clients'.

Scores are sums over images, so different processes may score parts of the test images.
Shapes: n images, C classes, T temperatures, B bins.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.core.errors import ClientFailure
from unskew.core.key import Key
from unskew.core.types import Engine, Exchange, Failure, Job, Reply, Sums, Tensors, TestPart, Visit
from unskew.models.networks import InParts
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.jobs import add, collect, register

CONFIDENCE = "metric/confidence"
TEMPERATURES = [2.0 ** (number / 8) for number in range(-48, 57)]  # 1/64 to 128
ONE = TEMPERATURES.index(1.0)
BINS = 15  # of equal width, as in Guo et al. 2017
MakeJob = Callable[[bool, bool], Job]  # by_image, confidence -> the job that scores images


@dataclass(frozen=True)
class Confidence:
    """The expected calibration error of a model's probabilities, as they are and with the best temperature.

    ``ece_scaled`` is cross-fitted: each half of the images is scored with the temperature of the other half.
    """

    ece: float
    temperature: float
    ece_scaled: float


@dataclass(frozen=True)
class Evaluation:
    """A model's results on the test images."""

    accuracy: float
    loss: float
    right: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), compare=False)  # [C], by class
    total: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), compare=False)  # [C]
    marks: npt.NDArray[np.float64] | None = field(default=None, compare=False)  # [n], 1 for a correct image
    failures: tuple[Failure, ...] = field(default=(), compare=False)  # clients that did not answer
    confidence: Confidence | None = field(default=None, compare=False)


def evaluate(
    engine: Engine,
    model: Tensors,
    examples: int,
    key: Key,
    *,
    job: MakeJob | None = None,
    by_image: bool = False,
    confidence: bool = False,
    exchange: Exchange | None = None,
) -> Evaluation:
    """Accuracy and mean loss on the server's ``examples`` test images, in parts spread over the engine.

    ``by_image`` also reports which images are classified correctly, ``confidence`` the calibration error. Without test
    images on the server, the clients evaluate on theirs, and neither is known; their replies pass through ``exchange``,
    masked under secure aggregation.
    """
    make = job or Evaluate
    if not examples:
        visits = [Visit(client, 1.0) for client in engine.roster.inhabited.tolist()]
        outcome = collect(exchange, engine, make(False, False), model, visits, key)
        if not outcome.sums or not float(outcome.sums["metric/total"].sum()):
            reason = outcome.void or (outcome.failures[0].reason if outcome.failures else "no client has test images")
            raise ClientFailure(f"the model on the clients' test images, job evaluate: {reason}")
        return replace(_evaluation(outcome.sums), failures=outcome.failures)
    parts = [TestPart(start, min(start + IMAGES_AT_ONCE, examples)) for start in range(0, examples, IMAGES_AT_ONCE)]
    outcome = add(engine.visit(make(by_image, confidence), model, parts, key), parts)
    if outcome.failures:
        reason = outcome.failures[0].reason
        raise ClientFailure(f"the model on the test images, job evaluate: {reason} (seed {key.seed} replays it)")
    marks = np.concatenate([outcome.extra[index]["marks"] for index in outcome.replied]) if by_image else None
    trusted = read_confidence(outcome.sums[CONFIDENCE]) if confidence else None
    return replace(_evaluation(outcome.sums), marks=marks, confidence=trusted)


def _evaluation(sums: Sums) -> Evaluation:
    total, right = float(sums["metric/total"].sum()), float(sums["metric/right"].sum())
    by_class = sums["metric/right"].numpy(), sums["metric/total"].numpy()
    return Evaluation(right / total, float(sums["metric/loss"]) / total, *by_class)


@register
class Evaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    """Score the server's model on a part of the server's test images, or on a client's."""

    by_image: bool = False
    confidence: bool = False

    def __call__(self, side: ClientSide, shared: Tensors, visit: TestPart | Visit, key: Key) -> Reply:
        """Correct predictions and examples by class, and the loss."""
        side.load(shared, training=False)
        encoder = InParts(side.network.encoder)
        return score_images(side, visit, lambda x: side.logits(encoder(x)).cpu(), self.by_image, self.confidence)


def score_images(
    side: ClientSide, visit: TestPart | Visit, logits: Callable[[Tensor], Tensor], by_image: bool, confidence: bool
) -> Reply:
    """Score ``logits`` on the visit's test images, as sums.

    ``by_image``: ``extra`` marks the correct ones. ``confidence``: the sums contain those of ``confidence_sums``. On
    its own images a client reports only the number of correct predictions by class.
    """
    if own := isinstance(visit, Visit):
        index = side.own_tests.get(visit.client, torch.zeros(0, dtype=torch.int64))
    else:
        index = torch.arange(visit.start, visit.stop)
    total, right = dict[str, Tensor](), list[Tensor]()
    with torch.no_grad():
        for some in torch.split(index, IMAGES_AT_ONCE):
            images, labels = side.test.batch(some)
            predicted, labels = logits(images), labels.cpu()
            hit = predicted.argmax(1) == labels
            right.append(hit.double())
            classes = predicted.shape[1]
            sums = {
                "metric/loss": F.cross_entropy(predicted.double(), labels, reduction="sum"),
                "metric/right": torch.bincount(labels[hit], minlength=classes).double(),
                "metric/total": torch.bincount(labels, minlength=classes).double(),
            }
            if confidence and not own:
                sums[CONFIDENCE] = confidence_sums(predicted, labels, some)
            total = {name: total[name] + value for name, value in sums.items()} if total else sums
    return Reply(total, {"marks": torch.cat(right)} if by_image and not own else {})


def confidence_sums(logits: Tensor, labels: Tensor, numbers: Tensor) -> Tensor:
    """[2, T, B, 4], by half of the images, temperature and bin: images, their confidence, right answers, loss.

    Images with even ``numbers`` are one half, those with odd ones the other.
    """
    logits = logits.double()
    highest, answers = logits.max(1)
    right, own = (answers == labels).double(), logits.gather(1, labels[:, None])[:, 0]
    sums = torch.zeros(len(TEMPERATURES), 2 * BINS, 4, dtype=torch.float64)
    for row, temperature in zip(sums, TEMPERATURES, strict=True):
        total = (logits / temperature).logsumexp(1)
        confidence = (highest / temperature - total).exp()
        bins = (confidence * BINS).ceil().nan_to_num(1).clamp(1, BINS).long() - 1
        values = torch.stack([torch.ones_like(right), confidence, right, total - own / temperature], 1)
        row.index_add_(0, numbers % 2 * BINS + bins, values)
    return sums.view(len(TEMPERATURES), 2, BINS, 4).transpose(0, 1).contiguous()


def read_confidence(sums: Tensor) -> Confidence | None:
    """The errors and the temperature that minimizes the loss; None with fewer than two images, or without finite loss.

    A temperature that does not lower the cross-fitted error is not used: then it is 1.

    Reference: Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", ICML 2017, section 4.2.
    """
    loss = sums[..., 3].sum(2)  # [2, T]
    if not bool(sums[:, ONE, :, 0].sum(1).all()) or not bool(loss.isfinite().all()):
        return None
    first, second = loss.argmin(1).tolist()
    ece, scaled = _error(sums[:, ONE].sum(0)), _error(sums[0, second] + sums[1, first])
    if scaled >= ece:
        return Confidence(ece, 1.0, ece)
    return Confidence(ece, TEMPERATURES[int(loss.sum(0).argmin())], scaled)


def _error(bins: Tensor) -> float:
    """The mean over images of |confidence − accuracy| in their bin; ``bins`` is [B, 4]."""
    error = float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())
    return error if math.isfinite(error) else 1.0
