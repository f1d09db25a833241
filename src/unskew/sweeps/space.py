"""What a sweep tries: ``lr=0.01,0.1`` lists values of an option, ``lr=0.001..0.3 log`` is a range to search.

``fedprox.mu=0.01,0.1`` lists values of a method's knob.
"""

import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import get_args

from unskew import methods
from unskew.core import text as language
from unskew.core.errors import UserError, a_kind, nearest
from unskew.runs import config as configs
from unskew.runs.config import OPTIONS, Config, Option, Value

MAX_SETTINGS = 10_000
LONGEST = 80  # characters of a folder's name
KINDS = {int: "an integer", float: "a number", bool: "true or false"}

_RANGE = re.compile(r"(.+?)\.\.(.+?)(\blog)?")
_VALUE = re.compile(r"""(?:[^,(\['"]|\([^)]*\)|\[[^\]]*\]|'[^']*'|"[^"]*")+""")  # with its brackets and quotes
_OTHERWISE = {"seed": "give --seeds 0,1,2 for several seeds", "validation": "give --validation SHARE"}


@dataclass(frozen=True)
class Dimension:
    """An option that a sweep varies, or a knob such as ``fedprox.mu``: the values to try, or the ends of a range."""

    option: str
    text: str  # as typed
    kind: type
    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @property
    def ranged(self) -> bool:
        """Whether it is a range."""
        return not self.values

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values to check: all of them, or the ends of the range."""
        if self.values:
            return self.values
        return (int(self.low), int(self.high)) if self.kind is int else (self.low, self.high)


def parse_over(texts: Sequence[str], flag: str = "--over") -> tuple[Dimension, ...]:
    """Parse the options to vary and check their values."""
    if not texts:
        raise UserError('a sweep needs an option to vary; give --over "lr=0.01,0.03,0.1"')
    dimensions: dict[str, Dimension] = {}
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{flag} must be texts such as 'lr=0.01,0.1', not {a_kind(text)}")
        try:
            new = _parse_dimension(text)
            if new.option in dimensions:
                raise UserError(f"{new.option} is given twice; list all of its values once")
        except UserError as error:
            raise UserError(f"{flag} {language.cut(text)}: {error}") from error
        dimensions[new.option] = new
    return tuple(dimensions.values())


def _parse_dimension(text: str) -> Dimension:
    name, equals, rest = (part.strip() for part in text.partition("="))
    option = _knob_option(name) if "." in name else OPTIONS.get(name.removeprefix("--").replace("-", "_"))
    if not equals or option is None:
        names = [known for known in OPTIONS if OPTIONS[known].decides and known not in _OTHERWISE]
        hint = nearest(name, names)
        raise UserError(f'no option is called {name!r}; write NAME=VALUES, such as "lr=0.01,0.1"; {hint}')
    if not option.decides or option.name in _OTHERWISE:
        reason = _OTHERWISE.get(option.name, "it does not affect the result")
        raise UserError(f"{option.name} cannot be varied; {reason}")
    ends = _RANGE.fullmatch(rest) if option.kind in (int, float) else None
    values = [_parse_value(option, part) for part in (ends.group(1, 2) if ends else _VALUE.findall(rest))]
    if not values:
        raise UserError('write NAME=VALUES, such as "lr=0.01,0.1"')
    if option.name in OPTIONS:  # the method checks its knobs when it is built
        for value in values:
            configs.checked(configs.with_values(Config(), {option.name: value}, "--over"))
    if ends is None:
        return Dimension(option.name, text, option.kind, tuple(dict.fromkeys(values)))
    low, high = map(float, values)
    if not low < high or (ends[3] and low <= 0):
        raise UserError("give the lower end of a range first, for a logarithmic one above 0")
    return Dimension(option.name, text, option.kind, (), low, high, bool(ends[3]))


def _knob_option(name: str) -> Option:
    method, _, knob = name.rpartition(".")
    knobs = _knobs(method)
    if knob not in knobs:
        raise UserError(f"{method} has no knob {knob!r}; {nearest(knob, knobs) if knobs else 'it has no knobs'}")
    declared = knobs[knob].annotation
    kinds = [kind for kind in (get_args(declared) or (declared,)) if kind in (int, float, bool, str)]
    return Option(name, float if float in kinds else kinds[0] if kinds else str, None, "")


def _knobs(method: str) -> Mapping[str, inspect.Parameter]:
    build = methods.find_method(method)
    if build is None:
        raise UserError(f"no method is called {method!r}; {nearest(method, methods.METHODS)}")
    return inspect.signature(build, eval_str=True).parameters


def _parse_value(option: Option, text: str) -> Value:
    text = text.strip()
    if option.kind is str:
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        value: Value = {"true": True, "false": False}[text.lower()] if option.kind is bool else option.kind(text)
        return value
    except (ValueError, KeyError):
        raise UserError(f"{option.name} must be {KINDS[option.kind]}, not {language.cut(text)!r}") from None


def grid(dimensions: Sequence[Dimension]) -> list[dict[str, Value]]:
    """Every combination of the values, the last option changing fastest."""
    if ranges := [dimension.text for dimension in dimensions if dimension.ranged]:
        raise UserError(f"--over {ranges[0]}: a range needs --trials N; add it, or list values")
    names, values = [dimension.option for dimension in dimensions], [dimension.values for dimension in dimensions]
    if (count := prod(map(len, values))) > MAX_SETTINGS:
        hint = "list fewer values, or give --trials N"
        raise UserError(f"{count:,} settings exceed the limit of {MAX_SETTINGS:,}; {hint}")
    return [dict(zip(names, combination, strict=True)) for combination in product(*values)]


def with_setting(base: Config, values: Mapping[str, Value]) -> Config:
    """The configuration with these values; knobs are written into the method's parentheses."""
    config = configs.with_values(base, {name: value for name, value in values.items() if "." not in name}, "--over")
    knobs = {name: value for name, value in values.items() if "." in name}
    calls = language.parse_calls(config.method, "method") if knobs else []
    for name, value in knobs.items():
        method, _, knob = name.rpartition(".")
        index = next((index for index, call in enumerate(calls) if call.name == method), None)
        if index is None or knob in (*calls[index].knobs, *list(_knobs(method))[: len(calls[index].values)]):
            raise UserError(f"--over {name}: --method {config.method!r} must contain {method} without a {knob}")
        calls[index] = replace(calls[index], knobs={**calls[index].knobs, knob: value})
    return replace(config, method=" + ".join(map(str, calls))) if knobs else config


def describe_values(values: Mapping[str, Value]) -> str:
    """A setting as text: ``lr 0.01, momentum 0.9``."""
    return ", ".join(f"{name.replace('_', ' ')} {spell_value(value)}" for name, value in values.items())


def spell_value(value: Value) -> str:
    """A value as a user writes it."""
    return f"{value:.12g}" if isinstance(value, float) else value if isinstance(value, str) else language.spell(value)


def folder_name(values: Mapping[str, Value]) -> str:
    """A setting as a folder name; if characters were dropped, a hash keeps it unique."""
    text = "_".join(f"{name.replace('_', '-')}-{spell_value(value)}" for name, value in values.items())
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-.")
    if plain == text and len(plain) <= LONGEST:
        return plain
    return f"{plain[:LONGEST].strip('-.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
