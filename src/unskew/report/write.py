"""From run directories to a page on disk: one run explained, or several compared."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from unskew.analysis import MEASURES, name_runs, parse_measure
from unskew.analysis.measure import (
    CellValue,
    Element,
    Measured,
    MeasureRequest,
    MeasureSource,
    Table,
    load_measure,
    load_or_take,
    name_clients,
    tabulate,
)
from unskew.analysis.ranking import group_by_settings, list_contenders, list_result_settings, pick_best, rank_settings
from unskew.calibration import is_bound
from unskew.charts import Axis, Bars, Chart, Line, Mark
from unskew.charts.builders import axis_of
from unskew.core.errors import Missing, UserError, accepts
from unskew.core.files import write_whole
from unskew.core.machine import neutral
from unskew.core.units import counted, format_bytes, format_duration, format_emd
from unskew.data.photographs import Say
from unskew.report.page import Page, Section, to_html
from unskew.runs.config import NODES
from unskew.runs.finished import FinishedRun
from unskew.runs.result import AT_NODES, VALIDATION, Calibration, Result
from unskew.runs.seeds import SeedSpread, spread_over_seeds

MAX_EVENTS = 500  # rows of the table of events
MAX_RUNS = 40  # on one page
MAX_CALIBRATIONS = 8  # columns of the table of results
Taken = tuple[MeasureRequest, Measured | str]  # a measure for the page, or why it is missing


def take_all(
    run: FinishedRun, only: Sequence[MeasureSource] = (), without: Sequence[MeasureSource] = (), again: bool = False
) -> list[Taken]:
    """Every measure of the run, or those in ``only``; stored ones are reused if they are up to date.

    Measures in ``without`` are shown only if they are stored.
    """
    left_out = {parse_measure(source).name for source in without}

    def take(request: MeasureRequest) -> Measured | str:
        try:
            if request.name not in left_out:
                return load_or_take(run, request, again=again)
            hint = f"left out; to include it, first run: unskew analyse {run.path} {request.name}"
            return load_measure(run, request) or hint
        except Missing as error:
            return str(error)

    return [(request, take(request)) for request in order_requests(only)]


def order_requests(only: Sequence[MeasureSource]) -> list[MeasureRequest]:
    """The measures of a page in the order of the registry, plug-ins last; without ``only`` all of them."""
    chosen: dict[str, MeasureRequest] = {}
    for request in map(parse_measure, only or MEASURES):
        if (other := chosen.setdefault(request.name, request)).text != request.text:
            raise UserError(f"--only {request.text}: {other.text} is already chosen; a page shows each measure once")
    order = [*MEASURES, *chosen]
    return sorted(chosen.values(), key=lambda request: order.index(request.name))


def run_page(run: FinishedRun, taken: Sequence[Taken]) -> Page:
    """The page of one run, with the first finding of each measure at the top."""
    result, who = run.result, counted(run.result.clients, "client")
    if "centralised" in result.method:
        who = "all examples in one place"
    elif result.rounds:
        who = f"{result.per_round:,} of {who} per round"
    ranked = [
        (rank, measured.findings)
        for request, measured in taken
        if isinstance(measured, Measured) and (rank := request.measure.headline) is not None
    ]
    return Page(
        title=f"{result.method} on {result.data}",
        subtitle=f"{result.partition}, {who}, {counted(result.rounds, 'round')}, seed {result.seed}",
        findings=[findings[0] for _, findings in sorted(ranked, key=lambda pair: pair[0]) if findings],
        facts=_facts(run),
        sections=[
            *(_section(run, *item) for item in taken),
            *_list_events(run),
            *_probabilities(run),
            Section("cost", "What it cost", "Bytes and time, for training and for each calibration.", [_costs(run)]),
            Section("made", "How it was made", _reproducibility(run), [_settings(run)], notes=result.notes),
        ],
        footer=f"Made by unskew from {run.path.name}; weights {result.weights_sha256[:12]}.",
    )


def _section(run: FinishedRun, request: MeasureRequest, taken: Measured | str) -> Section:
    about = request.name, request.measure.title or request.measure.name, request.measure.text
    if isinstance(taken, str):
        return Section(*about, missing=[taken])
    return Section(*about, taken.elements(run), findings=taken.findings, notes=taken.notes)


def _list_events(run: FinishedRun) -> list[Section]:
    rows: list[list[CellValue]] = []
    for row in run.rows:
        number, failures = int(row["round"]), row.get("failures", ())
        clients = name_clients(run, [item["client"] for item in failures])
        rows += [[number, f"client {name}", item["reason"]] for name, item in zip(clients, failures, strict=True)]
        rows += [[number, "", str(note)] for note in row.get("notes", ())]
    left = f"The first {MAX_EVENTS:,} of {len(rows):,}; see metrics.jsonl for all." if len(rows) > MAX_EVENTS else ""
    columns = {"round": "count", "who": "text", "what": "text"}
    table = tabulate("Round by round", columns, rows[:MAX_EVENTS], left)
    text = "Failed visits that were skipped, and other notes from metrics.jsonl."
    return [Section("happened", "Events during training", text, [table])] if rows else []


def _probabilities(run: FinishedRun) -> list[Section]:
    """The calibration error of each classifier; no section if it is unknown."""
    classifiers: dict[str, Result | Calibration] = {"as trained": run.result, **run.result.calibrations}
    rows: list[list[CellValue]] = [
        [name, scores.ece, scores.ece_scaled, scores.temperature]
        for name, scores in classifiers.items()
        if scores.ece is not None
    ]
    columns = {"classifier": "text", "ECE": "number", "with temperature": "number", "temperature": "number"}
    note = "ECE: the mean difference between confidence and accuracy, in 15 bins. The temperature is cross-fitted."
    table = tabulate("Calibration error", columns, rows, note)
    text = "Whether a classifier is right as often as its probabilities claim, before and after temperature scaling."
    return [Section("probabilities", "How far to trust the probabilities", text, [table])] if rows else []


def _costs(run: FinishedRun) -> Table:
    result = run.result
    rows: list[list[CellValue]] = [["training", result.bytes_up, result.bytes_down, result.seconds, result.accuracy]]
    added = [] if result.start is None else [(f"including the start by {result.start.name}", result.start)]
    added += [(f"calibration by {item.name}", item) for item in result.calibrations.values()]
    rows += [[what, item.bytes_up, None, item.seconds, item.accuracy] for what, item in added]
    columns = {"what": "text", "sent up": "bytes", "sent down": "bytes", "time": "seconds"}
    note = "Bytes are summed over all clients. Calibration needs no download: clients already have the encoder."
    return tabulate("Bytes and time", columns | {"accuracy after it": "percent"}, rows, note)


def _settings(run: FinishedRun) -> Table:
    lines = (run.path / "config.toml").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(" = ") for line in lines if " = " in line]
    rows = [[key, value.strip('"')] for key, _, value in pairs if key not in ("data_dir", "cache_dir")]
    return tabulate("Settings", {"option": "text", "value": "text"}, rows)


def _facts(run: FinishedRun) -> list[tuple[str, str]]:
    result = run.result
    facts = [("accuracy", f"{result.accuracy:.2%}")]
    images = {VALIDATION: "validation images", AT_NODES: "the nodes' own test images"}
    if on := images.get(result.evaluated_on):
        facts.append(("measured on", f"{on}, wherever this page mentions test images"))
    if result.calibrations:
        best = max(_usable(result) or result.calibrations.values(), key=lambda item: item.accuracy)
        facts.append((f"after {best.name}", f"{best.accuracy:.2%}"))
    if result.relative_accuracy is not None:
        facts.append(("of central training", f"{result.relative_accuracy:.1%}"))
    if result.privacy is not None:
        unit = f"for every {result.privacy.unit}"
        seeded = ", while the seed is secret" if result.privacy.seeded else ""
        facts.append(("privacy", f"ε {result.privacy.epsilon:.3g} at δ {result.privacy.delta:g} {unit}{seeded}"))
    facts += [] if result.released else [("EMD", format_emd(result.emd))]
    best_round = f", best {result.best_round:,}" if result.best_round else ""
    facts += [("clients", f"{result.clients:,}"), ("rounds", f"{result.rounds:,}{best_round}"), ("model", result.model)]
    facts += [] if (sent := _sent(result)) is None else [("sent", format_bytes(sent))]
    return [*facts, ("time", format_duration(result.seconds))]


def _sent(result: Result) -> int | None:
    """All bytes of training, up and down, and of the calibrations' statistics."""
    if result.bytes_up is None or result.bytes_down is None:
        return None
    return result.bytes_up + result.bytes_down + sum(row.bytes_up or 0 for row in result.calibrations.values())


