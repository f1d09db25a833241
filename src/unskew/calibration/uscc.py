"""USCC: FedECCR's second stage, ccvr with that paper's settings."""

from unskew.calibration.ccvr import ccvr
from unskew.calibration.finisher import Finisher, finisher
from unskew.calibration.knobs import check_positive


@finisher
def uscc(
    per_class: int = 400, epochs: int = 20, lr: float = 0.01, batch: int = 64, covariance: str = "full"
) -> Finisher:
    """Re-trains as ccvr does, with FedECCR's settings: its second stage.

    The same number of virtual features for each class, no transformation.

    Momentum and weight decay, on which the paper is silent, are ccvr's.

    Reference: Zeng et al., "FedECCR: Federated Learning Method with Encoding Comparison and Classification
    Rectification", CollaborateCom 2023, sections 3.3 and 4.1, Algorithm 2.
    """
    check_positive("uscc", per_class=per_class, epochs=epochs, batch=batch, lr=lr)
    return ccvr(per_class=per_class, epochs=epochs, lr=lr, batch=batch, covariance=covariance)
