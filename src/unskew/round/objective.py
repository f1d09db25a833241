"""2. What they minimise: cross-entropy, folded through the terms that the methods add."""

from collections.abc import Sequence

import torch.nn.functional as F

from unskew.core.types import Loss, Step, Term


def objective(terms: Sequence[Term], step: Step) -> Loss:
    """The loss of one mini-batch: each term takes the loss so far and gives the next one."""
    loss = Loss(F.cross_entropy(step.logits, step.labels, reduction="none"))
    for term in terms:
        loss = term(loss, step)
    return loss
