"""MOON: a client's features stay close to the server's model's and away from those of its own previous model."""

from dataclasses import replace

import torch.nn.functional as F

from unskew.core.language import check_not_negative, check_positive
from unskew.core.types import Loss, Step
from unskew.round.algorithm import Method
from unskew.round.client_memory import whole_model


def moon(mu: float = 1.0, tau: float = 0.5) -> Method:
    """Pulls features to the server's model, away from the client's last one.

    + μ·mean(−log(e^(sim(z, z_glob)/τ) / (e^(sim(z, z_glob)/τ) + e^(sim(z, z_prev)/τ)))), sim the cosine of the features
    that enter the classifier. z_glob: the server's model; z_prev: the client's own model after its last visit; both in
    eval mode and without gradient. The paper compares the output of a projection head: simple-cnn has one; for other
    networks the features themselves are compared.

    Where the paper is silent: at a client's first visit there is no z_prev and no term; two visits in one round both
    use the model from the round before.

    Parameters
    ----------
    mu
        The weight μ of the term. The default is the CCVR paper's for CIFAR-10 with α = 0.1 and 0.5; for 0.05 it uses 5.
    tau
        The temperature τ.

    Reference: Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, eq. (3).
    """
    check_not_negative("moon", mu=mu)
    check_positive("moon", tau=tau)

    def contrast(loss: Loss, step: Step) -> Loss:
        if not step.memory:
            return loss
        near = F.cosine_similarity(step.features, step.encode("shared"))
        far = F.cosine_similarity(step.features, step.encode("moon"))
        return loss.plus(mu * F.softplus((far - near) / tau).mean())  # −log(e^a / (e^a + e^b)) = softplus(b − a)

    return lambda algorithm: replace(
        algorithm, terms=(*algorithm.terms, contrast), remember=(*algorithm.remember, whole_model("moon"))
    )
