"""The little language of methods and partitions: ``name(value, knob=value) + name``.

Only literals are read and nothing is evaluated. Every error shows the text with a caret under the mistake.
"""

import inspect
import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any

from unskew.core.errors import IN_PLUGIN, UserError, brief, describe_error, nearest
from unskew.core.units import counted

Value = int | float | bool | str

MAX_TEXT = 10_000  # characters of a text
MAX_COUNT = 10**9  # for whole numbers of our own functions; a plug-in may take up to 2^63 − 1
MAX_WORD = 1000  # characters of a name or a number
LEAST, MOST = 1e-38, 1e38  # range of the floats used in training: that of float32
TRAINING = ("method", "calibration", "schedule", "optimizer")
SHOWN = 120  # characters of the text in an error

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))|(?P<name>[A-Za-z_][\w.:-]*)"
    r"|(?P<string>'[^']*'|\"[^\"]*\")|(?P<mark>[(),=+]))"
)


@dataclass(frozen=True)
class Call:
    """``name(*values, **knobs)``, at column ``start`` of the text ``source``."""

    name: str
    values: tuple[Value, ...]
    knobs: Mapping[str, Value]
    start: int
    source: str

    def __str__(self) -> str:
        """The call in canonical spelling; parsing it gives the call again."""
        inside = [*map(spell, self.values), *(f"{k}={spell(v)}" for k, v in self.knobs.items())]
        return f"{self.name}({', '.join(inside)})" if inside else self.name

    def error(self, message: str) -> UserError:
        """An error that shows the text and points at this call."""
        return _point_at(self.source, self.start, message)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


def spell(value: Value) -> str:
    """A value as it is written in the language."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_][\w.:-]*", value) and value.lower() not in ("true", "false")
        quote = "'" if '"' in value else '"'
        return value if plain else f"{quote}{value}{quote}"
    return repr(value)


def cut(shown: str, most: int = 80) -> str:
    """A text, shortened for a message."""
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _point_at(source: str, start: int, message: str) -> UserError:
    """An error that shows the text, or the part of a long one around the column, and points at the column."""
    shown, first = re.sub(r"\s", " ", source), max(0, start - SHOWN // 2)
    if len(shown) > SHOWN:
        shown = ("…" if first else "") + shown[first : first + SHOWN] + ("…" if first + SHOWN < len(shown) else "")
        start = start - first + (1 if first else 0)
    return UserError(f"{message}\n  {shown}\n  {' ' * start}^")


def parse_calls(source: str, what: str) -> list[Call]:
    """Parse ``"a(1) + b(x=2)"`` to a list of calls; ``what`` names the text in errors."""
    if len(source) > MAX_TEXT:
        raise UserError(f"{what}: the text has {len(source):,} characters; the limit is {MAX_TEXT:,}")
    tokens = _tokens(source)
    if tokens[0].kind == "end":
        raise UserError(f"{what} is empty; give a name")
    calls = [_call(source, tokens, what)]
    while (token := tokens.popleft()).text == "+":
        calls.append(_call(source, tokens, what))
    if token.kind != "end":
        raise _point_at(source, token.start, f"{what}: expected + or the end, found {brief(token.text)}")
    return calls


def parse_call(source: str, what: str) -> Call:
    """Parse a single call."""
    call, *more = parse_calls(source, what)
    if more:
        raise more[0].error(f"give one {what}; several cannot be added")
    return call


def apply(call: Call, function: Callable[..., Any], what: str) -> Any:
    """Call ``function`` with the call's arguments; a wrong one is a UserError that points at the call."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        first = len(getattr(function, "args", ()))  # those of a partial
        reason = f"it must take {counted(first, 'argument')} before its knobs" if first else "its signature is unknown"
        raise call.error(f"{what} {call.name} cannot be called from a text: {reason}") from error
    knobs = list(signature.parameters)
    for knob in call.knobs:
        if knob not in signature.parameters:
            hint = nearest(knob, knobs) if knobs else "it takes none"
            raise call.error(f"{what} {call.name} has no knob {brief(knob)}; {hint}")
    if len(call.values) > len(knobs):
        wanted = f"at most {len(knobs)} ({', '.join(knobs)})" if knobs else "no values"
        raise call.error(f"{what} {call.name} takes {wanted}, but {len(call.values)} were given")
    by_position = dict(zip(knobs, call.values, strict=False))
    if twice := next((knob for knob in call.knobs if knob in by_position), None):
        raise call.error(f"{what} {call.name}: {twice} is given twice")
    arguments = by_position | dict(call.knobs)
    for knob, parameter in signature.parameters.items():
        if knob in arguments:
            arguments[knob] = _convert(call, what, knob, arguments[knob], parameter.annotation)
        elif parameter.default is inspect.Parameter.empty:
            raise call.error(f"{what} {call.name} needs {knob}: {call.name}({knob}=…)")
    try:
        return function(**arguments)
    except UserError:
        raise
    except (ValueError, OverflowError) as error:
        raise call.error(str(error)) from error
    except (Exception, SystemExit, GeneratorExit) as error:  # a plug-in must not end this process
        described = describe_error(error)
        if isinstance(error, Exception) and IN_PLUGIN not in described:
            raise
        raise call.error(f"{what} {call.name} raises {described}") from error


