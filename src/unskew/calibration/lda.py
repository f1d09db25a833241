"""LDA and QDA: the linear and the quadratic discriminant of class means and covariances, in closed form.

Shapes: n features of d dimensions, C classes, P of them with examples.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.calibration.classifier import NEVER, last_linear, replace_rows
from unskew.calibration.covariances import CLIPPED, TINY, ClassReport, Full, negative_share, parse_form, require_memory
from unskew.calibration.finisher import Finisher, Made, StatisticsRequest, finisher
from unskew.calibration.protection import pooled_edge
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.language import check_not_negative, check_positive

GRID = [10 ** (step / 4) for step in range(-12, 13)]  # the ridges tried: 0.001 to 1000, four per decade
TOLERANCE = 1e-3  # a ridge that loses at most this share of the best separation is as good
MOST_LEVERAGE = 0.999
SHRUNK = 0.9  # a class mean that keeps less of its distance is noted
NEGATIVE = (
    "{}: negative eigenvalues of the pooled covariance were set to zero ({:.2g} of their total); some client sent "
    "moments that no features can have"
)
PASSES = 4  # iterations over k_c, m and τ
LEAST_SIGNAL = 0.01  # at least this share of the means' squared lengths is assumed not to be noise


@finisher
def lda(ridge: float = 0.0, layers: int = 1, expand: int = 0, covariance: str = "shared") -> Finisher:
    """Replaces the classifier by a linear discriminant, in closed form.

    It needs only the counts, the class means and the pooled covariance: one exchange of sums. No training, nothing
    drawn.

    w_c = s·A⁻¹·k_c·(μ_c − m), b_c = −½·k_c·(μ_c − m)ᵀw_c − mᵀw_c, where A = Σ + ρ·tr(Σ)/d·I and m = Σk_c·μ_c/Σk_c: the
    best classifier if all classes are equally likely Gaussians of the same shape. ρ, k_c and s account for the
    uncertainty of few examples. With f = tr(A⁻¹Σ), n examples and P classes,

    - δ = f/(1 − f/(n − P)) estimates tr(A⁻¹·true covariance), so noise adds δ/n_c to (μ_c − m)ᵀA⁻¹(μ_c − m) = q_c;
    - k_c = τ/(τ + δ/n_c), τ = Σk_c²·(q_c − δ/n_c)/Σk_c², shrinks the mean of a rare class towards m, to its posterior
      mean if without noise all classes are equally far from m;
    - ρ is the smallest value for which two classes are as far apart as possible, in standard deviations of unseen
      features: τ over the root of (μ_c − m)ᵀA⁻¹ΣA⁻¹(μ_c − m)/(1 − f/(n − P))², averaged like τ;
    - s turns the outputs into log-odds: their mean is half their variance, on unseen features.

    With many examples of every class this is the textbook discriminant: k_c and s are 1, and ρ is 0.001.

    Parameters
    ----------
    ridge
        ρ of the textbook discriminant, w_c = A⁻¹μ_c and b_c = −½·μ_cᵀw_c, for comparison: it neglects rare classes.
        0 chooses ρ, k_c and s as above.
    layers
        The number of linear layers to replace.
    expand
        Random features, ReLU of random sums of the layers' input, next to ReLU of the input itself: the classifier is
        then not linear in the input.
    covariance
        What the clients send: shared, or less for clients with few examples, diagonal or "low-rank(32)".

    References: Fisher, "The Use of Multiple Measurements in Taxonomic Problems", Annals of Eugenics, 1936. δ and the
    factor for unseen features: Wang, Jiang, "On the Dimension Effect of Regularized Linear Discriminant Analysis",
    Electronic Journal of Statistics, 2018. k_c: Efron, Morris, "Stein's Estimation Rule and Its Competitors", JASA
    1973. Random features: Rahimi, Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007.
    """
    check_not_negative("lda", ridge=ridge, expand=expand)
    check_positive("lda", layers=layers)

    def make(head: nn.Module, statistics: ClassStatistics, key: Key) -> Made:
        if ridge:
            return Made(solve_discriminant(head, statistics, ridge), classes=report_pooled(statistics))
        solution = discriminate(statistics)
        linear = replace_rows(head, solution.weight, solution.bias, statistics.held)
        notes = [f"ridge {solution.ridge:.2g} was chosen from the statistics"] if solution.ridge > GRID[0] else []
        if (least := float(solution.shrinkage.min())) < SHRUNK:
            label = int(statistics.held[solution.shrinkage.argmin()])
            notes.append(f"class means were shrunk by up to {1 - least:.0%} (class {label})")
        return Made(linear, classes=report_pooled(statistics), notes=tuple(notes))

    return Finisher(make, StatisticsRequest(parse_form(covariance), layers, expand))


@dataclass(frozen=True, eq=False)
class Discriminant:
    """A linear discriminant, in float64."""

    weight: Tensor  # [P, d]
    bias: Tensor  # [P]
    ridge: float  # ρ
    shrinkage: Tensor  # [P], k
    inflation: float  # 1/(1 − f/(n − P)): the factor on the variation of unseen features along the weights


def discriminate(statistics: ClassStatistics) -> Discriminant:
    """The linear discriminant for unseen features, described in ``lda``."""
    means, within, number = statistics.means(), statistics.within(), statistics.number.double()
    values, vectors = torch.linalg.eigh((within + within.mT) / 2)
    if statistics.noise is None:  # noise can hide all variance
        require_variation("lda", means, within)
        if (share := negative_share(values)) > CLIPPED:
            warnings.warn(NEGATIVE.format("lda", share), stacklevel=2)
    values = values.clamp(min=pooled_edge(statistics))
    rotated, unit, degrees = means @ vectors, float(values.mean()), statistics.degrees  # [P, d]
    added = 0.0 if statistics.noise is None else statistics.noise.sums**2  # noise variance of an entry of a class's sum

    def assess(ridge: float) -> tuple[float, float, Tensor, Tensor, Tensor]:
        """The separation of unseen features, their inflation, A⁻¹ and m along the eigenvectors [d], and k [P]."""
        inverse = 1 / (values + ridge * unit)
        freedom = min(float((values * inverse).sum()), MOST_LEVERAGE * degrees)
        inflation = 1 / (1 - freedom / degrees)
        noise = freedom * inflation / number + added * inverse.sum() / number.square()  # [P]
        shrinkage = number / (number + number.median())  # initial value
        for _ in range(PASSES):
            centre = shrinkage @ rotated / shrinkage.sum()
            squares, weights = (rotated - centre).square(), shrinkage.square() / shrinkage.square().sum()
            lengths = squares @ inverse  # [P], q
            signal = max(float(weights @ (lengths - noise)), LEAST_SIGNAL * float(weights @ lengths), TINY)
            shrinkage = signal / (signal + noise)
        spread = inflation * float(weights @ squares @ (values * inverse.square())) ** 0.5
        separation = signal / spread if spread and freedom < MOST_LEVERAGE * degrees else 0.0
        return separation, inflation, inverse, centre, shrinkage

    separations = [assess(ridge)[0] for ridge in GRID]
    enough = (1 - TOLERANCE) * max(separations)
    ridge = next(ridge for ridge, separation in zip(GRID, separations, strict=True) if separation >= enough)
    _, inflation, inverse, centre, shrinkage = assess(ridge)
    shrunk = shrinkage[:, None] * (rotated - centre)
    weight = shrunk * inverse
    spread = inflation**2 * float((weight.square() * values).sum())
    scale = float((weight * shrunk).sum()) / spread if spread else 1.0
    bias = -0.5 * scale * (weight * shrunk).sum(1) - scale * weight @ centre
    return Discriminant(scale * weight @ vectors.t(), bias, ridge, shrinkage, inflation)


def solve_discriminant(head: nn.Module, statistics: ClassStatistics, ridge: float) -> nn.Linear:
    """The textbook discriminant of equally likely Gaussians with the same covariance, described in ``lda``."""
    means, within = statistics.means(), statistics.within()
    require_variation("lda", means, within)
    solved, failed = torch.linalg.solve_ex(add_ridge(repair("lda", within, ridge), ridge), means.t())
    weight = solved.t()  # [P, d]
    if bool(failed) or not bool(weight.isfinite().all()):
        raise UserError(f"lda(ridge={ridge:g}) has no solution; give a larger ridge")
    return replace_rows(head, weight, -0.5 * (weight * means).sum(1), statistics.held)


def report_pooled(statistics: ClassStatistics) -> tuple[ClassReport, ...]:
    """The class reports if all classes have the pooled covariance."""
    pairs = zip(statistics.held.tolist(), statistics.number.tolist(), strict=True)
    return tuple(ClassReport(label, count, shrunk=1.0) for label, count in pairs)


def add_ridge(matrix: Tensor, ridge: float) -> Tensor:
    """A + ρ·tr(A)/d·I."""
    return matrix + (ridge * matrix.diagonal().mean()) * torch.eye(len(matrix), dtype=torch.float64)


def repair(name: str, within: Tensor, ridge: float) -> Tensor:
    """The covariance, without negative eigenvalues if it is not positive definite even with the ridge."""
    if not bool(torch.linalg.cholesky_ex(add_ridge(within, ridge)).info):
        return within
    values, vectors = torch.linalg.eigh((within + within.mT) / 2)
    if (share := negative_share(values)) <= CLIPPED:  # rounding errors
        return within
    warnings.warn(NEGATIVE.format(name, share), stacklevel=3)  # no features can have these moments
    repaired: Tensor = (vectors * values.clamp(min=0)) @ vectors.t()
    return repaired


def features_vary(means: Tensor, within: Tensor) -> bool:
    """Whether features vary within their classes by more than rounding errors."""
    return bool(within.diagonal().mean() > 1e-14 * means.square().mean())


def require_variation(name: str, means: Tensor, within: Tensor) -> None:
    """Refuse features that do not vary, such as those of BatchNorm layers after too few steps."""
    if not features_vary(means, within):
        raise UserError(
            f"{name} has no solution: the features do not vary within classes; check the encoder, and if it has "
            "BatchNorm, train it for a few dozen steps first"
        )


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
                raise UserError(f"qda: the covariance of class {label} is singular; increase pooled")
            inverse = torch.linalg.solve_triangular(factor, torch.eye(width, dtype=torch.float64), upper=False).t()
            mean = centre + float(linear.shrinkage[row]) * (means[row] - centre)
            factors[:, label], shifts[label] = inverse.to(like), (mean @ inverse).to(like)
            bias[label] = -factor.diagonal().log().sum()
            reports.append(ClassReport(label, count, weight))
        present = bias[statistics.held]
        bias[statistics.held] = present - present.mean()  # a common shift changes no prediction
        return Made(Quadratic(factors.flatten(1), shifts.flatten(), bias.to(like)), classes=tuple(reports))

    return Finisher(make, StatisticsRequest(Full(), layers))
