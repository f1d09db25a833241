"""From run folders to a page on disk: one run explained, or several compared."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from unskew.analysis import MEASURES, name_runs, parse_measure
from unskew.analysis.measure import (
    CellValue,
    Column,
    Comparison,
    Measured,
    MeasureRequest,
    MeasureSource,
    Table,
    load_measure,
    load_or_take,
)
from unskew.analysis.ranking import group_by_settings, list_contenders, list_result_settings, pick_best, rank_settings
from unskew.calibration import is_bound
from unskew.core.errors import COUNT, FLAG, FUNCTION, PATH, SEVERAL, TEXT, Missing, UserError, accepts, optional
from unskew.core.files import write_whole
from unskew.core.machine import neutral
from unskew.core.units import counted, emd_words, format_bytes, format_duration
from unskew.report.page import Page, Section, to_html
from unskew.runs.config import NODES
from unskew.runs.finished import FinishedRun, Say
from unskew.runs.result import AT_NODES, VALIDATION, Calibration, Result
from unskew.runs.seeds import spread_over_seeds

MAX_HAPPENED = 500  # rows of the table of what happened


@dataclass(frozen=True)
class Taken:
    """A measure for the page: taken, or the reason why not."""

    request: MeasureRequest
    result: Measured | str


def take_all(
    run: FinishedRun,
    only: Sequence[MeasureSource] = (),
    without: Sequence[MeasureSource] = (),
    again: bool = False,
) -> list[Taken]:
    """Every measure of the run, or those in ``only``; stored ones are used where they still fit.

    Those in ``without`` are not taken, but shown where they are stored.
    """
    left_out = {parse_measure(source).name for source in without}
    taken = []
    for request in order_requests(only):
        result: Measured | str
        if request.name in left_out:
            result = load_measure(run, request) or f"left out; unskew analyse {run.path} {request.name}"
        else:
            try:
                result = load_or_take(run, request, again=again)
            except Missing as error:
                result = str(error)
        taken.append(Taken(request, result))
    return taken


def order_requests(only: Sequence[MeasureSource]) -> list[MeasureRequest]:
    """The measures of a page in the order of the table, those from outside last; without ``only`` the whole table."""
    chosen: dict[str, MeasureRequest] = {}
    for source in only or MEASURES:
        request = parse_measure(source)
        if chosen.setdefault(request.name, request).text != request.text:
            raise UserError(
                f"--only {request.text}: {chosen[request.name].text} is chosen already; a page shows a measure once"
            )
    places = {name: place for place, name in enumerate(MEASURES)}
    return sorted(chosen.values(), key=lambda request: places.get(request.name, len(places)))


def run_page(run: FinishedRun, taken: Sequence[Taken]) -> Page:
    """The page of one run."""
    result = run.result
    return Page(
        title=f"{result.method} on {result.data}",
        subtitle=f"{result.partition}, {_who(run)}, {counted(result.rounds, 'round')}, seed {result.seed}",
        findings=_headlines(taken),
        facts=_facts(run),
        sections=[
            *(_section(run, each) for each in taken),
            *_happened(run),
            Section("cost", "What it cost", _COST, [_costs(run)]),
            Section("made", "How it was made", _made(run), [_settings(run)], notes=result.notes),
        ],
        footer=f"Made by unskew from {run.path.name}; weights {result.weights_sha256[:12]}.",
    )


def _section(run: FinishedRun, taken: Taken) -> Section:
    """A measure's section; where it could not be taken, the reason."""
    request, result = taken.request, taken.result
    name, title, text = request.name, request.title, request.measure.text
    if isinstance(result, str):
        return Section(name, title, text, missing=[result])
    return Section(name, title, text, result.elements(run), findings=result.findings, notes=result.notes)


