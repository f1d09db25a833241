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
from unskew.core.errors import UserError, brief, nearest
from unskew.core.files import read_content
from unskew.core.limits import check_plain, usable_path, user_path
from unskew.data.builders import absolute
from unskew.data.partition_files import IDS
from unskew.models.pretrained import IMAGENET
from unskew.runs.manifest import read_sealed
from unskew.runs.options import OPTIONS, Option, Value
from unskew.runs.options import Config as Config

CONFIG = "config.toml"
SEEDS = "seeds"  # in a recipe: several runs
TABLE = "federation"  # in a recipe: what only a federation uses
NODES = "nodes"  # as data or partition: what the nodes of a federation bring
HEADER = "# What this run was asked for, resolved. `unskew run` with this file repeats it."  # part of every fingerprint
SHA256 = "?sha256="  # what follows is the hash of pretrained weights
FROM_PYTHON = "python:"  # begins the description of a value that was given from Python

MAX_RECIPE = 1_000_000  # bytes

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def read(path: Path) -> Config:
    """A recipe: a TOML file whose keys are the options of ``unskew run``."""
    return read_recipe(path)[0]


def read_recipe(path: Path) -> tuple[Config, tuple[Any, ...]]:
    """A recipe, and the ``seeds`` that it lists for several runs, as they are there."""
    check_plain(path)
    content = read_content(path, MAX_RECIPE)
    if content is None:
        raise UserError(f"there is no recipe {path}")
    table = _table(content, path)
    table.pop(TABLE, None)
    seeds = table.pop(SEEDS, [])
    if not isinstance(seeds, list):
        raise UserError(f"{path}: {SEEDS} must be a list of whole numbers such as [0, 1, 2], {brief(seeds)} given")
    if seeds and "seed" in table:
        raise UserError(f"{path}: seed and {SEEDS} are both given; give seed for one run, or {SEEDS} for several")
    return with_values(Config(), table, str(path)), tuple(seeds)


def federation_table(path: Path) -> dict[str, Any]:
    """What a recipe says for a federation alone; empty where it says nothing."""
    table = _table(read_content(path, MAX_RECIPE) or b"", path).get(TABLE, {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: {TABLE} must be a table such as [federation], {brief(table)} given")
    return table


def read_run(path: Path) -> Config:
    """The configuration of a run folder, as it was written."""
    content = read_sealed(path, CONFIG)
    if content is None:
        raise UserError(f"{path} is not a run folder: it has no {CONFIG}")
    return with_values(Config(), _table(content, path / CONFIG), str(path / CONFIG))


def _table(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"the recipe {path} cannot be read: {error}") from error
    except ValueError as error:  # also an integer of more digits than Python reads
        raise UserError(f"the recipe {path} is not TOML: {error}") from error
    except RecursionError as error:
        raise UserError(f"the recipe {path} is nested too deeply; options are not nested") from error


def with_values(config: Config, values: Mapping[str, Any], where: str) -> Config:
    """The configuration with these values over it, of the right types; keys may be written with dashes."""
    changes = {}
    for given, value in values.items():
        key = str(given).replace("-", "_")
        if key not in OPTIONS:
            raise UserError(f"{where}: no option is called {brief(given)}; {nearest(key, OPTIONS)}")
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
    check_text("--data-dir (or UNSKEW_DATA)", folder or "")
    return replace(
        config,
        data=_absolute(absolute(config.data), "arrays:", "folder:", "table:"),
        partition=_absolute(config.partition, "file:"),
        data_dir=str(Path(folder).absolute()) if folder else None,
        pretrained=_absolute_weights(config.pretrained),
        cache_dir=str(user_path(config.cache_dir).absolute()) if config.cache_dir else None,
        baseline=str(usable_path(config.baseline).absolute()) if config.baseline else None,
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
    """The options that decide the result, with the values that the run had.

    An option that is None is left out, and so is one that older runs do not know while it has its default: otherwise
    the settings of two equal runs of different versions would differ.
    """
    values = {option.name: getattr(config, option.name) for option in OPTIONS.values() if option.decides}
    later = {option.name: option.default for option in OPTIONS.values() if option.added_later}
    return {name: value for name, value in values.items() if value is not None and later.get(name, ...) != value}


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
        raise UserError(f"{where}: {option.name} must be {_KINDS[option.kind]}, {brief(value)} given")
    return value


def _check(option: Option, value: Any) -> None:
    """Refuse a value outside the option's limits or choices."""
    flag = option.flag
    if isinstance(value, str) and not from_python(value):
        check_text(flag, value)
    if option.choices and value not in option.choices:
        raise UserError(f"{flag} {text.cut(value)}: {nearest(value, option.choices)}")
    if value == "" and option.default is None:
        raise UserError(f"{flag} is empty; leave it out, or give a value")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(
            f"{flag}: {value!a} has bytes that are not text in this locale, so no file can name it; rename it, or "
            "set a UTF-8 locale such as LC_ALL=C.UTF-8"
        )
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


def check_text(name: str, value: str) -> None:
    """Refuse a text that no file could have: too long, with a null byte, or not Unicode."""
    if len(value) > text.MAX_TEXT:
        raise UserError(f"{name}: the text has {len(value):,} characters; {text.MAX_TEXT:,} is the most")
    if "\0" in value:
        raise UserError(f"{name} {brief(value)}: it has a null byte; remove it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} {brief(value)}: it is not UTF-8, in which runs are written; rename it") from None


def _absolute_weights(text: str | None) -> str | None:
    """The file of pretrained weights made absolute; "imagenet" is no file."""
    where, asked, known = (text or "").partition(SHA256)
    if text is None or where == IMAGENET:
        return text
    return f"{usable_path(user_path(where)).absolute()}{asked}{known}"


def _absolute(value: str, *prefixes: str) -> str:
    """The text with its paths made absolute, so that a run can be resumed from anywhere."""
    for prefix in prefixes:
        if value.startswith(prefix) and len(value) > len(prefix):
            path, asked, table = value.removeprefix(prefix).partition(IDS)
            whole = prefix + str(user_path(path).absolute())
            return f"{whole}{asked}{user_path(table).absolute()}" if table else whole + asked
    return value