def _reproducibility(run: FinishedRun) -> str:
    weights = f"sha256 {run.result.weights_sha256}"
    if run.result.released:
        return (
            "A release: its noise comes from the operating system, so the run cannot be repeated. "
            f"Everything that (ε, δ) does not cover was left out. Weights: {weights}."
        )
    if run.result.partition == NODES:
        return (
            "unskew federation run with the same recipe and nodes repeats this run. It produces the same weights, "
            f"{weights}, if the same nodes answer in every round."
        )
    return (
        f"unskew run {run.path.name}/config.toml repeats this run and produces the same weights, {weights}. "
        "Local models are not stored; they are retrained from the run's keys, as in a round after the last."
    )


def comparison_page(runs: Sequence[FinishedRun], only: Sequence[MeasureSource] = (), again: bool = False) -> Page:
    """The page of several runs.

    Measures that need the data set are shown if they are stored; those in ``only`` are taken if they are missing.
    """
    if len({run.path.resolve() for run in runs}) < len(runs) or len(runs) > MAX_RUNS:
        raise UserError(f"give at most {MAX_RUNS} runs, each only once")
    named = dict(zip(name_runs(runs), runs, strict=True))
    chosen = {request.name: request for request in order_requests(only)} if only else {}
    able = {name: parse_measure(name) for name, measure in MEASURES.items() if measure.compare is not None}
    if unable := next((name for name, request in chosen.items() if request.measure.compare is None), None):
        raise UserError(f"--only {unable}: this measure cannot compare runs; these can: {', '.join(able)}")
    compared = [_compare(named, request, name in chosen, again) for name, request in (able | chosen).items()]
    methods = list(dict.fromkeys(run.result.method for run in runs))
    results = [run.result for run in runs]
    return Page(
        title=f"{counted(len(runs), 'run')} compared",
        heading="What these runs show",
        subtitle=", ".join(methods[:6]) + (f" and {len(methods) - 6} more" if len(methods) > 6 else ""),
        findings=[*_findings(results), *(sentence for _, sentences in compared for sentence in sentences)],
        facts=[
            ("runs", str(len(runs))),
            ("methods", str(len(methods))),
            ("data", ", ".join(dict.fromkeys(result.data for result in results))),
            ("measured on", " or ".join(dict.fromkeys(result.measured_on for result in results))),
        ],
        sections=[
            Section("runs", "The runs", _RANKED, [*_summarize(results), _tabulate_runs(named)]),
            *(section for section, _ in compared),
        ],
        footer="Made by unskew. Bands are one standard deviation over seeds.",
    )


