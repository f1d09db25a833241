"""LDA: the linear discriminant of class means and pooled covariance, in closed form."""

import warnings

import torch
from torch import Tensor, nn

from unskew.calibration.ccvr import check_positive
from unskew.calibration.classifier import last_linear, replace_rows
from unskew.calibration.covariances import ClassReport, Shared, drop_negative
from unskew.calibration.finisher import Finisher, Made, StatisticsRequest, finisher
from unskew.calibration.protection import pooled_edge, raise_eigenvalues
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key

RIDGE = 0.001


@finisher
def lda(ridge: float = RIDGE, layers: int = 1, expand: int = 0) -> Finisher:
    """Replaces the classifier by a linear discriminant, in closed form.

    It needs only the class means and the pooled covariance.

    w_c = (Σ + ρ·tr(Σ)/d·I)⁻¹·μ_c, b_c = −½·μ_cᵀw_c: the best classifier if all classes are Gaussians of one shape and
    equally likely. No training, nothing drawn.

    Parameters
    ----------
    ridge
        ρ. With statistics of known noise (``private``) and the default ρ, the covariance's eigenvalues below the
        noise's edge are raised to it.
    layers
        The number of linear layers to replace.
    expand
        Random features, ReLU of random sums of the layers' input, next to ReLU of the input itself: the classifier is
        then not linear in the input.

    Reference: Fisher, "The Use of Multiple Measurements in Taxonomic Problems", Annals of Eugenics, 1936; random
    features: Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007.
    """
    if not 0 < ridge < float("inf"):
        raise ValueError(
            f"lda(ridge={ridge}): ridge must be above 0, since a network's features are often linearly dependent"
        )
    check_shape("lda", layers, expand)

    def make(head: nn.Module, statistics: ClassStatistics, key: Key) -> Made:
        classes = last_linear(head).out_features
        within = statistics.within()
        if statistics.noise is not None and ridge == RIDGE:
            within = raise_eigenvalues(within, pooled_edge(statistics))
        linear = solve_discriminant(head, statistics.means(), within, statistics.held, ridge, classes)
        return Made(linear, classes=report_pooled(statistics))

    return Finisher(make, StatisticsRequest(Shared(), layers, expand))


def solve_discriminant(
    head: nn.Module | None, means: Tensor, within: Tensor, held: Tensor, ridge: float, classes: int
) -> nn.Linear:
    """The linear discriminant of Gaussians with one covariance, all classes equally likely.

    w_c = (Σ + ρ·tr(Σ)/d·I)⁻¹·μ_c, b_c = −½·μ_cᵀw_c for the classes held. The others keep the rows of a linear head of
    the same width; where there is no such head they are never predicted.
    """
    if not features_vary(means, within):
        raise UserError("lda has no solution: the features do not vary within classes; check the encoder")
    regular = add_ridge(within, ridge)
    if bool(torch.linalg.cholesky_ex(regular).info):  # not positive definite: no features have these moments
        positive, share = drop_negative(within)
        if share:
            warnings.warn(
                f"lda: negative eigenvalues of the pooled covariance were set to zero, {share:.2g} of it; "
                "some client sent "
                "moments that no features can have",
                stacklevel=2,
            )
            regular = add_ridge(positive, ridge)
    solved, failed = torch.linalg.solve_ex(regular, means.t())
    weight = solved.t()  # [P, d]
    if bool(failed) or not bool(weight.isfinite().all()):
        raise UserError(f"lda(ridge={ridge:g}) has no solution; give a larger ridge")
    return replace_rows(head, weight, -0.5 * (weight * means).sum(1), held, classes)


def check_shape(name: str, layers: int, expand: int) -> None:
    """Refuse knobs of a closed form that count nothing."""
    check_positive(name, layers=layers)
    if expand < 0:
        raise ValueError(f"{name}(expand={expand}): expand must be 0 or more random features")


def report_pooled(statistics: ClassStatistics) -> tuple[ClassReport, ...]:
    """All classes have the pooled covariance."""
    pairs = zip(statistics.held.tolist(), statistics.number.tolist(), strict=True)
    return tuple(ClassReport(label, count, shrunk=1.0) for label, count in pairs)


def add_ridge(matrix: Tensor, ridge: float) -> Tensor:
    """A + ρ·tr(A)/d·I."""
    return matrix + (ridge * matrix.diagonal().mean()) * torch.eye(len(matrix), dtype=torch.float64)


def features_vary(means: Tensor, within: Tensor) -> bool:
    """Whether features vary within their classes, beyond what rounding leaves of their squares."""
    return bool(within.diagonal().mean() > 1e-14 * means.square().mean())
