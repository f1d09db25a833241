"""FedECCR: prototype contrast, which moves features towards the mean feature of their class, then a new classifier.

Shapes: C classes, d features.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.calibration.ccvr import uscc
from unskew.core.language import check_positive
from unskew.core.types import RoundInfo, Statistic, Step, Sums, Tensors, Visited
from unskew.round.algorithm import Method


def prototypes(tau: float = 0.5, scale: float = 1.0, own: bool = True) -> Method:
    """Pulls each feature towards its class's mean over all clients.

    And pushes it away from the means of other classes. Loss = α·scale·L_pc + (1 − α)·L_ce, L_pc = −log(e^(sim(f,
    z_y)/τ) / Σ_k e^(sim(f, z_k)/τ)), sim the cosine, α = 1 − r/R in round r = 0 … R − 1. z_k is the unweighted mean,
    over the last round's visits that had class k, of the class's mean feature after training; a class that no visit had
    keeps its prototype. In round 0 there are none: the loss is L_ce.

    Departs from the paper: eq. (1) lacks the minus sign and the own class in its denominator; we use Algorithm 1, line
    16. Eq. (2) divides by all N clients; we divide by those that had the class. Where the paper is silent: an example
    whose class has no prototype yet has the loss L_ce, and classes without one are left out of the sum.

    Parameters
    ----------
    tau
        The temperature τ.
    scale
        The weight of L_pc. The paper uses 0.1 for nearly equal clients (β = 5).
    own
        Whether the denominator includes the own class; false is eq. (1).

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023, section 3.2 and Algorithm 1.
    """
    check_positive("prototypes", tau=tau, scale=scale)

    def contrast(entropy: Tensor, step: Step) -> Tensor:
        if "sent/prototypes/mean" not in step.shared:
            return entropy
        known, share = step.shared["sent/prototypes/known"] > 0, step.shared["sent/prototypes/share"]
        contrasted = contrast_loss(step.features, step.labels, step.shared["sent/prototypes/mean"], known, tau, own)
        mixed = share * scale * contrasted + (1 - share) * entropy
        return torch.where(known[step.labels], mixed, entropy)

    statistic = Statistic("prototypes", measure=_local_prototypes, fold=_global_prototypes, steady=True)
    return lambda algorithm: replace(algorithm, blend=contrast, statistics=(*algorithm.statistics, statistic))


def fedeccr(tau: float = 0.5, scale: float = 1.0, per_class: int = 400, epochs: int = 20) -> Method:
    """Trains with prototypes, then retrains the classifier with uscc: the complete FedECCR.

    prototypes(tau, scale) + uscc(per_class, epochs).

    Parameters
    ----------
    tau, scale
        As in prototypes.
    per_class, epochs
        As in uscc.

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023.
    """
    train, calibrate = prototypes(tau, scale), uscc(per_class=per_class, epochs=epochs)
    return lambda algorithm: calibrate(train(algorithm))


def contrast_loss(features: Tensor, labels: Tensor, mean: Tensor, known: Tensor, tau: float, own: bool) -> Tensor:
    """L_pc of each example [B]; 0 if there is nothing to compare with."""
    cosine = F.normalize(features, dim=1) @ F.normalize(mean, dim=1).t() / tau  # [B, C]
    right = cosine.gather(1, labels[:, None])
    compared = known.expand_as(cosine)
    if not own:
        compared = compared.scatter(1, labels[:, None], False)
    rivals = cosine.masked_fill(~compared, float("-inf")).logsumexp(1)
    losses = rivals - right[:, 0]
    return losses if own else torch.where(compared.any(1), losses, torch.zeros_like(losses))


def _local_prototypes(visited: Visited) -> Sums:
    """The mean feature of each class after training [C, d], zero without examples, and which classes had some [C]."""
    classes, width = visited.model[visited.classifier[0]].shape
    total = torch.zeros(classes, width, dtype=torch.float64)
    count = torch.zeros(classes, dtype=torch.float64)
    for features, labels in visited.features():
        total.index_add_(0, labels, features.double())
        count += torch.bincount(labels, minlength=classes)
    return {"mean": total / count.clamp(min=1)[:, None], "known": (count > 0).double()}


def _global_prototypes(sent: Tensors, sums: Sums, info: RoundInfo) -> Tensors:
    clients, updated = sums["known"], sums["known"] > 0
    mean = sums["mean"] / clients.clamp(min=1)[:, None]
    before = sent.get("mean", torch.zeros_like(mean))
    known = updated | (sent["known"] > 0) if sent else updated
    share = torch.tensor(1 - info.round / info.rounds, dtype=torch.float64)  # α of the next round
    return {"mean": torch.where(updated[:, None], mean, before), "known": known.double(), "share": share}
