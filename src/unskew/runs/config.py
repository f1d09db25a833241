"""A run's configuration: TOML and flags end here, no function below takes one."""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from unskew.core import text
from unskew.core.errors import UserError, nearest
from unskew.core.types import Local
from unskew.engines import check_name
from unskew.methods import plain_spelling
from unskew.runs import recording

MOST = 10**9  # of anything that is counted
FAILURE_POLICIES = ("stop", "skip")


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes, and how; ``None`` is filled in from the data."""

    data: str = "digits"  # the image set
    data_dir: str | None = None  # where image sets lie; the variable UNSKEW_DATA stands in
    partition: str = "dirichlet(alpha=0.1)"  # who holds what
    clients: int | None = None  # how many; 10, or what the partition says
    per_round: int | None = None  # how many come each round; all
    method: str = "fedavg"
    model: str | None = None  # the one that suits the images
    rounds: int = 20
    epochs: int = 5  # local passes over a client's data in each round
    batch: int = 64
    lr: float = 0.01  # of the clients; the server's rate is a knob of the method
    momentum: float = 0.9  # of the clients
    weight_decay: float = 1e-5
    augment: bool | None = None  # crops and flips; on where they leave the class alone
    engine: str = "auto"
    workers: int | None = None  # one a core
    seed: int = 0
    evaluate_every: int = 1
    on_failure: str = "stop"  # what a failed client does to the round: stop, or skip
    checkpoint_seconds: float = 10.0  # time between checkpoints; 0: after every round
    baseline: str | None = None  # the folder of a finished run that accuracy is compared with
    during: str | None = None  # what is written down while training, and when

    def local(self) -> Local:
        """What the clients are told."""
        return Local(self.epochs, self.batch, self.lr, self.momentum, self.weight_decay, bool(self.augment))


_LEAST = {
    "clients": 1, "per_round": 1, "rounds": 1, "epochs": 1, "batch": 1, "workers": 1, "evaluate_every": 1,
    "seed": 0, "weight_decay": 0, "momentum": 0, "checkpoint_seconds": 0,
}  # fmt: skip


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
    types = get_type_hints(Config)
    changes = {}
    for given, value in values.items():
        key = given.replace("-", "_")
        if key not in types:
            raise UserError(f"{where}: no option is called {given!r}; {nearest(key, types)}")
        if key in changes:
            raise UserError(f"{where}: {key} stands there twice, with a dash and without")
        changes[key] = _typed(key, value, types[key], where)
    return replace(config, **changes)


def checked(config: Config) -> Config:
    """The configuration if every value is possible; texts in their plainest spelling, the data folder absolute."""
    for key, least in _LEAST.items():
        value = getattr(config, key)
        if value is not None and not (least <= value < math.inf):
            raise UserError(f"{_flag(key)} {value}: give {least} or more")
        if isinstance(value, int) and key != "seed" and value > MOST:
            raise UserError(f"{_flag(key)}: {MOST:,} is the most that is allowed")
    if not 0 < config.lr < math.inf:
        raise UserError(f"--lr {config.lr}: a learning rate is a number above 0")
    if not config.momentum < 1:
        raise UserError(f"--momentum {config.momentum}: give 0 or more and less than 1")
    if config.on_failure not in FAILURE_POLICIES:
        raise UserError(f"--on-failure {config.on_failure}: {nearest(config.on_failure, FAILURE_POLICIES)}")
    if config.seed >= 2**63:
        raise UserError(f"--seed {config.seed}: give a number below 2^63")
    for key in ("baseline", "model", "during"):
        if getattr(config, key) == "":
            raise UserError(f"{_flag(key)} is empty; leave it out, or name one")
    check_name(config.engine)
    folder = config.data_dir or os.environ.get("UNSKEW_DATA")
    return replace(
        config,
        method=plain_spelling(config.method),
        data=_absolute(config.data, "arrays:", "folder:"),
        partition=_absolute(config.partition, "file:"),
        data_dir=str(Path(folder).absolute()) if folder else None,
        baseline=str(Path(config.baseline).absolute()) if config.baseline else None,
        during=recording.plain_spelling(config.during) if config.during else None,
    )


def to_toml(config: Config) -> str:
    """The configuration as a recipe; what is None is left out."""
    lines = ["# What this run was asked for, resolved. `unskew run` with this file repeats it."]
    for field in fields(config):
        value = getattr(config, field.name)
        if value is not None:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        plain = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else _escaped(c) for c in plain) + '"'
    return text.spell(value)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"


def _typed(key: str, value: Any, wanted: Any, where: str) -> Any:
    kinds = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, PathLike) and str in kinds:
        return str(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)  # NumPy's whole numbers too
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where}: {key} is too large for a number") from None
    if type(value) not in kinds:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise UserError(f"{where}: {key} must be {words[kinds[0]]}, {value!r} given")
    return value


def _absolute(text: str, *prefixes: str) -> str:
    """The text with its path made absolute, so that a run can be resumed from anywhere."""
    for prefix in prefixes:
        if text.startswith(prefix) and len(text) > len(prefix):
            try:
                return prefix + str(Path(text.removeprefix(prefix)).expanduser().absolute())
            except RuntimeError as error:
                raise UserError(f"{text}: {error}") from error
    return text


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
