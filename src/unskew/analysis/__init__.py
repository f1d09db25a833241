"""The registry of measures; measures of one finished run, and several runs drawn together."""

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unskew.analysis.cka import CKA
from unskew.analysis.confusion import CONFUSION
from unskew.analysis.curves import AGAINST, CURVES
from unskew.analysis.drift import CLIENT_FEATURES, DRIFT
from unskew.analysis.fairness import FAIRNESS
from unskew.analysis.inversion import INVERSION
from unskew.analysis.measure import Comparison as Comparison
from unskew.analysis.measure import Measure as Measure
from unskew.analysis.measure import (
    Measured,
    MeasureRequest,
    MeasureSource,
    check_measure,
    load_or_take,
    slug,
    take_measure,
)
from unskew.analysis.norms import NORMS
from unskew.analysis.projection import PROJECTION
from unskew.analysis.separability import SEPARABILITY
from unskew.analysis.skew import PLACES, SKEW
from unskew.charts import Chart
from unskew.charts.files import chart_bytes, check_format, for_paper, length
from unskew.core import language
from unskew.core.errors import Missing, UserError, accepts, nearest
from unskew.core.files import write_whole
from unskew.core.machine import neutral
from unskew.core.plugins import load_function
from unskew.data.photographs import Say
from unskew.runs.finished import FinishedRun
from unskew.runs.seeds import finished_runs

MEASURES: dict[str, Measure[Any]] = {
    measure.name: measure
    for measure in (SKEW, CURVES, CKA, NORMS, DRIFT, SEPARABILITY, PROJECTION, CONFUSION, FAIRNESS, INVERSION)
}  # in the order of the report
ON_REQUEST: dict[str, Measure[Any]] = {measure.name: measure for measure in (CLIENT_FEATURES, PLACES)}  # only by name


def parse_measure(source: MeasureSource) -> MeasureRequest:
    """The measure that a text such as ``"cka(clients=20)"`` or ``"package.module:function"`` names."""
    known = MEASURES | ON_REQUEST
    if not isinstance(source, str):
        check_measure(source, getattr(source, "name", None) or repr(source))
        if known.get(source.name, source) is not source:
            raise UserError(f"measure {source.name}: a built-in measure already has this name; choose another")
        return MeasureRequest(source.name, source.name, source, source.take, outside=source.name not in known)
    calls = language.parse_calls(source, "measure")
    if len(calls) > 1:
        raise calls[1].error("give measures separately, not joined with +")
    call = calls[0]
    if ":" in call.name:
        measure = language.apply(call, load_function(call.name, "measure"), "measure")
        check_measure(measure, str(call))
        return MeasureRequest(call.name, str(call), measure, measure.take, outside=True)
    if call.name not in known:
        raise call.error(f"no measure is called {call.name!r}; {nearest(call.name, known)}")
    measure = known[call.name]
    return MeasureRequest(call.name, str(call), measure, language.apply(call, bind_knobs(measure.take), "measure"))


