"""Records from values of unknown origin, such as parsed JSON: every field is checked against its declared type."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}


def record_from(kind: type[T], values: Any, **ready: Any) -> T:
    """A dataclass made from a dict of its fields; those in ``ready`` are taken as they are. Raises ValueError."""
    if not isinstance(values, Mapping):
        raise ValueError(f"an object with fields was expected, not {_shown(values)}")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if odd := [name for name in values if name not in known and name not in ready]:
        raise ValueError(f"it has a field {str(odd[0])[:40]!r} that this version does not know")
    needed = [name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in needed if name not in values and name not in ready]:
        raise ValueError(f"it has no {missing[0]}")
    check_fields(kind, {name: value for name, value in values.items() if name not in ready})
    return kind(**{**values, **ready})


def check_fields(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Refuse values that are not of the type their field is declared with; only plain types are looked at."""
    types = get_type_hints(kind)
    for name, value in values.items():
        wanted = get_args(types[name]) if isinstance(types.get(name), UnionType) else (types.get(name),)
        if all(each in _KINDS for each in wanted) and not any(_is(each, value) for each in wanted):
            words = " or ".join(_KINDS[each] for each in wanted)
            raise ValueError(f"{name} must be {words}, not {_shown(value)}")


def _is(kind: Any, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else text[:60] + "…"