def check_positive(name: str, **knobs: float) -> None:
    """Reject knobs that are not positive and finite, and counts above the limit."""
    for knob, value in knobs.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}({knob}={value}): give a number above 0")
        if isinstance(value, int) and value > MAX_COUNT:
            raise ValueError(f"{name}({knob}=…): give at most {MAX_COUNT:,}")


def check_not_negative(name: str, **knobs: float) -> None:
    """Reject knobs that are negative or not finite."""
    for knob, value in knobs.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}({knob}={value}): {knob} must be 0 or more, and finite")


def _convert(call: Call, what: str, knob: str, value: Value, annotation: Any) -> Value:
    """The value in the knob's type: a whole number may become a float, nothing else is converted."""
    wanted = {"int": int, "float": float, "bool": bool, "str": str}.get(annotation, annotation)
    if isinstance(wanted, UnionType) and NoneType in wanted.__args__:
        wanted = next(member for member in wanted.__args__ if member is not NoneType)
    if wanted is float and type(value) is int:
        value = float(value)
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    if wanted in kinds and type(value) is not wanted:
        raise call.error(f"{what} {call.name}: {knob} must be {kinds[wanted]}, not {cut(spell(value))}")
    most = 2**63 - 1 if ":" in call.name else MAX_COUNT
    if type(value) is int and abs(value) > most:
        raise call.error(f"{what} {call.name}: {knob}={cut(str(value))} is too large; the limit is {most:,}")
    if type(value) is float and what in TRAINING and ":" not in call.name and value and not LEAST <= abs(value) <= MOST:
        raise call.error(f"{what} {call.name}: {knob}={value:g} is out of range; give 0, or {LEAST} to {MOST}")
    return value


def _tokens(source: str) -> deque[_Token]:
    tokens, at, end = deque[_Token](), 0, len(source.rstrip())
    while at < end:
        match = _TOKEN.match(source, at)
        if match is None:
            start = at + len(source[at:]) - len(source[at:].lstrip())
            hint = "; put file names in quotes" if source[start] in "/\\~" else ""
            raise _point_at(source, start, f"cannot read {source[start]!r} here{hint}")
        kind = str(match.lastgroup)
        if kind in ("name", "number") and len(match.group(kind)) > MAX_WORD:
            raise _point_at(source, match.start(kind), f"this {kind} has more than {MAX_WORD:,} characters")
        tokens.append(_Token(kind, match.group(kind), match.start(kind)))
        at = match.end()
    tokens.append(_Token("end", "the end", end))
    return tokens


def _call(source: str, tokens: deque[_Token], what: str) -> Call:
    """Take a call's tokens."""
    name = tokens.popleft()
    if name.kind != "name":
        raise _point_at(source, name.start, f"{what}: expected a name, found {brief(name.text)}")
    values: list[Value] = []
    knobs: dict[str, Value] = {}
    token = tokens.popleft() if tokens[0].text == "(" else None
    while token and (token := tokens.popleft()).text != ")":
        if token.kind == "name" and tokens[0].text == "=":
            if token.text in knobs:
                raise _point_at(source, token.start, f"{what} {cut(name.text)}: {cut(token.text)} is given twice")
            tokens.popleft()
            knobs[token.text] = _value(source, tokens.popleft(), what)
        elif knobs:
            raise _point_at(source, token.start, f"{what}: a bare value cannot follow knob=value")
        else:
            values.append(_value(source, token, what))
        if tokens[0].text == ",":
            tokens.popleft()
        elif tokens[0].text != ")":
            found = brief(tokens[0].text)
            raise _point_at(source, tokens[0].start, f"{what}: expected , or ) after a value, found {found}")
    return Call(name.text, tuple(values), knobs, name.start, source)


def _value(source: str, token: _Token, what: str) -> Value:
    if token.kind == "number":
        if not math.isfinite(float(token.text)):
            raise _point_at(source, token.start, f"{what}: this number is too large")
        return int(token.text) if re.fullmatch(r"[-+]?\d+", token.text) else float(token.text)
    if token.kind == "name":
        return {"true": True, "false": False}.get(token.text.lower(), token.text)
    if token.kind == "string":
        return token.text[1:-1]
    raise _point_at(source, token.start, f"{what}: expected a value, found {brief(token.text)}")