def bind_knobs(take: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the knobs that returns ``take`` as a function of the run."""

    def bound(**knobs: Any) -> Callable[[Any], Any]:
        return partial(take, **knobs)

    knobs = list(inspect.signature(take).parameters.values())[1:]
    bound.__signature__ = inspect.Signature(knobs)  # type: ignore[attr-defined]
    return bound


def write_charts(folder: Path, charts: Sequence[Chart], form: str) -> list[Path]:
    """Write the charts as files into this folder."""
    files = {folder / f"{slug(chart.name)}.{form}": chart for chart in charts}
    for file, chart in files.items():
        write_whole(file, chart_bytes([chart], form))
    return list(files)


@neutral()
@accepts
def analyse(
    path: str | Path, *sources: MeasureSource, data_dir: str | Path | None = None, engine: str | None = None,
    workers: int | None = None, device: str | None = None, form: str = "svg", trust: bool = False,
    say: Say | None = None, observe: Callable[[str, Measured | Missing, list[Path]], None] | None = None,
    data: Any = None, model: Any = None, method: Any = None,
) -> dict[str, Measured]:  # fmt: skip
    """Take measures of a finished run, by default those of the report. Values and charts go into ``RUN/figures``.

    Parameters
    ----------
    path
        The run directory.
    sources
        Measures such as ``"cka"`` or ``"norms(round=0)"``, or your own as ``"package.module:function"`` or a Measure.
        If a named measure cannot be taken, Missing is raised after the others have been taken.
    data_dir
        The folder of the published data sets (or UNSKEW_DATA).
    engine, workers, device
        How local models are retrained, by default as in the run.
    form
        Format of the charts: svg, png or pdf.
    trust
        Whether plug-ins named in somebody else's run directory may run.
    say
        Called with the current activity, the work done and the total.
    observe
        Called with each measure when it is done, including those that cannot be taken.
    data, model, method
        The run's own values, if they were passed from Python.

    Returns
    -------
    The measures by their text.
    """
    check_format(form)
    requests = [parse_measure(source) for source in sources or MEASURES]
    results: dict[str, Measured] = {}
    missing: list[str] = []
    values = {"data": data, "model": model, "method": method}
    where = {"data_dir": data_dir, "engine": engine, "workers": workers, "device": device}
    with FinishedRun(path, **where, say=say, values=values, trust=trust) as run:  # type: ignore[arg-type]
        for request in requests:
            try:
                measured = take_measure(run, request)
            except Missing as error:
                missing.append(f"{request.text}: {error}")
                if observe is not None:
                    observe(request.text, error, [])
                continue
            run.say(f"drawing {request.text}", 0, 0)
            files = write_charts(run.path / "figures", measured.charts, form)
            results[request.text] = measured
            if observe is not None:
                observe(request.text, measured, files)
    if missing and (sources or not results):
        raise Missing("; ".join(missing))
    return results


@neutral()
@accepts
def draw_runs(
    paths: Sequence[str | Path], *sources: MeasureSource, out: str | Path | None = None, form: str = "svg",
    width: str | None = None, height: str | None = None, title: str | None = None, against: str | None = None,
    names: str | Sequence[str] = (), serif: bool = False, data_dir: str | Path | None = None, trust: bool = False,
    say: Say | None = None, observe: Callable[[str, Sequence[str], list[Path]], None] | None = None,
) -> list[Path]:  # fmt: skip
    """Draw finished runs in one figure, for a paper; runs that differ only in the seed are one line with a band.

    Parameters
    ----------
    paths
        Run directories, or folders of runs.
    sources
        Measures that can compare runs, by default ``curves``.
    out
        Folder for the files, by default ``figures`` next to the runs.
    form
        Format of the files: svg, png or pdf.
    width, height
        Lengths such as ``"8cm"`` or ``"3.3in"``.
    title
        Replaces the charts' own titles; "" removes them.
    against
        The x-axis of the curves: round, batches, bytes or seconds.
    names
        Names for the legend, in its order: a list, or a text such as ``"FedAvg, FedProx"``.
    serif
        Whether to use a serif font, as in most papers.
    data_dir
        The folder of the published data sets (or UNSKEW_DATA).
    trust
        Whether plug-ins named in somebody else's run directories may run.
    say
        Called with the current activity, the work done and the total.
    observe
        Called with each measure, its findings and its files.

    Returns
    -------
    The files.
    """
    check_format(form)
    requests = [parse_measure(source) for source in sources or ("curves",)]
    able = [name for name, measure in (MEASURES | ON_REQUEST).items() if measure.compare is not None]
    for request in requests:
        if request.measure.compare is None:
            raise UserError(f"{request.text} cannot compare runs; measures that can: {', '.join(able)}")
        if against is not None and request.name != "curves":
            raise UserError(f"--against is only for curves, not for {request.text}; leave it out")
    if against is not None and against not in AGAINST:
        raise UserError(f"--against {against}: {nearest(against, AGAINST)}")
    sides = {"--width": width, "--height": height}
    sizes = [None if side is None else length(side, name) for name, side in sides.items()]
    labels = [label.strip() for label in (names.split(",") if isinstance(names, str) else names)]
    labels = [] if labels == [""] else labels
    folders = [Path(path) for path in paths]
    if not folders:
        raise UserError("no runs; give the directories of finished runs")
    finished, _ = finished_runs(folders)
    target = Path(out) if out is not None else _find_figures(folders, finished)
    files = []
    with ExitStack() as stack:
        runs = [stack.enter_context(FinishedRun(path, data_dir=data_dir, say=say, trust=trust)) for path in finished]
        names = name_runs(runs)
        for request in requests:
            compare = request.measure.compare
            assert compare is not None
            values = {name: load_or_take(run, request).values for name, run in zip(names, runs, strict=True)}
            charts = request.call("compare.draw", compare.draw, values)
            if against is not None:
                charts = [chart for chart in charts if chart.name == f"curves-{against}"]
            left_out = request.call("compare.left_out", compare.left_out, values)
            findings = [*request.call("compare.findings", compare.findings, values)]
            findings += [f"not shown: {reason}" for reason in left_out]
            titled = [chart if title is None else replace(chart, title=title) for chart in charts]
            titled = [replace(_rename(chart, labels), serif=serif) for chart in titled]
            files += (written := write_charts(target, [for_paper(chart, *sizes) for chart in titled], form))
            if observe is not None:
                observe(request.text, findings, written)
    return files


def _rename(chart: Chart, labels: Sequence[str]) -> Chart:
    """The chart with these names in its legend, in order."""
    names = list(dict.fromkeys(name for mark in chart.marks if (name := getattr(mark, "name", ""))))
    if not labels or not names:
        return chart
    if len(labels) != len(names):
        raise UserError(f"--names has {len(labels)} names, but the legend has {len(names)}: {'; '.join(names)}")
    new = dict(zip(names, labels, strict=True))
    marks = [replace(mark, name=new[name]) if (name := getattr(mark, "name", "")) else mark for mark in chart.marks]
    return replace(chart, marks=marks)


def name_runs(runs: Sequence[FinishedRun]) -> list[str]:
    """Each run's folder name, with its parents if two are the same."""
    for depth in (1, 2, 3):
        names = ["/".join(run.path.absolute().parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [str(run.path.absolute()) for run in runs]


def _find_figures(folders: Sequence[Path], runs: Sequence[Path]) -> Path:
    """``figures`` in the only folder, or in the one that contains all runs."""
    if len(folders) == 1:
        return folders[0] / "figures"
    common, cwd = Path(os.path.commonpath([path.absolute().parent for path in runs])), Path.cwd()
    return (common.relative_to(cwd) if common.is_relative_to(cwd) else common) / "figures"
