"""Several runs side by side, as a table for people or for programs."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from unskew.analysis.ranking import list_result_settings, rank_settings
from unskew.console.progress import PlainConsole
from unskew.core.errors import UserError, nearest
from unskew.core.units import counted, emd_words
from unskew.runs.config import OPTIONS
from unskew.runs.journal import Rows, accuracy_at_batch, accuracy_at_round, batches, read_metrics, rounds_to
from unskew.runs.result import Result, read_result, to_json
from unskew.runs.seals import unsealed_note
from unskew.runs.seeds import finished_runs, spread_over_seeds

WORDS = ("run", "method", "data", "partition", "model")  # columns of text, not of numbers


def upright(lines: Sequence[Mapping[str, str]], shown: Sequence[str]) -> Table:
    """One row for each figure, one column for each run."""
    table = Table(show_header=False)
    for key in shown:
        table.add_row(Text(key), *(Text(row[key], overflow="fold") for row in lines))
    return table


def flat(lines: Sequence[Mapping[str, str]], shown: Sequence[str], width: int) -> list[Table]:
    """One row for each run, in as many tables as it takes."""
    tables = []
    for keys in _blocks(lines, shown, width):
        table = Table()
        for key in keys:
            words = key in WORDS
            table.add_column(key, justify="left" if words else "right", max_width=width // 4 if words else None)
        for row in lines:
            table.add_row(*(Text(row[key], overflow="fold") for key in keys))
        tables.append(table)
    return tables


def _blocks(lines: Sequence[Mapping[str, str]], shown: Sequence[str], width: int) -> list[list[str]]:
    """The columns of each table: as many as fit unbroken, after the first, which every table begins with."""
    needs = {key: 3 + max(cell_len(text) for text in (key, *(row[key] for row in lines))) for key in shown}
    needs |= {key: min(needs[key], 3 + width // 4) for key in shown if key in WORDS}
    blocks = [[shown[0]]]
    for key in shown[1:]:
        if len(blocks[-1]) > 1 and 1 + sum(needs[other] for other in (*blocks[-1], key)) > width:
            blocks.append([shown[0]])
        blocks[-1].append(key)
    return blocks


FORMATS = ("table", "markdown", "csv", "latex", "json")

MINIMUM_WIDTH = 70  # columns of a terminal below which one row for each run cannot be read

SHARES = (10, 50, 90)  # per cent of the baseline's accuracy: Hsu et al. 2020, Table 5

_PLAIN = ("method", "data", "partition", "clients", "per_round", "rounds", "seed")


@dataclass(frozen=True)
class Compared:
    """A run: its result, compared with its baseline where one is known, and what it had reached by when."""

    result: Result
    round: int | None  # None: no run has metrics
    accuracy_at_round: float | None
    batch: int | None
    accuracy_at_batch: float | None
    rounds_to: Mapping[int, int | None]  # share in per cent → round, None for never; empty without baseline or metrics


def side_by_side(
    results: Sequence[Result], metrics: Sequence[Rows], *, baseline: Result | None = None, at_round: int | None = None,
    at_batch: int | None = None,
) -> list[Compared]:  # fmt: skip
    """Runs, each with its rounds, at one round and one batch count: by default the last that all of them reached."""
    results = [_with_baseline(baseline, result) for result in results]
    runs = list(zip(results, metrics, strict=True))
    if at_round is None:
        at_round = min((rows[-1]["round"] for _, rows in runs if rows), default=None)
    if at_batch is None:
        at_batch = min((batches(rows) for _, rows in runs if rows), default=None)
    return [_compared(result, rows, at_round, at_batch) for result, rows in runs]


@dataclass(frozen=True)
class Figure:
    """A number of the table: None where it is unknown; ``never`` where a mark was not reached."""

    value: float | None
    decimals: int
    never: bool = False

    def words(self, never: str) -> str:
        """The number as the table has it."""
        return never if self.never else "" if self.value is None else f"{self.value:.{self.decimals}f}"


@dataclass(frozen=True)
class Sheet:
    """The rows of a table, and the columns that say the same in every row: none where there is one row."""

    rows: list[dict[str, str]]
    same: list[str]


def run_sheet(compared: Sequence[Compared], never: str = "-") -> Sheet:
    """One row a run: the settings that differ, what came out, then the settings that all runs share.

    There is a column for whatever any run has. Accuracies are in per cent. One run alone shows its settings first.
    """
    outcomes = [{key: each.words(never) for key, each in one.items()} for one in figures(compared)]
    places = [str(one.result.path) for one in compared]
    return arranged(places, [settings_shown(one.result) for one in compared], outcomes)


def arranged(places: Sequence[str], settings: Sequence[Mapping[str, str]], outcomes: Sequence[dict[str, str]]) -> Sheet:
    """The rows of a table: its place, the settings in which the rows differ, what came out, what they share."""
    keys = list(dict.fromkeys(key for each in settings for key in each))
    settings = [{key: each.get(key, _usual(key, each)) for key in keys} for each in settings]
    same = [key for key in keys if len(settings) > 1 and len({each[key] for each in settings}) == 1]
    made = [
        {"run": place}
        | {key: each[key] for key in keys if key not in same}
        | outcome
        | {key: each[key] for key in same}
        for place, each, outcome in zip(places, settings, outcomes, strict=True)
    ]
    return Sheet(made, same)


def _usual(key: str, settings: Mapping[str, str]) -> str:
    """What a run that does not have the setting had: its default; empty where the data decided, or where the run wrote
    down no settings at all and may have had any."""
    recorded = any(each in OPTIONS and each not in (*_PLAIN, "model") for each in settings)
    return OPTIONS[key].default_text if recorded and key in OPTIONS and OPTIONS[key].default is not None else ""


def settings_shown(result: Result) -> dict[str, str]:
    """What the run was: the fields of its result, then the options that these do not have."""
    plain = {key: getattr(result, key) for key in _PLAIN}
    others = {"model": result.model} | {key: value for key, value in result.settings.items() if key not in _PLAIN}
    return {key: str(value) for key, value in (plain | others).items()} | {"emd": emd_words(result.emd)}


def figures(compared: Sequence[Compared]) -> list[dict[str, Figure]]:
    """What came out of each run, with a figure for whatever any run has."""
    names = list(dict.fromkeys(name for one in compared for name in one.result.calibrations))
    relative = any(one.result.relative_accuracy is not None for one in compared)
    spreads = [one.result.clients_accuracy for one in compared]
    told, own = (any(map(bool, each)) for each in (spreads, [each and each.own_images for each in spreads]))
    table = []
    for one in compared:
        result = one.result
        made = {name: result.calibrations.get(name) for name in names}
        row = {"accuracy": _percent(result.accuracy)}
        row |= {f"after {name}": _percent(each.accuracy if each else None) for name, each in made.items()}
        if one.round is not None:
            row[f"acc@round {one.round:,}"] = _percent(one.accuracy_at_round)
        if one.batch is not None:
            row[f"acc@batch {one.batch:,}"] = _percent(one.accuracy_at_batch)
        if relative:
            row["relative"] = _percent(result.relative_accuracy)
            for share in SHARES:
                reached = one.rounds_to.get(share)
                row[f"to {share} %"] = Figure(reached, 0, bool(one.rounds_to) and reached is None)
        row |= _clients(result, names, told, own)
        row["loss"] = Figure(result.loss, 4)
        row["MB up"] = Figure(None if result.bytes_up is None else result.bytes_up / 1e6, 1)
        row |= {f"MB up, {name}": Figure(each.bytes_up / 1e6 if each else None, 1) for name, each in made.items()}
        row["MB down"] = Figure(None if result.bytes_down is None else result.bytes_down / 1e6, 1)
        row["seconds"] = Figure(result.seconds, 1)
        table.append(row)
    return table


def _clients(result: Result, names: Sequence[str], told: bool, own: bool) -> dict[str, Figure]:
    """The accuracy of the worst client and of the tenth from below and Jain's index, before and after calibration."""
    spreads = {"": result.clients_accuracy}
    for name in names:
        made = result.calibrations.get(name)
        spreads[f", {name}"] = made.clients_accuracy if made else None
    figures = dict[str, Figure]()
    for name, each in spreads.items() if told else ():
        figures |= {f"{word}{name}": _percent(getattr(each, word, None)) for word in ("worst", "p10")}
        figures[f"fairness{name}"] = Figure(getattr(each, "jain", None), 3)
        if own:
            figures[f"worst{name}, own images"] = _percent(getattr(each and each.own_images, "worst", None))
    return figures


