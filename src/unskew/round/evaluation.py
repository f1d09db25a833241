"""How well a model does: a job on parts of the server's test images, spread over the engine like any other."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.core.errors import ClientFailure
from unskew.core.key import Key
from unskew.core.types import Engine, Sums, Tensors, TestPart
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.jobs import Job, job_text

IMAGES = "images"  # the option of the job with which each image's mark is among the sums


@dataclass(frozen=True)
class Evaluation:
    """How well a model does on the test images."""

    accuracy: float
    loss: float
    right: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), compare=False)  # [C], by class
    total: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), compare=False)  # [C]
    marks: npt.NDArray[np.float64] | None = field(default=None, compare=False)  # [n], 1 where an image is right


def evaluate(
    engine: Engine, model: Tensors, examples: int, key: Key, *, job: str = "evaluate", by_image: bool = False
) -> Evaluation:
    """Accuracy and mean loss on the ``examples`` test images, in parts spread over the engine.

    With ``by_image`` it also says which images are right.
    """
    starts = range(0, examples, IMAGES_AT_ONCE)
    parts = [TestPart(start, min(start + IMAGES_AT_ONCE, examples)) for start in starts]
    outcome = engine.map_sum(job_text(job, IMAGES if by_image else ""), model, parts, key)
    if outcome.failures:
        reason = outcome.failures[0].reason
        raise ClientFailure(f"the model on the test images, job evaluate: {reason} (seed {key.seed} replays it)")
    sums = outcome.sums
    total, right = float(sums["metric/total"].sum()), float(sums["metric/right"].sum())
    marks = sums["metric/marks"].clone().numpy() if by_image else None  # an engine may use its memory again
    by_class = sums["metric/right"].clone().numpy(), sums["metric/total"].clone().numpy()
    return Evaluation(right / total, float(sums["metric/loss"]) / total, *by_class, marks)


def evaluate_part(side: ClientSide, shared: Tensors, part: TestPart, key: Key, options: str) -> Sums:
    """The job: right answers and loss of the server's model on one part of the test images, by class."""
    side.load(shared, training=False)
    with torch.no_grad():
        images, labels = side.test.batch(torch.arange(part.start, part.stop))
        logits = side.logits(side.network.encoder(images)).cpu()
        return score(logits, labels.cpu(), (part, len(side.test.labels)) if options == IMAGES else None)


def score(logits: Tensor, labels: Tensor, part: tuple[TestPart, int] | None = None) -> Sums:
    """Loss, right answers and examples by class, as sums; with a part of how many images, a mark for each image too."""
    classes = logits.shape[1]
    found = logits.argmax(1) == labels
    right = labels[found]
    marks = {}
    if part is not None:
        marks["metric/marks"] = torch.zeros(part[1], dtype=torch.float64)
        marks["metric/marks"][part[0].start : part[0].stop] = found.double()
    return {
        "metric/loss": F.cross_entropy(logits.double(), labels, reduction="sum"),
        "metric/right": torch.bincount(right, minlength=classes).double(),
        "metric/total": torch.bincount(labels, minlength=classes).double(),
        **marks,
    }


JOBS: Mapping[str, Job] = {"evaluate": evaluate_part}  # type: ignore[dict-item]  # it is given parts, not visits
