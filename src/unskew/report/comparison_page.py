"""Several runs as one page: their results side by side, then a section for each measure that compares runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from unskew.analysis import MEASURES, parse_measure
from unskew.analysis.elements import Cell, Column, Table
from unskew.analysis.measure import Comparison, Measured, Request, Source
from unskew.analysis.phrases import bound
from unskew.analysis.ranking import best_of, by_settings, candidates, headline
from unskew.analysis.seeds import settings_of_result
from unskew.analysis.store import stored_measure, stored_or_taken
from unskew.analysis.together import run_names
from unskew.core.errors import Missing, UserError
from unskew.core.units import counted, format_bytes
from unskew.report.page import Page, Section
from unskew.report.run_page import requests
from unskew.runs.result import Calibration, Result
from unskew.runs.spread import spread
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
    named = dict(zip(run_names(runs), runs, strict=True))
    compared = [_compared(named, *each, again) for each in _comparisons(only)]
    methods = list(dict.fromkeys(run.result.method for run in runs))
    sentences = [sentence for each in compared for sentence in _call(each, "findings", each.comparison.findings)]
    return Page(
        title=f"{counted(len(runs), 'run')} compared",
        heading="What these runs show",
        subtitle=", ".join(methods[:6]) + (f" and {len(methods) - 6} more" if len(methods) > 6 else ""),
        findings=[*_findings([run.result for run in runs]), *sentences],
        facts=[("runs", str(len(runs))), ("methods", str(len(methods))),
               ("data", ", ".join(dict.fromkeys(run.result.data for run in runs))),
               ("measured on", " or ".join(dict.fromkeys(run.result.measured_on for run in runs)))],
        sections=[
            Section("runs", "The runs", _RANKED, [*_over_seeds([run.result for run in runs]), _results(named)]),
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


def _results(runs: Mapping[str, FinishedRun]) -> Table:
    """A row for each run: the settings in which they differ, then what came out; what they share is the note."""
    every = list(dict.fromkeys(name for run in runs.values() for name in run.result.calibrations))[:MAX_CALIBRATIONS]
    settings = {name: settings_of_result(run.result) | {"seed": str(run.result.seed)} for name, run in runs.items()}
    keys = list(dict.fromkeys(key for each in settings.values() for key in each))
    values = {key: [each.get(key, "") for each in settings.values()] for key in keys}
    differing = [key for key in keys if len(set(values[key])) > 1]
    columns = [
        Column("run"), *(Column(key.replace("_", " "), _kind(values[key])) for key in differing),
        Column("EMD", "number"), Column("accuracy", "percent"), *(Column(f"after {name}", "percent") for name in every),
        Column("loss", "number"), Column("sent", "bytes"), Column("time", "seconds"),
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for name, run in runs.items():
        result, texts = run.result, [settings[name].get(key, "") for key in differing]
        told: list[Cell] = [_cell(text) for text in texts]
        after = [result.calibrations[each].accuracy if each in result.calibrations else None for each in every]
        rows.append([name, *told, result.emd, result.accuracy, *after, result.loss,
                     result.bytes_up + result.bytes_down, result.seconds])  # fmt: skip
    shared = [f"{key.replace('_', ' ')} {values[key][0]}" for key in keys if key not in differing]
    return Table("Results", columns, rows, f"The same in all runs: {'; '.join(shared)}." if shared else "")


def _kind(texts: Sequence[str]) -> str:
    """Of a column of settings: "number" where all that are known are whole numbers."""
    return "number" if all(text.isdigit() for text in texts if text) else "text"


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _cell(text: str) -> Cell:
    """A setting as a number where it is one: it is then sorted as one."""
    if not text:
        return None
    return int(text) if text.isdigit() else float(text) if _is_number(text) else text


def _over_seeds(results: Sequence[Result]) -> list[Table]:
    """Mean and deviation over seeds, where any settings were run with several."""
    groups = by_settings(results)
    if all(len(group) == 1 for group in groups.values()):
        return []
    rows: list[list[Cell]] = []
    for label, group in groups.items():
        made = [each for each in candidates({label: group}) if each.classifier]
        best = best_of(made) if made else None
        after = spread(best.scores.values()) if best else None
        before = spread(result.accuracy for result in group)
        rows.append([
            label, len(group), before.words(100) if before else None, best.classifier if best else None,
            after.words(100) if after else None,
        ])  # fmt: skip
    columns = [Column("settings"), Column("seeds", "count"), Column("accuracy, %", "number"),
               Column("best calibration"), Column("after it, %", "number")]  # fmt: skip
    return [Table("Over seeds", columns, rows, "Mean ± sample deviation.")]


def _usable(result: Result) -> list[Calibration]:
    """Its calibrations without those that are bounds for study."""
    return [each for each in result.calibrations.values() if not bound(each.name)]


def _findings(results: Sequence[Result]) -> list[str]:
    """Which settings are best, if the seeds say so, what calibration adds, what was sent."""
    sentences = headline(results)
    gains = [100 * (max(each.accuracy for each in _usable(one)) - one.accuracy) for one in results if _usable(one)]
    if gains:
        tried = max(len(_usable(one)) for one in results)
        how = f", by the best of up to {tried} on the test images" if tried > 1 else ""
        change = f"{min(gains):+.2f}" if min(gains) == max(gains) else f"{min(gains):+.2f} to {max(gains):+.2f}"
        sentences = [
            *sentences,
            f"Calibration changes accuracy by {change} points ({counted(len(gains), 'run')}{how}).",
        ]
    sent = [result.bytes_up + result.bytes_down for result in results]
    least, most = format_bytes(min(sent)), format_bytes(max(sent))
    return [*sentences, f"Training sent {least if least == most else f'{least} to {most}'} a run."]


_RANKED = (
    "Runs that differ in the seed alone are one setting. The best setting is named where the difference to each other "
    "one, paired over common seeds, has a t-interval above 0; the intervals hold together with 95%. Calibrated "
    "classifiers count as well."
)
