"""Code from outside the package: functions named ``package.module:function``, and optional dependencies."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from unskew.core.errors import UserError


def load_function(name: str, what: str) -> Callable[..., Any]:
    """``package.module:function``, for methods, networks and other code outside this package."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a file beside the user counts, after everything that is installed
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything when it is imported
        raise UserError(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"{what} {name!r} is not a function")
    return function


def require_extra(module: str, name: str = "privacy") -> Any:
    """A module of the packages that only the extra of that name needs, imported where it is used."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f'{module.split(".")[0]} is not installed; pip install "unskew[{name}]"') from error
