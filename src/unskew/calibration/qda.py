"""QDA: the quadratic discriminant, with each class's covariance shrunk towards the pooled one.

Shapes: n features of d dimensions, C classes, P of them with examples.
"""

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import NEVER, last_linear
from unskew.calibration.covariances import ClassReport, Full, require_memory
from unskew.calibration.finisher import Finisher, Made, StatisticsRequest, finisher
from unskew.calibration.lda import discriminate
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.text import check_positive


class Quadratic(nn.Module):
    """−½·‖F_cᵀ(z − μ_c)‖² + b_c for every class, in one product: ‖F_cᵀz − F_cᵀμ_c‖²."""

    factors: Tensor  # [d, C·d]
    shifts: Tensor  # [C·d]
    bias: Tensor  # [C]

    def __init__(self, factors: Tensor, shifts: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors)
        self.register_buffer("shifts", shifts)
        self.register_buffer("bias", bias)

    def forward(self, features: Tensor) -> Tensor:
        """[n, d] -> [n, C]."""
        apart = (features @ self.factors - self.shifts).view(-1, self.bias.shape[0], self.factors.shape[0])
        logits: Tensor = self.bias - 0.5 * apart.square().sum(2)
        return logits


@finisher
def qda(pooled: float = 0.9, layers: int = 1) -> Finisher:
    """Replaces the classifier by a quadratic discriminant, in closed form.

    It needs the full covariance of every class: one exchange of sums. The classifier is not linear.

    Class c has the logit −½·(z − m_c)ᵀΣ_c⁻¹(z − m_c) − ½·log|Σ_c| with Σ_c = (1 − w_c)·S_c + w_c·A: S_c is the class's
    covariance, A the pooled one with the ridge of ``lda``, m_c the class mean, shrunk as in ``lda``, and
    w_c = max(``pooled``, 1 − (N_c − 1)/d).

    Parameters
    ----------
    pooled
        The smallest weight of the pooled covariance, above 0 and at most 1.
    layers
        The number of linear layers to replace.

    Reference: Friedman, "Regularized Discriminant Analysis", JASA 1989.
    """
    if not 0 < pooled <= 1:
        raise ValueError(f"qda(pooled={pooled}): give a weight above 0 and at most 1")
    check_positive("qda", layers=layers)

    def make(head: nn.Module, statistics: ClassStatistics, key: Key) -> Made:
        if not isinstance(statistics.form, Full):
            raise UserError(f"qda needs full statistics, with a covariance for every class, not {statistics.form}")
        width, classes, like = statistics.width, last_linear(head).out_features, last_linear(head).weight
        what = f"qda's {classes:,} factors of {width:,} features"
        require_memory(like.element_size() * classes * width**2, what, "use lda, or fewer features")
        linear = discriminate(statistics)
        within, means = statistics.within(), statistics.means()
        within.diagonal().add_(linear.ridge * float(within.diagonal().mean()))
        centre = linear.shrinkage @ means / linear.shrinkage.sum()
        factors, shifts = like.new_zeros(width, classes, width), like.new_zeros(classes, width)
        bias, reports = torch.full((classes,), NEVER, dtype=torch.float64), []
        for row, label in enumerate(statistics.held.tolist()):
            count = int(statistics.number[row])
            weight = max(pooled, 1 - (count - 1) / width)
            covariance = statistics.form.scatter(statistics, row) / max(count - 1, 1)
            factor, failed = torch.linalg.cholesky_ex((1 - weight) * covariance + weight * within)
            if bool(failed):
                raise UserError(f"qda: the covariance of class {label} has no inverse; give a larger pooled")
            inverse = torch.linalg.solve_triangular(factor, torch.eye(width, dtype=torch.float64), upper=False).t()
            mean = centre + float(linear.shrinkage[row]) * (means[row] - centre)
            factors[:, label], shifts[label] = inverse.to(like), (mean @ inverse).to(like)
            bias[label] = -factor.diagonal().log().sum()
            reports.append(ClassReport(label, count, weight))
        present = bias[statistics.held]
        bias[statistics.held] = present - present.mean()  # a common shift changes no prediction
        return Made(Quadratic(factors.flatten(1), shifts.flatten(), bias.to(like)), classes=tuple(reports))

    return Finisher(make, StatisticsRequest(Full(), layers))
