"""One run as a page: a section for each measure, then what the run cost and how it was made."""

from collections.abc import Sequence
from dataclasses import dataclass

from unskew.analysis import MEASURES, parse_measure
from unskew.analysis.elements import Cell, Column, Table
from unskew.analysis.measure import Measured, Request, Source
from unskew.analysis.phrases import bound
from unskew.analysis.store import stored_measure, stored_or_taken
from unskew.core.errors import Missing, UserError
from unskew.core.units import counted, emd_words, format_bytes, format_duration
from unskew.report.page import Page, Section
from unskew.runs.config import NODES
from unskew.runs.result import AT_NODES, VALIDATION
from unskew.runs.study import FinishedRun

MAX_HAPPENED = 500  # rows of the table of what happened


@dataclass(frozen=True)
class Taken:
    """A measure for the page: taken, or the reason why not."""

    request: Request
    result: Measured | str


def take_all(
    run: FinishedRun,
    only: Sequence[Source] = (),
    without: Sequence[Source] = (),
    again: bool = False,
) -> list[Taken]:
    """Every measure of the run, or those in ``only``; stored ones are used where they still fit.

    Those in ``without`` are not taken, but shown where they are stored.
    """
    left_out = {parse_measure(source).name for source in without}
    taken = []
    for request in requests(only):
        result: Measured | str
        if request.name in left_out:
            result = stored_measure(run, request) or f"left out; unskew analyse {run.path} {request.name}"
        else:
            try:
                result = stored_or_taken(run, request, again=again)
            except Missing as error:
                result = str(error)
        taken.append(Taken(request, result))
    return taken


def requests(only: Sequence[Source]) -> list[Request]:
    """The measures of a page in the order of the table, those from outside last; without ``only`` the whole table."""
    chosen: dict[str, Request] = {}
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
    rows: list[list[Cell]] = []
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
    rows: list[list[Cell]] = [["training", result.bytes_up, result.bytes_down, result.seconds, result.accuracy]]
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
        usable = [each for each in result.calibrations.values() if not bound(each.name)]
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
