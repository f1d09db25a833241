"""Several runs as one page: their results side by side, then a section for each measure that compares runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from unskew.analysis import MEASURES, parse_measure
from unskew.analysis.elements import Cell, Column, Table
from unskew.analysis.measure import Comparison, Measured, Request, Source
from unskew.analysis.phrases import bound
from unskew.analysis.seeds import setting_names, settings_of
from unskew.analysis.store import stored_measure, stored_or_taken
from unskew.core.errors import Missing, UserError
from unskew.core.units import format_bytes
from unskew.report.page import Page, Section
from unskew.report.run_page import requests
from unskew.runs.result import Calibration
from unskew.runs.study import FinishedRun

MAX_RUNS = 40  # on one page
MAX_CALIBRATIONS = 8  # columns of the table of results


@dataclass(frozen=True)
class Compared:
    """One measure of all runs: its values by the run's name, and why it is missing for the others."""

    request: Request
    comparison: Comparison[Any]
    values: Mapping[str, Any]
    missing: Mapping[str, str]


def comparison_page(runs: Sequence[FinishedRun], only: Sequence[Source] = (), again: bool = False) -> Page:
    """The page of several runs.

    Measures that need the data set are shown where they are stored; those in ``only`` are taken of every run that
    lacks them.
    """
    if len(runs) > MAX_RUNS:
        raise UserError(f"{len(runs)} runs do not fit on one page; give at most {MAX_RUNS}")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("a run is named twice; give each run once")
    named = dict(zip(_names(runs), runs, strict=True))
    compared = [_compared(named, *each, again) for each in _comparisons(only)]
    methods = list(dict.fromkeys(run.result.method for run in runs))
    sentences = [sentence for each in compared for sentence in _call(each, "findings", each.comparison.findings)]
    return Page(
        title=f"{len(runs)} runs compared",
        heading="What these runs show",
        subtitle=", ".join(methods[:6]) + (f" and {len(methods) - 6} more" if len(methods) > 6 else ""),
        findings=[*_findings(runs), *sentences],
        facts=[("runs", str(len(runs))), ("methods", str(len(methods))),
               ("data", ", ".join(dict.fromkeys(run.result.data for run in runs)))],
        sections=[
            Section("runs", "The runs", "", [_results(named), *_over_seeds(runs)]),
            *map(_section, compared),
        ],
        footer="Made by unskew. Bands are one standard deviation over seeds.",
    )  # fmt: skip


def _comparisons(only: Sequence[Source]) -> list[tuple[Request, Comparison[Any], bool]]:
    """Every measure that compares runs, and whether it was chosen: taken, not only shown where it is stored."""
    chosen = {request.name: request for request in requests(only)} if only else {}
    able = [name for name, measure in MEASURES.items() if measure.compare is not None]
    every = {name: parse_measure(name) for name in able} | chosen
    for name, request in chosen.items():
        if request.measure.compare is None:
            raise UserError(f"--only {name}: it does not compare runs; a comparison shows {', '.join(able)}")
    return [(each, each.measure.compare, each.name in chosen) for each in every.values() if each.measure.compare]


def _compared(
    runs: Mapping[str, FinishedRun], request: Request, comparison: Comparison[Any], chosen: bool, again: bool
) -> Compared:
    """The measure of each run, or why it is missing."""
    values, missing = {}, {}
    for name, run in runs.items():
        try:
            measured = _measured(run, request, chosen, again)
            values[name] = measured.values
        except Missing as error:
            missing[name] = str(error)
    return Compared(request, comparison, values, missing)


def _measured(run: FinishedRun, request: Request, chosen: bool, again: bool) -> Measured:
    """The measure where it is stored, chosen, or needs the run folder alone."""
    if chosen:
        return stored_or_taken(run, request, again=again)
    quick = request.measure.folder_only
    stored = None if again and quick else stored_measure(run, request)
    if stored is not None:
        return stored
    if quick:
        return stored_or_taken(run, parse_measure(quick), again=again)
    raise Missing(f"not taken yet; add --only {request.name}, or unskew analyse RUN {request.name}")


def _call(compared: Compared, part: str, function: Any) -> list[Any]:
    return list(compared.request.call(f"compare.{part}", function, compared.values))


