"""clsprox and clsnorm: two changes to the classifier during training, from the CCVR paper."""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from unskew.core.language import check_not_negative
from unskew.core.tensors import half_squared_distance
from unskew.core.types import Loss, Step
from unskew.round.algorithm import Method


def clsprox(mu: float = 0.001) -> Method:
    """Adds a proximal term for the classifier only.

    + μ/2·‖φ − φ_global‖², φ the classifier's weight and bias.

    Parameters
    ----------
    mu
        The weight μ of the term. The default is the paper's for CIFAR-10 with α = 0.1 and 0.5.

    Reference: Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data",
    NeurIPS 2021, section 3.3.
    """
    check_not_negative("clsprox", mu=mu)

    def proximal(loss: Loss, step: Step) -> Loss:
        names = [name for name in step.classifier if name in step.params]
        local, reference = [step.params[name] for name in names], [step.shared[name] for name in names]
        return loss.plus(mu * half_squared_distance(local, reference))

    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, proximal))


def clsnorm() -> Method:
    """Scales each class's row of the classifier to length 1.

    logit_i = φ_iᵀz / ‖φ_i‖ in training and in inference, without bias: the network's bias is not used, and is zero in
    the saved model.

    Reference: Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data",
    NeurIPS 2021, section 3.3.
    """

    def unit_rows(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return F.normalize(weight, dim=1), None if bias is None else 0 * bias

    return lambda algorithm: replace(algorithm, head=unit_rows)
