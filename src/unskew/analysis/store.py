"""Measures taken and kept: values go into the run's folder ``figures`` and are used again while they fit the run."""

import hashlib
import inspect
from contextlib import suppress
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

from unskew.analysis.measure import Measured, Request, slug
from unskew.charts.files import svg
from unskew.core.errors import Missing, UserError, a_kind
from unskew.core.files import json_object
from unskew.runs.finished import FinishedRun
from unskew.runs.folder import json_bytes, read_sealed, write_sealed

VERSION = 1  # of the values in figures/*.json


def take_measure(run: FinishedRun, request: Request) -> Measured:
    """Take the measure of this run, and store its values."""
    before = len(run.notes)
    values = request.call("take", request.take, run)
    if not isinstance(values, request.measure.values):
        wanted = request.measure.values.__name__
        raise UserError(f"measure {request.text}: take gives {a_kind(values)}; its values are declared as {wanted}")
    fields = asdict(values)
    _check_values(fields, "", request.text)
    notes = tuple(dict.fromkeys(run.notes[before:]))
    measured = Measured(request, values, notes)
    if request.outside:
        request.call("findings or draw", _check_shown, measured)
    content = {"unskew": VERSION, **_stamp(run, request), "without_data": run.without_data, "notes": notes,
               "values": fields}  # fmt: skip
    try:
        write_sealed(run.path, {_file(request): json_bytes(content)})
    except UserError as error:  # a read-only folder can still be looked at
        return replace(measured, notes=(*notes, f"the values were not stored: {error}"))
    return measured


def stored_measure(run: FinishedRun, request: Request) -> Measured | None:
    """The measure as it was stored; None where it was not, or no longer fits the run; a changed file is refused."""
    kept = read_sealed(run.path, _file(request))
    if kept is None:
        return None
    with suppress(UserError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        content = json_object(kept, run.path / _file(request))
        stamp = _stamp(run, request)
        if content["unskew"] != VERSION or {key: content.get(key) for key in stamp} != stamp:
            return None
        measured = Measured(request, request.measure.values(**content["values"]), tuple(content["notes"]))
        _check_shown(measured)
        return None if content["without_data"] and run.at_hand else measured
    return None


def stored_or_taken(run: FinishedRun, request: Request, *, again: bool = False) -> Measured:
    """The stored measure where it still fits; otherwise, or with ``again``, a new one."""
    stored = None if again else stored_measure(run, request)
    return take_measure(run, request) if stored is None else stored


def _file(request: Request) -> str:
    return f"figures/{slug(request.text)}.json"


def _stamp(run: FinishedRun, request: Request) -> dict[str, Any]:
    """What the values depend on: when it changes they no longer fit."""
    stamp: dict[str, Any] = {"measure": request.text, "weights_sha256": run.result.weights_sha256}
    stamp["recorded"] = len(run.during)
    if request.measure.calibrations:
        stamp["calibrations"] = {each.name: each.accuracy for each in run.result.calibrations.values()}
    if request.outside:
        stamp["code_sha256"] = _code_hash(request)
    return stamp


def _code_hash(request: Request) -> str:
    """A hash of the file that a measure from outside is written in: with other code the values are taken again."""
    with suppress(TypeError, OSError):
        file = inspect.getsourcefile(request.measure.values)
        return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()
    return ""


def _check_shown(measured: Measured) -> None:
    """Draw every chart and write every sentence once: what cannot be shown is of no use."""
    charts = measured.charts
    names = [chart.name for chart in charts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"measure {measured.source}: two charts are named {twice[0]!r}; give each its own name")
    _ = [svg(chart) for chart in charts], measured.findings


def _check_values(value: Any, place: str, text: str) -> None:
    """Refuse what JSON cannot keep, and NaN and infinity, naming the field."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise UserError(f"measure {text}: {place} has the key {key!r}; keys of a dict are texts")
            _check_values(inner, f"{place}.{key}" if place else key, text)
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            _check_values(inner, f"{place}[{at}]", text)
    elif isinstance(value, float):
        if not isfinite(value):
            raise Missing(f"{place} is NaN or infinite; the model has probably diverged")
    elif value is not None and not isinstance(value, str | int):
        raise UserError(
            f"measure {text}: {place} is {a_kind(value)}; values are numbers, texts, lists and dicts of them"
        )
