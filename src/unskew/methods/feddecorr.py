"""FedDecorr: decorrelated features, against dimensional collapse."""

from dataclasses import replace

from unskew.core.language import check_not_negative
from unskew.core.types import Loss, Step
from unskew.round.algorithm import Method

SMALLEST = 1e-8  # added to a variance: a feature may be constant in a batch


def feddecorr(beta: float = 0.1) -> Method:
    """Penalizes correlations between features.

    + β/d²·‖K‖²_F, K [d, d] the correlation matrix of the features over the mini-batch. A batch of one example has none.

    The authors' code multiplies the penalty by about the batch size B: ``feddecorr(beta=6.4)`` is their 0.1 at B = 64.

    Parameters
    ----------
    beta
        The weight β of the penalty. The default is the paper's.

    Reference: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
    Learning", ICLR 2023, eqs. (7)-(8).
    """
    check_not_negative("feddecorr", beta=beta)

    def decorrelate(loss: Loss, step: Step) -> Loss:
        examples, width = step.features.shape
        if examples < 2:
            return loss
        variance, mean = step.features.var(0, unbiased=False), step.features.mean(0)
        z = (step.features - mean) / (variance + SMALLEST).sqrt()  # [B, d]
        products = z.t() @ z if width < examples else z @ z.t()  # of the same Frobenius norm
        return loss.plus(beta * (products / (examples * width)).square().sum())

    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, decorrelate))
