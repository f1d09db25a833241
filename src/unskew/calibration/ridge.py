"""Ridge: regression from features to classes, in closed form from summed class statistics.

Shapes: P classes with examples, d features.
"""

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import replace_rows
from unskew.calibration.covariances import parse_form
from unskew.calibration.finisher import Finisher, Made, StatisticsRequest, finisher
from unskew.calibration.lda import add_ridge, repair, report_pooled, require_variation
from unskew.calibration.protection import pooled_edge, raise_eigenvalues
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.language import check_not_negative, check_positive

GRID = [10 ** (step / 4) for step in range(-16, 9)]  # the strengths tried: 0.0001 to 100, four per decade
MOST_LEVERAGE = 0.999
LEAST_GAP = 0.01  # the gap between classes on unseen examples is at least this share of that on the examples


@finisher
def ridge(
    strength: float = 0.0, balanced: bool = True, layers: int = 1, expand: int = 0, covariance: str = "shared"
) -> Finisher:
    """Replaces the classifier by ridge regression on the features, in closed form.

    It needs only the class means, the counts and the second moment over all classes: one exchange of sums.

    w_c = (A + ρ·tr(A)/d·I)⁻¹·π_c·(μ_c − m), b_c = π_c − w_cᵀm, all times one scale. A is the covariance of all features
    around m = Σπ_c·μ_c.

    The scale turns shares into logits: log-odds of Gaussians have a mean of half their variance, and the scale achieves
    this for unseen features, on average over pairs of classes. It changes the loss but no prediction.

    Departs from the paper: the intercept is not penalised, classes are balanced, and the strength is chosen; Fed3R is
    ``ridge(strength=…, balanced=false)``.

    Parameters
    ----------
    strength
        ρ. 0 chooses it by generalized cross-validation, which needs only the same sums.
    balanced
        All classes have the same weight, π_c = 1/P, and A is composed of the pooled covariance and the means. Otherwise
        π_c = N_c/N: plain ridge regression on one-hot labels.
    layers, expand, covariance
        As in lda.

    Reference: Fanì, Camoriano, Caputo, Ciccone, "Accelerating Heterogeneous Federated Learning with Closed-form
    Classifiers", ICML 2024; the strength: Golub, Heath, Wahba, "Generalized Cross-Validation as a Method for Choosing a
    Good Ridge Parameter", Technometrics 1979.
    """
    check_not_negative("ridge", strength=strength, expand=expand)
    check_positive("ridge", layers=layers)

    def make(head: nn.Module, statistics: ClassStatistics, key: Key) -> Made:
        problem = Regression(statistics, balanced, known_noise=not strength)
        chosen = strength or _choose_strength(problem)
        weight, bias = _solve(problem, chosen)
        linear = replace_rows(head, weight, bias, statistics.held)
        notes = () if strength else (f"strength {chosen:.2g} was chosen by generalized cross-validation",)
        return Made(linear, classes=report_pooled(statistics), notes=notes)

    return Finisher(make, StatisticsRequest(parse_form(covariance), layers, expand))


class Regression:
    """The sums of a regression, in float64, with classes weighted by their shares."""

    def __init__(self, statistics: ClassStatistics, balanced: bool, known_noise: bool) -> None:
        """The regression of class statistics; ``known_noise`` raises eigenvalues that may be noise."""
        number, means, within = statistics.number.double(), statistics.means(), statistics.within()
        require_variation("ridge", means, within)
        if known_noise and statistics.noise is not None:
            within = raise_eigenvalues(within, pooled_edge(statistics))
        within = repair("ridge", within, GRID[0])
        shares = torch.full_like(number, 1 / len(number)) if balanced else number / number.sum()
        self.means = means  # [P, d]
        self.shares = shares  # [P], π, adding up to 1
        self.within = within * (1 - len(number) / number.sum())  # [d, d], around the class means, divisor N
        self.effective = float(1 / (shares.square() / number).sum())  # the effective number of examples
        self.centre = shares @ means  # [d], m
        self.targets = shares[:, None] * (means - self.centre)  # [P, d], covariance of features and one-hot labels
        self.around = self.within + self.targets.t() @ (means - self.centre)  # [d, d], A


def _choose_strength(problem: Regression) -> float:
    """The strength with the smallest mean squared residual / (1 − leverage)².

    The leverage is an example's average share in its own prediction: degrees of freedom / examples. Everything follows
    from the sums: in A's eigenvectors the residual is Σπ(1 − π) − Σ_j e_j·(s_j + 2λ)/(s_j + λ)².
    """
    values, vectors = torch.linalg.eigh(problem.around)
    values = values.clamp(min=0)
    explained = (problem.targets @ vectors).square().sum(0)  # [d], e
    total, unit = float((problem.shares * (1 - problem.shares)).sum()), float(values.mean())

    def score(strength: float) -> float:
        penalty = strength * unit
        residual = total - float((explained * (values + 2 * penalty) / (values + penalty).square()).sum())
        leverage = (1 + float((values / (values + penalty)).sum())) / problem.effective
        return residual / (1 - leverage) ** 2 if leverage < MOST_LEVERAGE else float("inf")

    return min(reversed(GRID), key=score)


def _solve(problem: Regression, strength: float) -> tuple[Tensor, Tensor]:
    width, penalty = len(problem.around), strength * float(problem.around.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(add_ridge(problem.around, strength))
    weight = torch.cholesky_solve(problem.targets.t(), factor).t()
    if bool(failed) or not bool(weight.isfinite().all()):
        raise UserError(f"ridge(strength={strength:g}) has no solution; give a larger strength")
    bias = problem.shares - weight @ problem.centre
    degrees = 1 + width - penalty * float(torch.cholesky_inverse(factor).diagonal().sum())  # tr A·(A + λI)⁻¹, and 1
    scale = _scale(problem, weight, bias, min(degrees / problem.effective, MOST_LEVERAGE))
    return scale * weight, scale * bias


def _scale(problem: Regression, weight: Tensor, bias: Tensor, leverage: float) -> float:
    """2·gap/variance, both of the difference between two classes' outputs, averaged over all pairs of classes.

    A left-out example has the residual r/(1 − leverage), so on unseen examples the gap is 1 − (1 − gap)/(1 − leverage)
    and the variance larger by (1 − leverage)⁻².
    """
    classes = len(weight)
    if classes == 1:
        return 1.0
    pairs, together = classes * (classes - 1), weight.sum(0)
    outputs = problem.means @ weight.t() + bias  # [P, P]: for each class mean, the output of each class
    gap = float(classes * outputs.diagonal().sum() - outputs.sum()) / pairs
    alone = float((weight @ problem.within * weight).sum())
    variance = 2 * (classes * alone - float(together @ problem.within @ together)) / pairs
    unseen = max(1 - (1 - gap) / (1 - leverage), LEAST_GAP * gap)
    scale = 2 * unseen * (1 - leverage) ** 2 / variance if variance > 0 else 0.0
    return scale if 0 < scale < float("inf") else 1.0
