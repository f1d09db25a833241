"""How well a model does: a job on parts of the server's test images, or on the clients' own where it has none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import ClientFailure
from unskew.core.key import Key
from unskew.core.types import Engine, Exchange, Failure, Sums, Tensors, TestPart, Visit
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
    failures: tuple[Failure, ...] = field(default=(), compare=False)  # clients that did not answer for theirs


def evaluate(
    engine: Engine, model: Tensors, examples: int, key: Key, *, job: str = "evaluate", by_image: bool = False,
    exchange: Exchange | None = None,
) -> Evaluation:  # fmt: skip
    """Accuracy and mean loss on the server's ``examples`` test images, in parts spread over the engine.

    With ``by_image`` it also says which images are right. Without test images the clients are asked for theirs; their
    answers come as the ``exchange`` lets them: masked under secure aggregation.
    """
    if not examples:
        return evaluate_at_clients(engine, model, key, job=job, exchange=exchange)
    starts = range(0, examples, IMAGES_AT_ONCE)
    parts = [TestPart(start, min(start + IMAGES_AT_ONCE, examples)) for start in starts]
    outcome = engine.map_sum(job_text(job, IMAGES if by_image else ""), model, parts, key)
    if outcome.failures:
        reason = outcome.failures[0].reason
        raise ClientFailure(f"the model on the test images, job evaluate: {reason} (seed {key.seed} replays it)")
    marks = outcome.sums["metric/marks"].clone().numpy() if by_image else None  # an engine may use its memory again
    return replace(_evaluation(outcome.sums), marks=marks)


def evaluate_at_clients(
    engine: Engine, model: Tensors, key: Key, *, job: str = "evaluate", exchange: Exchange | None = None
) -> Evaluation:
    """Accuracy and mean loss on the clients' own test images, over the clients that answered."""
    visits = [Visit(client, 1.0) for client in engine.roster.inhabited.tolist()]
    outcome = engine.map_sum(job, model, visits, key) if exchange is None else exchange(engine, job, model, visits, key)
    if not outcome.sums or not float(outcome.sums["metric/total"].sum()):
        reason = outcome.void or (outcome.failures[0].reason if outcome.failures else "no client has test images")
        raise ClientFailure(f"the model on the clients' test images, job {job}: {reason}")
    return replace(_evaluation(outcome.sums), failures=outcome.failures)


def _evaluation(sums: Sums) -> Evaluation:
    total, right = float(sums["metric/total"].sum()), float(sums["metric/right"].sum())
    by_class = sums["metric/right"].clone().numpy(), sums["metric/total"].clone().numpy()
    return Evaluation(right / total, float(sums["metric/loss"]) / total, *by_class)


def evaluate_part(side: ClientSide, shared: Tensors, part: TestPart | Visit, key: Key, options: str) -> Sums:
    """The job: right answers and loss of the server's model by class, on a part of the server's test images or on a
    client's own."""
    side.load(shared, training=False)

    def logits(images: Tensor) -> Tensor:
        return side.logits(side.network.encoder(images)).cpu()

    return scored(side, part, logits, by_image=options == IMAGES)


def scored(
    side: ClientSide, part: TestPart | Visit, logits: Callable[[Tensor], Tensor], *, by_image: bool = False
) -> Sums:
    """What ``logits`` makes of one part of the test images, or of all that a client has, as sums."""
    if isinstance(part, Visit):
        return _scored_own(side, part, logits)
    with torch.no_grad():
        images, labels = side.test.batch(torch.arange(part.start, part.stop))
        return score(logits(images), labels.cpu(), (part, len(side.test.labels)) if by_image else None)


def _scored_own(side: ClientSide, visit: Visit, logits: Callable[[Tensor], Tensor]) -> Sums:
    classes = side.network.classifier.out_features
    total = score(torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64))
    with torch.no_grad():
        for some in torch.split(side.own_tests.get(visit.client, torch.zeros(0, dtype=torch.int64)), IMAGES_AT_ONCE):
            images, labels = side.test.batch(some)
            total = tensors.add(total, score(logits(images), labels.cpu()))
    return total


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


JOBS: Mapping[str, Job] = {"evaluate": evaluate_part}