def as_table(compared: Sequence[Compared], width: int = 80, sheet: Sheet | None = None) -> Group:
    """For the terminal; what is the same in every run, or repeats the accuracy, is written once, below.

    The last line says which setting is best, if the seeds support it.
    Columns that do not fit side by side go into a further table; on narrow terminals each figure has its own row.
    ``sheet`` has the rows, where they are not one for each run.
    """
    sheet = sheet or run_sheet(compared)
    lines, same = sheet.rows, sheet.same
    tall = len(lines) == 1 or width < MINIMUM_WIDTH
    again = [key for key in lines[0] if key.startswith("acc@") and all(row[key] == row["accuracy"] for row in lines)]
    shown = [key for key in lines[0] if key not in same and key not in again]
    tables = [upright(lines, shown)] if tall else flat(lines, shown, width)
    notes = [f"{key} {lines[0][key]}" for key in same] + ([" = ".join((*again, "accuracy"))] if again else [])
    best = rank_settings([one.result for one in compared])
    return Group(*tables, *([Text("; ".join(notes))] if notes else []), *map(Text, best))


def as_text(compared: Sequence[Compared], form: str, sheet: Sheet | None = None) -> str:
    """The same as Markdown, CSV, LaTeX or JSON; JSON has the whole results, and how they are over the seeds."""
    if form == "json":
        return _json(compared)
    sheet = sheet or run_sheet(compared, never="" if form == "csv" else "-")
    lines, same = sheet.rows, sheet.same
    keys = list(lines[0])
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue().rstrip("\n")
    keys = [key for key in keys if key not in same]
    notes = [f"{key} {lines[0][key]}" for key in same]
    if form == "latex":
        return _latex(lines, keys, notes)
    rules = ["---" if key in WORDS else "---:" for key in keys]
    table = [keys, rules, *([row[key].replace("|", "\\|") for key in keys] for row in lines)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    return text + (f"\n\nThe same in all runs: {'; '.join(notes)}." if notes else "")


def _latex(lines: Sequence[Mapping[str, str]], keys: Sequence[str], notes: Sequence[str]) -> str:
    """A table of the package booktabs; what all runs share is a comment below it."""
    body = [" & ".join(map(_escaped, line)) + r" \\" for line in (keys, *([row[key] for key in keys] for row in lines))]
    columns = "".join("l" if key in WORDS else "r" for key in keys)
    head = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule"]
    below = [f"% the same in all runs: {'; '.join(notes)}"] if notes else []
    return "\n".join([*head, r"\end{tabular}", *below])


def _escaped(text: str) -> str:
    signs = {"±": r"$\pm$", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(signs.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)


def _with_baseline(baseline: Result | None, result: Result) -> Result:
    """The result with the baseline given, or else with its own, and its accuracy relative to it."""
    if baseline is not None:
        if baseline.data_sha256 != result.data_sha256:
            raise UserError(
                f"{result.path} ({result.data}) and its baseline {baseline.path} ({baseline.data}) use "
                "different data; give a run on the same data as --baseline"
            )
        if baseline.settings.get("validation") != result.settings.get("validation"):
            raise UserError(
                f"{result.path} was evaluated on {result.measured_on}, its baseline {baseline.path} on "
                f"{baseline.measured_on}, with another --validation; give a run with the same --validation "
                "as --baseline"
            )
        result = replace(result, baseline=str(baseline.path.absolute()), baseline_accuracy=baseline.accuracy)
    whole = result.baseline_accuracy
    if whole is None:
        return result
    if not isfinite(whole) or whole <= 0:
        raise UserError(
            f"the baseline {result.baseline} of {result.path} has the accuracy {whole:g}, so there is no "
            "relative accuracy; give a run with an accuracy above 0 as --baseline"
        )
    return replace(result, relative_accuracy=result.accuracy / whole)


def _compared(result: Result, rows: Rows, at_round: int | None, at_batch: int | None) -> Compared:
    whole = result.baseline_accuracy
    return Compared(
        result=result,
        round=at_round,
        accuracy_at_round=None if at_round is None else accuracy_at_round(rows, at_round),
        batch=at_batch,
        accuracy_at_batch=None if at_batch is None else accuracy_at_batch(rows, at_batch),
        rounds_to={share: rounds_to(rows, share / 100 * whole) for share in SHARES} if rows and whole else {},
    )


def _percent(accuracy: float | None) -> Figure:
    return Figure(None if accuracy is None else 100 * accuracy, 2)


def _json(compared: Sequence[Compared]) -> str:
    """Every run's whole result, and with it what the runs of its setting come to: ``over_seeds``."""
    values: list[dict[str, Any]] = []
    for one in compared:
        at_round = {"round": one.round, "accuracy": one.accuracy_at_round}
        at_batch = {"batch": one.batch, "accuracy": one.accuracy_at_batch}
        own = {"run": str(one.result.path), **to_json(one.result)}
        values.append(own | {"accuracy_at_round": at_round, "accuracy_at_batch": at_batch})
        if one.rounds_to:
            values[-1]["rounds_to"] = {str(key): value for key, value in one.rounds_to.items()}
    for group in grouped(compared):
        results = [compared[place].result for place in group]
        names = dict.fromkeys(name for each in results for name in each.calibrations)
        made = {name: [each.calibrations[name] for each in results if name in each.calibrations] for name in names}
        told = {
            "seeds": [each.seed for each in results],
            "accuracy": _record(each.accuracy for each in results),
            "loss": _record(each.loss for each in results),
            "calibrations": {name: _record(each.accuracy for each in several) for name, several in made.items()},
        }
        for place in group:
            values[place]["over_seeds"] = told
    return json.dumps(values, indent=2)


def grouped(compared: Sequence[Compared]) -> list[list[int]]:
    """The runs of each setting by their places; a seed that comes twice begins a group of its own."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for place, one in enumerate(compared):
        setting = (*sorted(list_result_settings(one.result).items()), one.result.data_sha256)
        copy = seen[(*setting, one.result.seed)] = seen.get((*setting, one.result.seed), -1) + 1
        groups.setdefault((*setting, copy), []).append(place)
    return list(groups.values())


def seed_sheet(compared: Sequence[Compared], form: str = "table") -> Sheet:
    """The table with one row for each setting; in CSV the deviation has its own column, behind the mean."""
    groups, every = grouped(compared), figures(compared)
    settings, outcomes = [], []
    for group in groups:
        settings.append(_settings([compared[place] for place in group]))
        emd = [Figure(compared[place].result.emd, 2) for place in group]
        columns = {key: [every[place][key] for place in group] for key in every[0]}
        outcome = {"n": str(len(group))}
        for key, several in (columns | {"emd": emd}).items():
            outcome |= _cells(key, several, form)
        outcomes.append(outcome)
    return arranged([_place([compared[place] for place in group]) for group in groups], settings, outcomes)


def _record(values: Any) -> dict[str, Any] | None:
    found = spread_over_seeds(values)
    return None if found is None else {"mean": found.mean, "deviation": found.deviation, "n": found.count}


def _settings(several: Sequence[Compared]) -> dict[str, str]:
    """The settings of a group, its seeds in one cell."""
    every = [settings_shown(one.result) for one in several]
    keys = dict.fromkeys(key for each in every for key in each if key not in ("seed", "emd"))
    joined = {key: " / ".join(dict.fromkeys(each.get(key, "") for each in every)) for key in keys}
    return joined | {"seeds": " ".join(str(one.result.seed) for one in several)}


def _place(several: Sequence[Compared]) -> str:
    """The folder of the runs where it is theirs alone, or the first of them and how many more."""
    paths: list[Path] = [one.result.path for one in several]
    if len(paths) == 1:
        return str(paths[0])
    if len({path.parent for path in paths}) == 1 and all(path.name.startswith("seed") for path in paths):
        return str(paths[0].parent)
    return f"{paths[0]} +{len(paths) - 1}"


def _cells(key: str, several: Sequence[Figure], form: str) -> dict[str, str]:
    """The mean of a figure and its deviation; where some runs lack it, of how many it is."""
    found, decimals = spread_over_seeds(each.value for each in several), several[0].decimals
    decimals = decimals or (1 if len(several) > 1 else 0)  # the mean of whole numbers is none
    apart = form == "csv"
    if found is None:
        words = "-" if any(each.never for each in several) and not apart else ""
        return {key: words} | ({f"{key} ±": ""} if apart else {})
    if apart:
        deviation = "" if found.deviation is None else f"{found.deviation:.{decimals}f}"
        return {key: f"{found.mean:.{decimals}f}", f"{key} ±": deviation}
    if key.startswith("MB") and found.deviation == 0:  # what is sent does not depend on the seed
        return {key: f"{found.mean:.{decimals}f}"}
    fewer = f" ({found.count} of {len(several)})" if found.count < len(several) else ""
    return {key: found.words(decimals=decimals) + fewer}


out = PlainConsole()
Trust = Annotated[bool, typer.Option("--trust", help="Trust plug-ins named in run directories by other authors.")]


def note_unsealed(paths: Iterable[Path]) -> None:
    """Note on standard error each run directory that has no manifest."""
    for path in paths:
        if note := unsealed_note(path):
            print(f"note: {note}", file=sys.stderr)  # noqa: T201


def runs_named(paths: Sequence[Path]) -> list[Path]:
    """The runs that these folders are or have; a note on standard error says which are not finished."""
    found, begun = finished_runs(paths)
    if begun:
        words = f"{counted(len(begun), 'run')} left out: not finished"
        print(f"note: {words}: {', '.join(map(str, begun[:5]))}{' …' if begun[5:] else ''}", file=sys.stderr)  # noqa: T201
    return found


def compare(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that contain some.")
    ],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run with --method centralised, for relative accuracy.")
    ] = None,
    at_round: Annotated[
        int | None, typer.Option(help="Accuracy at this round (default: the last that all runs reached).")
    ] = None,
    at_batch: Annotated[
        int | None, typer.Option(help="Accuracy at this batch count (default: the largest that all runs reached).")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="table | markdown | csv | latex | json")] = "table",
    each: Annotated[
        bool, typer.Option("--each", help="One row per run, even if runs differ only in the seed.")
    ] = False,
) -> None:
    """Compare finished runs in a table; runs that differ only in the seed share a row, mean ± deviation."""
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
    for name, place in (("round", at_round), ("batch", at_batch)):
        if place is not None and place < 1:
            raise UserError(f"--at-{name} {place}: give a whole number of at least 1")
    paths = runs_named(paths)
    note_unsealed([*paths, *([baseline] if baseline else [])])
    compared = side_by_side(
        [read_result(path) for path in paths],
        [read_metrics(path) for path in paths],
        baseline=None if baseline is None else read_result(baseline),
        at_round=at_round,
        at_batch=at_batch,
    )
    alone = each or len(grouped(compared)) == len(compared)
    sheet = None if alone else seed_sheet(compared, form)
    if form == "table":
        out.print(as_table(compared, out.width, sheet))
    else:
        print(as_text(compared, form, sheet))  # noqa: T201  for programs: no wrapping, no colour
