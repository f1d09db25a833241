"""Unskew: federated training on skewed image data, and the unskewing of the classifier it leaves behind."""

from unskew.algorithm import Algorithm
from unskew.errors import ClientFailure, UserError
from unskew.experiment import resume, run
from unskew.key import Key
from unskew.results import Calibration, Result

__version__ = "0.1.0"

__all__ = ["Algorithm", "Calibration", "ClientFailure", "Key", "Result", "UserError", "resume", "run"]