def _happened(run: FinishedRun) -> list[Section]:
    """Who failed in which round and why, and what else was noted; no section where nothing was."""
    rows: list[list[CellValue]] = []
    for row in run.rows:
        number = int(row["round"])
        rows += [[number, f"client {each['client']}", each["reason"]] for each in row.get("failures", ())]
        rows += [[number, "", str(note)] for note in row.get("notes", ())]
    if not rows:
        return []
    columns = [Column("round", "count"), Column("who"), Column("what")]
    left = f"The first {MAX_HAPPENED:,} of {len(rows):,}; metrics.jsonl has all." if len(rows) > MAX_HAPPENED else ""
    table = Table("Round by round", columns, rows[:MAX_HAPPENED], left)
    return [Section("happened", "What happened on the way", _HAPPENED, [table])]


def _headlines(taken: Sequence[Taken]) -> list[str]:
    """The first sentence of each measure, in the order that the measures ask for; the others are in the sections."""
    ranked = [
        (each.request.measure.headline, each.result)
        for each in taken
        if isinstance(each.result, Measured) and each.request.measure.headline is not None
    ]
    sentences = [result.findings for _, result in sorted(ranked, key=lambda pair: pair[0] or 0)]
    return [each[0] for each in sentences if each]


def _costs(run: FinishedRun) -> Table:
    result = run.result
    rows: list[list[CellValue]] = [["training", result.bytes_up, result.bytes_down, result.seconds, result.accuracy]]
    if (start := result.start) is not None:
        rows.append([f"of it the start, by {start.name}", start.bytes_up, None, start.seconds, start.accuracy])
    for each in result.calibrations.values():
        rows.append([f"calibration by {each.name}", each.bytes_up, None, each.seconds, each.accuracy])
    columns = [Column("what"), Column("sent up", "bytes"), Column("sent down", "bytes"), Column("time", "seconds"),
               Column("accuracy after it", "percent")]  # fmt: skip
    note = "Bytes are those of all clients together. A calibration's download is its encoder, which clients have."
    return Table("Bytes and time", columns, rows, note)


def _settings(run: FinishedRun) -> Table:
    lines = (run.path / "config.toml").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(" = ") for line in lines if " = " in line]
    rows = [[key, value.strip('"')] for key, _, value in pairs if key not in ("data_dir", "cache_dir")]
    return Table("Settings", [Column("option"), Column("value")], rows)


def _facts(run: FinishedRun) -> list[tuple[str, str]]:
    result = run.result
    facts = [("accuracy", f"{result.accuracy:.2%}")]
    if result.evaluated_on == VALIDATION:
        facts.append(("measured on", "validation images, wherever this page says test images"))
    if result.evaluated_on == AT_NODES:
        facts.append(("measured on", "the nodes' own test images, wherever this page says test images"))
    if result.calibrations:
        usable = [each for each in result.calibrations.values() if not is_bound(each.name)]
        best = max(usable or result.calibrations.values(), key=lambda each: each.accuracy)
        facts.append((f"after {best.name}", f"{best.accuracy:.2%}"))
    if result.relative_accuracy is not None:
        facts.append(("of central training", f"{result.relative_accuracy:.1%}"))
    if result.privacy is not None:
        facts.append(("privacy", f"ε {result.privacy.epsilon:.3g} at δ {result.privacy.delta:g}"))
    facts += [
        ("EMD", emd_words(result.emd)),
        ("clients", f"{result.clients:,}"),
        ("rounds", f"{result.rounds:,}" + (f", best {result.best_round:,}" if result.best_round else "")),
        ("model", result.model),
        ("sent", format_bytes(result.bytes_up + result.bytes_down)),
        ("time", format_duration(result.seconds)),
    ]
    return facts


def _who(run: FinishedRun) -> str:
    result = run.result
    if "centralised" in result.method:
        return "all examples in one place"
    if not result.rounds:
        return counted(result.clients, "client")
    return f"{result.per_round:,} of {counted(result.clients, 'client')} a round"