def _section(compared: Compared) -> Section:
    reasons: dict[str, list[str]] = {}
    for run, reason in compared.missing.items():
        reasons.setdefault(reason, []).append(run)
    name, comparison = compared.request.name, compared.comparison
    charts = _call(compared, "draw", comparison.draw)
    missing = [f"{name} of {', '.join(runs)}: {reason}" for reason, runs in reasons.items()]
    left_out = _call(compared, "left_out", comparison.left_out)
    return Section(name, comparison.title, comparison.text, charts, missing=[*missing, *left_out])


def _names(runs: Sequence[FinishedRun]) -> list[str]:
    """Each run's folder name, with its parents where two are the same."""
    for depth in (1, 2, 3):
        names = ["/".join(run.path.absolute().parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [str(run.path.absolute()) for run in runs]


def _results(runs: Mapping[str, FinishedRun]) -> Table:
    every = list(dict.fromkeys(name for run in runs.values() for name in run.result.calibrations))[:MAX_CALIBRATIONS]
    columns = [
        Column("run"), Column("method"), Column("data"), Column("partition"), Column("clients", "count"),
        Column("rounds", "count"), Column("seed", "count"), Column("EMD", "number"), Column("accuracy", "percent"),
        *(Column(f"after {name}", "percent") for name in every), Column("loss", "number"), Column("sent", "bytes"),
        Column("time", "seconds"),
    ]  # fmt: skip
    rows = []
    for name, run in runs.items():
        result = run.result
        after = [result.calibrations[each].accuracy if each in result.calibrations else None for each in every]
        rows.append(
            [name, result.method, result.data, result.partition, result.clients, result.rounds, result.seed, result.emd,
             result.accuracy, *after, result.loss, result.bytes_up + result.bytes_down, result.seconds]
        )  # fmt: skip
    return Table("Results", columns, rows)


def _over_seeds(runs: Sequence[FinishedRun]) -> list[Table]:
    """Mean and deviation over seeds, where any settings were run with several."""
    groups = _by_settings(runs)
    if all(len(group) == 1 for group in groups.values()):
        return []
    rows: list[list[Cell]] = []
    for label, group in groups.items():
        accuracies = [run.result.accuracy for run in group]
        best = [max([each.accuracy for each in _usable(run)] or [run.result.accuracy]) for run in group]
        spread = [stdev(values) if len(values) > 1 else None for values in (accuracies, best)]
        rows.append([label, len(group), fmean(accuracies), spread[0], fmean(best), spread[1]])
    columns = [Column("settings"), Column("seeds", "count"), Column("accuracy, mean", "percent"),
               Column("± deviation", "percent"), Column("best calibration, mean", "percent"),
               Column("± deviation ", "percent")]  # fmt: skip
    return [Table("Over seeds", columns, rows)]


def _usable(run: FinishedRun) -> list[Calibration]:
    """Its calibrations without those that are bounds for study."""
    return [each for each in run.result.calibrations.values() if not bound(each.name)]


def _by_settings(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    groups: dict[str, list[FinishedRun]] = {}
    for name, run in zip(setting_names([settings_of(run) for run in runs]), runs, strict=True):
        groups.setdefault(name, []).append(run)
    return groups


def _findings(runs: Sequence[FinishedRun]) -> list[str]:
    """The best and the worst settings, what calibration adds, what was sent."""
    groups = _by_settings(runs)
    means = {label: fmean(run.result.accuracy for run in group) for label, group in groups.items()}
    sentences = []
    if len(means) > 1:
        best, worst = max(means, key=lambda each: means[each]), min(means, key=lambda each: means[each])
        sentences.append(f"Highest accuracy: {best}, {means[best]:.2%}; lowest: {worst}, {means[worst]:.2%}.")
    gains = [
        max(each.accuracy for each in _usable(run)) - run.result.accuracy for run in runs if _usable(run)
    ]  # fmt: skip
    if gains:
        low, high = min(gains), max(gains)
        sentences.append(f"The best calibration of each run changes accuracy by {low:+.2%} to {high:+.2%}.")
    sent = [run.result.bytes_up + run.result.bytes_down for run in runs]
    least, most = format_bytes(min(sent)), format_bytes(max(sent))
    return [*sentences, f"Training sent {least if least == most else f'{least} to {most}'} a run."]
