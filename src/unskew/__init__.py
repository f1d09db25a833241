"""Unskew: federated training on skewed image data, and calibration of the classifier afterwards.

Names are imported when first used: ``import unskew`` is quick, and an interrupt in the first second ends cleanly.
"""

TYPE_CHECKING = False  # as type checkers read it; ``typing`` itself would take longer than the whole rest
if TYPE_CHECKING:
    from typing import Any

    from unskew.analysis import analyse, draw_runs
    from unskew.api import resume, run, run_seeds, sweep
    from unskew.calibration.calibrate import calibrate
    from unskew.calibration.classifier import CalibratedClassifier, Lift
    from unskew.calibration.statistics import ClassStatistics
    from unskew.core.errors import ClientFailure, UserError
    from unskew.core.key import Key
    from unskew.loggers import open_logger
    from unskew.report.table import compare
    from unskew.report.write import write_report
    from unskew.round.algorithm import Algorithm
    from unskew.runs.export import export
    from unskew.runs.finished import calibrate_run, load
    from unskew.runs.prediction import predict
    from unskew.runs.result import Calibration, Result
    from unskew.runs.train import STOP, StopRun

__version__ = "0.1.0"

__all__ = [
    "STOP", "Algorithm", "CalibratedClassifier", "Calibration", "ClassStatistics", "ClientFailure", "Key", "Lift",
    "Result", "StopRun", "UserError", "analyse", "calibrate", "calibrate_run", "compare", "draw_runs", "export", "load",
    "open_logger", "predict", "resume", "run", "run_seeds", "sweep", "write_report",
]  # fmt: skip

_NAMES = {
    "analysis": "analyse draw_runs",
    "api": "resume run run_seeds sweep",
    "calibration.calibrate": "calibrate",
    "calibration.classifier": "CalibratedClassifier Lift",
    "calibration.statistics": "ClassStatistics",
    "core.errors": "ClientFailure UserError",
    "core.key": "Key",
    "loggers": "open_logger",
    "report.table": "compare",
    "report.write": "write_report",
    "round.algorithm": "Algorithm",
    "runs.export": "export",
    "runs.finished": "calibrate_run load",
    "runs.prediction": "predict",
    "runs.result": "Calibration Result",
    "runs.train": "STOP StopRun",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> "Any":
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'unskew' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unskew.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__version__"]
