"""Unskew: federated training on skewed image data, and the unskewing of the classifier it leaves behind.

Names are imported when first used: ``import unskew`` is quick, and an interrupt in the first second ends cleanly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unskew.afterwards import calibrate_run, load
    from unskew.algorithm import Algorithm
    from unskew.analysis import analyse
    from unskew.calibration.head import CalibratedClassifier, Lift
    from unskew.calibration.methods import calibrate
    from unskew.calibration.statistics import ClassStatistics
    from unskew.errors import ClientFailure, UserError
    from unskew.experiment import resume, run
    from unskew.key import Key
    from unskew.loggers import open_logger
    from unskew.report.writing import write_report
    from unskew.results import Calibration, Result

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "CalibratedClassifier",
    "Calibration",
    "ClassStatistics",
    "ClientFailure",
    "Key",
    "Lift",
    "Result",
    "UserError",
    "analyse",
    "calibrate",
    "calibrate_run",
    "load",
    "open_logger",
    "resume",
    "run",
    "write_report",
]

_HOME = {
    "Algorithm": "algorithm",
    "CalibratedClassifier": "calibration.head",
    "Calibration": "results",
    "ClassStatistics": "calibration.statistics",
    "ClientFailure": "errors",
    "Key": "key",
    "Lift": "calibration.head",
    "Result": "results",
    "UserError": "errors",
    "analyse": "analysis",
    "calibrate": "calibration.methods",
    "calibrate_run": "afterwards",
    "load": "afterwards",
    "open_logger": "loggers",
    "resume": "experiment",
    "run": "experiment",
    "write_report": "report.writing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unskew' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unskew.{_HOME[name]}"), name)
