"""LDA: the linear discriminant of class means and pooled covariance, in closed form."""

from torch import nn

from unskew.calibration.classifier import last_linear
from unskew.calibration.covariances import Shared
from unskew.calibration.finisher import Finisher, Made, StatisticsRequest, finisher
from unskew.calibration.gaussians import ClassReport
from unskew.calibration.known_noise import pooled_edge, raised
from unskew.calibration.retraining import check_positive, discriminant
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

RIDGE = 0.001


@finisher
def lda(ridge: float = RIDGE, layers: int = 1, expand: int = 0) -> Finisher:
    """Replaces the classifier by a linear discriminant, in closed form.

    It needs the class means and the pooled covariance alone.

    w_c = (Σ + ρ·tr(Σ)/d·I)⁻¹·μ_c, b_c = −½·μ_cᵀw_c: the best classifier if all classes are Gaussians of one shape and
    equally likely. No training, nothing drawn. With ``layers`` above 1 it replaces that many linear layers of the
    network; with ``expand`` it sees ReLU of that many random sums of their input beside ReLU of the input itself, and
    is no longer linear in it.

    Of statistics with known noise (``private``) the covariance's eigenvalues below the noise's edge are raised to it,
    unless you give a ``ridge`` other than the default.

    Reference: Fisher, "The Use of Multiple Measurements in Taxonomic Problems", Annals of Eugenics, 1936; random
    features: Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007.
    """
    if not 0 < ridge < float("inf"):
        raise ValueError(
            f"lda(ridge={ridge}): give a number above 0; features of a network are often linearly dependent"
        )
    check_positive("lda", layers=layers)
    if expand < 0:
        raise ValueError(f"lda(expand={expand}): it counts random features, give 0 or more")

    def make(head: nn.Module, statistics: ClassStatistics, key: Key) -> Made:
        classes = last_linear(head).out_features
        within = statistics.within()
        if statistics.noise is not None and ridge == RIDGE:
            within = raised(within, pooled_edge(statistics))
        linear = discriminant(head, statistics.means(), within, statistics.held, ridge, classes)
        pairs = zip(statistics.held.tolist(), statistics.number.tolist(), strict=True)
        return Made(linear, classes=tuple(ClassReport(label, count, shrunk=1.0) for label, count in pairs))

    return Finisher(make, StatisticsRequest(Shared(), layers, expand))
