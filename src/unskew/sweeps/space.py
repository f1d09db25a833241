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
from unskew.core.errors import UserError, brief, nearest
from unskew.runs import config as configs
from unskew.runs.config import OPTIONS, Config, Option, Value

MAX_SETTINGS = 10_000
LONGEST = 80  # characters of a folder's name

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(log)?\s*")
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
    def label(self) -> str:
        """The option's name for charts."""
        return self.option.replace("_", " ")

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values to check: all of them, or the ends of the range."""
        if self.values:
            return self.values
        return (int(self.low), int(self.high)) if self.kind is int else (self.low, self.high)


def parse_over(texts: Sequence[str]) -> tuple[Dimension, ...]:
    """Parse the options to vary and check their values."""
    if not texts:
        raise UserError('a sweep needs an option to vary; give --over "lr=0.01,0.03,0.1"')
    dimensions: dict[str, Dimension] = {}
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"over: give texts such as lr=0.01,0.1, not {brief(text)}")
        new = _parse_dimension(text)
        if new.option in dimensions:
            raise UserError(f"--over {language.cut(text)}: {new.option} is given twice; list all of its values once")
        dimensions[new.option] = new
    return tuple(dimensions.values())


def grid(dimensions: Sequence[Dimension]) -> list[dict[str, Value]]:
    """Every combination of the values, the last option changing fastest."""
    if ranges := [dimension.text for dimension in dimensions if dimension.ranged]:
        raise UserError(f"--over {ranges[0]}: a range needs --trials N; add it, or list values")
    count = prod(len(dimension.values) for dimension in dimensions)
    if count > MAX_SETTINGS:
        raise UserError(
            f"{count:,} settings exceed the limit of {MAX_SETTINGS:,}; list fewer values, or give --trials N"
        )
    names, values = [dimension.option for dimension in dimensions], [dimension.values for dimension in dimensions]
    return [dict(zip(names, combination, strict=True)) for combination in product(*values)]


def with_setting(base: Config, values: Mapping[str, Value]) -> Config:
    """The configuration with these values; knobs are written into the method's parentheses."""
    config = configs.with_values(base, {name: value for name, value in values.items() if "." not in name}, "--over")
    knobs = {name: value for name, value in values.items() if "." in name}
    calls = language.parse_calls(config.method, "method") if knobs else []
    for name, value in knobs.items():
        method, _, knob = name.rpartition(".")
        index = next((index for index, call in enumerate(calls) if call.name == method), None)
        if index is None:
            raise UserError(
                f"--over {name}: the method {config.method!r} does not contain {method}; add it to --method"
            )
        call = calls[index]
        if knob in (*call.knobs, *list(_knobs(method))[: len(call.values)]):
            raise UserError(f"--over {name}: --method already sets {knob} in {call}; remove it there")
        calls[index] = replace(call, knobs={**call.knobs, knob: value})
    return replace(config, method=" + ".join(map(str, calls))) if knobs else config


def _knobs(method: str) -> Mapping[str, inspect.Parameter]:
    build = methods.find_method(method)
    if build is None:
        raise UserError(f"no method is called {method!r}; {nearest(method, methods.METHODS)}")
    return inspect.signature(build, eval_str=True).parameters


def _knob_option(name: str, text: str) -> Option:
    """A knob of a method as an option."""
    method, _, knob = name.rpartition(".")
    knobs = _knobs(method)
    if knob not in knobs:
        hint = nearest(knob, knobs) if knobs else "it has no knobs"
        raise UserError(f"--over {language.cut(text)}: {method} has no knob {knob!r}; {hint}")
    declared = knobs[knob].annotation
    kinds = [kind for kind in (get_args(declared) or (declared,)) if kind in (int, float, bool, str)]
    return Option(name, float if float in kinds else kinds[0] if kinds else str, None, "")


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


def _parse_dimension(text: str) -> Dimension:
    name, equals, rest = text.partition("=")
    if not equals:
        raise UserError(f'--over {language.cut(text)}: write it as NAME=VALUES, such as "lr=0.01,0.1"')
    plain = name.strip().removeprefix("--").replace("-", "_")
    option = _knob_option(name.strip(), text) if "." in name else OPTIONS.get(plain)
    if option is None:
        names = [known for known in OPTIONS if OPTIONS[known].decides and known not in _OTHERWISE]
        raise UserError(f"--over {language.cut(text)}: no option is called {name.strip()!r}; {nearest(name, names)}")
    if not option.decides or option.name in _OTHERWISE:
        reason = _OTHERWISE.get(option.name, "it does not affect the result")
        raise UserError(f"--over {language.cut(text)}: {option.name} cannot be varied; {reason}")
    if (ends := _RANGE.fullmatch(rest)) and option.kind in (int, float):
        return _parse_range(option, text, ends)
    values = tuple(_parse_value(option, part, text) for part in _split_values(rest))
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"--over {language.cut(text)}: {spell_value(value)} is given twice; give each value once")
        _check(option, value, text)
    return Dimension(option.name, text, option.kind, values)


def _parse_range(option: Option, text: str, ends: re.Match[str]) -> Dimension:
    low, high = (_parse_value(option, end, text) for end in ends.group(1, 2))
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    if not low < high:
        raise UserError(f"--over {language.cut(text)}: the range is empty; give the lower end first")
    if ends[3] and low <= 0:
        raise UserError(f"--over {language.cut(text)}: a logarithmic range must start above 0")
    for end in (low, high):
        _check(option, end, text)
    return Dimension(option.name, text, option.kind, (), float(low), float(high), bool(ends[3]))


def _split_values(text: str) -> list[str]:
    """Split the text at its commas, except those in brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _parse_value(option: Option, text: str, source: str) -> Value:
    where = f"--over {language.cut(source)}: "
    if not text:
        raise UserError(f"{where}a value is empty; write NAME=VALUE,VALUE")
    if option.kind is str:
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    if option.kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UserError(f"{where}{option.name} must be true or false, not {language.cut(text)!r}")
    try:
        return int(text) if option.kind is int else float(text)
    except ValueError:
        kind = "an integer" if option.kind is int else "a number"
        raise UserError(f"{where}{option.name} must be {kind}, not {language.cut(text)!r}") from None


def _check(option: Option, value: Value, text: str) -> None:
    if option.name not in OPTIONS:  # the method checks its knobs when it is built
        return
    try:
        configs.checked(configs.with_values(Config(), {option.name: value}, "--over"))
    except UserError as error:
        raise UserError(f"--over {language.cut(text)}: {error}") from error
