"""FedETF: all clients train towards one fixed classifier, whose classes are as far apart as possible."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.core.language import check_not_negative, check_positive
from unskew.core.types import Step
from unskew.round.algorithm import Method


def fedetf(scale: float = 10.0, gamma: float = 1.0) -> Method:
    """Replaces the classifier by a fixed simplex.

    logit_c = v_cᵀz in evaluation and β·v_cᵀz/‖z‖ + γ·log n_c in training, where z are the features and n_c is the
    client's number of examples of class c. The v_c are a simplex equiangular tight frame: length 1 and cosine
    −1/(C − 1) between any two. A class that the client lacks leaves the softmax. The network's own classifier is not
    used; the saved model has the v_c instead.

    Departs from the paper: β is a knob, not learned; the features are used without a projection layer; the frame is not
    drawn but spread evenly over the features (feature j belongs to class j mod C), which features after a ReLU can
    reach. The paper's personalization is left out.

    Parameters
    ----------
    scale
        The factor β on the cosines.
    gamma
        The weight γ of the class counts; 1 is balanced softmax, 0 ignores them.

    Reference: Li et al., "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
    Fixed Classifier", ICCV 2023, eqs. (3)-(6).
    """
    check_positive("fedetf", scale=scale)
    check_not_negative("fedetf", gamma=gamma)

    def head(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return simplex(*weight.shape).to(weight), None if bias is None else torch.zeros_like(bias)

    def margin(step: Step) -> Tensor:
        length = torch.linalg.vector_norm(step.features, dim=1, keepdim=True).clamp(min=1e-12)
        cosines: Tensor = (scale / length - 1) * step.logits  # added to the logits: β·v_cᵀz/‖z‖
        return cosines + gamma * step.counts.to(step.logits.dtype).log() if gamma else cosines

    return lambda algorithm: replace(algorithm, head=head, margin=(*algorithm.margin, margin))


def simplex(classes: int, width: int) -> Tensor:
    """[C, d], C vectors of length 1 with equal angles between them."""
    if width < classes or classes < 2:
        raise ValueError(
            f"fedetf needs at least 2 classes and as many features as classes, not {classes} classes, {width} features"
        )
    owner = F.one_hot(torch.arange(width) % classes, classes).double()  # [d, C]
    basis = owner / owner.sum(0).sqrt()  # orthonormal columns
    return math.sqrt(classes / (classes - 1)) * (basis - basis.mean(1, keepdim=True)).t()
