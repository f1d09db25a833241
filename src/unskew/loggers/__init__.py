"""Loggers: observers that write a run's figures for TensorBoard, Weights & Biases or MLflow.

The logs are in the run folder, under ``logs/``, and nothing goes over a network unless its user has set WANDB_MODE or
MLFLOW_TRACKING_URI. Steps are rounds; a resumed run continues the same log, and each round is in it once.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial

from unskew.core import text
from unskew.core.errors import FUNCTION, TEXT, UserError, a_kind, accepts, nearest, optional
from unskew.core.plugins import load_function
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


@accepts(name=TEXT, note=optional(FUNCTION))
def open_logger(name: str, note: Callable[[str], None] | None = None) -> Logger:
    """A logger by its name or ``package.module:function(knobs)``, for ``observe``.

    The function gives a Backend. ``note`` is called with a message if the log fails; without it there is a warning.
    """
    make = _outside(name) if ":" in name else LOGGERS.get(name)
    if make is None:
        raise UserError(f"--log {name}: {nearest(name, LOGGERS)}; or give package.module:function")
    return Logger(_folder_name(name), _opened(name, make), note or (lambda text: warnings.warn(text, stacklevel=2)))


def _outside(name: str) -> Callable[[], Backend]:
    """The function that ``package.module:function(knobs)`` names, with its knobs."""
    calls = text.parse_calls(name, "--log")
    if len(calls) > 1:
        raise text.complain(name, calls[1].start, "give each logger its own --log")
    return partial(text.apply, calls[0], load_function(calls[0].name, "--log"), "--log")


def _opened(name: str, make: Callable[[], Backend]) -> Backend:
    try:
        backend = make()
    except UserError:
        raise
    except Exception as error:  # someone else's code may raise anything
        raise UserError(f"--log {name}: it cannot be opened: {type(error).__name__}: {error}") from error
    missing = [part for part in ("start", "write", "close") if not callable(getattr(backend, part, None))]
    if missing:
        raise UserError(
            f"--log {name}: it gives {a_kind(backend)} without {', '.join(missing)}; "
            "give a function whose result has start, write and close"
        )
    return backend


def _folder_name(name: str) -> str:
    """The name as a folder under logs/."""
    return re.sub(r"[^\w.-]+", "-", name)
