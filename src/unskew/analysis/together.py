"""Several runs in one figure, for a paper: runs that differ in the seed alone are one line, their mean, with a band."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from unskew.analysis import MEASURES, parse_measure, write_charts
from unskew.analysis.curves import AGAINST
from unskew.analysis.measure import Request, Source
from unskew.analysis.store import stored_or_taken
from unskew.charts import Chart
from unskew.charts.files import for_paper, length
from unskew.core.errors import FUNCTION, PATH, SEVERAL, TEXT, UserError, accepts, nearest, optional
from unskew.core.machine import neutral
from unskew.runs.finished import FinishedRun, Say
from unskew.runs.seeds import finished_runs

Drawn = Callable[[str, Sequence[str], list[Path]], None]  # the measure, what it found, the files


@neutral()
@accepts(
    paths=SEVERAL, out=optional(PATH), form=TEXT, width=optional(TEXT), height=optional(TEXT), title=optional(TEXT),
    against=optional(TEXT), data_dir=optional(PATH), say=optional(FUNCTION), observe=optional(FUNCTION),
)  # fmt: skip
def draw_runs(
    paths: Sequence[str | Path], *sources: Source, out: str | Path | None = None, form: str = "svg",
    width: str | None = None, height: str | None = None, title: str | None = None, against: str | None = None,
    data_dir: str | Path | None = None, say: Say | None = None, observe: Drawn | None = None,
) -> list[Path]:  # fmt: skip
    """Draw finished runs together, by default their ``curves``; the files, by default in ``figures`` beside the runs.

    ``width`` and ``height`` are lengths such as ``"8cm"`` or ``"3.3in"``. ``title`` takes the place of the charts' own,
    "" leaves it out. ``against`` chooses one of the curves: round, batches, bytes or seconds. A path may be a folder of
    runs. Legends are whole.
    """
    requests = [_comparing(parse_measure(source)) for source in sources or ("curves",)]
    if against is not None and against not in AGAINST:
        raise UserError(f"--against {against}: {nearest(against, AGAINST)}")
    sizes = tuple(
        None if text is None else length(text, f"--{name}") for name, text in (("width", width), ("height", height))
    )
    given = [Path(path) for path in paths]
    if not given:
        raise UserError("no run was given; give the folders of finished runs")
    found, _ = finished_runs(given)
    target = Path(out) if out is not None else _beside(given, found)
    files = []
    with ExitStack() as stack:
        runs = [stack.enter_context(FinishedRun(path, data_dir=data_dir, say=say)) for path in found]
        for request in requests:
            charts, findings = _drawn(request, runs, against)
            titled = [chart if title is None else replace(chart, title=title) for chart in charts]
            written = write_charts(target, [for_paper(chart, *sizes) for chart in titled], form, "")
            files += written
            if observe is not None:
                observe(request.text, findings, written)
    return files


def run_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Each run's folder name, with its parents where two are the same."""
    for depth in (1, 2, 3):
        names = ["/".join(run.path.absolute().parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [str(run.path.absolute()) for run in runs]


def _comparing(request: Request) -> Request:
    """The request, if its measure can compare runs."""
    if request.measure.compare is None:
        able = [name for name, measure in MEASURES.items() if measure.compare is not None]
        raise UserError(f"{request.text} is drawn of one run alone; several runs together have: {', '.join(able)}")
    return request


def _drawn(request: Request, runs: Sequence[FinishedRun], against: str | None) -> tuple[list[Chart], list[str]]:
    values = {
        name: stored_or_taken(run, request).values for name, run in zip(run_names(runs), runs, strict=True)
    }  # fmt: skip
    compare = request.measure.compare
    assert compare is not None
    charts = list(request.call("compare.draw", compare.draw, values))
    if against is not None:
        charts = [chart for chart in charts if chart.name == f"curves-{against}"]
        if not charts:
            raise UserError(f"--against is for curves, not for {request.text}; leave it out")
    left_out = request.call("compare.left_out", compare.left_out, values)
    said = [*request.call("compare.findings", compare.findings, values), *(f"not shown: {each}" for each in left_out)]
    return charts, said


def _beside(given: Sequence[Path], found: Sequence[Path]) -> Path:
    """``figures`` in the folder that was given, or in the one that has all runs."""
    if len(given) == 1:
        return given[0] / "figures"
    common = Path(os.path.commonpath([path.absolute().parent for path in found]))
    here = Path.cwd()
    return (common.relative_to(here) if common.is_relative_to(here) else common) / "figures"
