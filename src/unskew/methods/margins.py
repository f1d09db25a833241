"""FedLC, FedRS and balanced softmax: margins on the logits for clients with unequal class sizes.

All three use n_c, the client's number of examples of class c, only in training: evaluation uses the plain logits, and
n_c never leaves the client.
"""

from dataclasses import replace

import torch
from torch import Tensor

from unskew.core.language import check_not_negative
from unskew.core.types import Step
from unskew.round.algorithm import Method


def fedlc(tau: float = 0.5) -> Method:
    """Lowers the logits of classes that are rare on the client.

    logit_c − τ·n_c^(−1/4): between classes y and i this is the paper's pairwise margin τ·(n_y^(−1/4) − n_i^(−1/4)). A
    class that the client lacks has n_c = 0: its margin is −∞, and it leaves the softmax.

    Departs from the paper: its denominator leaves out the own class, so that the loss has no lower bound; ours is
    cross-entropy over all classes that the client has, as in public code.

    Parameters
    ----------
    tau
        The scale τ of the margin. The paper gives no value; 0.5 is the default of Flower's baseline.

    Reference: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022,
    eq. (7).
    """
    check_not_negative("fedlc", tau=tau)

    def margin(step: Step) -> Tensor:
        return -tau * _counts(step) ** -0.25 if tau else torch.zeros_like(step.logits)

    return lambda algorithm: replace(algorithm, margin=(*algorithm.margin, margin))


def fedrs(alpha: float = 0.5) -> Method:
    """Scales down the logits of classes that the client lacks.

    α·logit_c where n_c = 0. The factor is expressed as a margin, (α − 1)·logit_c, of the logits before any other
    margin.

    Parameters
    ----------
    alpha
        The factor α; 1 is FedAvg. The default is the paper's.

    Reference: Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data",
    KDD 2021.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"fedrs(alpha={alpha}): alpha must be between 0 and 1")

    def margin(step: Step) -> Tensor:
        return (alpha - 1) * step.logits * (step.counts == 0)

    return lambda algorithm: replace(algorithm, margin=(*algorithm.margin, margin))


def balanced() -> Method:
    """Trains as if the client's classes were equally frequent.

    logit_c + log n_c in the softmax, so that the network need not learn the client's class frequencies. A class that
    the client lacks has log 0 = −∞ and leaves the softmax.

    Reference: Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020, eq. (3).
    """

    def margin(step: Step) -> Tensor:
        return _counts(step).log()

    return lambda algorithm: replace(algorithm, margin=(*algorithm.margin, margin))


def _counts(step: Step) -> Tensor:
    """[C], n_c in the logits' dtype."""
    return step.counts.to(step.logits.dtype)
