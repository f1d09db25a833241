"""A run's configuration: read from a recipe, checked, written, and reduced to a fingerprint."""

import hashlib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from unskew.core import text
from unskew.core.errors import UserError, nearest
from unskew.runs.options import OPTIONS, Option, Value
from unskew.runs.options import Config as Config

HEADER = "# What this run was asked for, resolved. `unskew run` with this file repeats it."  # part of every fingerprint
FROM_PYTHON = "python:"  # begins the description of a value that was given from Python

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def read(path: Path) -> Config:
    """A recipe: a TOML file whose keys are the options of ``unskew run``."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no recipe {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the recipe {path} cannot be read: {error}") from error
    except ValueError as error:  # also an integer of more digits than Python reads
        raise UserError(f"the recipe {path} is not TOML: {error}") from error
    return with_values(Config(), table, str(path))


def with_values(config: Config, values: Mapping[str, Any], where: str) -> Config:
    """The configuration with these values over it, of the right types; keys may be written with dashes."""
    changes = {}
    for given, value in values.items():
        key = given.replace("-", "_")
        if key not in OPTIONS:
            raise UserError(f"{where}: no option is called {given!r}; {nearest(key, OPTIONS)}")
        if key in changes:
            raise UserError(f"{where}: {key} is given twice, with a dash and without")
        changes[key] = _typed(OPTIONS[key], value, where)
    return replace(config, **changes)


def checked(config: Config) -> Config:
    """The configuration if every value is possible, with its paths made absolute."""
    for option in OPTIONS.values():
        if (value := getattr(config, option.name)) is not None:
            _check(option, value)
    folder = config.data_dir or os.environ.get("UNSKEW_DATA")
    return replace(
        config,
        data=_absolute(config.data, "arrays:", "folder:"),
        partition=_absolute(config.partition, "file:"),
        data_dir=str(Path(folder).absolute()) if folder else None,
        baseline=str(Path(config.baseline).absolute()) if config.baseline else None,
    )


def to_toml(config: Config) -> str:
    """The configuration as a recipe; an option that is None is left out."""
    described = ", ".join(values_described(config))
    header = f"# What this run was asked for, resolved. Values given from Python are only described: {described}."
    values = ((name, getattr(config, name)) for name in OPTIONS)
    return "\n".join([header if described else HEADER, *_lines(values)]) + "\n"


def values_described(config: Config) -> list[str]:
    """The options whose values were given from Python: the configuration alone does not repeat the run."""
    return [name for name in OPTIONS if from_python(getattr(config, name))]


def fingerprint(config: Config) -> str:
    """SHA-256 over the options that decide the result; the others count as if they had their defaults."""
    values = []
    for option in OPTIONS.values():
        value = getattr(config, option.name) if option.decides else option.default
        if not (option.added_later and value == option.default):
            values.append((option.name, value))
    return hashlib.sha256(("\n".join([HEADER, *_lines(values)]) + "\n").encode()).hexdigest()


def deciding(config: Config) -> dict[str, Value]:
    """The options that decide the result, with the values that the run had; an option that is None is left out."""
    values = {option.name: getattr(config, option.name) for option in OPTIONS.values() if option.decides}
    return {name: value for name, value in values.items() if value is not None}


def from_python(value: Any) -> bool:
    """Whether a text describes a value that was given from Python: no file can give it again."""
    return isinstance(value, str) and value.startswith(FROM_PYTHON)


def _lines(values: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        plain = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else _escaped(c) for c in plain) + '"'
    return text.spell(value)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"


def _typed(option: Option, value: Any, where: str) -> Any:
    if value is None and option.default is None:
        return None
    if isinstance(value, PathLike) and option.kind is str:
        return str(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)  # NumPy's whole numbers too
    if option.kind is float and isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where}: {option.name} is too large for a number") from None
    if type(value) is not option.kind:
        raise UserError(f"{where}: {option.name} must be {_KINDS[option.kind]}, {value!r} given")
    return value


def _check(option: Option, value: Any) -> None:
    """Refuse a value outside the option's limits or choices."""
    flag = option.flag
    if option.choices and value not in option.choices:
        raise UserError(f"{flag} {value}: {nearest(value, option.choices)}")
    if value == "" and option.default is None:
        raise UserError(f"{flag} is empty; leave it out, or give a value")
    if option.check is not None:
        option.check(value)
    if option.most is not None and value > option.most:
        raise UserError(f"{flag}: {option.most:,} is the most that is allowed")
    if option.limits and not (
        (option.least is None or value >= option.least)
        and (option.above is None or value > option.above)
        and value < (math.inf if option.below is None else option.below)
    ):
        raise UserError(f"{flag} {value}: give {option.limits}")


def _absolute(text: str, *prefixes: str) -> str:
    """The text with its path made absolute, so that a run can be resumed from anywhere."""
    for prefix in prefixes:
        if text.startswith(prefix) and len(text) > len(prefix):
            try:
                return prefix + str(Path(text.removeprefix(prefix)).expanduser().absolute())
            except RuntimeError as error:
                raise UserError(f"{text}: {error}") from error
    return text
