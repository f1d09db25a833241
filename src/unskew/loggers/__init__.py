"""Loggers: observers that write a run's figures for TensorBoard, Weights & Biases or MLflow.

The logs lie in the run folder, under ``logs/``, and nothing goes over a network unless its user has set WANDB_MODE or
MLFLOW_TRACKING_URI. Steps are rounds; a resumed run goes on in the same log, and each round stands there once.
"""

import warnings
from collections.abc import Callable

from unskew.core.errors import UserError, nearest
from unskew.loggers.logger import Backend as Backend
from unskew.loggers.logger import Logger as Logger
from unskew.loggers.mlflow import MLflow
from unskew.loggers.tensorboard import TensorBoard
from unskew.loggers.wandb import WeightsAndBiases

LOGGERS: dict[str, Callable[[], Backend]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def open_logger(name: str, note: Callable[[str], None] | None = None) -> Logger:
    """A logger by its name, for ``observe``; ``note`` is told if its log fails, otherwise a warning says so."""
    if name not in LOGGERS:
        raise UserError(f"--log {name}: {nearest(name, LOGGERS)}")
    return Logger(name, LOGGERS[name](), note or (lambda text: warnings.warn(text, stacklevel=2)))