def _made(run: FinishedRun) -> str:
    if run.result.partition == NODES:
        return (
            "unskew federation run with the same recipe and nodes repeats this run. It gives the same weights, "
            f"sha256 {run.result.weights_sha256}, where the same nodes answer in every round."
        )
    return (
        f"unskew run {run.path.name}/config.toml repeats this run and gives the same weights, sha256 "
        f"{run.result.weights_sha256}. Local models are not stored: they are trained again from the run's keys, as the "
        "clients would train them in the round after the last."
    )


_HAPPENED = "Visits that failed: the round went on without them. And what else a round's line in metrics.jsonl notes."
_COST = "What was sent and how long it took, for training and for each calibration."


MAX_RUNS = 40  # on one page
MAX_CALIBRATIONS = 8  # columns of the table of results


@dataclass(frozen=True)
class ComparedMeasure:
    """One measure of all runs: its values by the run's name, and why it is missing for the others."""

    request: MeasureRequest
    comparison: Comparison[Any]
    values: Mapping[str, Any]
    missing: Mapping[str, str]


def comparison_page(runs: Sequence[FinishedRun], only: Sequence[MeasureSource] = (), again: bool = False) -> Page:
    """The page of several runs.

    Measures that need the data set are shown where they are stored; those in ``only`` are taken of every run that
    lacks them.
    """
    if len(runs) > MAX_RUNS:
        raise UserError(f"{len(runs)} runs do not fit on one page; give at most {MAX_RUNS}")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("a run is named twice; give each run once")
    named = dict(zip(name_runs(runs), runs, strict=True))
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
            *map(_comparison_section, compared),
        ],
        footer="Made by unskew. Bands are one standard deviation over seeds.",
    )  # fmt: skip


def _comparisons(only: Sequence[MeasureSource]) -> list[tuple[MeasureRequest, Comparison[Any], bool]]:
    """Every measure that compares runs, and whether it was chosen: taken, not only shown where it is stored."""
    chosen = {request.name: request for request in order_requests(only)} if only else {}
    able = [name for name, measure in MEASURES.items() if measure.compare is not None]
    every = {name: parse_measure(name) for name in able} | chosen
    for name, request in chosen.items():
        if request.measure.compare is None:
            raise UserError(f"--only {name}: it does not compare runs; a comparison shows {', '.join(able)}")
    return [(each, each.measure.compare, each.name in chosen) for each in every.values() if each.measure.compare]


def _compared(
    runs: Mapping[str, FinishedRun], request: MeasureRequest, comparison: Comparison[Any], chosen: bool, again: bool
) -> ComparedMeasure:
    """The measure of each run, or why it is missing."""
    values, missing = {}, {}
    for name, run in runs.items():
        try:
            measured = _measured(run, request, chosen, again)
            values[name] = measured.values
        except Missing as error:
            missing[name] = str(error)
    return ComparedMeasure(request, comparison, values, missing)


def _measured(run: FinishedRun, request: MeasureRequest, chosen: bool, again: bool) -> Measured:
    """The measure where it is stored, chosen, or needs the run folder alone."""
    if chosen:
        return load_or_take(run, request, again=again)
    quick = request.measure.folder_only
    stored = None if again and quick else load_measure(run, request)
    if stored is not None:
        return stored
    if quick:
        return load_or_take(run, parse_measure(quick), again=again)
    raise Missing(f"not taken yet; add --only {request.name}, or unskew analyse RUN {request.name}")


def _call(compared: ComparedMeasure, part: str, function: Any) -> list[Any]:
    return list(compared.request.call(f"compare.{part}", function, compared.values))


def _comparison_section(compared: ComparedMeasure) -> Section:
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
    settings = {name: list_result_settings(run.result) | {"seed": str(run.result.seed)} for name, run in runs.items()}
    keys = list(dict.fromkeys(key for each in settings.values() for key in each))
    values = {key: [each.get(key, "") for each in settings.values()] for key in keys}
    differing = [key for key in keys if len(set(values[key])) > 1]
    columns = [
        Column("run"), *(Column(key.replace("_", " "), _kind(values[key])) for key in differing),
        Column("EMD", "number"), Column("accuracy", "percent"), *(Column(f"after {name}", "percent") for name in every),
        Column("loss", "number"), Column("sent", "bytes"), Column("time", "seconds"),
    ]  # fmt: skip
    rows: list[list[CellValue]] = []
    for name, run in runs.items():
        result, texts = run.result, [settings[name].get(key, "") for key in differing]
        told: list[CellValue] = [_cell(text) for text in texts]
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


