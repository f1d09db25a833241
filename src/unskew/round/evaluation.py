"""How well a model does: a job on parts of the server's test images, spread over the engine like any other."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.core.errors import ClientFailure
from unskew.core.key import Key
from unskew.core.types import Engine, Sums, Tensors, TestPart
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.jobs import Job


@dataclass(frozen=True)
class Evaluation:
    """How well a model does on the test images."""

    accuracy: float
    loss: float


def evaluate(engine: Engine, model: Tensors, examples: int, key: Key, *, job: str = "evaluate") -> Evaluation:
    """Accuracy and mean loss on the ``examples`` test images, in parts spread over the engine."""
    starts = range(0, examples, IMAGES_AT_ONCE)
    parts = [TestPart(start, min(start + IMAGES_AT_ONCE, examples)) for start in starts]
    outcome = engine.map_sum(job, model, parts, key)
    if outcome.failures:
        reason = outcome.failures[0].reason
        raise ClientFailure(f"the model on the test images, job evaluate: {reason} (seed {key.seed} replays it)")
    total = float(outcome.sums["metric/total"].sum())
    right = float(outcome.sums["metric/right"].sum())
    return Evaluation(right / total, float(outcome.sums["metric/loss"]) / total)


def evaluate_part(side: ClientSide, shared: Tensors, part: TestPart, key: Key, options: str) -> Sums:
    """The job: right answers and loss of the server's model on one part of the test images, by class."""
    side.load(shared, training=False)
    with torch.no_grad():
        images, labels = side.test.batch(torch.arange(part.start, part.stop))
        return score(side.logits(side.network.encoder(images)).cpu(), labels.cpu())


def score(logits: Tensor, labels: Tensor) -> Sums:
    """Loss, right answers and examples by class, as sums."""
    classes = logits.shape[1]
    right = labels[logits.argmax(1) == labels]
    return {
        "metric/loss": F.cross_entropy(logits.double(), labels, reduction="sum"),
        "metric/right": torch.bincount(right, minlength=classes).double(),
        "metric/total": torch.bincount(labels, minlength=classes).double(),
    }


JOBS: Mapping[str, Job] = {"evaluate": evaluate_part}  # type: ignore[dict-item]  # it is given parts, not visits