def _compare(
    runs: Mapping[str, FinishedRun], request: MeasureRequest, chosen: bool, again: bool
) -> tuple[Section, Sequence[str]]:
    """The section of a measure of all runs, including why it is missing for some, and its findings."""
    comparison, quick = request.measure.compare, request.measure.folder_only  # quick: needs only the run directory
    assert comparison is not None
    values: dict[str, Any] = {}
    reasons: dict[str, list[str]] = {}
    for name, run in runs.items():
        try:
            measured = None if chosen or (again and quick) else load_measure(run, request)
            if measured is None and not chosen and not quick:
                raise Missing(f"not measured yet; add --only {request.name}, or run: unskew analyse RUN {request.name}")
            measured = measured or load_or_take(run, request if chosen else parse_measure(quick), again=again)
            values[name] = measured.values
        except Missing as error:
            reasons.setdefault(str(error), []).append(name)
    charts, left_out, findings = (
        request.call(f"compare.{part}", getattr(comparison, part), values) for part in ("draw", "left_out", "findings")
    )
    missing = [f"{request.name} of {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    title = comparison.title or request.measure.title or request.measure.name
    text = comparison.text or request.measure.text
    return Section(request.name, title, text, list(charts), missing=[*missing, *left_out]), findings


def _tabulate_runs(runs: Mapping[str, FinishedRun]) -> Table:
    """A row for each run: the settings that differ, then the results; shared settings are in the note."""
    added = list(dict.fromkeys(name for run in runs.values() for name in run.result.calibrations))[:MAX_CALIBRATIONS]
    settings = [list_result_settings(run.result) | {"seed": str(run.result.seed)} for run in runs.values()]
    values = {key: [item.get(key, "") for item in settings] for item in settings for key in item}
    shared = [f"{key.replace('_', ' ')} {texts[0]}" for key, texts in values.items() if len(set(texts)) == 1]
    differing = {key: texts for key, texts in values.items() if len(set(texts)) > 1}
    kinds = ["number" if all(text.isdigit() for text in texts if text) else "text" for texts in differing.values()]
    columns = {"run": "text", **dict(zip((key.replace("_", " ") for key in differing), kinds, strict=True))}
    columns |= {"EMD": "number", "accuracy": "percent"} | {f"after {name}": "percent" for name in added}
    columns |= {"loss": "number", "sent": "bytes", "time": "seconds"}
    rows: list[list[CellValue]] = []
    for at, (name, run) in enumerate(runs.items()):
        result, cells = run.result, [_cell(texts[at]) for texts in differing.values()]
        after = [result.calibrations[item].accuracy if item in result.calibrations else None for item in added]
        rows.append([name, *cells, result.emd, result.accuracy, *after, result.loss, _sent(result), result.seconds])
    return tabulate("Results", columns, rows, f"Common to all runs: {'; '.join(shared)}." if shared else "")


def _cell(text: str) -> CellValue:
    """A setting as a number if possible, so that it is sorted numerically."""
    try:
        number = float(text)
    except ValueError:
        return text or None
    return text if not isfinite(number) else int(text) if text.isdigit() else number


def _summarize(results: Sequence[Result]) -> list[Element]:
    """The final accuracy of each setting before and after the best calibration: a chart, and a table over seeds."""
    groups, before, after = group_by_settings(results), list[SeedSpread | None](), list[SeedSpread | None]()
    rows: list[list[CellValue]] = []
    for name, group in groups.items():
        calibrated = [item for item in list_contenders({name: group}) if item.classifier]
        best = pick_best(calibrated) if calibrated else None
        before.append(spread_over_seeds(run.accuracy for run in group))
        after.append(best.accuracy if best else None)
        own, gained = (spreads[-1].format(100) if spreads[-1] else None for spreads in (before, after))
        rows.append([name, len(group), own, best.classifier if best else None, gained])
    several = len(results) > len(groups)
    title = "Final accuracy" + (", with one standard deviation over seeds" if several else "")
    alt = f"{title}, before calibration: {'; '.join(f'{row[0]} {row[2]}' for row in rows)}."
    found = {"before calibration": before, "after the best calibration": after}
    bars = {label: spreads for label, spreads in found.items() if any(spreads)}
    marks: list[Mark] = []
    thick = 0.8 / max(len(bars), 1)
    for colour, (label, spreads) in enumerate(bars.items()):
        y = [at + (colour - (len(bars) - 1) / 2) * thick for at in range(len(rows))]
        texts = [spread.format(100) if spread else "none" for spread in spreads]
        tips = [f"{name}, {label}: {text}" for name, text in zip(groups, texts, strict=True)]
        means = [spread.mean if spread else None for spread in spreads]
        marks.append(Bars(y, means, width=0.9 * thick, colour=colour, name=label, flat=True, tips=tips))
        for at, spread in zip(y, spreads, strict=True):
            if spread and (deviation := spread.deviation):
                marks.append(Line([spread.mean - deviation, spread.mean + deviation], [at, at], colour="ink"))
    x, y_axis = Axis("accuracy", low=0, high=1, kind="percent"), axis_of("", list(groups))
    y_axis = replace(y_axis, low=-0.5, high=len(rows) - 0.5, reverse=True)
    chart = Chart("final-accuracy", title, alt, marks, x, y_axis, 880, 120 + 44 * len(rows))
    columns = {"settings": "text", "seeds": "count", "accuracy, %": "number", "best calibration": "text"}
    note = "Mean ± sample standard deviation."
    return [chart, *([tabulate("Over seeds", columns | {"after it, %": "number"}, rows, note)] if several else [])]


def _usable(result: Result) -> list[Calibration]:
    return [item for item in result.calibrations.values() if not is_bound(item.name)]


def _findings(results: Sequence[Result]) -> list[str]:
    """Which setting is best if the seeds support it, what calibration adds, and what was sent."""
    sentences = rank_settings(results)
    usable = [(result.accuracy, [item.accuracy for item in _usable(result)]) for result in results]
    if gains := [100 * (max(after) - before) for before, after in usable if after]:
        tried = max(len(after) for _, after in usable)
        how = f", the best of up to {tried} on the test images" if tried > 1 else ""
        change = f"{min(gains):+.2f}" if min(gains) == max(gains) else f"{min(gains):+.2f} to {max(gains):+.2f}"
        sentences.append(f"Calibration changes accuracy by {change} points ({counted(len(gains), 'run')}{how}).")
    if sent := [total for result in results if (total := _sent(result)) is not None]:
        amounts = " to ".join(dict.fromkeys((format_bytes(min(sent)), format_bytes(max(sent)))))
        sentences.append(f"Training and calibration sent {amounts} per run.")
    return sentences


_RANKED = (
    "Runs that differ only in the seed form one setting. A winner is named only if its difference from every other "
    "setting, paired over common seeds, has a t-interval above 0; the intervals hold jointly with 95%. Calibrated "
    "classifiers count too."
)


@neutral()
@accepts
def write_report(
    *paths: str | Path, out: str | Path | None = None, only: Sequence[MeasureSource] = (),
    without: Sequence[MeasureSource] = (), again: bool = False, data_dir: str | Path | None = None,
    engine: str | None = None, workers: int | None = None, device: str | None = None, trust: bool = False,
    say: Say | None = None, data: Any = None, model: Any = None, method: Any = None,
) -> Path:  # fmt: skip
    """Write the page of one run, or the comparison of several, as one self-contained HTML file.

    Parameters
    ----------
    paths
        Run directories: one for a report, several for a comparison.
    out
        The file, by default ``report.html`` in the run directory; required for a comparison.
    only, without
        Measures to show, and measures not to take. Your own is ``"package.module:function"`` or a Measure.
    again
        Take measures again, even if they are stored.
    data_dir
        The folder of the published data sets (or UNSKEW_DATA).
    engine, workers, device
        How local models are retrained, by default as in the run.
    trust
        Whether plug-ins named in somebody else's run directory may run.
    say
        Called with the current activity, the work done and the total.
    data, model, method
        The run's own values, if they were passed from Python.

    Returns
    -------
    Path
        The file.
    """
    options = locals()
    return make_report(*options.pop("paths"), **options)[0]


def make_report(
    *paths: str | Path, out: str | Path | None = None, only: Sequence[MeasureSource] = (),
    without: Sequence[MeasureSource] = (), again: bool = False, data: Any = None, model: Any = None,
    method: Any = None, **where: Any,
) -> tuple[Path, Page]:  # fmt: skip
    """Write the page like ``write_report``, and return the file and the page."""
    order_requests(only)
    order_requests(without)
    if not paths:
        raise UserError("no runs; give the directory of a finished run")
    if len(paths) > 1 and (without or out is None):
        raise UserError("a comparison of runs needs --out FILE.html; --without is only for the report of one run")
    if out is not None and Path(out).suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: the file must end in .html")
    values = {"data": data, "model": model, "method": method}
    target = Path(out) if out is not None else Path(paths[0]) / "report.html"
    with ExitStack() as stack:
        runs = [stack.enter_context(FinishedRun(path, **where, values=values)) for path in paths]
        if len(runs) == 1:
            page = run_page(runs[0], take_all(runs[0], only, without, again))
        else:
            page = comparison_page(runs, only, again)
    write_whole(target, to_html(page).encode())
    return target, page
