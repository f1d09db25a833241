"""The table of measures, and the way from ``"cka(clients=20)"`` and a run folder to values, charts and sentences."""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

from unskew.analysis import cka, confusion, curves, drift, inversion, norms, projection, separability, skew
from unskew.charts import Chart
from unskew.charts.svg import svg
from unskew.core import text
from unskew.core.errors import UserError, nearest
from unskew.core.files import write_whole
from unskew.runs.folder import read_json, write_json
from unskew.runs.study import FinishedRun, Missing, Say

FORMATS = ("svg", "png", "pdf")
VERSION = 1  # of the values in figures/*.json


@dataclass(frozen=True)
class Measure:
    """One kind of measure: the module that takes and draws it, the record that holds it."""

    module: ModuleType
    values: type
    calibrations: bool  # whether it changes when a calibration is added


MEASURES = {
    "skew": Measure(skew, skew.Skew, False),
    "curves": Measure(curves, curves.Curves, True),
    "cka": Measure(cka, cka.Similarity, False),
    "norms": Measure(norms, norms.Norms, True),
    "drift": Measure(drift, drift.Drift, False),
    "separability": Measure(separability, separability.Separability, False),
    "projection": Measure(projection, projection.Projection, True),
    "confusion": Measure(confusion, confusion.Confusion, True),
    "inversion": Measure(inversion, inversion.Inversion, False),
}


@dataclass(frozen=True)
class Found:
    """What a measure found: its values, and what must be known to read them."""

    name: str
    source: str  # the measure as it was asked for, in its plainest spelling
    values: Any
    notes: tuple[str, ...] = ()

    @property
    def charts(self) -> list[Chart]:
        """Its pictures; those of a measure with knobs have names of their own."""
        module, own = MEASURES[self.name].module, slug(self.source)
        return [replace(chart, name=chart.name.replace(self.name, own, 1)) for chart in module.draw(self.values)]

    @property
    def findings(self) -> list[str]:
        """What it shows, in a sentence each."""
        said: list[str] = MEASURES[self.name].module.findings(self.values)
        return said


def parse_measure(source: str) -> tuple[str, str, Callable[[FinishedRun], Any]]:
    """A measure's name, its text in the plainest spelling, and the function that takes it."""
    calls = text.parse_calls(source, "measure")
    if len(calls) > 1:
        raise text.complain(source, calls[1].start, "name one measure at a time, as words of their own")
    call = calls[0]
    if call.name not in MEASURES:
        hint = nearest(call.name, MEASURES)
        raise text.complain(source, call.start, f"no measure is called {call.name!r}; {hint}")
    return call.name, str(call), text.apply(call, _knobs(MEASURES[call.name].module.measure), "measure")


def _knobs(measure: Callable[..., Any]) -> Callable[..., Any]:
    """The knobs of a measure alone: what is given is bound, and the subject comes later."""

    def bound(**knobs: Any) -> Callable[[FinishedRun], Any]:
        return partial(measure, **knobs)

    own = list(inspect.signature(measure).parameters.values())[1:]
    bound.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return bound


def measured(subject: FinishedRun, source: str, *, again: bool = True) -> Found:
    """The measure of this run: taken, or as it was stored if it still fits; stored for the next time."""
    name, plain, take = parse_measure(source)
    file = subject.path / "figures" / f"{slug(plain)}.json"
    if not again and (stored := _stored(subject, file, name, plain)) is not None:
        return stored
    before = len(subject.notes)
    values = take(subject)
    notes = tuple(dict.fromkeys(subject.notes[before:]))
    if not _finite(asdict(values)):
        raise Missing("what was measured holds NaN or infinity: the model has diverged")
    found = Found(name, plain, values, notes)
    content = {"unskew": VERSION, **_stamp(subject, name, plain), "without_data": subject.without_data, "notes": notes,
               "values": asdict(values)}  # fmt: skip
    try:
        write_json(file, content)
    except UserError as error:  # a folder that may only be read can still be looked at
        return replace(found, notes=(*notes, f"the values were not stored: {error}"))
    return found


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return not isinstance(value, float) or isfinite(value)


def known(subject: FinishedRun, source: str) -> Found | None:
    """The measure as it was stored, if it is and still fits."""
    name, plain, _ = parse_measure(source)
    return _stored(subject, subject.path / "figures" / f"{slug(plain)}.json", name, plain)


def _stored(subject: FinishedRun, file: Path, name: str, plain: str) -> Found | None:
    if not file.exists():
        return None
    with suppress(UserError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError):  # damaged: made anew
        content = read_json(file)
        stamp = _stamp(subject, name, plain)
        if content["unskew"] != VERSION or {key: content.get(key) for key in stamp} != stamp:
            return None
        found = Found(name, plain, MEASURES[name].values(**content["values"]), tuple(content["notes"]))
        _ = [svg(chart) for chart in found.charts], found.findings  # what cannot be shown is of no use
        return None if content["without_data"] and subject.at_hand else found
    return None


def _stamp(subject: FinishedRun, name: str, plain: str) -> dict[str, Any]:
    """What the values stand on: when it changes they no longer fit."""
    stamp: dict[str, Any] = {"measure": plain, "weights_sha256": subject.result.weights_sha256}
    stamp["recorded"] = len(subject.during)
    if MEASURES[name].calibrations:
        stamp["calibrations"] = {each.name: each.accuracy for each in subject.result.calibrations.values()}
    return stamp


def write_charts(path: Path, charts: Sequence[Chart], form: str = "svg") -> list[Path]:
    """The charts as files in the run's folder ``figures``."""
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
    files = []
    for chart in charts:
        file = path / "figures" / f"{slug(chart.name)}.{form}"
        if form == "svg":
            content = svg(chart).encode()
        else:
            from unskew.charts.paper import paper

            content = paper(chart, form)
        write_whole(file, content)
        files.append(file)
    return files


def analyse(
    path: str | Path, *sources: str, data_dir: str | Path | None = None, engine: str | None = None,
    workers: int | None = None, form: str = "svg", say: Say | None = None,
    observe: Callable[[str, Found | Missing, list[Path]], None] | None = None,
) -> dict[str, Found]:  # fmt: skip
    """Take measures such as ``"cka"`` or ``"norms(round=0)"`` of a finished run; all of them where none is named.

    Values and pictures go into the run's folder ``figures``. ``observe`` hears of each as it is there, and of those
    that cannot be taken. A measure that was named and cannot be taken is an error, after the others.
    """
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
    asked = [parse_measure(source)[1] for source in sources] or list(MEASURES)
    results: dict[str, Found] = {}
    missing: list[str] = []
    with FinishedRun(path, data_dir=data_dir, engine=engine, workers=workers, say=say) as subject:
        for source in asked:
            try:
                found = measured(subject, source)
            except Missing as error:
                missing.append(f"{source}: {error}")
                if observe is not None:
                    observe(source, error, [])
                continue
            subject.say(f"drawing {source}", 0, 0)
            files = write_charts(subject.path, found.charts, form)
            results[source] = found
            if observe is not None:
                observe(source, found, files)
    if missing and (sources or not results):
        raise Missing("; ".join(missing))
    return results


def slug(source: str) -> str:
    """A text as a file's name: ``cka(round=0)`` is cka-round-0, and −1 is no 1."""
    plain = re.sub(r"([(=, ])-", r"\1minus", source.lower()).replace("e-", "e_")
    return re.sub(r"[^a-z0-9_.]+", "-", plain).strip("-")[:120]
