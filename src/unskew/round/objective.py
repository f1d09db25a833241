"""2. What they minimise: cross-entropy of logits with margins, blended, weighted, and with penalties added."""

from typing import TYPE_CHECKING

import torch.nn.functional as F

from unskew.core.types import Loss, Step

if TYPE_CHECKING:
    from unskew.round.algorithm import Algorithm


def objective(algorithm: "Algorithm", step: Step) -> Loss:
    """The loss of one mini-batch: margins, then cross-entropy, then the blend, then the terms."""
    logits = step.logits
    for margin in algorithm.margin:
        logits = logits + margin(step)
    example = F.cross_entropy(logits, step.labels, reduction="none")
    loss = Loss(example if algorithm.blend is None else algorithm.blend(example, step))
    for term in algorithm.terms:
        loss = term(loss, step)
    return loss
