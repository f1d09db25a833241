"""The table of measures, and the way from ``"cka(clients=20)"`` and a run folder to values, charts and sentences."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unskew.analysis.cka import CKA
from unskew.analysis.confusion import CONFUSION
from unskew.analysis.curves import CURVES
from unskew.analysis.drift import DRIFT
from unskew.analysis.fairness import FAIRNESS
from unskew.analysis.inversion import INVERSION
from unskew.analysis.measure import Comparison as Comparison
from unskew.analysis.measure import Measure as Measure
from unskew.analysis.measure import Measured, Request, Source, check_measure, slug
from unskew.analysis.norms import NORMS
from unskew.analysis.projection import PROJECTION
from unskew.analysis.separability import SEPARABILITY
from unskew.analysis.skew import SKEW
from unskew.analysis.store import take_measure
from unskew.charts import Chart
from unskew.charts.files import FORMATS, chart_bytes
from unskew.core import text
from unskew.core.errors import COUNT, FUNCTION, PATH, TEXT, Missing, UserError, accepts, nearest, optional
from unskew.core.files import write_whole
from unskew.core.machine import neutral
from unskew.core.plugins import load_function
from unskew.runs.finished import FinishedRun, Say

MEASURES: dict[str, Measure[Any]] = {
    measure.name: measure
    for measure in (SKEW, CURVES, CKA, NORMS, DRIFT, SEPARABILITY, PROJECTION, CONFUSION, FAIRNESS, INVERSION)
}  # in the order of the report


def parse_measure(source: Source) -> Request:
    """The measure that a text such as ``"cka(clients=20)"`` or ``"package.module:function"`` asks for."""
    if not isinstance(source, str):
        return _given(source)
    calls = text.parse_calls(source, "measure")
    if len(calls) > 1:
        raise text.complain(source, calls[1].start, "give measures one by one, not joined with +")
    call = calls[0]
    if ":" in call.name:
        measure = _made(call)
        return Request(call.name, str(call), measure, measure.take, outside=True)
    if call.name not in MEASURES:
        hint = nearest(call.name, MEASURES)
        raise text.complain(source, call.start, f"no measure is called {call.name!r}; {hint}")
    measure = MEASURES[call.name]
    return Request(call.name, str(call), measure, text.apply(call, _with_knobs(measure.take), "measure"))


def _given(measure: Measure[Any]) -> Request:
    """A measure given as a value, from Python."""
    check_measure(measure, getattr(measure, "name", None) or repr(measure))
    if measure.name in MEASURES and MEASURES[measure.name] is not measure:
        raise UserError(f"measure {measure.name}: there is a measure of this name already; choose another name")
    return Request(measure.name, measure.name, measure, measure.take, outside=measure.name not in MEASURES)


def _made(call: text.Call) -> Measure[Any]:
    """The measure that ``package.module:function(knobs)`` gives."""
    function = load_function(call.name, "measure")
    try:
        measure = text.apply(call, function, "measure")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"measure {call}: {call.name} failed: {type(error).__name__}: {error}") from error
    check_measure(measure, str(call))
    return measure  # type: ignore[no-any-return]


def _with_knobs(take: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the knobs alone, which gives a function of the run."""

    def bound(**knobs: Any) -> Callable[[FinishedRun], Any]:
        return partial(take, **knobs)

    knobs = list(inspect.signature(take).parameters.values())[1:]
    bound.__signature__ = inspect.Signature(knobs)  # type: ignore[attr-defined]
    return bound


def write_charts(path: Path, charts: Sequence[Chart], form: str = "svg", inside: str = "figures") -> list[Path]:
    """Write the charts as files into the run's folder ``figures``."""
    _check_format(form)
    files = []
    for chart in charts:
        file = path / inside / f"{slug(chart.name)}.{form}"
        write_whole(file, chart_bytes(chart, form))
        files.append(file)
    return files


@neutral()
@accepts(
    path=PATH, data_dir=optional(PATH), engine=optional(TEXT), workers=optional(COUNT), device=optional(TEXT),
    form=TEXT, say=optional(FUNCTION), observe=optional(FUNCTION),
)  # fmt: skip
def analyse(
    path: str | Path, *sources: Source, data_dir: str | Path | None = None, engine: str | None = None,
    workers: int | None = None, device: str | None = None, form: str = "svg", say: Say | None = None,
    observe: Callable[[str, Measured | Missing, list[Path]], None] | None = None, data: Any = None, model: Any = None,
    method: Any = None,
) -> dict[str, Measured]:  # fmt: skip
    """Take measures such as ``"cka"`` or ``"norms(round=0)"`` of a finished run; all of them where none is named.

    A measure of your own is ``"package.module:function"`` or a Measure. Values and charts go into the run's folder
    ``figures``. ``observe`` is called for each measure when it is done, and for those that cannot be taken. A measure
    that was named and cannot be taken is an error, after the others. A run that was given ``data``, ``model`` or
    ``method`` as values from Python needs the same values again.
    """
    _check_format(form)
    requests = [parse_measure(source) for source in sources or MEASURES]
    results: dict[str, Measured] = {}
    missing: list[str] = []
    values = {"data": data, "model": model, "method": method}
    with FinishedRun(
        path, data_dir=data_dir, engine=engine, workers=workers, device=device, say=say, values=values
    ) as run:
        for request in requests:
            try:
                measured = take_measure(run, request)
            except Missing as error:
                missing.append(f"{request.text}: {error}")
                if observe is not None:
                    observe(request.text, error, [])
                continue
            run.say(f"drawing {request.text}", 0, 0)
            files = write_charts(run.path, measured.charts, form)
            results[request.text] = measured
            if observe is not None:
                observe(request.text, measured, files)
    if missing and (sources or not results):
        raise Missing("; ".join(missing))
    return results


def _check_format(form: str) -> None:
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