def _cell(text: str) -> CellValue:
    """A setting as a number where it is one: it is then sorted as one."""
    if not text:
        return None
    return int(text) if text.isdigit() else float(text) if _is_number(text) else text


def _over_seeds(results: Sequence[Result]) -> list[Table]:
    """Mean and deviation over seeds, where any settings were run with several."""
    groups = group_by_settings(results)
    if all(len(group) == 1 for group in groups.values()):
        return []
    rows: list[list[CellValue]] = []
    for label, group in groups.items():
        made = [each for each in list_contenders({label: group}) if each.classifier]
        best = pick_best(made) if made else None
        after = spread_over_seeds(best.scores.values()) if best else None
        before = spread_over_seeds(result.accuracy for result in group)
        rows.append([
            label, len(group), before.words(100) if before else None, best.classifier if best else None,
            after.words(100) if after else None,
        ])  # fmt: skip
    columns = [Column("settings"), Column("seeds", "count"), Column("accuracy, %", "number"),
               Column("best calibration"), Column("after it, %", "number")]  # fmt: skip
    return [Table("Over seeds", columns, rows, "Mean ± sample deviation.")]


def _usable(result: Result) -> list[Calibration]:
    """Its calibrations without those that are bounds for study."""
    return [each for each in result.calibrations.values() if not is_bound(each.name)]


def _findings(results: Sequence[Result]) -> list[str]:
    """Which settings are best, if the seeds say so, what calibration adds, what was sent."""
    sentences = rank_settings(results)
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


@neutral()
@accepts(
    paths=PATH, out=optional(PATH), only=SEVERAL, without=SEVERAL, again=FLAG, data_dir=optional(PATH),
    engine=optional(TEXT), workers=optional(COUNT), device=optional(TEXT), say=optional(FUNCTION),
)  # fmt: skip
def write_report(
    *paths: str | Path, out: str | Path | None = None, only: Sequence[MeasureSource] = (),
    without: Sequence[MeasureSource] = (), again: bool = False, data_dir: str | Path | None = None,
    engine: str | None = None, workers: int | None = None, device: str | None = None, say: Say | None = None,
    data: Any = None, model: Any = None, method: Any = None,
) -> Page:  # fmt: skip
    """Write the page of one run (by default to its folder), or the comparison of several, and return the page.

    Measures are taken where they are not stored yet; ``only`` and ``without`` choose among them. A measure of your own
    is shown with ``only="package.module:function"`` or a Measure. Runs that were given ``data``, ``model`` or
    ``method`` as values from Python need the same values again.
    """
    if not paths:
        raise UserError("no run was given; give the folder of a finished run")
    order_requests(only)
    order_requests(without)
    if out is not None and Path(out).suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: a report is written as .html")
    if without and len(paths) > 1:
        raise UserError("--without is for the report of one run; a comparison shows what is stored, and --only adds")
    if out is None and len(paths) > 1:
        raise UserError("a comparison has no run folder to go to; say where to write it with --out FILE.html")
    values = {"data": data, "model": model, "method": method}
    target = Path(out) if out is not None else Path(paths[0]) / "report.html"
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                FinishedRun(
                    path, data_dir=data_dir, engine=engine, workers=workers, device=device, say=say, values=values
                )
            )
            for path in paths
        ]
        if len(runs) == 1:
            page = run_page(runs[0], take_all(runs[0], only, without, again))
        else:
            page = comparison_page(runs, only, again)
    write_whole(target, to_html(page).encode())
    return page
