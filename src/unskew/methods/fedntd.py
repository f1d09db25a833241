"""FedNTD: clients preserve the server's predictions for the classes that an example does not belong to."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.core.language import check_not_negative, check_positive
from unskew.core.types import Loss, Step
from unskew.round.algorithm import Method


def fedntd(beta: float = 1.0, tau: float = 1.0) -> Method:
    """Preserves the server's predictions for the other classes.

    + β·τ²·mean(KL(q_global ‖ q)), q the softmax of logits/τ over all classes but the example's own. The server's model
    is used in eval mode and without gradient: one more forward pass per step.

    Parameters
    ----------
    beta
        The weight β of the term. The default is the paper's.
    tau
        The temperature τ. The default is the paper's.

    Reference: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
    NeurIPS 2022, eqs. (4)-(6).
    """
    check_not_negative("fedntd", beta=beta)
    check_positive("fedntd", tau=tau)

    def distill(loss: Loss, step: Step) -> Loss:
        student = _without_own_class(step.logits, step.labels)
        teacher = _without_own_class(step.predict("shared"), step.labels)
        student, teacher = F.log_softmax(student / tau, dim=1), F.log_softmax(teacher / tau, dim=1)
        return loss.plus(beta * tau**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True))

    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, distill))


def _without_own_class(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, C] -> [B, C − 1]."""
    examples, classes = logits.shape
    others = torch.arange(classes, device=labels.device) != labels[:, None]  # [B, C]
    return logits[others].view(examples, classes - 1)
